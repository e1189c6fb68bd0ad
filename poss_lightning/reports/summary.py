"""Rounds summed up by method and suite: the measures of `measures.py`, and each method compared with a reference.

A *training* is one draft that decoded all prompts: one for each method of a benchmark, or one for each seed of a
sweep's choice, in folders choice=NAME/seed=N. Trainings are paired by their seed, which gives the same order of data.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import pandas as pd

from poss_lightning.evaluation.rounds import BASELINES, KEY, read_answers
from poss_lightning.reports.measures import MEASURES, Measure, Sums, position, sum_by_prompt
from poss_lightning.reports.statistics import Comparison, Estimate, Jackknife, compare_means, mean_over

ALL = "all"  # the name given to all suites together
# By method, then by training seed: the answers of the method, and of every method that was decoded beside it, by name.
Trainings = Mapping[str, Mapping[int, Mapping[str, pd.DataFrame]]]


@dataclass(frozen=True)
class MethodSummary:
    """One method over the prompts of one suite, or of all.

    Measures are those of `MEASURES`, and `pos_acc_1`, `pos_acc_2` and so on; those that are not defined are absent.
    """

    suite: str
    method: str
    prompts: int
    seeds: tuple[int, ...]  # of its trainings
    rounds: int  # in all trainings together
    values: dict[str, Estimate] = field(default_factory=dict)  # by measure, the mean over trainings
    gains: dict[str, Comparison] = field(default_factory=dict)  # by measure, over seeds shared with the reference
    trainings: dict[str, dict[int, float]] = field(default_factory=dict)  # by measure and seed

    @property
    def pos_acc(self) -> list[Estimate]:
        """pos-acc of positions 1 to K."""
        return [value for name, value in self.values.items() if name.startswith("pos_acc")]


def summarise(
    trainings: Trainings,  # from `split_trainings`
    *,
    baseline: str | None = None,  # for `speed_up` and `identical`, where it was decoded beside every training
    reference: str | None = None,  # the method that the gains compare the others with
    depths: Mapping[str, int] | None = None,  # K by method; at least the most tokens that a round accepted
) -> list[MethodSummary]:
    """Sum up every method over all prompts, then over each suite if there are several.

    Raises:
        ValueError: `reference` is not a method, or no method was decoded beside `baseline` but beside another.
    """
    if reference is not None and reference not in trainings:
        raise ValueError(f"reference is {reference!r}; these records have the methods {', '.join(trainings)}")
    beside_all = [{*beside} for by_seed in trainings.values() for beside in by_seed.values()]
    if not all(baseline in names for names in beside_all):
        known = sorted(set.union(*beside_all) & set(BASELINES))
        if baseline and known and not any(baseline in names for names in beside_all):
            raise ValueError(f"baseline is {baseline!r}; these records have {', '.join(known)}")
        baseline = None
    sums: dict[str, dict[int, Sums]] = {}
    suites = pd.Index([])
    for name, by_seed in trainings.items():
        rounds = (accepted for beside in by_seed.values() for accepted in beside[name]["accepted"])
        depth = max([(depths or {}).get(name, 0), *(accepted.max(initial=0) for accepted in rounds)])
        plain = None if name == baseline else baseline  # compared with itself it says nothing
        for seed, beside in by_seed.items():
            sums.setdefault(name, {})[seed] = sum_by_prompt(beside[name], depth, beside[plain] if plain else None)
            suites = beside[name].index.droplevel(["turn", "repeat"]).unique().get_level_values("suite")
    rows = []
    for suite in [ALL, *sorted({*suites})] if len({*suites}) > 1 else [ALL]:
        chosen = [row for row, own in enumerate(suites) if suite in (ALL, own)]
        of_suite = {name: {seed: one.of(chosen) for seed, one in by_seed.items()} for name, by_seed in sums.items()}
        rows += _summarise_suite(suite, of_suite, reference)
    return rows


def split_trainings(rounds: pd.DataFrame) -> Trainings:
    """Return the trainings of each method or choice, each with what was decoded beside it.

    Raises:
        ValueError: only some rounds are of a sweep, two folders are of one choice and seed, a cell has no rounds of its
            choice; or as `split_methods`.
    """
    if bool(rounds["choice"].isna().all()):
        methods = split_methods(rounds)
        return {name: {0: methods} for name in methods}
    if len(apart := rounds.loc[rounds["choice"].isna(), "folder"]):
        raise ValueError(f"{apart.iloc[0]} is not a folder choice=NAME/seed=N, as others are; compare it by itself")
    trainings: dict[str, dict[int, dict[str, pd.DataFrame]]] = {}
    for (choice, seed), cell in rounds.groupby(["choice", "seed"], sort=False):
        if len(folders := cell["folder"].unique()) > 1:
            raise ValueError(
                f"{folders[1]} is a second {choice}, seed {seed}; give the choices of several sweeps different names"
            )
        if choice not in (names := cell["method"].unique()):
            raise ValueError(f"choice {choice!r}, seed {seed}: no record has this method; there are {', '.join(names)}")
        methods = split_methods(cell[cell["method"].isin([choice, *BASELINES])])
        trainings.setdefault(choice, {})[int(seed)] = methods
    cells = ((choice, seed, own) for choice, by_seed in trainings.items() for seed, own in by_seed.items())
    check_same_prompts({f"{choice!r}, seed {seed}": own[choice] for choice, seed, own in cells})
    return {choice: dict(sorted(by_seed.items())) for choice, by_seed in trainings.items()}


def split_methods(rounds: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """Split rounds by method, baselines first, each indexed and sorted by suite, id, turn and repeat.

    Raises:
        ValueError: an answer is duplicated, missing for a method, or to a different prompt.
    """
    methods = {}
    for name in sorted(rounds["method"].unique(), key=lambda name: name not in BASELINES):
        answers = rounds[rounds["method"] == name].set_index(KEY).sort_index()
        if len(twice := answers.index[answers.index.duplicated()]):
            raise ValueError(
                f"{name!r} answers {_describe(twice[0])} twice; decode all drafts in one benchmark, or give the "
                "methods of several runs different names"
            )
        methods[name] = answers
    check_same_prompts({f"{name!r}": answers for name, answers in methods.items()})
    return methods


def check_same_prompts(named: Mapping[str, pd.DataFrame]) -> None:
    """Raise ValueError, which names an answer, where answers are to different prompts.

    Prompts of the first turn must have the same length. Prompts of later turns contain the target's answers, in which
    ties may differ. Replayed rounds come from one answer, so the tokens that two replays share must be the same.
    """
    (first, theirs), *others = named.items()
    for name, own in others:
        if len(differing := own.index.symmetric_difference(theirs.index)):
            raise ValueError(
                f"{name} and {first} differ in {len(differing)} answers, such as {min(map(_describe, differing))}. "
                "Methods are compared on the same prompts"
            )
        is_first = own.index.get_level_values("turn") == 0
        replayed = own["seconds"].isna() & theirs["seconds"].isna() & (own["answer"] != theirs["answer"])
        differing = {
            "prompts of different lengths": own.index[is_first & (own["prompt_tokens"] != theirs["prompt_tokens"])],
            "replays of different answers": [key for key in own.index[replayed] if not _share_tokens(own, theirs, key)],
        }
        for what, (key, *_) in ((what, keys) for what, keys in differing.items() if len(keys)):
            raise ValueError(
                f"{first} and {name} have {what} at {_describe(key)}; methods are compared on the same texts"
            )


def _share_tokens(own: pd.DataFrame, theirs: pd.DataFrame, key: tuple) -> bool:
    """Whether the shorter of two answers is how the longer one begins."""
    rows = [answers.loc[[key]] for answers in (own, theirs)]
    shared = min(int(row["new_tokens"].iloc[0]) for row in rows)
    one, other = (read_answers(row).loc[(*key[:3], row["answer"].iloc[0]), "tokens"] for row in rows)
    return [*one[:shared]] == [*other[:shared]]


def _describe(key: tuple) -> str:
    suite, prompt, turn, repeat = key
    return f"{suite}/{prompt} turn {turn} repeat {repeat}"


def _summarise_suite(suite: str, sums: Mapping[str, Mapping[int, Sums]], reference: str | None) -> list[MethodSummary]:
    rows = {}
    for name, by_seed in sums.items():
        (first, *_), rounds = by_seed.values(), sum(own.reach[:, 0].sum() for own in by_seed.values())
        rows[name] = MethodSummary(suite, name, len(first.prompts), tuple(by_seed), int(rounds))
    depth = max(own.reach.shape[1] for by_seed in sums.values() for own in by_seed.values()) - 1
    for measure in (*MEASURES, *map(position, range(1, depth + 1))):
        found = {name: _measure(measure, by_seed) for name, by_seed in sums.items()}
        theirs, means = found.get(reference or "", {}), {}
        for name, own in ((name, own) for name, own in found.items() if own):
            rows[name].values[measure.name] = measure.estimate([*own.values()])
            rows[name].trainings[measure.name] = {seed: float(one.values[0]) for seed, one in own.items()}
            is_compared = name != reference and (reference in BASELINES or name not in BASELINES)
            if is_compared and (shared := [seed for seed in own if seed in theirs]):
                pairs = ([each[seed] for seed in shared] for each in (own, theirs))
                means[name] = mean_over(*pairs, logs=measure.logs)
        for name, gain in compare_means(means, measure.logs).items():
            rows[name].gains[measure.name] = gain
    return [*rows.values()]


def _measure(measure: Measure, by_seed: Mapping[int, Sums]) -> dict[int, Jackknife]:
    """A measure by training seed, where the rounds define it; pos-acc of all positions, also where none was reached."""
    if measure.k:
        by_seed = {seed: own for seed, own in by_seed.items() if own.drafted.any() and measure.k < own.reach.shape[1]}
    found = {seed: measure.jackknife(own) for seed, own in by_seed.items()}
    return {seed: one for seed, one in found.items() if measure.k or np.isfinite(one.values[0])}
