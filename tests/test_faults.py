"""Commands that are killed, on a full disk, or beside a second one: a few cases of `benchmarks/faults.py`."""

from pathlib import Path

import pytest

from poss_lightning import cli
from tests.support.faults import Fault
from tests.support.processes import forked
from tests.support.writers import WRITERS, Place

CASES = {
    "extract": ["foreign:30"],
    "benchmark": ["foreign:25"],
    "fit": ["foreign:40"],
    "replay": ["foreign:12", "foreign:25", "kill:9", "full:6"],
    "synthesize": ["foreign:5", "foreign:30", "kill:9", "torn:8", "kill:30", "beside:12"],
    "convert": ["foreign:5", "kill:3", "limit:0", "limit:50000", "full:2", "beside:2"],
}


def check_cases(folder: str) -> None:
    place = Place(Path(folder))
    for name, faults in CASES.items():
        whole = place.observe(WRITERS[name]).whole
        for fault in faults:
            problem = place.check(WRITERS[name], Fault.parse(fault), whole)
            assert problem is None, f"python -m benchmarks.faults {name} {fault}: {problem}"


@pytest.mark.nightly
def test_commands_survive(tmp_path):
    """In a process of its own, which forks."""
    forked(1, check_cases, str(tmp_path))


def test_every_command_that_writes_is_among_them():
    """All but those that only read and print."""
    reading = {"list", "generate", "validate"}
    assert {writer.command for writer in WRITERS.values()} == {*cli.TOOLS, *cli.TRAINER} - reading
