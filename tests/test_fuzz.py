"""Any options and any corpus end in a result or in one line: no traceback, no file left behind.

Here a few, the same in every run; POSS_FUZZ=100 runs as many new ones.
"""

import os
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import HealthCheck, given, note, settings

from poss_lightning import cli
from tests.support.command import left, run_in
from tests.support.fuzz import Command, command_lines

pytestmark = pytest.mark.nightly
COMMANDS = [*cli.TOOLS, *cli.TRAINER]
TOTAL = int(os.environ.get("POSS_FUZZ", "0"))  # commands of a long run
OPTIONS = {"deadline": None, "database": None, "suppress_health_check": list(HealthCheck)}
RUN = settings(max_examples=TOTAL // len(COMMANDS) or 1, derandomize=not TOTAL, **OPTIONS)


@pytest.mark.parametrize("command", COMMANDS)
def test_any_options_end_in_a_result_or_in_one_line(inputs, command):
    @RUN
    @given(line=command_lines(command))
    def run_any(line: Command) -> None:
        check(inputs, line)

    run_any()


def check(inputs: Path, line: Command) -> None:
    """Run a command in a folder of its own, and compare its outcome with the promise."""
    with TemporaryDirectory() as folder:
        place = Path(folder)
        (place / "inputs" / "mine").mkdir(parents=True)
        for path in inputs.iterdir():
            (place / "inputs" / path.name).symlink_to(path)
        for name, content in line.files.items():
            (place / "inputs" / "mine" / name).write_bytes(content)
        (place / "mine").mkdir()
        (place / "mine" / "notes.txt").write_text("mine")
        before = left(place)
        result = run_in(place, *(text.replace("{inputs}", "inputs") for text in line.arguments), stdin=line.stdin)
        after = left(place)
    note(f"{line.arguments}: {result}")
    assert result.code in (None, 0) or isinstance(result.code, str), result.code
    assert "\n" not in str(result.code) and "Traceback" not in result.err
    assert result.code in (None, 0) or before == after, f"left behind: {set(after) ^ set(before)}"
