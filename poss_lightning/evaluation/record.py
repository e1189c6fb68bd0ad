"""What `poss benchmark` and `poss replay` share: a measurement in parts, which resumes after a kill.

run.json is written first, `unfinished/` holds the answers of each finished part, rounds.parquet is written last.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import torch
from tqdm import tqdm

from poss_lightning.evaluation.provenance import provenance
from poss_lightning.evaluation.rounds import ROUNDS, RUN, UNFINISHED, AnswerRow, write_rounds
from poss_lightning.files import atomic, read_json
from poss_lightning.work import Work, check_same


def record(
    folder: Path,
    facts: dict[str, Any],  # of run.json: `config` and `methods`, with which alone it resumes, and any others
    parts: Mapping[str, Callable[[], list[AnswerRow]]],  # what gives the answers of each
    device: torch.device,
    *,
    begin: Callable[[], object] = lambda: None,  # called before the first part
    timed: bool = True,  # seconds are measured, so it resumes on the same machine alone
) -> None:
    """Measure every part that is not measured yet, and write the folder; one that is finished stays as it is.

    Raises:
        ValueError: it was made or begun with other settings, or on another machine, or another process writes there.
    """
    settings = {**facts["config"], "methods": facts["methods"]}
    work = Work(folder / UNFINISHED, settings)
    if (folder / ROUNDS).exists():
        _check_settings(folder, settings)
        work.clear()  # the process that wrote them may have been killed before it did
    else:
        with work.exclusive(wait=False):
            unfinished = [part for part in parts if work.receipt(part) is None]
            if unfinished:
                resumed = len(unfinished) < len(parts)
                write_run(folder, _note_process(folder, facts, provenance(device), resumed, timed))
                begin()
            done = len(parts) - len(unfinished)
            for part in tqdm(unfinished, desc="measure", unit="part", initial=done, total=len(parts)):
                work.write_receipt(part, parts[part]())
            write_rounds(folder, [answer for part in parts for answer in work.receipt(part) or ()])
            work.clear()
    count = pq.read_metadata(folder / ROUNDS).num_rows
    print(f"{folder}: {count} answers of {len(facts['methods'])} methods")


def write_run(folder: Path, facts: dict[str, Any]) -> None:
    """Write run.json."""
    with atomic(folder / RUN) as path:
        path.write_text(json.dumps(facts, indent=1) + "\n")


def _check_settings(folder: Path, settings: dict[str, Any]) -> None:
    """Raise ValueError where the run.json of a finished folder has another value of one of these settings."""
    run = read_json(folder / RUN)  # without it nobody knows how rounds were made
    check_same(folder, {**run.get("config", {}), "methods": run.get("methods")}, settings)


def _note_process(
    folder: Path, facts: dict[str, Any], process: dict[str, Any], resumed: bool, timed: bool
) -> dict[str, Any]:
    """Return the facts of run.json with this process's; ValueError for a machine whose seconds do not compare."""
    if not resumed:
        return facts | process
    earlier = read_json(folder / RUN)
    for fact in ("machine", "device", "threads") if timed else ():
        if earlier.get(fact, process[fact]) != process[fact]:
            raise ValueError(
                f"{folder} was begun with {fact} {earlier[fact]!r}, here it is {process[fact]!r}; seconds of the two "
                "do not compare: resume there, or choose another folder"
            )
    return earlier | {"resumed": [*earlier.get("resumed", []), process]}
