"""Commands of `poss` and `make`, files and blocks in a Markdown document."""

import functools
import inspect
import re
import shlex
from collections.abc import Iterable, Iterator
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
CONSOLE = re.compile(r"(?<=^\$ ).*$", re.MULTILINE)
INDENTED = re.compile(r"^ {4,}(\S(?:.*\\\n)*.*)$", re.MULTILINE)
SPAN = re.compile(r"`((?:poss|make)\s[^`]+)`")
SETTING = re.compile(r"([A-Z])=(\S+)(\s+#.*)?")  # T=…, which later lines call $T
ELLIPSES = {"…", "..."}


class Block(NamedTuple):
    """A fenced block."""

    line: int  # of the document, from 1
    text: str


class Command(NamedTuple):
    """A command as a shell would split it."""

    line: int
    program: str  # poss or make
    words: list[str]  # its arguments
    complete: bool = True  # False if an ellipsis leaves the rest to the reader

    def __str__(self) -> str:
        return f"line {self.line}: {shlex.join([self.program, *self.words])}"


def blocks(text: str, language: str) -> list[Block]:
    """All fenced blocks of a language."""
    return [Block(_line(text, found.start(3)), found[3]) for found in FENCED.finditer(text) if found[2] == language]


def files(text: str) -> dict[str, str]:
    """The YAML files that a document shows, by the path in their first line."""
    shown = [block.text for block in blocks(text, "yaml")]
    return {name[1]: own for own in shown if (name := re.match(r"# (\S+\.yaml)\b", own))}


def shell(text: str, pattern: re.Pattern[str] = SHELL, language: str = "bash") -> Iterator[tuple[int, str]]:
    """Line and text of every command line of the bash blocks."""
    for block in blocks(text, language):
        for found in pattern.finditer(block.text):
            yield block.line + _line(block.text, found.start()) - 1, found[0]


def everywhere(text: str) -> Iterator[tuple[int, str]]:
    """As `shell`, and of console blocks, indented blocks, and spans that begin with a program."""
    yield from shell(text)
    yield from shell(text, CONSOLE, "console")
    for taken, pattern in ((FENCED, INDENTED), (INDENTED, SPAN)):
        text = taken.sub(lambda found: "\n" * found[0].count("\n"), text)  # so that line numbers stay
        for found in pattern.finditer(text):
            yield _line(text, found.start()), found[1]


def expanded(lines: Iterable[tuple[int, str]], **names: str) -> Iterator[tuple[int, str]]:
    """The lines in order, with `$T` replaced by the value of T=…; `names` replaces values, by letter."""
    given = {}
    for number, line in sorted(lines):
        for name, value in given.items():
            line = line.replace(f"${name}", value)
        if setting := SETTING.fullmatch(line):
            given[setting[1]] = names.get(setting[1], setting[2])
        else:
            yield number, line.replace("\\\n", " ")


def commands(lines: Iterable[tuple[int, str]], **names: str) -> Iterator[Command]:
    """Commands of `poss` and `make`, alone or after another program."""
    for number, line in expanded(lines, **names):
        for part in line.partition("$(")[0].split(" && "):
            words = shlex.split(part.partition(" > ")[0], comments=True)  # output may go into a file
            while words and Path(words[0]).name not in ("poss", "make"):
                del words[0]
            if words:
                given = [word for word in words[1:] if word not in ELLIPSES]
                yield Command(number, Path(words[0]).name, given, given == words[1:])


class Parsed(Exception):
    """Raised where a command would begin its work, with the arguments of the function that does it."""


def parsed(command: Command) -> dict[str, Any]:
    """The arguments that a tool's function would get; the command is parsed but not run."""
    name, *words = command.words
    if name in cli.TRAINER:
        owner, work = Training, "before_instantiate_classes"
        words = words if command.complete else ["--data.store", "any", "--model.allocation", "[1]", *words]
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


def _line(text: str, place: int) -> int:
    return text.count("\n", 0, place) + 1
