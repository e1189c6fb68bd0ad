"""Results: what records measure, as one table, with intervals and comparisons.

A *training* is one draft that decoded all prompts: one for each method of a benchmark, or one for each seed of a
sweep's choice, in folders choice=NAME/seed=N. Trainings are paired by their seed, which gives the same order of data.
"""

import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from poss_lightning.evaluation.rounds import BASELINES, KEY, Paths, read_rounds, read_runs
from poss_lightning.files import public_name
from poss_lightning.reports.comparable import (
    CELL,
    Runs,
    check_drafts,
    check_targets,
    choose_own,
    label_trainings,
    list_methods,
    not_comparable,
)
from poss_lightning.reports.measures import MEASURES, SPEED, SPEED_UP, TAU_MACRO, Measure, pos_acc, sum_by_prompt
from poss_lightning.reports.statistics import Jackknife, compare_means, mean_over
from poss_lightning.terminal import announced

ALL = "all"  # the name given to all suites together
AUTO = (
    "Trees were sized by their cost (tree: auto), so a round may end before a position is drafted: pos-acc and τ "
    "depend on the draft, on this machine, and on earlier prompts, from which auto learns."
)
TRAINED_ONCE = (
    "Each method was trained once: 95 % intervals are for other prompts, and say nothing about other trainings."
)
SEEDS = "95 % intervals are for other trainings and other prompts."
APART = "Each way of sampling is compared, and corrected, by itself."


class Result(NamedTuple):
    """A row of `results`."""

    suite: str  # "all": of all prompts
    method: str
    measure: (
        str  # a name in `MEASURES`, "pos_acc", "sd" (of τ macro, over trainings), "prompts", "trainings" or "rounds"
    )
    position: int  # of a pos_acc; 0 of any other
    against: str  # the reference, where the value is the difference from it, or the ratio to it; otherwise ""
    value: float  # the mean over trainings
    low: float = math.nan  # the ends of its 95 % interval; nan where there is none
    high: float = math.nan
    p: float = math.nan  # of a comparison, two-sided, by Holm's correction for all methods
    detectable: float = math.nan  # of a comparison, its minimum detectable effect
    direction: str = ""  # of a comparison: "larger" or "smaller" where p < 0.05, "identical" without any difference


class Findings(NamedTuple):
    """Results, and what tables and page say beside them."""

    results: pd.DataFrame  # a row is a `Result`
    answers: pd.DataFrame  # a row an answer of the first training of each method, named as in results
    runs: Runs  # how the rounds were made, by folder
    notes: list[str]  # what to know before methods are compared
    title: str  # what all this was read from
    baseline: str | None
    reference: str | None
    is_sweep: bool

    @property
    def overall(self) -> pd.DataFrame:
        """The results over all suites."""
        return self.results[self.results["suite"] == ALL]

    @property
    def compared(self) -> list[Measure]:
        """The measures of the table against the reference; a sweep's choices were timed apart, each beside plain."""
        other = SPEED if self.is_sweep else SPEED_UP
        return sorted((m for m in MEASURES if m.scale != "share" and m is not other), key=lambda m: m.logs)


def results(records: Paths, *, baseline: str = "plain", reference: str | None = None) -> pd.DataFrame:
    """Measure the methods of records, with intervals and, where a reference is named, comparisons with it.

    Args:
        records: folders with rounds in them or below, or files of engines; or a single one of these.
        baseline: the method whose speed is 1; the others should give its tokens.
        reference: the method that the others are compared with.

    Returns:
        a row for each suite, method and measure, and one more for each comparison; its columns are those of `Result`.

    Raises:
        FileNotFoundError, ValueError: as `read_rounds`, `label_trainings` and `measure`; or of several targets, or of
            one name for several drafts.
    """
    return find(records, baseline=baseline, reference=reference).results


