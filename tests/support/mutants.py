"""Catch us cheating: faults put in on purpose, one by one, and the first test that fails of each. `make mutants`

Several are those of the published code (docs/METHOD.md, 8). Where no test sees one, it says so and exits with 1.
"""

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]


class Mutant(NamedTuple):
    """A fault: in `file` of the package `right` stands once, and `wrong` takes its place."""

    fault: str
    file: str
    right: str
    wrong: str
    tests: str  # where it should be seen


def load() -> list[Mutant]:
    """Those of mutants.txt, which says how it is read."""
    _, *blocks = Path(__file__).with_suffix(".txt").read_text().split("\n\n")
    found = []
    for fault, place, *lines in (block.removesuffix("\n").split("\n") for block in blocks):
        file, _, tests = place.partition(" | ")
        right, wrong = ("\n".join(line[1:] for line in lines if line[0] == sign) for sign in "-+")
        found.append(Mutant(fault, file, right, wrong, tests))
    return found


MUTANTS = load()


def failing(folder: Path, tests: Sequence[str]) -> list[str]:
    """Which of these tests fails first, in a copy of the repository; none where all pass."""
    command = [sys.executable, "-m", "pytest", "-qx", "--no-header", "-p", "no:cacheprovider"]
    command += [f"tests/{name}" for name in tests]
    said = subprocess.run(command, cwd=folder, capture_output=True, text=True).stdout
    return [line.removeprefix("FAILED ").split(" - ")[0] for line in said.splitlines() if "FAILED" in line]


def main() -> int:
    """Try every fault in a copy of the repository; the number of those that nobody saw.

    First without a fault: a test that fails then would seem to see any.
    """
    unseen = 0
    with tempfile.TemporaryDirectory() as place:
        copy = Path(place) / "copy"
        shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".git", ".venv*", "runs", "cells", "__pycache__"))
        everything = sorted({name for mutant in MUTANTS for name in mutant.tests.split()})
        if failed := failing(copy, everything):
            print(f"without a fault\n    {failed[0]}")
            return 1
        for mutant in MUTANTS:
            file = copy / "poss_lightning" / mutant.file
            whole = file.read_text()
            file.write_text(whole.replace(mutant.right, mutant.wrong))
            failed = failing(copy, mutant.tests.split())
            file.write_text(whole)
            unseen += not failed
            print(f"{mutant.fault}\n    {failed[0] if failed else 'NOBODY SAW IT'}", flush=True)
    return unseen


if __name__ == "__main__":
    sys.exit(bool(main()))
