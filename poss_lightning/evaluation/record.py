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
    settings, process = {**facts["config"], "methods": facts["methods"]}, provenance(device)
    place = {name: process[name] for name in ("machine", "device", "threads") if timed}
    work = Work(folder / UNFINISHED, settings | {"process": place})
    if (folder / ROUNDS).exists():
        run = read_json(folder / RUN)  # without it nobody knows how rounds were made
        check_same(folder, {**run["config"], "methods": run["methods"]}, settings)
        work.clear()  # the process that wrote them may have been killed before it did
    else:
        with work.exclusive(wait=False):
            unfinished = [part for part in parts if work.receipt(part) is None]
            done = len(parts) - len(unfinished)
            if unfinished:
                earlier = read_json(folder / RUN) if done else {}
                resumed = {"resumed": [*earlier.get("resumed", []), process]}
                write_run(folder, earlier | resumed if done else facts | process)
                begin()
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