@announced("reading records")
def find(records: Paths, *, baseline: str = "plain", reference: str | None = None) -> Findings:
    """Return the results of records, and what tables and page say beside them; arguments as for `results`."""
    rounds = read_rounds(records)
    runs = read_runs(rounds)
    check_targets(runs)
    if bool(rounds["choice"].isna().any()):  # folders of a sweep tell the trainings of a choice apart
        check_drafts(runs)
    ways = {folder: _sampling(runs.get(folder, {})) for folder in rounds["folder"].unique()}
    measured, answers = [], []
    notes: dict[str, None] = {}  # in order
    for way in sorted({*ways.values()}):
        chosen = [folder for folder, its_way in ways.items() if its_way == way]
        some, its_runs = rounds[rounds["folder"].isin(chosen)], {name: runs[name] for name in chosen if name in runs}
        trainings = label_trainings(some)
        depths = {name: facts["depth"] for _, name, facts in list_methods(its_runs) if "depth" in facts}
        found = measure(trainings, baseline=baseline, reference=reference, depths=depths)
        notes |= dict.fromkeys(not_comparable(some, its_runs) + _notes(trainings, found, its_runs, reference))
        suffix = f" {_name_way(*way)}" * (len({*ways.values()}) > 1)
        first = _first_trainings(trainings)
        measured.append(found.assign(method=found["method"] + suffix))
        answers.append(first.assign(method=first["method"] + suffix))
    table = pd.concat(measured, ignore_index=True)
    return Findings(
        table,
        pd.concat(answers, ignore_index=True),
        runs,
        [*notes, *[APART] * (len(measured) > 1)],
        _name_folders(rounds["folder"].unique()),
        baseline if SPEED_UP.name in {*table["measure"]} else None,
        reference,
        is_sweep=not bool(rounds["choice"].isna().all()),
    )


def measure(
    answers: pd.DataFrame,  # from `label_trainings`
    *,
    baseline: str | None = None,  # for `speed_up` and `identical`, where it was decoded beside every training
    reference: str | None = None,  # the method that the others are compared with
    depths: Mapping[str, int] | None = None,  # K by method; at least the most tokens that a round accepted
) -> pd.DataFrame:
    """Measure every method over all prompts, then over each suite if there are several; a row is a `Result`.

    Raises:
        ValueError: `reference` is not a method, or no method was decoded beside `baseline` but beside another.
    """
    own = choose_own(answers)
    names = sorted(own["method"].unique(), key=lambda name: name not in BASELINES)
    if reference is not None and reference not in names:
        raise ValueError(f"reference is {reference!r}; these records have the methods {', '.join(names)}")
    beside = _beside(answers, baseline)
    own = own.merge(beside, "left", [*CELL, *KEY])
    plain = [*beside.columns.difference([*CELL, *KEY])]
    own[plain] = own[plain].where(own["method"] != baseline)  # compared with itself it says nothing
    most = own["accepted"].map(lambda accepted: accepted.max(initial=0)).groupby(own["method"]).max()
    depths = {name: max(int(most[name]), (depths or {}).get(name, 0)) for name in names}
    sums = sum_by_prompt(own, max(depths.values()))
    suites, rows = sums.index.unique("suite"), []
    for suite in [ALL, *suites] if len(suites) > 1 else [ALL]:
        some = sums if suite == ALL else sums.xs(suite, level="suite", drop_level=False)
        by_seed = {name: dict([*some.loc[name].groupby(level="seed")]) for name in names}
        rows += _measure_suite(suite, by_seed, depths, reference)
    return pd.DataFrame(rows)


def _beside(answers: pd.DataFrame, baseline: str | None) -> pd.DataFrame:
    """Return tokens, seconds and answers of the baseline by training and answer; none if it is not beside all."""
    plain = answers[answers["method"] == baseline]
    if len(plain[CELL].drop_duplicates()) < len(answers[CELL].drop_duplicates()):
        known = sorted({*answers["method"]} & {*BASELINES})
        if baseline and known and not len(plain):
            raise ValueError(f"baseline is {baseline!r}; these records have {', '.join(known)}")
        plain = plain[:0]
    names = {"new_tokens": "plain_tokens", "seconds": "plain_seconds", "answer": "plain_answer"}
    return plain[[*CELL, *KEY, *names]].rename(columns=names)


