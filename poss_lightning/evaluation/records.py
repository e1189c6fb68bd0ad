"""Benchmark records: one line of JSON per prompt, turn, method and repeat. Every table and plot is computed from them.

Beside a `records.jsonl` (or `records.jsonl.gz`) lies `run.json`: the resolved config, versions, git SHA, device and
depth of each method, and in `gone_on` the processes that went on after a kill. Where a draft was trained with several
seeds, each training has a folder CHOICE/seed-N; an experiment keeps them in two files (`cells.py`), which are read as
these folders would be.
"""

import gzip
import json
import re
import reprlib
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, fields
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, NamedTuple

from pydantic import Field, ValidationError
from pydantic.dataclasses import dataclass

from poss_lightning.evaluation.cells import CELLS, NOTE, ROWS, packed_cells, packed_rows
from poss_lightning.evaluation.engines import engine_lines
from poss_lightning.files import read_json
from poss_lightning.target.fingerprints import same_weights

NAMES = ("records.jsonl", "records.jsonl.gz")
UNFINISHED = "unfinished"  # folder beside them while a command is at work; see `work.py`
OURS = (UNFINISHED, *NAMES, NOTE)  # one of them is in every folder that has, or will have, records
BESIDE = ("run.json", "rounds.jsonl", "sweep.yaml", CELLS, ROWS)  # files that are not records, beside some or below
# What makes the rounds of a method, in run.json, and what it is where that does not name it.
DRAFT_FACTS = {"weights": None, "depth": None, "nodes": None, "tree_width": None, "tree": "fixed", "lookup": 0}
OPTIONAL = {"pieces", "question", "category"}  # fields of a record
PLAIN = "plain"  # the target alone, in our own loop
EARLIER = {"autoregressive": PLAIN}  # what older records call it
BASELINES = (PLAIN, "generate", "lookup", "vllm")  # without rounds, or none kept


Natural = Annotated[int, Field(ge=0, strict=True)]
Name = Annotated[str, Field(min_length=1, strict=True)]
Prompt = Natural | Name  # a prompt's id
Seconds = dict[str, Annotated[float, Field(ge=0, allow_inf_nan=False)]]


@dataclass(frozen=True)
class Record:
    """One decoded answer; its fields are checked when it is made.

    Attributes:
        suite: the name of the prompt set.
        id: the prompt within its suite; all its turns and repeats go together in the statistics.
        turn: which turn of the conversation, from 0.
        repeat: which repetition of the same measurement, from 0.
        prompt_tokens: tokens read before the first new one, earlier turns included.
        new_tokens: the length of `tokens`.
        accepted: drafted tokens that the target accepted, a number a round; empty for the methods in `BASELINES`. The
            prefill gives one token, and a round accepted + 1: its last is the bonus, or a stop token in its place. All
            rounds together give `new_tokens`, or more where the limit cut the last round.
        seconds: wall-clock seconds; `total` always, and `prefill`, `draft`, `verify`, `commit` where measured. Beside
            the total stands `measure`, the time in which `tree: auto` measured the machine. Empty for replayed rounds.
        tokens: the new token ids, up to and with the stop token.
        text: the new tokens decoded together.
        pieces: the text of each new token, where recorded.
        question: what the user wrote in this turn, where recorded.
        category: of the question, where its suite has some.

    Raises:
        ValueError: a field has a wrong type or range, or `accepted` does not fit `new_tokens`.
    """

    suite: Name
    id: Prompt
    turn: Natural
    method: Name
    repeat: Natural
    seed: Natural
    prompt_tokens: Natural
    new_tokens: Annotated[int, Field(ge=1, strict=True)]
    accepted: list[Natural]
    seconds: Seconds
    tokens: list[Natural]
    text: str
    pieces: list[str] | None = None
    question: str | None = None
    category: str | None = None

    def __post_init__(self) -> None:
        """Raise ValueError where fields contradict each other."""
        rounds, length = self.accepted, len(self.tokens)
        if self.seconds and not self.seconds.get("total", 0) > 0:
            raise ValueError(f'seconds is {self.seconds}; it must have a "total" above 0, or be empty')
        if self.new_tokens != length:
            raise ValueError(f"new_tokens is {self.new_tokens}; it must be {length}, the length of tokens")
        if self.pieces is not None and len(self.pieces) != length:
            raise ValueError(f"pieces has {len(self.pieces)} entries; it must have {length}, one a token")
        if self.method in BASELINES:
            if rounds:
                raise ValueError(f"accepted is {reprlib.repr(rounds)}; it must be [], {self.method} has no rounds")
            return
        most = 1 + sum(rounds) + len(rounds)
        least = most - rounds[-1] if rounds else most
        if not least <= length <= most:
            raise ValueError(
                f"accepted is {reprlib.repr(rounds)}, which emits {least} to {most} tokens (1, and accepted + 1 a "
                f"round, the last of which may be cut); it must emit new_tokens = {length}"
            )


