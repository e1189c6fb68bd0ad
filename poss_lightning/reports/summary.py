"""Records summed up by method and suite: the measures of `statistics.py`, and each method compared with a reference.

A *training* is one draft that decoded all prompts: one for each method of a benchmark, or one for each seed of a
sweep's choice, in folders CHOICE/seed-N. Trainings are paired by their seed, which gives the same order of data.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import chain

import numpy as np

from poss_lightning.evaluation.records import BASELINES, Record
from poss_lightning.reports import statistics
from poss_lightning.reports.statistics import Comparison, Estimate, Floats, Jackknife, Sums

ALL = "all"  # the name given to all suites together
LOGS = ("tokens_per_second", "speed_up")  # measures that are averaged and compared in logarithms, as ratios
SHARES = ("pos_acc", "identical")  # measures, or their beginnings, that lie between 0 and 1
Answers = dict[tuple, Record]  # one method's records, by suite, id, turn and repeat
# By method, then by training seed: the answers of the method, and of every method that was decoded beside it, by name.
Trainings = Mapping[str, Mapping[int, Mapping[str, Answers]]]


@dataclass(frozen=True)
class MethodSummary:
    """One method over the prompts of one suite, or of all.

    Measures are `tau_macro` (the mean over prompts of each prompt's tokens per round, the published measure),
    `tau_micro` (over all rounds), `pos_acc_1` and so on (the share of rounds that accept position k, of those that
    accept k-1), `tokens_per_second` (prefill included), `speed_up` (tokens per second over those of the baseline beside
    it) and `identical` (share of prompts whose tokens, in all turns and repeats, are the baseline's). Those that are
    not defined are absent.

    Attributes:
        seeds: training seeds.
        rounds: in all trainings together.
        values: by measure, the mean over trainings.
        gains: by measure, the comparison with the reference over the seeds of both, Holm-corrected over methods.
        trainings: by measure, each training's own value.
    """

    suite: str
    method: str
    prompts: int
    seeds: tuple[int, ...]
    rounds: int
    values: dict[str, Estimate]
    gains: dict[str, Comparison] = field(default_factory=dict)
    trainings: dict[str, dict[int, float]] = field(default_factory=dict)

    @property
    def pos_acc(self) -> list[Estimate]:
        """pos-acc of positions 1 to K."""
        return [value for name, value in self.values.items() if name.startswith("pos_acc")]


def summarise(
    trainings: Trainings,
    *,
    baseline: str | None = None,
    reference: str | None = None,
    depths: Mapping[str, int] | None = None,
) -> list[MethodSummary]:
    """Every method over all prompts, then over each suite if there are several.

    Args:
        trainings: from `by_method` or `by_choice`.
        baseline: what `speed_up` and `identical` are relative to, where it was decoded beside every training.
        reference: the method that the gains compare the others with.
        depths: K by method; by default, and at least, the most tokens that a round of the method accepted.

    Raises:
        ValueError: `reference` is not a method.
    """
    if reference is not None and reference not in trainings:
        raise ValueError(f"reference is {reference!r}; these records have the methods {', '.join(trainings)}")
    if not all(baseline in beside for by_seed in trainings.values() for beside in by_seed.values()):
        baseline = None
    sums: dict[str, dict[int, Sums]] = {}
    prompts: list[tuple] = []
    for name, by_seed in trainings.items():
        rounds = (record.accepted for beside in by_seed.values() for record in beside[name].values())
        depth = max(chain([(depths or {}).get(name, 0)], *rounds))
        plain = None if name == baseline else baseline  # compared with itself it says nothing
        for seed, beside in by_seed.items():
            own = sum_by_prompt(beside[name], depth, beside[plain] if plain else None)
            sums.setdefault(name, {})[seed] = own
            prompts = [*_by_prompt(beside[name])]  # the same in all trainings
    suites = sorted({suite for suite, _ in prompts})
    rows = []
    for suite in [ALL, *suites] if len(suites) > 1 else [ALL]:
        chosen = [row for row, prompt in enumerate(prompts) if suite in (ALL, prompt[0])]
        rows += _summarise_suite(suite, chosen, sums, reference)
    return rows


def by_method(records: Iterable[Record]) -> Trainings:
    """Methods that were each trained once, and decoded beside one another."""
    methods = group(records)
    return {name: {0: methods} for name in methods}


def by_choice(cells: Mapping[tuple[str, int], list[Record]]) -> Trainings:
    """A sweep's choices by training seed, each with the baselines beside it.

    Args:
        cells: the records of each choice and training seed.

    Raises:
        ValueError: a cell has no record of its choice, or cells have answers to different prompts.
    """
    trainings: dict[str, dict[int, dict[str, Answers]]] = {}
    for (choice, seed), records in cells.items():
        methods = group(record for record in records if record.method in (choice, *BASELINES))
        if choice not in methods:
            names = ", ".join(dict.fromkeys(record.method for record in records))
            raise ValueError(f"choice {choice!r}, seed {seed}: no record has this method; there are {names}")
        trainings.setdefault(choice, {})[seed] = methods
    check_same_prompts({f"{choice!r}, seed {seed}": trainings[choice][seed][choice] for choice, seed in cells})
    return {choice: dict(sorted(by_seed.items())) for choice, by_seed in trainings.items()}


def group(records: Iterable[Record]) -> dict[str, Answers]:
    """The records by method, baselines first, each in the same order of prompts.

    Raises:
        ValueError: an answer is duplicated, missing for a method, or to a different prompt.
    """
    methods: dict[str, Answers] = {}
    for record in sorted(records, key=lambda record: record.method not in BASELINES):
        key = (record.suite, record.id, record.turn, record.repeat)
        if key in methods.setdefault(record.method, {}):
            raise ValueError(
                f"{record.method!r} answers {_describe(key)} twice; decode all drafts in one benchmark, or give the "
                "methods of several runs different names"
            )
        methods[record.method][key] = record
    check_same_prompts({f"{name!r}": answers for name, answers in methods.items()})
    order = sorted(next(iter(methods.values()), {}), key=lambda key: (key[0], str(key[1]), *key[2:]))
    return {name: {key: answers[key] for key in order} for name, answers in methods.items()}


def check_same_prompts(named: Mapping[str, Answers]) -> None:
    """Refuse answers to different prompts.

    Prompts of the first turn must have the same length. Prompts of later turns contain the target's answers, in which
    ties may differ. Replayed rounds come from one answer, so the tokens that two replays share must be the same.

    Raises:
        ValueError: the message names an answer, and whose it is.
    """
    first, theirs = next(iter(named.items()), ("", {}))
    for name, answers in named.items():
        if differing := sorted(map(_describe, answers.keys() ^ theirs.keys())):
            raise ValueError(
                f"{name} and {first} differ in {len(differing)} answers, such as {differing[0]}. Methods are compared "
                "on the same prompts"
            )
        for key, one in answers.items():
            other, differ = theirs[key], ""
            both = min(one.new_tokens, other.new_tokens)
            if one.turn == 0 and one.prompt_tokens != other.prompt_tokens:
                differ = f"prompts of {other.prompt_tokens} and {one.prompt_tokens} tokens"
            elif not (one.seconds or other.seconds) and one.tokens[:both] != other.tokens[:both]:
                differ = "replays of different answers"
            if differ:
                where = f"{first} and {name} have {differ} at {_describe(key)}"
                raise ValueError(f"{where}; methods are compared on the same texts")


def _describe(key: tuple) -> str:
    suite, prompt, turn, repeat = key
    return f"{suite}/{prompt} turn {turn} repeat {repeat}"


def sum_by_prompt(answers: Answers, depth: int, plain: Answers | None = None) -> Sums:
    """One training's sums, with those of its baseline, if any; `depth` is K."""
    prompts = [*_by_prompt(answers).values()]
    accepted = [np.array([count for key in keys for count in answers[key].accepted], dtype=int) for keys in prompts]
    reach = [(counts[:, None] >= np.arange(depth + 1)).sum(0) for counts in accepted]

    def totals(own: Answers) -> tuple[Floats, Floats]:
        tokens = [sum(own[key].new_tokens for key in keys) for keys in prompts]
        seconds = [sum(own[key].seconds.get("total", math.nan) for key in keys) for keys in prompts]
        return np.array(tokens, dtype=float), np.array(seconds, dtype=float)

    beside = None
    if plain is not None:
        same = [all(answers[key].tokens == plain[key].tokens for key in keys) for keys in prompts]
        beside = *totals(plain), np.array(same, dtype=float)
    return Sums(np.array(reach, dtype=float), *totals(answers), beside)


def _by_prompt(answers: Answers) -> dict[tuple, list[tuple]]:
    """The keys of the answers to each prompt (suite, id)."""
    prompts: dict[tuple, list[tuple]] = {}
    for key in answers:
        prompts.setdefault(key[:2], []).append(key)
    return prompts


def _summarise_suite(
    suite: str, prompts: list[int], sums: Mapping[str, Mapping[int, Sums]], reference: str | None
) -> list[MethodSummary]:
    measured: dict[str, dict[str, dict[int, Jackknife]]] = {name: {} for name in sums}  # method, measure, seed
    for name, by_seed in sums.items():
        for seed, one in by_seed.items():
            for measure, found in statistics.measures(one, prompts).items():
                measured[name].setdefault(measure, {})[seed] = found
    gains = _compare(measured, reference) if reference else {}
    return [
        MethodSummary(
            suite,
            name,
            prompts=len(prompts),
            seeds=tuple(by_seed),
            rounds=int(sum(one.reach[prompts, 0].sum() for one in by_seed.values())),
            values={measure: _estimate(measure, [*own.values()]) for measure, own in measured[name].items()},
            gains=gains.get(name, {}),
            trainings={
                measure: {seed: float(one.values[0]) for seed, one in own.items()}
                for measure, own in measured[name].items()
            },
        )
        for name, by_seed in sums.items()
    ]


def _estimate(measure: str, trainings: list[Jackknife]) -> Estimate:
    logs = measure in LOGS
    found = statistics.interval(statistics.mean_over(trainings, logs=logs), logs)
    if not measure.startswith(SHARES):
        return found
    return Estimate(found.value, *np.clip([found.low, found.high], 0.0, 1.0).tolist())


def _compare(measured: dict[str, dict[str, dict[int, Jackknife]]], reference: str) -> dict[str, dict[str, Comparison]]:
    """Each method's measures compared with the reference's over the seeds of both; baselines with a baseline alone."""
    gains: dict[str, dict[str, Comparison]] = {name: {} for name in measured}
    others = [name for name in measured if name != reference and (reference in BASELINES or name not in BASELINES)]
    for measure, theirs in measured[reference].items():
        means, logs = {}, measure in LOGS
        for name in others:
            own = measured[name].get(measure, {})
            if seeds := [seed for seed in own if seed in theirs]:
                pairs = [own[seed] for seed in seeds], [theirs[seed] for seed in seeds]
                means[name] = statistics.mean_over(*pairs, logs=logs)
        for name, gain in statistics.compare_means(means, logs).items():
            gains[name][measure] = gain
    return gains