def _measure_suite(
    suite: str, trainings: Mapping[str, Mapping[int, pd.DataFrame]], depths: Mapping[str, int], reference: str | None
) -> Iterator[Result]:
    """Yield the results of a suite from sums by method, then by seed."""
    for name, by_seed in trainings.items():
        prompts, rounds = len(next(iter(by_seed.values()))), sum(own[0].sum() for own in by_seed.values())
        for what, count in (("prompts", prompts), ("trainings", len(by_seed)), ("rounds", rounds)):
            if count:
                yield Result(suite, name, what, 0, "", float(count))
    for measure in (*MEASURES, *map(pos_acc, range(1, max(depths.values()) + 1))):
        found = {name: _jackknives(measure, by_seed, depths[name]) for name, by_seed in trainings.items()}
        theirs, means = found.get(reference or "", {}), {}
        for name, own in ((name, own) for name, own in found.items() if own):
            estimate = measure.estimate([*own.values()])
            yield Result(suite, name, measure.name, measure.position, "", **vars(estimate))
            if measure is TAU_MACRO and len(own) > 1:
                yield Result(suite, name, "sd", 0, "", np.std([one.values[0] for one in own.values()], ddof=1))
            is_compared = name != reference and (reference in BASELINES or name not in BASELINES)
            if is_compared and (shared := [seed for seed in own if seed in theirs]):
                pairs = ([each[seed] for seed in shared] for each in (own, theirs))
                means[name] = mean_over(*pairs, logs=measure.logs)
        for name, gain in compare_means(means, measure.logs).items():
            numbers = (gain.value, gain.low, gain.high, gain.p, gain.detectable)
            direction = "identical" if gain.identical else gain.direction
            yield Result(suite, name, measure.name, measure.position, str(reference), *numbers, direction)


def _jackknives(measure: Measure, by_seed: Mapping[int, pd.DataFrame], depth: int) -> dict[int, Jackknife]:
    """A measure by training seed, where the rounds define it; pos-acc of all positions, also where none was reached."""
    if measure.position:
        by_seed = {seed: own for seed, own in by_seed.items() if own["drafted"].any() and measure.position <= depth}
    found = {seed: measure.jackknife(own) for seed, own in by_seed.items()}
    return {seed: one for seed, one in found.items() if measure.position or np.isfinite(one.values[0])}


def _first_trainings(answers: pd.DataFrame) -> pd.DataFrame:
    """Return the answers of each method's first training, and of the baselines beside the first of all."""
    own = choose_own(answers)
    firsts = own[own["seed"] == own.groupby("method")["seed"].transform("min")]
    beside = answers[(answers[CELL] == firsts[CELL].iloc[0]).all(axis=1) & answers["method"].isin(BASELINES)]
    return pd.concat([beside, firsts]).drop_duplicates(["method", *KEY])


def _notes(answers: pd.DataFrame, found: pd.DataFrame, runs: Runs, reference: str | None) -> list[str]:
    """Say what intervals are for, and what acceptance depends on."""
    seeds = {name: {*own} for name, own in choose_own(answers).groupby("method", sort=False)["seed"]}
    notes = [SEEDS] if any(len(own) > 1 for own in seeds.values()) else [TRAINED_ONCE]
    compared = {*found.loc[found["against"] != "", "method"]}
    few = sorted(name for name in compared if len(seeds[name] & seeds[reference]) == 1)
    if few and notes == [SEEDS]:
        notes.append(
            f"One seed alone is shared with {reference}, so the interval is for other prompts: {', '.join(few)}."
        )
    if any(run.get("config", {}).get("tree") == "auto" for run in runs.values()):
        notes.append(AUTO)
    return notes


def _sampling(run: dict[str, Any]) -> tuple[float, int, float]:
    """Return temperature, top-k and top-p of a run; greedy where its run.json does not say."""
    config = run.get("config", {})
    temperature = config.get("temperature") or 0
    return (temperature, config.get("top_k") or 0, config.get("top_p") or 1) if temperature else (0, 0, 1)


def _name_way(temperature: float, top_k: int, top_p: float) -> str:
    return f"T={temperature:g}" + f" top_k={top_k}" * (top_k > 0) + f" top_p={top_p:g}" * (top_p < 1)


def _name_folders(folders: list[str]) -> str:
    """Return a title: the folder that holds them all, for a sweep's cells the experiment's."""
    parts = Path(os.path.commonpath([os.path.abspath(folder) for folder in folders])).parts
    kept = next((i for i, part in enumerate(parts) if part.startswith("choice=")), len(parts))
    named = public_name(Path(*parts[:kept]))
    return "records" if named == "." else named
