"""`poss histogram`: how many drafted tokens each round accepted, of our records or of what engines measured.

Three forms are read, a line of JSON an answer, and the first is what is written:

    {"spec_decode_acceptance": {"acceptance_histogram": {"0": 34, "2": 9}, ...}, ...}     AIPerf's profile_export.jsonl
    {"metrics": {"speculative_decoding": {"acceptance_histogram": [34, 0, 9], ...}}, ...}  a response of vLLM's server
    a records.jsonl, or folders of them                                                    `poss benchmark`, `replay`

AIPerf's form is its SpecDecodeAcceptanceRecord (0.12), and vLLM's its per-request metrics (0.32). Neither tells trees
from chains: drafted tokens are all that were verified, so `--nodes` less the root in each round of ours, which are
not known of `tree: auto`.
"""

import json
import math
import os
import reprlib
from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np

from poss_lightning.evaluation.records import (
    BASELINES,
    Record,
    Source,
    as_object,
    draft_facts,
    read_lines,
    read_sources,
    sampled,
)
from poss_lightning.files import check_file, check_new
from poss_lightning.ranges import Draws, Seed, check_numbers
from poss_lightning.reports import statistics
from poss_lightning.reports.compare import print_tables
from poss_lightning.reports.statistics import Sums, draw_counts, estimate
from poss_lightning.reports.summary import describe_answer
from poss_lightning.reports.tables import Cell, Table, drop_empty_columns, make_cell
from poss_lightning.work import write_alone

MOST = 1024  # tokens that a round may accept
AIPERF, VLLM = "spec_decode_acceptance", ("metrics", "speculative_decoding")
OURS = "poss_lightning"  # as an engine
PLACE = ("suite", "id", "turn", "repeat")  # of an answer
NOTE = (
    "Prompts are a random sample: under each value stands its 95 % interval for others like them. All answers to a "
    "prompt count together; a line of an engine that does not name its prompt counts as one."
)


@dataclass(frozen=True)
class Acceptance:
    """One answer's rounds; they are checked when it is made.

    Attributes:
        engine: that decoded it.
        histogram: accepted tokens -> rounds that accepted so many; the bonus is not counted.
        drafted: tokens that were drafted and verified, in all rounds; None where it is not known.
        most: that a round can accept; None where it is not known.
        new_tokens: of the answer; None where it is not known.
        accepted: round by round, where it is known.

    Raises:
        ValueError: the numbers contradict each other.
    """

    engine: str
    histogram: dict[int, int]
    drafted: int | None = None
    most: int | None = None
    new_tokens: int | None = None
    accepted: list[int] | None = None

    def __post_init__(self) -> None:
        if self.drafted is not None and self.drafted < self.total:
            raise ValueError(f"{self.total} tokens are accepted, and num_draft_tokens is {self.drafted}")
        if self.most is not None and max(self.histogram, default=0) > self.most:
            raise ValueError(f"a round accepted {max(self.histogram)} tokens, and num_spec_tokens is {self.most}")
        if self.accepted is not None and Counter(self.accepted) != Counter(self.histogram):
            raise ValueError("per_step_accepted and acceptance_histogram are of different rounds")

    @property
    def rounds(self) -> int:
        return sum(self.histogram.values())

    @property
    def total(self) -> int:
        """Accepted tokens."""
        return sum(accepted * rounds for accepted, rounds in self.histogram.items())

    def to_aiperf(self) -> dict[str, Any]:
        """As AIPerf's SpecDecodeAcceptanceRecord; what is not known is left out."""
        known = {
            "engine": self.engine,
            "mean_acceptance_length": 1 + self.total / self.rounds if self.rounds else 1.0,
            "draft_acceptance_rate": None if self.drafted is None else self.total / max(self.drafted, 1),
            "acceptance_histogram": {str(accepted): self.histogram[accepted] for accepted in sorted(self.histogram)},
            "num_accepted_draft_tokens": self.total,
            "num_draft_tokens": self.drafted,
            "num_spec_steps": self.rounds,
            "num_spec_tokens": self.most,
            "completion_tokens": self.new_tokens,
            "per_step_accepted": self.accepted,
        }
        return {name: value for name, value in known.items() if value is not None}

    @classmethod
    def from_engine(cls, values: dict[str, Any], engine: str = "vllm") -> "Acceptance":
        """From either engine's form, whose histogram is a dict or a list.

        Raises:
            ValueError: a field is missing, of a wrong type, or contradicts another; the message names it.
        """
        counts = values.get("acceptance_histogram")
        pairs = counts if isinstance(counts, dict) else dict(enumerate(counts)) if isinstance(counts, list) else None
        if pairs is None or not all(map(_is_accepted, pairs)) or not all(map(_is_natural, pairs.values())):
            raise ValueError(
                f"acceptance_histogram is {reprlib.repr(counts)}; it must be a list of integers of at least 0, or an "
                f"object of such, by numbers of accepted tokens from 0 to {MOST}"
            )
        histogram = {int(key): count for key, count in pairs.items()}
        accepted = values.get("per_step_accepted")
        if accepted is not None and not isinstance(accepted, list):
            raise ValueError(f"per_step_accepted is {reprlib.repr(accepted)}; it must be a list")
        found = cls(
            engine=str(values.get("engine", engine)),
            histogram={key: count for key, count in histogram.items() if count},
            drafted=_optional("num_draft_tokens", values.get("num_draft_tokens")),
            most=_optional("num_spec_tokens", values.get("num_spec_tokens"), MOST),
            new_tokens=_optional("completion_tokens", values.get("completion_tokens")),
            accepted=accepted and [_natural("per_step_accepted", count) for count in accepted],
        )
        for name, counted in (("num_spec_steps", found.rounds), ("num_accepted_draft_tokens", found.total)):
            if name in values and values[name] != counted:
                raise ValueError(f"{name} is {values[name]!r}; by acceptance_histogram it is {counted}")
        return found

    @classmethod
    def from_record(cls, record: Record, depth: int, drafted: int | None) -> "Acceptance":
        """From a record of ours; `drafted` tokens a round, if known, of which `depth` can be accepted."""
        accepted = record.accepted
        every = None if drafted is None else drafted * len(accepted)
        return cls(OURS, dict(Counter(accepted)), every, depth, record.new_tokens, accepted)


