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
    label_trainings,
    not_comparable,
)
from poss_lightning.reports.measures import (
    MEASURES,
    MILLISECONDS,
    SPEED,
    SPEED_UP,
    TAU_MACRO,
    TIMED,
    Measure,
    pos_acc,
    sum_by_prompt,
)
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
    # A name in `MEASURES`, "pos_acc", "sd" (of τ macro, over trainings), "prompts", "trainings" or "rounds"; outside a
    # sweep, whose choices were timed apart, also "ms_draft" and the other `MILLISECONDS` per new token.
    measure: str
    position: int  # of a pos_acc; 0 of any other
    against: str  # the reference, where the value is the difference from it, or the ratio to it; otherwise ""
    value: float  # the mean over trainings
    low: float = math.nan  # the ends of its 95 % interval; nan without one
    high: float = math.nan
    p: float = math.nan  # of a comparison, two-sided, by Holm's correction for all methods
    detectable: float = math.nan  # of a comparison, its minimum detectable effect
    direction: str = ""  # of a comparison: "larger" or "smaller" where p < 0.05, "identical" without any difference


class Findings(NamedTuple):
    """Results, and what records say besides."""

    results: pd.DataFrame  # a row is a `Result`
    answers: pd.DataFrame  # from `label_trainings`, with methods named as in results
    runs: Runs  # how the rounds were made, by folder
    notes: list[str]  # what to know before methods are compared
    title: str  # what all this was read from

    @property
    def overall(self) -> pd.DataFrame:
        """The results over all suites."""
        return self.results[self.results["suite"] == ALL]


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
    """Return the results of records, and what they say besides; arguments as for `results`."""
    rounds = read_rounds(records)
    runs = read_runs(rounds)
    check_targets(runs)
    if bool(rounds["choice"].isna().any()):  # folders of a sweep tell the trainings of a choice apart
        check_drafts(runs)
    rounds["sampling"] = rounds["folder"].map(lambda folder: _describe_sampling(runs.get(folder, {})))
    measured, answers = [], []
    notes: dict[str, None] = {}  # in order
    for sampling, some in rounds.groupby("sampling"):
        its_runs = {folder: run for folder, run in runs.items() if folder in {*some["folder"]}}
        trainings = label_trainings(some)
        methods = (each for run in its_runs.values() for each in run.get("methods", {}).items())
        depths = {name: facts["depth"] for name, facts in methods if "depth" in facts}
        measures = measure(trainings, baseline=baseline, reference=reference, depths=depths)
        notes |= dict.fromkeys(not_comparable(some, its_runs) + _notes(trainings, measures, its_runs, reference))
        suffix = f" {sampling[-1]}" * (rounds["sampling"].nunique() > 1)
        measured.append(measures.assign(method=measures["method"] + suffix))
        answers.append(trainings.assign(method=trainings["method"] + suffix))
    return Findings(
        pd.concat(measured, ignore_index=True),
        pd.concat(answers, ignore_index=True),
        runs,
        [*notes, *[APART] * (len(measured) > 1)],
        _name_folders(rounds["folder"].unique()),
    )


def measure(
    answers: pd.DataFrame,  # from `label_trainings`
    *,
    baseline: str | None = None,  # for `speed_up` and `identical`, where it was decoded with every training
    reference: str | None = None,  # the method that the others are compared with
    depths: Mapping[str, int] | None = None,  # K by method; at least the most tokens that a round accepted
) -> pd.DataFrame:
    """Measure every method over all prompts, then over each suite if there are several; a row is a `Result`.

    Raises:
        ValueError: `reference` is not a method, or no method was decoded with `baseline` but with another.
    """
    compared = answers[answers["is_measured"]]
    names = sorted(compared["method"].unique(), key=lambda name: name not in BASELINES)
    if reference is not None and reference not in names:
        raise ValueError(f"reference is {reference!r}; these records have the methods {', '.join(names)}")
    plain = _baseline_columns(answers, baseline)
    compared = compared.merge(plain, "left", left_on=[*CELL, *KEY], right_index=True)
    compared[plain.columns] = compared[plain.columns].where(
        compared["method"] != baseline
    )  # with itself it says nothing
    most = compared["accepted"].map(lambda accepted: accepted.max(initial=0)).groupby(compared["method"]).max()
    depths = {name: max(int(most[name]), (depths or {}).get(name, 0)) for name in names}
    sums = sum_by_prompt(compared, max(depths.values()))
    is_sweep = bool((compared["choice"] != "").any())
    times = MILLISECONDS if not is_sweep and sums[TIMED].to_numpy().any() else []
    speed = SPEED_UP if is_sweep else SPEED  # a sweep's choices were timed apart, each with plain decoding
    suites, rows = sums.index.unique("suite"), []
    for suite in [ALL, *suites] if len(suites) > 1 else [ALL]:
        some = sums if suite == ALL else sums.xs(suite, level="suite", drop_level=False)
        by_seed = {name: dict([*some.loc[name].groupby(level="seed")]) for name in names}
        rows += _count(suite, by_seed)
        for metric in (*MEASURES, *times, *map(pos_acc, range(1, max(depths.values()) + 1))):
            by_method = {name: _jackknives(metric, own, depths[name]) for name, own in by_seed.items()}
            is_compared = metric not in (*MILLISECONDS, SPEED, SPEED_UP) or metric is speed
            rows += _measure_methods(suite, metric, by_method, reference if is_compared else None)
    return pd.DataFrame(rows)


