"""The trainings of an experiment in two files, `cells.jsonl` and `records.parquet`, as `poss sweep` writes them.

A *cell* is one training: of one choice, with one seed. While it is trained and measured it has a folder, which git
ignores; when it is done, what the tables need goes into the two files.

EXPERIMENT/
  sweep.yaml             what is asked for
  cells.jsonl            one line per cell: choice, seed, settings, digests of inputs, processes, run, last scalars
  records.parquet        one row per answer: choice and seed of the cell, then the fields of a `Record`
  cells/CHOICE/seed-N/   drafts, checkpoints, TensorBoard files

The path EXPERIMENT/cells/CHOICE/seed-N names a cell whether or not its folder is there.
"""

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from poss_lightning.files import atomic

CELLS_FILE, ROWS_FILE, FOLDERS = "cells.jsonl", "records.parquet", "cells"
NOTE = "cell.json"  # in the folder of a cell that is trained or measured
KEPT_SCALARS = re.compile(
    r"val/(loss|tau_tree)|val_(pos_acc_(tree|unroll)|drift_\w+)/depth_\d+|throughput/slots_per_second"
)
WORD = pa.dictionary(pa.int32(), pa.string())  # few different values
SCHEMA = pa.schema(
    {
        "choice": WORD,
        "training_seed": pa.int64(),
        "suite": WORD,
        "id": pa.string(),  # as JSON: 50 is a different prompt from "50"
        "turn": pa.int64(),
        "method": WORD,
        "repeat": pa.int64(),
        "seed": pa.int64(),
        "prompt_tokens": pa.int64(),
        "new_tokens": pa.int64(),
        "accepted": pa.list_(pa.int64()),
        "seconds": pa.map_(pa.string(), pa.float64()),
        "tokens": pa.list_(pa.int64()),
        "text": pa.string(),
        "pieces": pa.list_(pa.string()),
        "question": WORD,
        "category": WORD,
    }
)

Row = dict[str, Any]  # the fields of a record


class PackedCell(NamedTuple):
    """A finished cell."""

    folder: Path  # where it was made, EXPERIMENT/cells/CHOICE/seed-N
    choice: str  # its name in sweep.yaml
    seed: int  # the seed of its training
    facts: dict[str, Any]  # its line: settings, inputs, processes, run (its run.json) and scalars (see `_fold`)

    @property
    def key(self) -> tuple[str, int]:
        return self.choice, self.seed

    def last_scalars(self) -> dict[str, list[tuple[int, float]]]:
        """The last step and value of each scalar, by tag."""
        scalars = {}
        for step, folded in self.facts["scalars"].items():
            for name, values in folded.items():
                by_tag = {name: values}
                if isinstance(values, list):
                    by_tag = {f"{name}/depth_{k}": value for k, value in enumerate(values, 1) if value is not None}
                scalars |= {tag: [(int(step), value)] for tag, value in by_tag.items()}
        return scalars


def packed_cells(path: str | Path) -> list[PackedCell]:
    """The finished cells of an experiment, of its cells/ or of folders below, in the order of their paths."""
    for place in (Path(path), Path(path).absolute()):
        for experiment in (place, *place.parents):
            below = place.relative_to(experiment).parts
            if below[:1] in ((), (FOLDERS,)) and (experiment / CELLS_FILE).is_file():
                cells = sorted(_read_lines(experiment), key=lambda cell: cell.folder)
                return [cell for cell in cells if cell.folder.is_relative_to(place)]
    return []


def packed_rows(cells: Iterable[PackedCell]) -> dict[Path, list[Row]]:
    """The fields of the records of packed cells by the cells' folders, in the order in which they were measured."""
    by_folder: dict[Path, list[Row]] = {cell.folder: [] for cell in cells}
    for file in dict.fromkeys(folder.parents[2] / ROWS_FILE for folder in by_folder):
        for row in _read_rows(file):
            folder = file.parent / FOLDERS / row.pop("choice") / f"seed-{row.pop('training_seed')}"
            if folder in by_folder:
                by_folder[folder].append(row)
    if empty := [folder for folder, rows in by_folder.items() if not rows]:
        raise ValueError(f"{empty[0].parents[2] / ROWS_FILE} has no rows of {empty[0].parent.name}, {empty[0].name}")
    return by_folder