def explain(error: ValidationError) -> str:
    """What is wrong with the first field, in a line: its name, its value, and what it must be."""
    first = error.errors()[0]
    if "ctx" in first and isinstance(first["ctx"].get("error"), ValueError):  # one of ours
        return str(first["ctx"]["error"])
    named = ".".join(str(place) for place in first["loc"] if place not in ("constrained-int", "constrained-str"))
    must = first["msg"].removeprefix("Input should be ")
    return f"{named} is {reprlib.repr(first['input'])}; it must be {must}"


def check_names(drafts: Iterable[str]) -> None:
    """Raise ValueError where a draft is named like a method without rounds, or not by a text."""
    for name in drafts:
        if not isinstance(name, str):
            raise ValueError(f"a draft is named {name}, which YAML reads as {type(name).__name__}: quote it")
    if clash := set(drafts) & set(BASELINES):
        raise ValueError(f"a draft is named {clash.pop()!r}, like a baseline: choose another name")


def to_line(record: Record) -> str:
    """The record as one line of JSON, without the line's end."""
    line = {name: value for name, value in asdict(record).items() if value is not None}
    return json.dumps(line, ensure_ascii=False)


class Source(NamedTuple):
    """Records that were made together.

    Attributes:
        folder: where they were made.
        records: in the order in which they were made.
        run: their run.json; None where there is none.
        inputs: digests of what a cell of a sweep was made of, by name.
    """

    folder: Path
    records: list[Record]
    run: dict[str, Any] | None
    inputs: Mapping[str, str] = MappingProxyType({})


Paths = Iterable[str | Path] | str | Path


def read_sources(paths: Paths) -> list[Source]:
    """The records of all `paths`, in their order; fields unknown here are ignored.

    Args:
        paths: files of records; folders that hold a `records.jsonl` or `records.jsonl.gz`, or have folders below that
            do; experiments, or folders of their cells/; or a single one of these.

    Raises:
        FileNotFoundError: no such file.
        ValueError: no path, or an empty one; a file without records, or a line that is not a record; the message names
            file, line, field and value.
    """
    listed = [paths] if isinstance(paths, str | Path) else list(paths)
    if not listed or any(not str(path).strip() for path in listed):
        raise ValueError(f"records is {[*map(str, listed)]}; name files of records, or folders that hold some")
    return [source for path in listed for source in _packed(Path(path)) or _unpacked(Path(path))]


def read_records(paths: Paths) -> list[Record]:
    """The records of all `paths`, in their order. Args and errors are those of `read_sources`."""
    return [record for source in read_sources(paths) for record in source.records]


def by_cell(sources: Iterable[Source]) -> dict[tuple[str, int], list[Record]]:
    """The records of each choice and training seed, from folders named CHOICE/seed-N; nothing where none is named so.

    Raises:
        ValueError: only some folders are named so, or two are for the same choice and seed.
    """
    sources = list(sources)
    seeds = [re.fullmatch(r"seed-(\d+)", source.folder.absolute().name) for source in sources]
    if not any(seeds):
        return {}
    cells: dict[tuple[str, int], list[Record]] = {}
    for source, seed in zip(sources, seeds, strict=True):
        if seed is None:
            raise ValueError(f"{source.folder} is not a folder CHOICE/seed-N, as others are; compare it by itself")
        cell = (source.folder.absolute().parent.name, int(seed[1]))
        if cell in cells:
            raise ValueError(
                f"{source.folder} is a second {cell[0]}/seed-{cell[1]}; name the choices of several sweeps apart"
            )
        cells[cell] = source.records
    return cells


def by_folder(sources: Iterable[Source]) -> dict[str, dict[str, Any]]:
    """The run.json of each folder; one without it is left out."""
    return {str(source.folder): source.run for source in sources if source.run is not None}


def read_runs(paths: Paths) -> dict[str, dict[str, Any]]:
    """`by_folder` of what is at these paths. Args and errors are those of `read_sources`."""
    return by_folder(read_sources(paths))


def as_object(value: Any) -> dict[str, Any]:
    """A part of a run.json or of a line, which may hold anything: an object as it is, nothing for all else."""
    return value if isinstance(value, dict) else {}


def has_records(folder: Path) -> bool:
    """Whether a command has written records into this folder, or, while it is at work, the first of them."""
    return any((folder / name).exists() for name in NAMES) or any((folder / UNFINISHED).glob("question-*.json"))


