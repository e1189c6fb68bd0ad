"""The trainings of an experiment in two files, `cells.jsonl` and `records.parquet`, as `poss sweep` writes them.

A *cell* is one training: of one choice, with one seed. While it is trained and measured it has a folder, which git
ignores; when it is done, what the tables need goes into the two files.

EXPERIMENT/
  sweep.yaml             what is asked for
  cells.jsonl            a line a cell: choice, seed, settings, digests of inputs, processes, run, the last scalars that
                         anything reads
  records.parquet        a row an answer: choice and seed of the cell, then the fields of a `Record`
  cells/CHOICE/seed-N/   drafts, checkpoints, TensorBoard files

The path EXPERIMENT/cells/CHOICE/seed-N names a cell whether its folder is there or not.
"""

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from poss_lightning.files import atomic

CELLS, ROWS, FOLDERS = "cells.jsonl", "records.parquet", "cells"
NOTE = "cell.json"  # in the folder of a cell that is trained or measured
KEY = ("choice", "training_seed")
KEPT = re.compile(r"val/(loss|tau_tree)|val_(pos_acc_(tree|unroll)|drift_\w+)/depth_\d+|throughput/slots_per_second")
TEXTS = ["choice", "suite", "method", "question", "category"]  # columns of few different values
SCHEMA = pa.schema(
    {
        "choice": pa.dictionary(pa.int32(), pa.string()),
        "training_seed": pa.int64(),
        "suite": pa.dictionary(pa.int32(), pa.string()),
        "id": pa.string(),  # as JSON: 50 is another prompt than "50"
        "turn": pa.int64(),
        "method": pa.dictionary(pa.int32(), pa.string()),
        "repeat": pa.int64(),
        "seed": pa.int64(),
        "prompt_tokens": pa.int64(),
        "new_tokens": pa.int64(),
        "accepted": pa.list_(pa.int64()),
        "seconds": pa.map_(pa.string(), pa.float64()),
        "tokens": pa.list_(pa.int64()),
        "text": pa.string(),
        "pieces": pa.list_(pa.string()),
        "question": pa.dictionary(pa.int32(), pa.string()),
        "category": pa.dictionary(pa.int32(), pa.string()),
    }
)

Row = dict[str, Any]  # the fields of a record


class PackedCell(NamedTuple):
    """A finished cell.

    Attributes:
        folder: where it was made, EXPERIMENT/cells/CHOICE/seed-N.
        choice: its name in sweep.yaml.
        seed: of its training.
        facts: its line: settings, inputs, processes, run (its run.json) and scalars (by step and tag; those by depth
            side by side).
    """

    folder: Path
    choice: str
    seed: int
    facts: dict[str, Any]

    @property
    def key(self) -> tuple[str, int]:
        return self.choice, self.seed

    def last_scalars(self) -> dict[str, list[tuple[int, float]]]:
        """The last step and value of each scalar, by tag."""
        try:
            folded = [(int(step), *one) for step, own in self.facts["scalars"].items() for one in own.items()]
            return {
                f"{name}/depth_{k}" if several else name: [(step, float(value))]
                for step, name, values in folded
                for several in [isinstance(values, list)]
                for k, value in enumerate(values if several else [values], 1)
                if value is not None
            }
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{self.folder}: scalars of {CELLS} are not values by step and tag ({error})") from None


def packed_cells(path: str | Path) -> list[PackedCell]:
    """The finished cells of an experiment, of its cells/ or of folders below, in the order of their paths.

    None where the path is another's.

    Raises:
        ValueError: a line that is not a cell; the message names file and line.
    """
    path = Path(path)
    for experiment, below in ((path, ()), *_above(path), *_above(path.absolute())):
        if (experiment / CELLS).is_file():
            cells = sorted(_read_lines(experiment), key=lambda cell: cell.folder)
            return [cell for cell in cells if cell.folder.parts[len(experiment.parts) + 1 :][: len(below)] == below]
    return []


def packed_rows(cells: Iterable[PackedCell]) -> dict[Path, list[Row]]:
    """The records of packed cells as plain values, by the cells' folders, in the order in which they were measured.

    Raises:
        ValueError: a records.parquet that is torn, or has no rows of a cell.
    """
    by_folder: dict[Path, list[Row]] = {cell.folder: [] for cell in cells}
    for file in dict.fromkeys(folder.parents[2] / ROWS for folder in by_folder):
        for row in _read_rows(file):
            choice, seed = (row.pop(name) for name in KEY)
            folder = file.parent / FOLDERS / choice / f"seed-{seed}"
            if folder in by_folder:
                by_folder[folder].append(row)
    if empty := [folder for folder, rows in by_folder.items() if not rows]:
        raise ValueError(f"{empty[0].parents[2] / ROWS} has no rows of {empty[0].parent.name}, {empty[0].name}")
    return by_folder


