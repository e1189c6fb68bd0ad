"""What rounds say: every method summed up, by temperature, and what to know before methods are compared."""

import os
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from poss_lightning.evaluation.rounds import BASELINES, Paths, read_rounds, read_runs
from poss_lightning.files import public_name
from poss_lightning.reports.measures import MEASURES, SPEED, SPEED_UP, Measure
from poss_lightning.reports.summary import ALL, MethodSummary, split_trainings, summarise
from poss_lightning.target.fingerprints import same_weights
from poss_lightning.terminal import announced

AUTO = (
    "Trees were sized by their cost (tree: auto), so a round may end before a position is drafted: pos-acc and τ "
    "depend on the draft, on this machine, and on earlier prompts, from which auto learns."
)
TRAINED_ONCE = (
    "Each method was trained once: 95 % intervals are for other prompts, and say nothing about other trainings."
)
SEEDS = "95 % intervals are for other trainings and other prompts."
APART = "Each way of sampling is compared, and corrected, by itself."
# What determines the rounds of a method, in run.json, and its value where run.json does not say.
DRAFT_FACTS = {"weights": None, "depth": None, "nodes": None, "tree_width": None, "tree": "fixed", "lookup": 0}

Runs = Mapping[str, dict[str, Any]]  # the run.json of each folder


class Findings(NamedTuple):
    """What rounds say."""

    rows: list[MethodSummary]  # the methods over all prompts, then by suite
    baseline: str | None
    reference: str | None
    speed: Measure  # by which speeds are compared: a sweep's choices were timed apart, each beside its baseline
    notes: list[str]  # what to know before methods are compared
    answers: dict[str, pd.DataFrame]  # of the first training of each method, named as the rows are
    runs: Runs  # how the rounds were made, by folder
    title: str  # what all this was read from

    @property
    def overall(self) -> list[MethodSummary]:
        """The rows over all suites."""
        return [row for row in self.rows if row.suite == ALL]

    @property
    def compared(self) -> list[Measure]:
        """The measures of the table against the reference: lengths, and the one speed that can be compared."""
        other = {SPEED, SPEED_UP} - {self.speed}
        return sorted((m for m in MEASURES if m.scale != "share" and m not in other), key=lambda m: m.logs)


@announced("reading records")
def find(records: Paths, *, baseline: str = "plain", reference: str | None = None) -> Findings:
    """Sum up rounds; arguments are those of `compare`.

    Raises:
        FileNotFoundError, ValueError: as `read_rounds`, `split_trainings` and `summarise`; or of several targets, or of
            one name for several drafts.
    """
    rounds = read_rounds(records)
    runs = read_runs(rounds)
    _check_targets(runs)
    is_sweep = not bool(rounds["choice"].isna().all())
    if bool(rounds["choice"].isna().any()):  # folders of a sweep tell the trainings of a choice apart
        _check_drafts(runs)
    rows: list[MethodSummary] = []
    notes: dict[str, None] = {}  # in order
    answers: dict[str, pd.DataFrame] = {}
    ways = {folder: _sampling(runs.get(folder, {})) for folder in rounds["folder"].unique()}
    for temperature, top_k, top_p in sorted({*ways.values()}):
        name = f"T = {temperature:g}" + f", top_k {top_k}" * (top_k > 0) + f", top_p {top_p:g}" * (top_p < 1)
        suffix = f", {name}" * (len({*ways.values()}) > 1)
        chosen = [folder for folder, way in ways.items() if way == (temperature, top_k, top_p)]
        some, its_runs = rounds[rounds["folder"].isin(chosen)], {name: runs[name] for name in chosen if name in runs}
        trainings = split_trainings(some)
        depths = {name: facts["depth"] for _, name, facts in _methods(its_runs) if "depth" in facts}
        summed = summarise(trainings, baseline=baseline, reference=reference, depths=depths)
        rows += [replace(row, method=row.method + suffix) for row in summed]
        notes |= dict.fromkeys(not_comparable(some, its_runs) + _notes(summed, its_runs, reference))
        firsts = {name: next(iter(by_seed.values())) for name, by_seed in trainings.items()}
        beside = next(iter(firsts.values()))
        of_method = {name: own for name, own in beside.items() if name in BASELINES}
        of_method |= {name: own[name] for name, own in firsts.items()}
        answers |= {name + suffix: own for name, own in of_method.items()}
    return Findings(
        rows=rows,
        baseline=baseline if any(SPEED_UP.name in row.values for row in rows) else None,
        reference=reference,
        speed=SPEED_UP if is_sweep else SPEED,
        notes=[*notes, *[APART] * (len({*ways.values()}) > 1)],
        answers=answers,
        runs=runs,
        title=_name_folders(rounds["folder"].unique()),
    )


