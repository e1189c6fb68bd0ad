"""`poss` run by a test, in this process and in a folder, and its outcome."""

import io
import sys
from collections.abc import Callable, Iterator
from contextlib import chdir, contextmanager
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

from poss_lightning import cli


@dataclass
class Result:
    code: int | str | None  # of a SystemExit: a text is printed, and makes the exit code 1
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
    """Assert that a command ended with one clear line that has these words, and no other output of failure."""
    assert isinstance(result.code, str), f"exit code {result.code}, {result.err}"
    assert result.code.startswith(f"poss {command}: ") and "\n" not in result.code
    assert words in result.code
    assert not any(noise in result.err for noise in ("Traceback", "usage:", "rror")), result.err


def left(folder: Path) -> list[str]:
    """Names of everything in a folder."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


@contextmanager
def unchanged(*folders: Path) -> Iterator[None]:
    """Assert that the block writes, removes and changes nothing in these folders."""

    def times() -> list[dict[Path, int]]:
        return [{path: path.is_file() and path.stat().st_mtime_ns for path in each.rglob("*")} for each in folders]

    before = times()
    yield
    assert times() == before