def pack(experiment: Path, choice: str, seed: int, facts: dict[str, Any], rows: list[Row]) -> None:
    """Add a finished cell to the files of an experiment, in place of an earlier one of this choice and seed.

    Only one process may do so at a time. The records are written first, so a cell that has a line has its rows.

    Args:
        facts: what `PackedCell.facts` holds, but its scalars are the step and value of every tag; those that `KEPT`
            names are kept, to 5 digits.
        rows: fields of its records.
    """
    table = [row for row in _read_rows(experiment / ROWS) if (row["choice"], row["training_seed"]) != (choice, seed)]
    places: dict[str, int] = {}
    for row in [*table, *rows]:  # the same answer of all cells side by side, which packs well
        places.setdefault(_answer(row), len(places))
    table += [{"choice": choice, "training_seed": seed, **row} for row in rows]
    table.sort(key=lambda row: places[_answer(row)])
    columns = [{**row, "id": json.dumps(row["id"]), "seconds": [*row["seconds"].items()]} for row in table]
    dense = {"use_dictionary": TEXTS, "data_page_size": 2**26}  # lists pack to half of what dictionaries of them take
    with atomic(experiment / ROWS) as path:
        pq.write_table(pa.Table.from_pylist(columns, SCHEMA), path, compression="zstd", compression_level=19, **dense)
    lines = {(cell.choice, cell.seed): cell.facts for cell in _read_lines(experiment)}
    lines[choice, seed] = {"choice": choice, "seed": seed, **facts}
    if "scalars" in facts:
        lines[choice, seed]["scalars"] = _fold(facts["scalars"])
    text = "".join(json.dumps(line, ensure_ascii=False, separators=(",", ":")) + "\n" for line in lines.values())
    with atomic(experiment / CELLS) as path:
        path.write_text(text, encoding="utf-8")


def _fold(scalars: dict[str, tuple[int, float]]) -> dict[int, dict[str, Any]]:
    """By step and name; the values of the depths 1, 2, … side by side, None where one is missing."""
    folded: dict[int, dict[str, Any]] = {}
    for tag, (step, value) in scalars.items():
        if not KEPT.fullmatch(tag):
            continue
        name, _, depth = tag.partition("/depth_")
        own, short = folded.setdefault(step, {}), float(f"{value:.5g}")
        if not depth:
            own[name] = short
            continue
        values = own.setdefault(name, [])
        values += [None] * (int(depth) - len(values))
        values[int(depth) - 1] = short
    return folded


def _above(path: Path) -> list[tuple[Path, tuple[str, ...]]]:
    """The experiments that a path may be inside of, each with what stands behind its cells/."""
    places = [place for place, part in enumerate(path.parts) if part == FOLDERS]
    return [(Path(*path.parts[:place]), path.parts[place + 1 :]) for place in places]


def _read_lines(experiment: Path) -> list[PackedCell]:
    file, cells = experiment / CELLS, []
    if not file.is_file():
        return []
    for number, line in enumerate(filter(None, file.read_text(encoding="utf-8").split("\n")), start=1):
        try:
            facts = json.loads(line)
            choice, seed = facts["choice"], facts["seed"]
            if not isinstance(run := facts.get("run", {}), dict):
                raise TypeError(f"its run is a {type(run).__name__}")
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{file}, line {number} is not a cell ({error!r})") from None
        cells.append(PackedCell(experiment / FOLDERS / choice / f"seed-{seed}", choice, seed, facts))
    return cells


def _read_rows(file: Path) -> list[Row]:
    if not file.is_file():
        return []
    try:
        rows = pq.read_table(file).to_pylist()
    except (OSError, pa.ArrowException) as error:
        raise ValueError(f"{file} cannot be read as Parquet ({error})") from error
    for row in rows:
        row["id"], row["seconds"] = json.loads(row["id"]), dict(row["seconds"])
    return rows


def _answer(row: Row) -> str:
    return json.dumps([row[name] for name in ("suite", "id", "turn", "repeat")])