def _sampling(run: dict[str, Any]) -> tuple[float, int, float]:
    """Return temperature, top-k and top-p of a run; greedy where its run.json does not say."""
    config = run.get("config", {})
    temperature = config.get("temperature") or 0
    return (temperature, config.get("top_k") or 0, config.get("top_p") or 1) if temperature else (0, 0, 1)


def _notes(rows: list[MethodSummary], runs: Runs, reference: str | None) -> list[str]:
    """Say what intervals are for, and what acceptance depends on."""
    notes = [SEEDS] if any(len(row.seeds) > 1 for row in rows) else [TRAINED_ONCE]
    seeds = {seed for row in rows if row.method == reference for seed in row.seeds}
    few = sorted({row.method for row in rows if row.gains and len(seeds & {*row.seeds}) == 1})
    if few and notes == [SEEDS]:
        notes.append(
            f"One seed alone is shared with {reference}, so the interval is for other prompts: {', '.join(few)}."
        )
    if any(run.get("config", {}).get("tree") == "auto" for run in runs.values()):
        notes.append(AUTO)
    return notes


def not_comparable(rounds: pd.DataFrame, runs: Runs) -> list[str]:
    """Return a warning for each input (store, start, config), and each circumstance of a measurement, that differs."""
    seen: dict[str, set[str]] = defaultdict(set)
    for folder, run in runs.items():
        options = run.get("config", {})
        facts: dict[str, Any] = {**run.get("cell", {}).get("inputs", {}), "dtype": options.get("dtype")}
        if rounds.loc[rounds["folder"] == folder, "seconds"].notna().any():
            facts |= {"max_new_tokens": options.get("max_new_tokens")}
            facts |= {name: run.get(name) for name in ("machine", "device")}
        for name, value in facts.items():
            if value is not None:
                seen[name].add(str(value))
    return [
        f"WARNING: not comparable: these records had {len(different)} different {public_name(name)}"
        for name, different in seen.items()
        if len(different) > 1
    ]


def _methods(runs: Runs) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Return folder, name and facts of every method."""
    return ((folder, name, facts) for folder, run in runs.items() for name, facts in run.get("methods", {}).items())


def _check_drafts(runs: Runs) -> None:
    """Raise ValueError where one name stands for several drafts, or for one draft with several trees."""
    firsts: dict[str, tuple[str, dict]] = {}
    for folder, name, facts in _methods(runs):
        facts = {fact: facts.get(fact, usual) for fact, usual in DRAFT_FACTS.items()}
        first, known = firsts.setdefault(name, (folder, facts))
        if other := [fact for fact in facts if facts[fact] != known[fact]]:
            values = ", ".join(f"{fact} {known[fact]} and {facts[fact]}" for fact in other)
            raise ValueError(f"{name!r} of {first} differs from that of {folder} ({values}): rename one")


def _check_targets(runs: Runs) -> None:
    """Raise ValueError for runs of several targets; one without its target's fingerprint may be of any."""
    fingerprints = {folder: run.get("config", {}).get("fingerprint") for folder, run in runs.items()}
    known = [(folder, str(fingerprint)) for folder, fingerprint in fingerprints.items() if fingerprint]
    for folder, fingerprint in known[1:]:
        first, earlier = known[0]
        if not same_weights(earlier, fingerprint):
            raise ValueError(
                f"{first} was measured on another target than {folder} (fingerprints {earlier} and {fingerprint}); "
                "methods are compared on one target"
            )


def _name_folders(folders: list[str]) -> str:
    """Return a title: the folder that holds them all, for a sweep's cells the experiment's."""
    parts = Path(os.path.commonpath([os.path.abspath(folder) for folder in folders])).parts
    kept = next((i for i, part in enumerate(parts) if part.startswith("choice=")), len(parts))
    named = public_name(Path(*parts[:kept]))
    return "records" if named == "." else named
