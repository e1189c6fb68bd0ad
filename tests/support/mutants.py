"""Plants faults, one by one, and names the first test that fails of each: `make mutants`.

Several are faults of the published code (docs/METHOD.md, 8). It exits with 1 if no test sees one.
"""

import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]


class Mutant(NamedTuple):
    """A fault: `wrong` replaces `right`, which `file` of the package has once."""

    fault: str
    file: str
    right: str
    wrong: str
    tests: str  # one of which must fail


def load() -> list[Mutant]:
    """The faults of mutants.txt, which explains its format."""
    _, *blocks = Path(__file__).with_suffix(".txt").read_text().split("\n\n")
    found = []
    for fault, place, *lines in (block.removesuffix("\n").split("\n") for block in blocks):
        file, _, tests = place.partition(" | ")
        right, wrong = ("\n".join(line[1:] for line in lines if line[0] == sign) for sign in "-+")
        found.append(Mutant(fault, file, right, wrong, tests))
    return found


MUTANTS = load()


def failing(folder: Path, tests: str) -> str | None:
    """The first of these tests that fails in a copy of the repository; None if all pass."""
    command = [sys.executable, "-m", "pytest", "-qx", "--no-header", "-p", "no:cacheprovider"]
    command += ["-m", "not slow and not vllm"]  # nightly ones, too
    command += dict.fromkeys(f"tests/{name}" for name in tests.split())
    printed = subprocess.run(command, cwd=folder, capture_output=True, text=True).stdout
    failed = re.search(r"^FAILED (.*?)(?: - |$)", printed, re.MULTILINE)
    return failed and failed[1]


def main() -> int:
    """Plant every fault in a copy of the repository; return how many no test saw.

    First the tests run without a fault: one that fails then would seem to see them all.
    """
    unseen = 0
    with tempfile.TemporaryDirectory() as place:
        copy = Path(place) / "copy"
        shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".git", ".venv*", "runs", "__pycache__"))
        if failed := failing(copy, " ".join(mutant.tests for mutant in MUTANTS)):
            print(f"without a fault\n    {failed}")
            return 1
        for mutant in MUTANTS:
            file = copy / "poss_lightning" / mutant.file
            whole = file.read_text()
            file.write_text(whole.replace(mutant.right, mutant.wrong))
            failed = failing(copy, mutant.tests)
            file.write_text(whole)
            unseen += not failed
            print(f"{mutant.fault}\n    {failed or 'NOBODY SAW IT'}", flush=True)
    return unseen


if __name__ == "__main__":
    sys.exit(bool(main()))
