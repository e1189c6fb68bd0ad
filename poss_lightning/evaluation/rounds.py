"""Rounds: a table with a row for each decoded answer, and what each of its rounds accepted. Every figure comes from it.

A folder of `poss benchmark` or `poss replay`, and each cell of a sweep (EXPERIMENT/choice=NAME/seed=N), holds

  rounds.parquet     a row per answer, see `read_rounds`; written last, so it is the mark of a finished measurement
  answers.parquet    the tokens of each answer, once, see `read_answers`; those of a sweep's cells lie in EXPERIMENT
  run.json           how they were made: resolved config, versions, git SHA, device, and depth and size of each draft
"""

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NotRequired, TypedDict

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from poss_lightning.evaluation.serving_metrics import read_engine
from poss_lightning.files import atomic, read_json

ROUNDS, ANSWERS, RUN = "rounds.parquet", "answers.parquet", "run.json"
CELL = "cell.json"  # in a folder that is trained or measured by `poss sweep`
UNFINISHED = "unfinished"  # folder of a running command; see `work.py`
RUN_FILES = (UNFINISHED, ROUNDS, CELL)  # one of them is in every folder that has, or will have, rounds
PLAIN = "plain"  # the target alone, in our own loop
BASELINES = (PLAIN, "generate", "lookup", "vllm")  # methods without rounds, or whose rounds are not kept
KEY = ["suite", "id", "turn", "repeat"]  # what tells the answers of a method apart
ANSWER_KEY = ["suite", "id", "turn", "answer"]
PARTS = ("prefill", "draft", "verify", "commit", "round", "measure", "capture")
SCHEMA = pa.schema(
    {
        **dict.fromkeys(("method", "suite", "id"), pa.string()),
        **dict.fromkeys(("turn", "repeat", "prompt_tokens", "new_tokens"), pa.int32()),
        "accepted": pa.list_(pa.int16()),
        **dict.fromkeys(("seconds", *PARTS), pa.float64()),
        "category": pa.string(),
        "answer": pa.int64(),
    }
)
ANSWER_SCHEMA = pa.schema(
    {name: SCHEMA.field(name).type for name in ANSWER_KEY}
    | {"tokens": pa.list_(pa.int32()), "pieces": pa.list_(pa.string()), "question": pa.string()}
)

Paths = Iterable[str | Path] | str | Path


class AnswerRow(TypedDict):
    """An answer of a method, as benchmark, replay and engines' files give it: a row of both tables together."""

    method: str
    suite: str
    id: str
    turn: int  # of the conversation, from 0
    repeat: int  # from 0
    prompt_tokens: int  # earlier turns included; 0 where an engine measured, which gives rounds in no order
    new_tokens: int  # a stop token included
    accepted: list[int]  # drafted tokens that each round accepted, [] for `BASELINES`; see `read_rounds`
    seconds: dict[str, float]  # by part, and "total"; {} where nothing was timed
    tokens: list[int]  # `new_tokens`, or more; [] where an engine measured
    category: NotRequired[str | None]  # of the question
    question: NotRequired[str]
    pieces: NotRequired[list[str]]  # the text of each token


def read_rounds(paths: Paths) -> pd.DataFrame:
    """Read the rounds of benchmarks, replays, sweeps or serving engines: a row per answer.

    The columns are those of `AnswerRow`, and

    - `choice`, `seed`: of the training, where a sweep made it
    - `accepted`: an array. The prefill gives one token and a round accepted + 1, the last of which is the bonus, or a
      stop token in its place. All rounds together give `new_tokens`, or more where the limit cut the last round
    - `seconds`: in all; nan where nothing was timed, as by `poss replay`
    - `prefill`, `draft`, `verify`, `commit`: seconds of them; `round`, of the last three in a CUDA graph
    - `measure`, `capture`: seconds beside these, in which `tree: auto` measured the machine and graphs were captured
    - `answer`: a number, the same for the same tokens after one prompt, see `read_answers`; instead of tokens and text
    - `folder`: where the rounds lie

    Args:
        paths: folders with rounds in them or below, files of engines (see `read_engine`), or a single one of these.

    Raises:
        FileNotFoundError: no such file, or a folder without rounds.
        ValueError: no path, or a file that is not an engine's.
    """
    listed = [paths] if isinstance(paths, str | Path) else paths
    if not listed:
        raise ValueError("paths is empty; give folders with rounds, or files of engines")
    return pd.concat([_read(file) for path in listed for file in find_rounds(Path(path))], ignore_index=True)