@dataclass(frozen=True)
class Answered:
    """An answer: where it comes from, and its rounds."""

    method: str
    place: dict[str, Any]  # suite, id, turn and repeat, of a record; else the line's metadata
    rounds: Acceptance
    folder: str = field(default="", compare=False)  # of the records, or the engine's file; absolute
    made: str = field(default="", compare=False)  # of the answers of one draft that was sampled in one way, the same


@check_numbers
def histogram(files: list[str] | str, *, out: str | None = None, resamples: Draws = 2000, seed: Seed = 0) -> None:
    """Show how many rounds accepted how many drafted tokens, of our records or of what engines measured.

    Args:
        files: records, or folders of them; AIPerf's profile_export.jsonl (`--export-level records`); or lines of
            responses of vLLM's server (`--per-request-spec-decode-metrics`). Several as [a,b].
        out: file to write, a new one: a line an answer, as AIPerf writes it.
        resamples: draws of the bootstrap over prompts.
        seed: of the bootstrap.
    """
    if out is not None:
        check_file(out, ".jsonl")
    with nullcontext() if out is None else write_alone(out) as path:
        if out is not None:
            check_new(out)
        found = [answer for file in ([files] if isinstance(files, str) else files) for answer in read_answers(file)]
        if not found:
            raise ValueError(f"files is {files}; no record in it is of a method that drafts")
        answers = name_apart(found)
        if path is not None:
            lines = ({"metadata": {"method": a.method, **a.place}, AIPERF: a.rounds.to_aiperf()} for a in answers)
            path.write_text("".join(f"{json.dumps(line, ensure_ascii=False)}\n" for line in lines), encoding="utf-8")
    print_tables(tables(by_prompt(answers), resamples, seed), note=NOTE, legend="")


def name_apart(answers: list[Answered]) -> list[Answered]:
    """The answers; where several trainings, trees or temperatures have one name, each with its folder's beside it."""
    made: dict[str, set[str]] = {}
    folders: dict[str, set[str]] = {}
    for answer in answers:
        made.setdefault(answer.method, set()).add(answer.made)
        folders.setdefault(answer.method, set()).add(answer.folder)
    names = {
        (method, folder): f"{method}, {os.path.relpath(folder, os.path.commonpath(folders[method]))}"
        for method, ways in made.items()
        if len(ways) > 1
        for folder in folders[method]
    }
    return [replace(answer, method=names.get((answer.method, answer.folder), answer.method)) for answer in answers]


def by_prompt(answers: list[Answered]) -> dict[str, list[Acceptance]]:
    """The rounds of each method's prompts, all turns and repeats of a prompt together.

    Raises:
        ValueError: an answer is there twice.
    """
    found: dict[str, dict[Any, list[Acceptance]]] = {}
    seen: dict[tuple, Answered] = {}
    for number, answer in enumerate(answers):
        if all(name in answer.place for name in PLACE):
            key = (answer.method, *(str(answer.place[name]) for name in PLACE))
            if (first := seen.setdefault(key, answer)) is not answer:
                raise ValueError(
                    f"{answer.method!r} answers {describe_answer(key[1:])} twice, in {first.folder} and in "
                    f"{answer.folder}; name each answer once"
                )
        suite, prompt = answer.place.get("suite"), answer.place.get("id")
        key = number if suite is None or prompt is None else (str(suite), str(prompt))
        found.setdefault(answer.method, {}).setdefault(key, []).append(answer.rounds)
    return {method: [_together(rounds) for rounds in prompts.values()] for method, prompts in found.items()}


def _together(answers: list[Acceptance]) -> Acceptance:
    histogram: Counter[int] = sum((Counter(one.histogram) for one in answers), Counter())
    known = [one.most for one in answers if one.most is not None]
    drafted = [one.drafted for one in answers if one.drafted is not None]
    every = sum(drafted) if len(drafted) == len(answers) else None
    return Acceptance(answers[0].engine, dict(histogram), every, max(known, default=None))