def pack(experiment: Path, choice: str, seed: int, facts: dict[str, Any], rows: list[Row]) -> None:
    """Add a finished cell to the files of an experiment; it replaces an earlier one of this choice and seed.

    Only one process at a time may do so. The records are written first, so a cell that has a line has its rows.

    Args:
        facts: those of a `PackedCell`, but its scalars are the step and value of every tag; `pack` keeps those that
            `KEPT_SCALARS` matches, to 5 digits.
        rows: the fields of its records.
    """
    table = [
        row for row in _read_rows(experiment / ROWS_FILE) if (row["choice"], row["training_seed"]) != (choice, seed)
    ]
    table += [{"choice": choice, "training_seed": seed, **row} for row in rows]
    places: dict[str, int] = {}
    for row in table:  # the same answer of all cells side by side, which compresses well
        places.setdefault(_answer_key(row), len(places))
    table.sort(key=lambda row: places[_answer_key(row)])
    columns = [{**row, "id": json.dumps(row["id"]), "seconds": [*row["seconds"].items()]} for row in table]
    words = [field.name for field in SCHEMA if field.type == WORD]  # lists take twice the space as dictionaries
    dense = {"use_dictionary": words, "data_page_size": 2**26, "compression": "brotli", "compression_level": 11}
    with atomic(experiment / ROWS_FILE) as path:
        pq.write_table(pa.Table.from_pylist(columns, SCHEMA), path, **dense)
    lines = {cell.key: cell.facts for cell in _read_lines(experiment)}
    lines[choice, seed] = {"choice": choice, "seed": seed, **facts, "scalars": _fold(facts.get("scalars", {}))}
    text = "".join(json.dumps(line, ensure_ascii=False, separators=(",", ":")) + "\n" for line in lines.values())
    with atomic(experiment / CELLS_FILE) as path:
        path.write_text(text, encoding="utf-8")


def _fold(scalars: dict[str, tuple[int, float]]) -> dict[int, dict[str, Any]]:
    """Values by step and name; those of depths 1, 2, … in a list, with None where one is missing."""
    folded: dict[int, dict[str, Any]] = {}
    for tag, (step, value) in scalars.items():
        if not KEPT_SCALARS.fullmatch(tag):
            continue
        name, _, depth = tag.partition("/depth_")
        at_step, rounded = folded.setdefault(step, {}), float(f"{value:.5g}")
        if depth:
            values = at_step.setdefault(name, [])
            values += [None] * (int(depth) - len(values))
            values[int(depth) - 1] = rounded
        else:
            at_step[name] = rounded
    return folded


def _read_lines(experiment: Path) -> list[PackedCell]:
    file, cells = experiment / CELLS_FILE, []
    if not file.is_file():
        return []
    for number, line in enumerate(filter(None, file.read_text(encoding="utf-8").split("\n")), start=1):
        try:
            facts = json.loads(line)
            choice, seed = facts["choice"], facts["seed"]
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{file}, line {number} is not a cell ({error!r})") from None
        cells.append(PackedCell(experiment / FOLDERS / choice / f"seed-{seed}", choice, seed, facts))
    return cells


def _read_rows(file: Path) -> list[Row]:
    if not file.is_file():
        return []
    rows = pq.read_table(file).to_pylist()
    for row in rows:
        row["id"], row["seconds"] = json.loads(row["id"]), dict(row["seconds"])
    return rows


def _answer_key(row: Row) -> str:
    return json.dumps([row[name] for name in ("suite", "id", "turn", "repeat")])
