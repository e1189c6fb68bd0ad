"""Benchmark records: one line of JSON per prompt, turn, method and repeat. Every table and plot is computed from them.

Beside a `records.jsonl` (or `records.jsonl.gz`) lies `run.json`: the resolved config, versions, git SHA, device and
depth of each method, and in `gone_on` the processes that resumed it. The trainings of a sweep have folders
CHOICE/seed-N; finished ones are packed into two files (`cells.py`) and read as if the folders were there.
"""

import json
import re
import reprlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, NamedTuple

from pydantic import Field, ValidationError
from pydantic.dataclasses import dataclass

from poss_lightning.corpus.formats import Malformed, file_records, parse_line
from poss_lightning.evaluation.cells import CELLS_FILE, NOTE, ROWS_FILE, packed_cells, packed_rows
from poss_lightning.evaluation.engines import HOW, engine_records
from poss_lightning.files import read_json
from poss_lightning.target.fingerprints import same_weights

NAMES = ("records.jsonl", "records.jsonl.gz")
UNFINISHED = "unfinished"  # folder beside them while a command is running; see `work.py`
RUN_FILES = (UNFINISHED, *NAMES, NOTE)  # one of them is in every folder that has, or will have, records
OTHER_FILES = ("run.json", "sweep.yaml", CELLS_FILE, ROWS_FILE)  # beside or above records
# What determines the rounds of a method, in run.json, and its value where run.json does not say.
DRAFT_FACTS = {"weights": None, "depth": None, "nodes": None, "tree_width": None, "tree": "fixed", "lookup": 0}
PLAIN = "plain"  # the target alone, in our own loop
EARLIER = {"autoregressive": PLAIN}  # its name in older records
BASELINES = (PLAIN, "generate", "lookup", "vllm")  # methods without rounds, or whose rounds are not kept

Natural = Annotated[int, Field(ge=0, strict=True)]
Name = Annotated[str, Field(min_length=1, strict=True)]
Seconds = dict[str, Annotated[float, Field(ge=0, allow_inf_nan=False)]]
Paths = Iterable[str | Path] | str | Path


@dataclass(frozen=True, kw_only=True)
class Record:
    """One decoded answer.

    Attributes:
        suite: the name of the prompt set.
        id: the prompt within its suite; statistics keep all its turns and repeats together.
        turn: turn of the conversation, from 0.
        repeat: repetition of the same measurement, from 0.
        prompt_tokens: tokens read before the first new one, earlier turns included.
        new_tokens: the length of `tokens`.
        accepted: drafted tokens that the target accepted, per round; empty for `BASELINES`. Prefill gives one token
            and a round accepted + 1: the last is the bonus, or a stop token in its place. All rounds together give
            `new_tokens`, or more where the limit cut the last round.
        seconds: wall-clock seconds: `total`, and `prefill`, `draft`, `verify`, `commit` where measured. Not part of
            the total is `measure`, the time in which `tree: auto` measured the machine. Empty for replayed rounds.
        tokens: the new token ids, including the stop token.
        text: the new tokens decoded together.
        pieces: the text of each new token, where recorded.
        question: the user's message of this turn, where recorded.
        category: of the question, where its suite has categories.

    Raises:
        ValueError: a field has a wrong type or range, or `accepted` does not fit `new_tokens`.
    """

    suite: Name
    id: Natural | Name
    turn: Natural
    method: Name
    repeat: Natural = 0
    seed: Natural = 0
    prompt_tokens: Natural
    new_tokens: Annotated[int, Field(ge=1, strict=True)]
    accepted: list[Natural]
    seconds: Seconds = Field(default_factory=dict)
    tokens: list[Natural]
    text: str = ""
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
            raise ValueError(f"pieces has {len(self.pieces)} entries; it must have {length}, one per token")
        if self.method in BASELINES:
            if rounds:
                raise ValueError(f"accepted is {reprlib.repr(rounds)}; it must be [], {self.method} has no rounds")
            return
        most = 1 + sum(rounds) + len(rounds)
        least = most - rounds[-1] if rounds else most
        if not least <= length <= most:
            raise ValueError(
                f"accepted is {reprlib.repr(rounds)}, which emits {least} to {most} tokens (1, and accepted + 1 per "
                f"round, the last of which may be cut); it must emit new_tokens = {length}"
            )