def read_answers(rounds: pd.DataFrame) -> pd.DataFrame:
    """Read `tokens`, `pieces` (the text of each) and `question` of answers, by suite, id, turn and answer."""
    folders = [Path(folder) for folder in rounds["folder"].unique()]
    files = {place / ANSWERS: None for folder in folders for place in (folder, folder.absolute().parents[1])}
    answers = [ANSWER_SCHEMA.empty_table(), *(_read_table(file, ANSWER_SCHEMA) for file in files if file.is_file())]
    return pa.concat_tables(answers).to_pandas().drop_duplicates(ANSWER_KEY).set_index(ANSWER_KEY)


def read_runs(rounds: pd.DataFrame) -> dict[str, dict[str, Any]]:
    """Read the run.json of each folder of rounds that has one."""
    files = {folder: Path(folder, RUN) for folder in rounds["folder"].unique()}
    return {folder: read_json(file) for folder, file in files.items() if file.is_file()}


def write_rounds(folder: Path, rows: Sequence[AnswerRow]) -> None:
    """Write rounds.parquet and answers.parquet."""
    table = [_flat(row) for row in rows]
    _write_answers(folder, table)
    _write(folder / ROUNDS, table, SCHEMA)


def move_answers(cell: Path, experiment: Path) -> None:
    """Move the answers of a cell into those of its experiment; only one process at a time may do so."""
    files = [file for place in (experiment, cell) if (file := place / ANSWERS).is_file()]
    if cell / ANSWERS in files:
        tables = [_read_table(file, ANSWER_SCHEMA) for file in files]
        _write_answers(experiment, pa.concat_tables(tables).to_pylist())
        (cell / ANSWERS).unlink()


def check_method_names(drafts: Iterable[str]) -> None:
    """Raise ValueError where a draft's name is not a string, is that of a method without rounds, or has a comma."""
    for name in drafts:
        if not isinstance(name, str):
            raise ValueError(f"a draft is named {name}, which YAML reads as {type(name).__name__}: quote it")
        if name in BASELINES:
            raise ValueError(f"a draft is named {name!r}, like a baseline: choose another name")
        if "," in name:
            raise ValueError(f"a draft is named {name!r}; names stand in lists, so it must have no comma")


def find_rounds(path: Path) -> list[Path]:
    """Find files of rounds: the path itself, that in it, those of an experiment's cells, or all below."""
    if path.is_file():
        return [path]
    for pattern in (ROUNDS, f"seed=*/{ROUNDS}", f"choice=*/seed=*/{ROUNDS}", f"**/{ROUNDS}"):
        if files := sorted(path.glob(pattern)):
            return files
    raise FileNotFoundError(f"{path} has no {ROUNDS} in it or below (is it finished?), and is not an engine's file")


def _read(file: Path) -> pd.DataFrame:
    is_ours = file.name == ROUNDS
    table = _read_table(file, SCHEMA) if is_ours else pa.Table.from_pylist(list(map(_flat, read_engine(file))), SCHEMA)
    rounds, cell = table.to_pandas(), re.search(r"/choice=([^/]+)/seed=(\d+)$", file.absolute().parent.as_posix())
    return rounds.assign(
        choice=pd.Series(cell and cell[1], rounds.index, "str"),
        seed=pd.Series(cell and int(cell[2]), rounds.index, "Int64"),
        folder=str(file.parent),
    )


def _read_table(file: Path, schema: pa.Schema) -> pa.Table:
    return pq.read_table(file, schema=schema, partitioning=None)


def _flat(row: AnswerRow) -> dict[str, Any]:
    """Return the columns of an answer in both tables."""
    seconds = row["seconds"]
    return {**row, **seconds, "seconds": seconds.get("total"), "answer": _number(row["tokens"])}


def _write_answers(folder: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write each answer once."""
    answers = {tuple(row[name] for name in ANSWER_KEY): row for row in rows}
    _write(folder / ANSWERS, list(answers.values()), ANSWER_SCHEMA)


def _write(file: Path, rows: Sequence[Mapping[str, Any]], schema: pa.Schema) -> None:
    """Write the columns that have any value; files of cells are small, so each column and its statistics count."""
    table = pa.Table.from_pylist(rows, schema)
    table = table.select([name for name in table.column_names if table[name].null_count < len(table)])
    with atomic(file) as path:
        pq.write_table(
            table, path, compression="zstd", compression_level=19, write_statistics=False, store_schema=False
        )


def _number(tokens: Sequence[int]) -> int:
    """31 bits of a digest: enough to tell the answers to one prompt apart."""
    return int.from_bytes(hashlib.sha256(json.dumps(list(tokens)).encode()).digest()[:4]) >> 1
