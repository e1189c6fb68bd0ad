"""Options in YAML files: found, read, checked; and which file an error is about."""

import re
from argparse import ArgumentError
from collections.abc import Callable, Iterable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import jsonargparse
import yaml
from pydantic import ValidationError

from poss_lightning.files import conf_names, find_config
from poss_lightning.ranges import describe_refusal, near

ConfigSource = str | Mapping[str, Any]  # a YAML file, by path or by its name in conf/; or a mapping of options
FLAGS = ("--config", "-c")
# How jsonargparse names the option of an error.
OPTION = re.compile(r"""(?:unrecognized arguments: (?:--)?|(?:[Oo]ption|[Kk]ey) ["'])([\w.]+)""")
WRONG_TYPE = re.compile(r"Expected a <class '(\w+)'>\. Got value: (.*)", re.DOTALL)
RIGHT_TYPE = {  # of an option and a value that it does not take
    "tuple": "a list, as [{1}]",
    "list": "a list, as [{1}]",
    "dict": "named, as --{0}.NAME {1}",
    "str": "a text, so quote it in YAML",
    "bool": "true or false",
}


def set_up_parser() -> None:
    """Settings of every parser: `${trainer.max_steps}` refers to the options as a whole."""
    jsonargparse.set_parsing_settings(
        docstring_parse_attribute_docstrings=False, omegaconf_absolute_to_relative_paths=True
    )


def locate_configs(arguments: Iterable[str]) -> list[str]:
    """Return the arguments with each `--config` file of conf/ as a path: a wheel has no conf/ in its user's folder.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: as `read_config`, which reads each once so that a broken one is named.
    """
    words = [part for word in arguments for part in (word.split("=", 1) if word.startswith("--config=") else [word])]
    located = words[:1]
    for before, word in pairwise(words):
        is_file = before in FLAGS and not word.startswith("{")  # options may stand in place of a file
        try:
            located.append(find_config(word) if is_file else word)
        except FileNotFoundError as error:
            raise FileNotFoundError(f"--config {error}{near(word.removeprefix('conf/'), conf_names())}") from error
    for file in config_files(located):
        read_config(file)
    return located


def config_files(arguments: Iterable[str]) -> list[str]:
    """Return the files given as `--config FILE`, of located arguments."""
    return [word for before, word in pairwise(arguments) if before in FLAGS and not word.startswith("{")]


def read_config(file: str) -> dict[str, Any]:
    """Return the options in a YAML file; none if there is no such file.

    Raises:
        ValueError: it is not valid YAML, not a mapping, or names a group twice.
    """
    if not Path(file).is_file():
        return {}
    try:
        options = yaml.safe_load(Path(file).read_text())
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{file} is not valid YAML: {error}") from error
    if not isinstance(options, dict):
        what = "empty" if options is None else f"a {type(options).__name__}"
        raise ValueError(f"{file} is {what}; it must have options, `name: value`")
    for name in map(str, options):
        if (group := name.partition(".")[0]) != name and group in options:  # the parser would drop one of them
            raise ValueError(f"{file} has {name!r} beside {group!r}: write it below {group}")
    return options


def check_options(function: Callable[..., None], options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keyword arguments that `function` would get from these options, defaults included.

    Raises:
        ArgumentError: an option that it does not have, or a value that it does not take.
    """
    parser = jsonargparse.ArgumentParser(exit_on_error=False)
    parser.add_function_arguments(function)
    try:
        return parser.parse_object(dict(options)).as_dict()
    except ArgumentError as error:
        raise explain_option(error, parser) from error


def explain_option(
    error: ArgumentError, parser: jsonargparse.ArgumentParser, files: Iterable[str] = ()
) -> ArgumentError:
    """Return a parser's error with its first cause alone, those of the files that have the option, and the nearest one.

    The parser's own text has each type that an option may have, with the reason why the value is none of that type.
    """
    if not (match := OPTION.search(str(error))):
        return error
    option, cause = match[1], _first_cause(error)
    if isinstance(cause, ValidationError):
        text = describe_refusal(cause, option)
    elif (wrong := WRONG_TYPE.fullmatch(str(cause))) and wrong[1] in RIGHT_TYPE:
        text = f"{option} is {wrong[2]}; it must be {RIGHT_TYPE[wrong[1]].format(option, wrong[2].strip('[,]'))}"
    else:
        text = str(cause) if option in str(cause) else f"{option}: {cause}"
    known = [action.dest for action in parser._actions]
    bare = f"unrecognized arguments: {option}=" in text
    placed = f"; {option} is given by its place" if "unrecognized arguments" in text and not bare else ""
    hint = placed if option in known else near(option, known)
    text = "; see ".join([text, *files_with(option, files)])
    return ArgumentError(None, text + (f"; an option begins with --, as --{option}=…" if bare else "") + hint)


def files_with(option: str, files: Iterable[str]) -> list[str]:
    """Return those of the YAML files that have a dotted option."""
    return [file for file in files if _has_option(read_config(file), option)]


def _first_cause(error: Exception) -> Exception:
    """Return the error that led to this one: of an option with several types, that of the first."""
    cause = error.__cause__
    return _first_cause(cause) if isinstance(cause, ValueError | TypeError | ArgumentError) else error


def _has_option(options: object, option: str) -> bool:
    """Return whether a dotted option is among nested or dotted ones."""
    head, _, rest = option.partition(".")
    return isinstance(options, dict) and (option in options or _has_option(options.get(head), rest))