def check_drafts(runs: dict[str, dict[str, Any]]) -> None:
    """Refuse runs in which one name stands for several drafts, or for one with several trees.

    Raises:
        ValueError: the message names the method, the folders and what differs.
    """
    first_runs: dict[str, tuple[str, dict]] = {}
    for folder, run in runs.items():
        for name, facts in as_object(run.get("methods")).items():
            if not isinstance(facts, dict):
                continue
            facts = {fact: facts.get(fact, usual) for fact, usual in DRAFT_FACTS.items()}
            first, known = first_runs.setdefault(name, (folder, facts))
            if other := [fact for fact in facts if facts[fact] != known[fact]]:
                values = ", ".join(f"{fact} {known[fact]} and {facts[fact]}" for fact in other)
                raise ValueError(f"{name!r} of {first} differs from that of {folder} ({values}): rename one")


def check_targets(runs: dict[str, dict[str, Any]]) -> None:
    """Refuse runs of several targets; one that does not tell its target's fingerprint may be of any.

    Raises:
        ValueError: the message names two of the folders and their targets.
    """
    configs = [(folder, as_object(run.get("config"))) for folder, run in runs.items()]
    known = [
        (folder, config.get("target"), config["fingerprint"]) for folder, config in configs if config.get("fingerprint")
    ]
    for folder, target, fingerprint in known:
        first, other, earlier = known[0]
        if not same_weights(str(fingerprint), str(earlier)):
            raise ValueError(
                f"{first} was measured on another target than {folder} ({other}, fingerprint {earlier}, and {target}, "
                f"fingerprint {fingerprint}); methods are compared on one target"
            )


def find_depths(runs: dict[str, dict[str, Any]]) -> dict[str, int]:
    """The depth K of each method, where a run.json has it."""
    entries = [
        (name, as_object(facts)) for run in runs.values() for name, facts in as_object(run.get("methods")).items()
    ]
    return {name: facts["depth"] for name, facts in entries if isinstance(facts.get("depth"), int)}


def _packed(path: Path) -> list[Source]:
    """The finished cells of an experiment, where the path is one or lies in it."""
    cells = packed_cells(path)
    rows = packed_rows(cells) if cells else {}
    return [
        Source(
            cell.folder,
            [_record(str(cell.folder), row) for row in rows[cell.folder]],
            cell.facts.get("run"),
            as_object(cell.facts.get("inputs")),
        )
        for cell in cells
    ]


def _unpacked(path: Path) -> list[Source]:
    """Files of records, with the run.json beside each."""
    sources, files = [], _below(path)
    if twice := next((file for file in files if file.with_name(f"{file.name}.gz") in files), None):
        raise ValueError(f"{twice.parent} holds {NAMES[0]} and {NAMES[1]}; remove one")
    for file in files:
        beside = file.parent / "run.json"
        run = read_json(beside) if beside.is_file() else None
        lines = [] if file.name in NAMES else engine_lines(file)
        records = [_record(place, values) for place, values in lines or read_lines(file)]
        if not records:
            raise ValueError(f"{file} holds no records; `poss benchmark` writes one a line")
        sources.append(Source(file.parent, records, run))
    return sources


def _below(path: Path) -> list[Path]:
    """The path itself, the records in it, or those below."""
    if path.is_file() and path.name in BESIDE:
        raise ValueError(f"{path} lies beside records: give its folder, {path.parent}")
    files = [path] if path.is_file() else [path / name for name in NAMES if (path / name).is_file()]
    files = files or sorted(file for name in NAMES for file in path.rglob(name))
    if not files and (path / UNFINISHED).is_dir():
        raise FileNotFoundError(f"{path} is unfinished: give the command that began it again")
    if not files:
        file = path / NAMES[0] if path.is_dir() else path
        raise FileNotFoundError(f"{file}: no such file; give a {NAMES[0]} or {NAMES[1]}, or a folder that holds one")
    return files


def read_lines(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """The objects of a file of JSON lines, packed or not, each with its place: file and line.

    Raises:
        ValueError: a line that is not a JSON object, or a torn file.
    """
    for number, line in enumerate(_read_bytes(file).split(b"\n"), start=1):
        if line.strip():
            place = f"{file}, line {number}"
            yield place, _parse_object(place, line)


def _read_bytes(file: Path) -> bytes:
    """The content of the file, unpacked."""
    try:
        return gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"{file} is not a complete gzip file ({error})") from None


def _record(place: str, values: dict[str, Any]) -> Record:
    known = {field.name for field in fields(Record)}
    if "method" in values:
        values = values | {"method": EARLIER.get(str(values["method"]), values["method"])}
    if missing := sorted(known - values.keys() - OPTIONAL):
        raise ValueError(f"{place}: lacks {', '.join(missing)}")
    try:
        return Record(**{name: value for name, value in values.items() if name in known})
    except ValidationError as error:
        raise ValueError(f"{place}: {explain(error)}") from None


def _parse_object(place: str, line: bytes) -> dict[str, Any]:
    try:
        values = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{place}: {reprlib.repr(line)} is not JSON ({error})") from None
    if not isinstance(values, dict):
        raise ValueError(f"{place}: {reprlib.repr(values)} is not a JSON object")
    return values
