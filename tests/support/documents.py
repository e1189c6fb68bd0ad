"""Commands of `poss` and `make`, files and blocks in a Markdown document."""

import functools
import inspect
import re
import shlex
from collections.abc import Iterable, Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from poss_lightning import cli
from poss_lightning.training.command import Training

ROOT = Path(__file__).parents[2]
DOCUMENTS = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "ARCHITECTURE.md")),
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "experiments").rglob("README.md")),
    *sorted((ROOT / "notebooks").glob("*.md")),
]

FENCED = re.compile(r"^( *)```(\w*)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
SHELL = re.compile(r"^\S(?:.*\\\n)*.*$", re.MULTILINE)  # with the lines after a backslash
INDENTED = re.compile(r"^ {4,}(\S(?:.*\\\n)*.*)$", re.MULTILINE)
SPAN = re.compile(r"`((?:poss|make)\s[^`]+)`")
SETTING = re.compile(r"([A-Z])=(\S+)(\s+#.*)?")  # T=…, which later lines call $T
ELLIPSES = {"…", "..."}


class Command(NamedTuple):
    """A command as a shell would split it."""

    program: str  # poss or make
    words: list[str]  # its arguments
    complete: bool  # False if an ellipsis leaves the rest to the reader


def blocks(text: str, language: str) -> list[str]:
    """All fenced blocks of a language."""
    return [found[3] for found in FENCED.finditer(text) if found[2] == language]


def files(text: str) -> dict[str, str]:
    """The YAML files that a document shows, by the path in their first line."""
    return {name[1]: shown for shown in blocks(text, "yaml") if (name := re.match(r"# (\S+\.yaml)\b", shown))}


def shell(text: str) -> list[str]:
    """Every command line of the bash blocks."""
    return [line for block in blocks(text, "bash") for line in SHELL.findall(block)]


def everywhere(text: str) -> list[str]:
    """As `shell`, then of indented blocks, and spans that begin with a program."""
    rest = FENCED.sub("", text)
    return [*shell(text), *INDENTED.findall(rest), *SPAN.findall(INDENTED.sub("", rest))]


def expanded(lines: Iterable[str], **names: str) -> Iterator[str]:
    """The lines, with `$T` replaced by the value of T=…; `names` replaces values, by letter."""
    given = {}
    for line in lines:
        for name, value in given.items():
            line = line.replace(f"${name}", value)
        if setting := SETTING.fullmatch(line):
            given[setting[1]] = names.get(setting[1], setting[2])
        else:
            yield line.replace("\\\n", " ")


def commands(lines: Iterable[str], **names: str) -> Iterator[Command]:
    """Commands of `poss` and `make`, alone or after another program."""
    for line in expanded(lines, **names):
        for part in line.partition("$(")[0].split(" && "):
            words = shlex.split(part.partition(" > ")[0], comments=True)  # output may go into a file
            while words and Path(words[0]).name not in ("poss", "make"):
                del words[0]
            if words:
                given = [word for word in words[1:] if word not in ELLIPSES]
                yield Command(Path(words[0]).name, given, given == words[1:])


class Parsed(Exception):
    """Raised where a command would begin its work, with the arguments of the function that does it."""


def parsed(words: Sequence[str], complete: bool = True) -> dict[str, Any]:
    """The arguments that the function of `poss WORDS…` would get; the command is parsed but not run."""
    name, *words = words
    if name in cli.TRAINER:
        owner, work = Training, "before_instantiate_classes"
        words = words if complete else ["--data.store", "any", "--model.allocation", "[1]", *words]
    else:
        owner, work = import_module(cli.TOOLS[name][0]), name
    function = getattr(owner, work)

    @functools.wraps(function)
    def stop(*args, **kwargs) -> None:
        bound = inspect.signature(function).bind(*args, **kwargs)
        raise Parsed({**bound.arguments, **bound.kwargs})

    with pytest.MonkeyPatch.context() as patch, pytest.raises(Parsed) as caught:
        patch.setattr(owner, work, stop)
        cli.run(name, words)
    return caught.value.args[0]
