"""`poss` as a test runs it: in this process, in a folder, and what came of it."""

import io
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import chdir, contextmanager
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

from poss_lightning import cli


@dataclass
class Result:
    code: int | str | None  # what a SystemExit carries: a text is printed, and makes the exit code 1
    out: str
    err: str


Poss = Callable[..., Result]


def run_in(folder: Path, *arguments: object, stdin: str = "") -> Result:
    """Run a command line in this process, in a folder."""
    out, err, code = io.StringIO(), io.StringIO(), None
    argv = ["poss", *map(str, arguments)]
    streams = patch.multiple(sys, argv=argv, stdin=io.StringIO(stdin), stdout=out, stderr=err)
    with chdir(folder), streams:
        try:
            cli.main()
        except SystemExit as stop:
            code = stop.code
    return Result(code, out.getvalue(), err.getvalue())


def says(result: Result, command: str, words: str) -> None:
    """One clear line, and no other talk of failure."""
    assert isinstance(result.code, str), f"exit code {result.code}, {result.err}"
    assert result.code.startswith(f"poss {command}: ") and "\n" not in result.code
    assert words in result.code
    assert not any(noise in result.err for noise in ("Traceback", "usage:", "rror")), result.err


def left(folder: Path) -> list[str]:
    """Names of all that is in a folder."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


@contextmanager
def unchanged(*folders: Path) -> Iterator[None]:
    """Nothing in these folders is written, removed or changed within the block."""
    before = [_state(folder) for folder in folders]
    yield
    assert [_state(folder) for folder in folders] == before


def _state(folder: Path) -> dict[str, object]:
    """What is in a folder, with the time of each file."""
    return {name: (folder / name).is_dir() or os.stat(folder / name).st_mtime_ns for name in left(folder)}
