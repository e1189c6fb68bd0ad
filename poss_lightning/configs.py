"""Options in YAML files: found, read, checked; and which file an error is about."""

import re
import reprlib
from argparse import ArgumentError
from ast import literal_eval
from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from inspect import signature
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import jsonargparse
import yaml

from poss_lightning.files import find_config
from poss_lightning.ranges import refuse_numbers

FLAGS = ("--config", "-c")


def get_types(function: Callable[..., Any]) -> dict[str, Any]:
    """The type of each option of a function or class."""
    return {name: parameter.annotation for name, parameter in signature(function).parameters.items()}


def set_up_parser() -> None:
    """What all parsers of options have in common: `${trainer.max_steps}` is looked for in the whole of the options."""
    jsonargparse.set_parsing_settings(
        docstring_parse_attribute_docstrings=False, omegaconf_absolute_to_relative_paths=True
    )


def locate_configs(arguments: list[str]) -> list[str]:
    """The arguments with `--config` files of conf/ as paths: a user of the wheel has no conf/ beside him.

    Raises:
        ValueError: as of `read_config`.
    """

    def place(name: str) -> str:
        try:
            return find_config(name)
        except OSError:  # the parser says so, of what the user typed
            return name

    located = [
        place(word) if before in FLAGS else re.sub("^--config=(.*)", lambda file: f"--config={place(file[1])}", word)
        for before, word in zip(["", *arguments], arguments, strict=False)
    ]
    for file in config_files(located):
        read_config(file)  # a broken one is named
    return located


def config_files(arguments: list[str]) -> list[str]:
    """The files given as `--config FILE` and `--config=FILE`; options may stand in the place of a file."""
    pairs = zip(["", *arguments], arguments, strict=False)
    given = [
        word.removeprefix("--config=") for before, word in pairs if before in FLAGS or word.startswith("--config=")
    ]
    return [file for file in given if not file.startswith("{")]


def read_config(file: str) -> dict[str, Any]:
    """The options in a YAML file; none where there is no file, which the parser reports.

    Raises:
        ValueError: it is no YAML, or no mapping.
    """
    if not Path(file).is_file():
        return {}
    try:
        options = yaml.safe_load(Path(file).read_text())
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        mark = getattr(error, "problem_mark", None)
        place = f", line {mark.line + 1}" if mark else ""
        raise ValueError(f"{file} is no YAML{place}: {getattr(error, 'problem', error)}") from error
    if not isinstance(options, dict):
        what = "is empty" if options is None else f"is a {type(options).__name__}"
        raise ValueError(f"{file} {what}; it must have options, `name: value`")
    for name in map(str, options):
        if (group := name.partition(".")[0]) != name and group in options:  # the parser would drop one of them
            raise ValueError(f"{file} has {name!r} beside {group!r}: write it below {group}")
    return options


def check_options(function: Callable[..., None], options: Mapping[str, Any]) -> dict[str, Any]:
    """The keyword arguments of `function` that these options are, its defaults included.

    Raises:
        ArgumentError: an option that it does not have, or a value that it does not take.
        ValueError: a number out of its range.
    """
    parser = jsonargparse.ArgumentParser(exit_on_error=False)
    parser.add_function_arguments(function)
    try:
        parsed = parser.parse_object(dict(options)).as_dict()
    except ArgumentError as error:
        raise explain(error, (), get_types(function)) from error
    refuse_numbers(function, parsed)
    return parsed


