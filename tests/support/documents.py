"""Commands of `poss` and `make`, files and blocks in a Markdown document."""

import functools
import inspect
import re
import shlex
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

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
INDENTED = re.compile(r"^ {4,}\S(?:.*\\\n)*.*$", re.MULTILINE)
SHELL = re.compile(r"^\S(?:.*\\\n)*.*$", re.MULTILINE)  # with the lines after a backslash
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


def shell(text: str) -> Iterator[tuple[int, str]]:
    """Line and text of every command line of the bash blocks."""
    return _found(SHELL, text, "bash")


def everywhere(text: str) -> Iterator[tuple[int, str]]:
    """As `shell`, and of console blocks, indented blocks, and spans that begin with a program."""
    yield from shell(text)
    yield from _found(re.compile(r"(?<=^\$ ).*$", re.MULTILINE), text, "console")
    text = FENCED.sub(_blank, text)
    for found in INDENTED.finditer(text):
        yield _line(text, found.start()), found[0].strip()
    text = INDENTED.sub(_blank, text)
    for found in SPAN.finditer(text):
        yield _line(text, found.start()), found[1]


def _found(pattern: re.Pattern[str], text: str, language: str) -> Iterator[tuple[int, str]]:
    for block in blocks(text, language):
        for found in pattern.finditer(block.text):
            yield block.line + _line(block.text, found.start()) - 1, found[0]


def expanded(lines: Iterator[tuple[int, str]], **names: str) -> Iterator[tuple[int, str]]:
    """The lines in order, with `$T` replaced by the value of T=…; `names` replaces values, by letter."""
    given = {}
    for number, line in sorted(lines):
        for name, value in given.items():
            line = line.replace(f"${name}", value)
        if setting := SETTING.fullmatch(line):
            given[setting[1]] = names.get(setting[1], setting[2])
        else:
            yield number, line.replace("\\\n", " ")


def commands(lines: Iterator[tuple[int, str]], **names: str) -> Iterator[Command]:
    """Commands of `poss` and `make`, alone or after another program."""
    for number, line in expanded(lines, **names):
        for part in line.partition("$(")[0].split(" && "):
            words = shlex.split(part.partition(" > ")[0], comments=True)  # output may go into a file
            begin = next((place for place, word in enumerate(words) if Path(word).name in ("poss", "make")), None)
            if begin is not None:
                program, *words = words[begin:]
                given = [word for word in words if word not in ELLIPSES]
                yield Command(number, Path(program).name, given, given == words)


class Parsed(Exception):
    """Raised where a command would begin its work."""


def parsed(command: Command) -> dict:
    """The arguments that a tool's function would get, none of a training; the command is parsed but not run."""
    (name, *words), given = command.words, {}
    with pytest.MonkeyPatch.context() as patch:
        if name in cli.TRAINER:
            patch.setattr(Training, "before_instantiate_classes", _stop)
            words = words if command.complete else ["--data.store", "any", "--model.allocation", "[1]", *words]
        else:
            module = import_module(cli.TOOLS[name][0])
            tool = getattr(module, name)

            @functools.wraps(tool)
            def instead(*args, **kwargs) -> None:
                given.update(inspect.signature(tool).bind(*args, **kwargs).arguments)
                _stop()

            patch.setattr(module, name, instead)
        with pytest.raises(Parsed):
            cli.run(name, words)
    return given


def _stop(*_) -> None:
    raise Parsed


def _line(text: str, place: int) -> int:
    return text.count("\n", 0, place) + 1


def _blank(found: re.Match) -> str:
    return "\n" * found[0].count("\n")  # so that line numbers stay