def check_method_names(drafts: Iterable[str]) -> None:
    """Raise ValueError where a draft's name is not a string, or is that of a method without rounds."""
    for name in drafts:
        if not isinstance(name, str):
            raise ValueError(f"a draft is named {name}, which YAML reads as {type(name).__name__}: quote it")
    if clash := set(drafts) & set(BASELINES):
        raise ValueError(f"a draft is named {clash.pop()!r}, like a baseline: choose another name")


def to_line(record: Record) -> str:
    """The record as one line of JSON, without the newline."""
    fields = {name: value for name, value in asdict(record).items() if value is not None}
    return json.dumps(fields, ensure_ascii=False)


class Source(NamedTuple):
    """Records that were made together."""

    folder: Path  # where they were made
    records: list[Record]  # in the order in which they were made
    run: dict[str, Any] | None  # their run.json, if there is one
    inputs: Mapping[str, str] = MappingProxyType({})  # digests of what a sweep's training was made from, by name


def read_sources(paths: Paths) -> list[Source]:
    """The records of all `paths`, in their order; unknown fields are ignored.

    Args:
        paths: files of records; folders that hold a `records.jsonl` or `records.jsonl.gz`, directly or below;
            experiments, or folders of their cells/; or a single one of these.

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
    """The records of all `paths`, as `read_sources` reads them."""
    return [record for source in read_sources(paths) for record in source.records]


def read_runs(paths: Paths) -> dict[str, dict[str, Any]]:
    """The run.json of each folder, as `read_sources` reads them."""
    return by_folder(read_sources(paths))


def by_folder(sources: Iterable[Source]) -> dict[str, dict[str, Any]]:
    """The run.json of each folder that has one."""
    return {str(source.folder): source.run for source in sources if source.run is not None}


def by_cell(sources: Iterable[Source]) -> dict[tuple[str, int], list[Record]]:
    """Records by choice and training seed, from folders named CHOICE/seed-N; empty where no folder is.

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
        choice, key = source.folder.absolute().parent.name, int(seed[1])
        if (choice, key) in cells:
            raise ValueError(
                f"{source.folder} is a second {choice}/seed-{key}; give the choices of several sweeps different names"
            )
        cells[choice, key] = source.records
    return cells


def as_object(value: Any) -> dict[str, Any]:
    """A part of a run.json, which may hold anything: an object as it is, {} for all else."""
    return value if isinstance(value, dict) else {}