def explain(
    error: ArgumentError, files: Iterable[str], known: Mapping[str, Any], arguments: Iterable[str] = ()
) -> ArgumentError:
    """The error in one line: the value and what would be right, the files it stands in, the nearest option.

    Args:
        error: as the parser words it.
        files: that were given as `--config`.
        known: options and their types.
        arguments: of the terminal; an option that stands there is not looked for in the files.
    """
    text = str(error)
    if unknown := re.search(r"unrecognized arguments: --([\w.]+)", text):
        if placed := [name for name in re.findall(r"--([\w.]+)", text) if name in known]:
            places, options = " and ".join(placed), " and ".join(f"--{name}" for name in placed)
            return ArgumentError(None, f"{places} stand in their places, without {options}: see the usage")
        near = _nearest(unknown[1], known)
        return ArgumentError(None, f"{text}; did you mean --{' or --'.join(near)}?") if near else error
    if re.search(r"unrecognized arguments: .*[\]}]$", text):
        return ArgumentError(None, f"{text}; a list has no spaces in the terminal, [A,B], or stands in quotes")
    if text.startswith("argument data.source --> model.store"):
        return ArgumentError(None, "model.store is the store of the data: name it as --data.store")
    match = re.search(r"""(?:[Oo]ption|Parser key) ["']([\w.]+)["']""", text)
    if not match:
        return error
    option = match[1]
    value = re.search(r".*(?:Got|Given) value: (.*)", text, re.DOTALL)
    places = [file for file in files if _has(read_config(file), option)]
    given = {argument.partition("=")[0] for argument in arguments}
    named = places or given & {f"--{option}", f"--{option}+", f"--{option}.class_path"}
    if not named and value and (nested := re.match(r"NestedArg\(key='([\w.]+)'", value[1])):
        part, example = option.rpartition(".")[2], _CLASSES.get(option, "CLASS")
        text = f"--{option}.{nested[1]} is an option of a {part}: name a {part} first: --{option} {example}"
    if wrong := re.search(r"Problem with given class_path '([\w.]+)':[\s-]*(Option '\w+' is not accepted)", text):
        text = f"{option}, {wrong[1].rpartition('.')[2]}: {wrong[2]}"
    if lacks := re.search(r"class_path '(?:\w+\.)*(\w+)':\s*the following arguments are required: (\w+)", text):
        text = f"{option}, {lacks[1]}: it needs {lacks[2]}: --{option}.{lacks[2]} VALUE"
    if value and (words := describe_type(known.get(option))):
        text = f"{option} is {reprlib.repr(value[1])}; it must be {words}{_quote_hint(value[1], words)}"
    if name := re.search(r"Expected a dot import path string: (\S+)", text):
        example = f", for example {_CLASSES[option]}" if option in _CLASSES else ""
        text = f"{option} is {name[1]!r}; it must be the name of a class{example}"
    if any(word.startswith(f"--{option}") for word in given):
        return ArgumentError(None, text)
    near = [] if option in known else _nearest(option, known)
    below = [name for name in near if name.endswith(f".{option}")] if places else []
    deeper = f", below `{below[0].removesuffix(option)[:-1]}:`" if below else ""
    hint = f"; did you mean {' or '.join(near)}{deeper}?" if near else ""
    stands = f"; it stands in {' and '.join(places)}" if places else ""
    return ArgumentError(None, f"{text}{stands}{hint}")


_CLASSES = {"trainer.logger": "TensorBoardLogger"}  # the one of the examples, of an option that takes a class


def describe_type(hint: Any) -> str:
    """What a value of that type is, in words; empty for a type that has none."""
    inner, kind = get_args(hint), get_origin(hint)
    if kind is Annotated:
        return describe_type(inner[0])
    if kind is Literal:
        return _or([str(value) for value in inner])
    if kind in (Union, UnionType):
        words = [describe_type(each) for each in inner]
        return _or(words) if all(words) else ""
    if kind in (list, tuple):
        return f"{_WORDS[list]}, each {each}" if (each := describe_type(inner[0])) else ""
    if kind is dict and (each := describe_type(inner[1])):
        return f"{_WORDS[dict]}, each {each}"
    if isinstance(hint, type) and issubclass(hint, int) and hint is not bool:  # jsonargparse has such of a range
        return _WORDS[int]
    return _WORDS.get(kind or hint, "")


_WORDS = {
    int: "a whole number",
    float: "a number",
    str: "a text",
    bool: "true or false",
    list: "a list [A,B]",
    dict: "names with values {A: B}",
    type(None): "null",
}


def _quote_hint(value: str, words: str) -> str:
    """What to do about a text that YAML reads as another value, as it does 1 and on."""
    try:
        read: Any = literal_eval(value) if "a text" in words else None
    except (ValueError, SyntaxError):
        return ""
    if type(read) in (dict, list) and _WORDS[type(read)] not in words:
        return ""
    parts = [*read, *read.values()] if isinstance(read, dict) else read if isinstance(read, list) else [read]
    other = next((part for part in parts if isinstance(part, int | float)), None)
    return "" if other is None else f"; YAML reads {other} as {type(other).__name__}: quote it"


def _or(words: list[str]) -> str:
    return " or ".join(filter(None, [", ".join(words[:-1]), words[-1]]))


def _nearest(option: str, known: Iterable[str]) -> list[str]:
    """The options of that name in some group, or else the one spelt most like it."""
    known = list(known)
    return [name for name in known if name.endswith(f".{option}")] or get_close_matches(option, known, 1)


def _has(options: object, option: str) -> bool:
    """Whether a dotted option is among those, nested or dotted."""
    head, _, rest = option.partition(".")
    return isinstance(options, dict) and (option in options or _has(options.get(head), rest))