def _baseline_columns(answers: pd.DataFrame, baseline: str | None) -> pd.DataFrame:
    """Return tokens, seconds and answers of the baseline by training and answer; none if one training lacks it."""
    plain = answers[answers["method"] == baseline]
    if len(plain[CELL].drop_duplicates()) < len(answers[CELL].drop_duplicates()):
        others = sorted({*answers["method"]} & {*BASELINES})
        if baseline and others and not len(plain):
            raise ValueError(f"baseline is {baseline!r}; these records have {', '.join(others)}")
        plain = plain[:0]
    plain = plain.set_index([*CELL, *KEY])[["new_tokens", "seconds", "answer"]]
    return plain.set_axis(["plain_tokens", "plain_seconds", "plain_answer"], axis=1)


def _count(suite: str, trainings: Mapping[str, Mapping[int, pd.DataFrame]]) -> Iterator[Result]:
    """Yield the numbers of prompts, trainings and rounds, from sums by method, then by seed."""
    for name, by_seed in trainings.items():
        prompts, rounds = len(next(iter(by_seed.values()))), sum(own[0].sum() for own in by_seed.values())
        for what, count in (("prompts", prompts), ("trainings", len(by_seed)), ("rounds", rounds)):
            if count:
                yield Result(suite, name, what, 0, "", float(count))


def _measure_methods(
    suite: str, measure: Measure, trainings: Mapping[str, Mapping[int, Jackknife]], reference: str | None
) -> Iterator[Result]:
    """Yield the values of a measure, then the comparisons with the reference; trainings by method, then by seed."""
    base, means = trainings.get(reference or "", {}), {}
    for name, by_seed in trainings.items():
        if not by_seed:
            continue
        estimate = measure.estimate([*by_seed.values()])
        yield Result(suite, name, measure.name, measure.position, "", **vars(estimate))
        if measure is TAU_MACRO and len(by_seed) > 1:
            yield Result(suite, name, "sd", 0, "", np.std([one.values[0] for one in by_seed.values()], ddof=1))
        is_compared = name != reference and (reference in BASELINES or name not in BASELINES)
        if is_compared and (shared := [seed for seed in by_seed if seed in base]):
            means[name] = mean_over(*([each[seed] for seed in shared] for each in (by_seed, base)), logs=measure.logs)
    for name, gain in compare_means(means, measure.logs).items():
        numbers = (gain.value, gain.low, gain.high, gain.p, gain.detectable)
        direction = "identical" if gain.identical else gain.direction
        yield Result(suite, name, measure.name, measure.position, str(reference), *numbers, direction)


def _jackknives(measure: Measure, by_seed: Mapping[int, pd.DataFrame], depth: int) -> dict[int, Jackknife]:
    """A measure by training seed, where the rounds define it; pos-acc of all positions, also where none was reached."""
    if measure.position:
        by_seed = {seed: own for seed, own in by_seed.items() if own["drafted"].any() and measure.position <= depth}
    jackknives = {seed: measure.jackknife(own) for seed, own in by_seed.items()}
    return {seed: one for seed, one in jackknives.items() if measure.position or np.isfinite(one.values[0])}


def _notes(answers: pd.DataFrame, found: pd.DataFrame, runs: Runs, reference: str | None) -> list[str]:
    """Say what intervals are for, and what acceptance depends on."""
    seeds = {name: {*own} for name, own in answers[answers["is_measured"]].groupby("method")["seed"]}
    notes = [SEEDS] if any(len(own) > 1 for own in seeds.values()) else [TRAINED_ONCE]
    compared = {*found.loc[found["against"] != "", "method"]}
    few = sorted(name for name in compared if len(seeds[name] & seeds[reference]) == 1)
    if few and notes == [SEEDS]:
        notes.append(
            f"One seed alone is shared with {reference}, so the interval is for other prompts: {', '.join(few)}."
        )
    methods = (facts for run in runs.values() for facts in run.get("methods", {}).values())
    if any(facts.get("tree") == "auto" for facts in methods):
        notes.append(AUTO)
    return notes


def _describe_sampling(run: dict[str, Any]) -> tuple[float, int, float, str]:
    """Return temperature, top-k, top-p and their description; greedy where run.json does not say."""
    stated = run.get("config", {})
    temperature = stated.get("temperature") or 0
    top_k, top_p = (stated.get("top_k") or 0, stated.get("top_p") or 1) if temperature else (0, 1)
    return (
        temperature,
        top_k,
        top_p,
        f"T={temperature:g}" + f" top_k={top_k}" * (top_k > 0) + f" top_p={top_p:g}" * (top_p < 1),
    )


def _name_folders(folders: list[str]) -> str:
    """Return a title: the folder that holds them all, for a sweep's cells the experiment's."""
    parts = Path(os.path.commonpath([os.path.abspath(folder) for folder in folders])).parts
    above = next((i for i, part in enumerate(parts) if part.startswith("choice=")), len(parts))
    named = public_name(Path(*parts[:above]))
    return "records" if named == "." else named
