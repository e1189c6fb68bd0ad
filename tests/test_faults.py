"""Commands killed, on a full disk, beside another, or on a store that changes: a few cases of `benchmarks/soak.py`."""

import re
from pathlib import Path

from benchmarks.faults import plan
from poss_lightning import cli
from tests.support.faults import Fault, Operation
from tests.support.processes import forked, printed
from tests.support.writers import MADE, WRITERS, Observed, Place, write_inputs

CASES = {
    "extract": ["foreign:30"],
    "benchmark": ["foreign:25"],
    "fit": ["foreign:40"],
    "replay": ["foreign:12", "foreign:25", "kill:9", "truncate:3", "remove:3", "rewrite:3", "full:6"],
    "synthesize": ["foreign:5", "foreign:30", "kill:9", "torn:8", "kill:30", "beside:12"],
    "convert": ["foreign:5", "kill:3", "limit:0", "limit:50000", "full:2", "beside:2"],
}


def check_cases(folder: str) -> None:
    place = Place(Path(folder))
    for name, faults in CASES.items():
        seen = place.observe(WRITERS[name])
        for fault in faults:
            problem = place.check(WRITERS[name], Fault.parse(fault), seen.whole)
            assert problem is None, f"python -m benchmarks.faults {name} {fault}: {problem}"


def test_commands_survive(tmp_path):
    """In a process of its own, off which others are forked."""
    assert forked(tmp_path / "log", 1, check_cases, str(tmp_path)) == [0], printed(tmp_path / "log")


def test_a_fault_is_written_as_it_is_read():
    for text in ("kill:17", "time:0.35", "limit:0"):
        assert str(Fault.parse(text)) == text


def test_a_plan_kills_at_each_operation_and_tears_what_is_written():
    events = ["os.mkdir", "open", "os.chmod", "os.rename", "append", "append", "os.remove"]
    seen = Observed({}, [Operation(event, f"/{event}") for event in events], [], [5000])
    planned = plan(WRITERS["extract"], seen)
    assert [fault.at for fault in planned if fault.kind == "kill"] == [1, 2, 3, 4, 5, 7]
    assert [fault.at for fault in planned if fault.kind == "torn"] == [3]
    assert [fault.at for fault in planned if fault.kind == "full"] == [1, 2, 5]
    assert [fault.at for fault in planned if fault.kind == "limit"] == [0, 2500]
    assert plan(WRITERS["fit-two"], Observed({}, [], [], [])) == []  # of two processes nothing is counted


def test_what_every_command_reads_is_there(tmp_path):
    write_inputs(tmp_path / "inputs")
    for writer in [*WRITERS.values(), *MADE.values()]:
        for name in [*re.findall(r"\{inputs\}/([\w.]+)", " ".join(writer.arguments)), *writer.copies]:
            assert name in MADE or (tmp_path / "inputs" / name).exists(), f"{writer.command} reads {name}"


def test_every_command_that_writes_is_among_them():
    """All of `poss` but those that only read, print or upload, and the demo, which is made of the others."""
    reading = {"list", "plan", "generate", "allocate", "validate", "demo"}
    assert {writer.command for writer in WRITERS.values()} == {*cli.TOOLS, *cli.TRAINER} - reading
