"""Options in YAML files: found, read, checked; and which file an error is about."""

import re
from argparse import ArgumentError
from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from inspect import signature
from pathlib import Path
from typing import Any

import jsonargparse
import yaml
from pydantic import ValidationError

from poss_lightning.files import find_config
from poss_lightning.ranges import describe

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
        ValueError: it is not valid YAML, or no mapping.
    """
    if not Path(file).is_file():
        return {}
    try:
        options = yaml.safe_load(Path(file).read_text())
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        mark = getattr(error, "problem_mark", None)
        place = f", line {mark.line + 1}" if mark else ""
        raise ValueError(f"{file} is not valid YAML{place}: {getattr(error, 'problem', error)}") from error
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
    """
    parser = jsonargparse.ArgumentParser(exit_on_error=False)
    parser.add_function_arguments(function)
    try:
        return parser.parse_object(dict(options)).as_dict()
    except ArgumentError as error:
        raise explain(error, (), get_types(function)) from error


def explain(
    error: ArgumentError, files: Iterable[str], known: Mapping[str, Any], arguments: Iterable[str] = ()
) -> ArgumentError:
    """The error with the files that its option stands in, and the nearest option where there is none of that name.

    Args:
        error: of the parser.
        files: that were given as `--config`.
        known: options and their types.
        arguments: of the terminal; an option that stands there is not looked for in the files.
    """
    text = str(error)
    named = re.findall(r"--([\w.]+)", text) if "unrecognized arguments" in text else []
    if placed := [name for name in named if name in known]:
        places, options = " and ".join(placed), " and ".join(f"--{name}" for name in placed)
        return ArgumentError(None, f"{places} stand in their places, without {options}: see the usage")
    match = re.search(r"""(?:unrecognized arguments: --|(?:[Oo]ption|[Kk]ey) ["'])([\w.]+)""", text)
    if not match:
        return error
    option, first = match[1], _first_cause(error)
    if isinstance(first, ValidationError):
        text = describe(first, option)
    elif option not in str(first):
        text = f"{option}: {first}"
    typed = any(word.startswith(f"--{option}") for word in arguments)
    places = [] if typed else [file for file in files if _has(read_config(file), option)]
    stands = f"; it stands in {' and '.join(places)}" if places else ""
    near = [] if option in known else _nearest(option, known)
    hint = f"; did you mean {' or '.join(near)}?" if near else ""
    return ArgumentError(None, f"{text}{stands}{hint}")


def _first_cause(error: Exception) -> Exception:
    """The error of the value that led to this one: that of the first type, where an option may have several."""
    cause = error.__cause__
    return _first_cause(cause) if isinstance(cause, ValueError | TypeError | ArgumentError) else error


def _nearest(option: str, known: Iterable[str]) -> list[str]:
    """The options of that name in some group, or else the one spelt most like it."""
    known = list(known)
    return [name for name in known if name.endswith(f".{option}")] or get_close_matches(option, known, 1)


def _has(options: object, option: str) -> bool:
    """Whether a dotted option is among those, nested or dotted."""
    head, _, rest = option.partition(".")
    return isinstance(options, dict) and (option in options or _has(options.get(head), rest))