def _methods(runs: Mapping[str, dict]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Folder, name and facts of every method."""
    for folder, run in runs.items():
        for name, facts in as_object(run.get("methods")).items():
            yield folder, name, as_object(facts)


def check_drafts(runs: dict[str, dict[str, Any]]) -> None:
    """Raise ValueError where one name stands for several drafts, or for one draft with several trees."""
    firsts: dict[str, tuple[str, dict]] = {}
    for folder, name, facts in _methods(runs):
        facts = {fact: facts.get(fact, usual) for fact, usual in DRAFT_FACTS.items()}
        first, known = firsts.setdefault(name, (folder, facts))
        if other := [fact for fact in facts if facts[fact] != known[fact]]:
            values = ", ".join(f"{fact} {known[fact]} and {facts[fact]}" for fact in other)
            raise ValueError(f"{name!r} of {first} differs from that of {folder} ({values}): rename one")


def check_targets(runs: dict[str, dict[str, Any]]) -> None:
    """Raise ValueError for runs of several targets; one without its target's fingerprint may be of any."""
    fingerprints = {folder: as_object(run.get("config")).get("fingerprint") for folder, run in runs.items()}
    known = [(folder, str(fingerprint)) for folder, fingerprint in fingerprints.items() if fingerprint]
    for folder, fingerprint in known[1:]:
        first, earlier = known[0]
        if not same_weights(earlier, fingerprint):
            raise ValueError(
                f"{first} was measured on another target than {folder} (fingerprints {earlier} and {fingerprint}); "
                "methods are compared on one target"
            )


def find_depths(runs: dict[str, dict[str, Any]]) -> dict[str, int]:
    """The depth K of each method that has one in its run.json."""
    return {name: facts["depth"] for _, name, facts in _methods(runs) if isinstance(facts.get("depth"), int)}


def _packed(path: Path) -> list[Source]:
    """The finished cells of an experiment, where the path is one or lies in it."""
    cells = packed_cells(path)
    rows = packed_rows(cells)
    sources = []
    for cell in cells:
        records = [_record(str(cell.folder), row) for row in rows[cell.folder]]
        sources.append(Source(cell.folder, records, cell.facts.get("run"), as_object(cell.facts.get("inputs"))))
    return sources


def _unpacked(path: Path) -> list[Source]:
    """Files of records, with the run.json beside each."""
    sources, files = [], _find_files(path)
    for file in files:
        if file.with_name(f"{file.name}.gz") in files:
            raise ValueError(f"{file.parent} holds {NAMES[0]} and {NAMES[1]}; remove one")
        beside = file.parent / "run.json"
        run = read_json(beside) if beside.is_file() else None
        lines = list(_read_objects(file))
        if file.name not in NAMES:
            lines = engine_records(lines, file) or lines
        records = [_record(place, values, "" if file.name in NAMES else f"; {HOW}") for place, values in lines]
        if not records:
            raise ValueError(f"{file} holds no records; `poss benchmark` writes one per line")
        sources.append(Source(file.parent, records, run))
    return sources


def _find_files(path: Path) -> list[Path]:
    """The path itself, the records in it, or those below."""
    if path.name in OTHER_FILES:
        raise ValueError(f"{path} lies beside records: give its folder, {path.parent}")
    if path.is_file():
        return [path]
    files = [path / name for name in NAMES if (path / name).is_file()]
    files = files or sorted(file for name in NAMES for file in path.rglob(name))
    if not files and (path / UNFINISHED).is_dir():
        raise FileNotFoundError(f"{path} is unfinished: give the command that began it again")
    if not files:
        raise FileNotFoundError(f"{path}: no such file; give a {NAMES[0]} or {NAMES[1]}, or a folder that holds one")
    return files


def _read_objects(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """The objects of a file of JSON lines or of one array, gzipped or not, each with its place: file and line."""
    for number, line in file_records(file):
        place = f"{file}, line {number}"
        try:
            values = parse_line(line) if isinstance(line, bytes) else line
        except Malformed as error:
            hint = "" if file.name in NAMES else f"; {HOW}"
            raise ValueError(f"{place}: {error}{hint}") from None
        if not isinstance(values, dict):
            raise ValueError(f"{place}: {reprlib.repr(values)} is not a JSON object")
        yield place, values


def _record(place: str, values: dict[str, Any], hint: str = "") -> Record:
    """A record of these fields; unknown ones are ignored. An error ends with the hint."""
    if "method" in values:
        values = values | {"method": EARLIER.get(str(values["method"]), values["method"])}
    try:
        return Record(**values)
    except ValidationError as error:
        raise ValueError(f"{place}: {_explain(error)}{hint}") from None


def _explain(error: ValidationError) -> str:
    """What is wrong with a record, in one line."""
    errors = error.errors()
    if missing := sorted(str(each["loc"][0]) for each in errors if each["type"] == "missing"):
        return f"lacks {', '.join(missing)}"
    first = errors[0]
    if first["type"] == "value_error":  # of `Record.__post_init__`
        return first["msg"].removeprefix("Value error, ")
    places = [str(place) for place in first["loc"] if not str(place).startswith("constrained-")]  # a union's types
    return f"{'.'.join(places)} is {reprlib.repr(first['input'])}; {first['msg'].replace('Input should', 'it must')}"
