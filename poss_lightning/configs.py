"""Options in YAML files: found, read, checked; and which file an error is about."""

import re
from argparse import ArgumentError
from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import jsonargparse
import yaml
from pydantic import ValidationError

from poss_lightning.files import conf_names, find_config
from poss_lightning.ranges import describe_refusal

FLAGS = ("--config", "-c")
# How jsonargparse names the option of an error.
OPTION = re.compile(r"""(?:unrecognized arguments: --|(?:[Oo]ption|[Kk]ey) ["'])([\w.]+)""")


def get_types(parser: jsonargparse.ArgumentParser) -> dict[str, Any]:
    """The type of each option of a parser."""
    return {action.dest: getattr(action, "_typehint", action.type) for action in parser._actions}


def set_up_parser() -> None:
    """Settings of every parser: `${trainer.max_steps}` refers to the options as a whole."""
    jsonargparse.set_parsing_settings(
        docstring_parse_attribute_docstrings=False, omegaconf_absolute_to_relative_paths=True
    )


def locate_configs(arguments: list[str]) -> list[str]:
    """The arguments with each `--config` file of conf/ as a path: an installed wheel has no conf/ beside its user.

    Raises:
        ValueError: there is no such file; or as `read_config`, which reads each once so that a broken one is named.
    """

    def locate(name: str) -> str:
        try:
            return find_config(name)
        except OSError as error:
            if name.startswith("{"):  # options in place of a file
                return name
            near = get_close_matches(name.removeprefix("conf/"), conf_names(), 1)
            hint = f"did you mean {near[0]}?" if near else "`poss list` shows those of the package"
            raise ValueError(f"--config {name}: there is no such file; {hint}") from error

    located = [
        locate(word) if before in FLAGS else re.sub("^--config=(.*)", lambda file: f"--config={locate(file[1])}", word)
        for before, word in zip(["", *arguments], arguments, strict=False)
    ]
    for file in config_files(located):
        read_config(file)
    return located


def config_files(arguments: list[str]) -> list[str]:
    """The files given as `--config FILE` or `--config=FILE`, without options that are given in place of a file."""
    pairs = zip(["", *arguments], arguments, strict=False)
    given = [
        word.removeprefix("--config=") for before, word in pairs if before in FLAGS or word.startswith("--config=")
    ]
    return [file for file in given if not file.startswith("{")]


def read_config(file: str) -> dict[str, Any]:
    """The options in a YAML file; none if there is no such file, which the parser reports.

    Raises:
        ValueError: it is not valid YAML, not a mapping, or names a group twice.
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
    """The keyword arguments that `function` would get from these options, defaults included.

    Raises:
        ArgumentError: an option that it does not have, or a value that it does not take.
    """
    parser = jsonargparse.ArgumentParser(exit_on_error=False)
    parser.add_function_arguments(function)
    try:
        return parser.parse_object(dict(options)).as_dict()
    except ArgumentError as error:
        raise explain_option(error, (), get_types(parser)) from error


def explain_option(
    error: ArgumentError, files: Iterable[str], known: Mapping[str, Any], arguments: Iterable[str] = ()
) -> ArgumentError:
    """A parser's error with the file that has the option, and the nearest known option if there is none of that name.

    Args:
        error: of the parser.
        files: given as `--config`.
        known: options and their types.
        arguments: of the command line; an option that is among them is not looked for in the files.
    """
    text = str(error)
    if not (match := OPTION.search(text)):
        several = "unrecognized arguments: " in text
        return ArgumentError(None, f"{text}; several values of an option are given as [a,b]") if several else error
    option, cause = match[1], _first_cause(error)
    if option in known and "unrecognized arguments" in text:
        return ArgumentError(None, f"{option} is given by its place, without --{option}: see the usage")
    if isinstance(cause, ValidationError):
        text = describe_refusal(cause, option)
    elif option not in str(cause):
        text = f"{option}: {cause}"
    if not any(word.startswith(f"--{option}") for word in arguments):
        places = [file for file in files if _has_option(read_config(file), option)]
        text += f"; it is set in {' and '.join(places)}" if places else ""
    if option not in known:
        near = [name for name in known if name.endswith(f".{option}") or _initials(name) == option]
        near = near or get_close_matches(option, known, 1)
        text += f"; did you mean {' or '.join(near)}?" if near else ""
    return ArgumentError(None, text)


def _first_cause(error: Exception) -> Exception:
    """The error that led to this one: of an option with several types, that of the first."""
    cause = error.__cause__
    return _first_cause(cause) if isinstance(cause, ValueError | TypeError | ArgumentError) else error


def _initials(option: str) -> str:
    """`model.learning_rate` -> `model.lr`."""
    group, dot, name = option.rpartition(".")
    return group + dot + "".join(word[:1] for word in name.split("_"))


def _has_option(options: object, option: str) -> bool:
    """Whether a dotted option is among nested or dotted ones."""
    head, _, rest = option.partition(".")
    return isinstance(options, dict) and (option in options or _has_option(options.get(head), rest))
