"""The YAML files of a command line: where they are, what they hold, and which of them an error is about."""

import re
from argparse import ArgumentError
from collections.abc import Iterable
from difflib import get_close_matches
from pathlib import Path

import yaml

from poss_lightning.files import find_config

GIVEN = ("--config", "-c")


def locate_configs(arguments: list[str]) -> list[str]:
    """`--config` with files of conf/ by their path, which who installed a wheel does not have beside him."""

    def place(name: str) -> str:
        try:
            return find_config(name)
        except OSError:  # the parser says so, of what the user typed
            return name

    return [
        place(each) if before in GIVEN else re.sub("^--config=(.*)", lambda own: f"--config={place(own[1])}", each)
        for before, each in zip(["", *arguments], arguments, strict=False)
    ]


def files_of(arguments: list[str]) -> list[str]:
    """What is given as `--config FILE` and `--config=FILE`."""
    pairs = zip(["", *arguments], arguments, strict=False)
    return [file.removeprefix("--config=") for before, file in pairs if before in GIVEN or file.startswith("--config=")]


def read(file: str) -> dict:
    """What a YAML file holds; nothing where there is none, which the parser says."""
    if not Path(file).is_file():
        return {}
    try:
        given = yaml.safe_load(Path(file).read_text())
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        mark = getattr(error, "problem_mark", None)
        place = f", line {mark.line + 1}" if mark else ""
        raise ValueError(f"{file} is no YAML{place}: {getattr(error, 'problem', error)}") from error
    if not isinstance(given, dict):
        what = "is empty" if given is None else f"is a {type(given).__name__}"
        raise ValueError(f"{file} {what}; it must have options, `name: value`")
    return given


def explain(error: ArgumentError, arguments: list[str], known: Iterable[str]) -> ArgumentError:
    """The error with the files whose option it is about, and the nearest of the options there are."""
    found = re.search(r"""(?:[Oo]ption|Parser key) ["']([\w.]+)["']""", str(error))
    if not found or any(each.startswith(f"--{found[1]}") for each in arguments):
        return error
    option, known = found[1], list(known)
    files = [file for file in files_of(arguments) if _has(read(file), option)]
    if not files:
        return error
    below = [name for name in known if name.endswith(f".{option}")]
    near = [] if option in known else below or get_close_matches(option, known, 1)
    deeper = f", below `{below[0].removesuffix(option)[:-1]}:`" if near and near == below else ""
    hint = f"; did you mean {' or '.join(near)}{deeper}?" if near else ""
    return ArgumentError(None, f"{error}; it stands in {' and '.join(files)}{hint}")


def _has(given: object, option: str) -> bool:
    """Whether a dotted option is among those given, nested or dotted."""
    head, _, rest = option.partition(".")
    return isinstance(given, dict) and (option in given or _has(given.get(head), rest))