def tables(methods: dict[str, list[Acceptance]], resamples: int = 2000, seed: int = 0) -> list[Table]:
    """Acceptance of each method, and its rounds by accepted tokens in per cent."""
    columns = [
        ("prompts",),
        ("rounds",),
        ("tokens a round", "τ micro"),
        ("by prompt", "τ macro"),
        ("accepted of drafted, %",),
    ]
    means, shares = [], []
    deepest = max(max(max(one.histogram, default=0), one.most or 0) for found in methods.values() for one in found)
    for name, found in methods.items():
        exact = np.array([[one.histogram.get(accepted, 0) for accepted in range(deepest + 1)] for one in found], float)
        reach = np.flip(np.flip(exact, 1).cumsum(1), 1)  # rounds that accepted so many or more
        sums = Sums(reach, np.zeros(len(found)), np.zeros(len(found)))
        counts = draw_counts(len(found), resamples, seed)
        active = int((reach[:, 0] > 0).sum())  # prompts that have rounds
        taus = [estimate(tau(counts, sums), active) for tau in (statistics.tau_micro, statistics.tau_macro)]
        drafted = np.array([math.nan if one.drafted is None else one.drafted for one in found])
        rate = statistics.ratio(counts @ reach[:, 1:].sum(1), counts @ drafted)
        cells = [Cell(str(len(found))), Cell(str(int(reach[:, 0].sum()))), *map(make_cell, taus)]
        means.append(([name], [*cells, make_cell(statistics.estimate_share(rate, active).percent(), ".1f")]))
        drawn = counts @ exact  # (1+R, K+1)
        parts = statistics.ratio(drawn, np.broadcast_to(drawn.sum(1, keepdims=True), drawn.shape))
        shares.append(
            ([name], [make_cell(statistics.estimate_share(part, active).percent(), ".1f") for part in parts.T])
        )
    places = [[str(accepted)] for accepted in range(deepest + 1)]
    return [
        drop_empty_columns(Table("Acceptance", ["method"], columns, means)),
        Table("Rounds by accepted tokens, %", ["method"], places, shares),
    ]


def read_answers(file: str) -> Iterator[Answered]:
    """The answers of a file or folder, in order. Lines of an engine without acceptance are passed over.

    Raises:
        FileNotFoundError, ValueError: as `read_sources`; it is not known how many tokens a round drafts; no line has
            any acceptance, or one contradicts itself, which is named.
    """
    path = Path(file)
    lines = list(read_lines(path)) if path.is_file() else []
    if not lines or "accepted" in lines[0][1]:
        for source in read_sources(file):
            yield from _of_records(source)
        return
    found = [answer for place, values in lines if (answer := _of_engine(place, values, path.absolute()))]
    if not found:
        raise ValueError(f"{file}: no line has {AIPERF!r} or {'.'.join(VLLM)!r}")
    yield from found


def _of_records(source: Source) -> Iterator[Answered]:
    """Of the methods that draft."""
    methods, way = as_object((source.run or {}).get("methods")), sampled(source)
    for record in source.records:
        if record.method in BASELINES:
            continue
        facts = as_object(methods.get(record.method))
        depth, nodes = facts.get("depth"), facts.get("nodes")
        if not _is_natural(depth) or not _is_natural(nodes):
            raise ValueError(
                f"{source.folder}: its run.json does not say how many tokens {record.method!r} drafts a round"
            )
        place = {name: getattr(record, name) for name in PLACE}
        drafted = nodes - 1 if facts.get("tree", "fixed") == "fixed" else None  # else each round has a size of its own
        rounds = Acceptance.from_record(record, depth, drafted)
        made = repr((draft_facts(facts), way))
        yield Answered(record.method, place, rounds, str(source.folder.absolute()), made)


def _of_engine(place: str, values: dict[str, Any], file: Path) -> Answered | None:
    """Of one line; None where it has no acceptance, as a failed request's line has none."""
    metadata, found = as_object(values.get("metadata")), values
    for name in (AIPERF,) if AIPERF in values else VLLM:
        found = as_object(found.get(name))
    if not found:
        return None
    try:
        rounds = Acceptance.from_engine(found)
    except ValueError as error:
        raise ValueError(f"{place}: {error}") from None
    return Answered(str(metadata.pop("method", file.stem)), metadata, rounds, str(file))


def _is_accepted(key: Any) -> bool:
    """Whether it is a number of accepted tokens, as JSON spells it."""
    return str(key).isdecimal() and str(int(key)) == str(key) and int(key) <= MOST


def _is_natural(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _natural(name: str, value: Any) -> int:
    if not _is_natural(value):
        raise ValueError(f"{name} is {reprlib.repr(value)}; it must be an integer of at least 0")
    return value


def _optional(name: str, value: Any, most: int | None = None) -> int | None:
    if value is not None and most is not None and _natural(name, value) > most:
        raise ValueError(f"{name} is {value}; it must be at most {most}")
    return None if value is None else _natural(name, value)
