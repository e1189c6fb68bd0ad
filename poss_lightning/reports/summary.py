"""Records summed up by method and suite: the measures of `statistics.py`, and each method compared with a reference.

A *training* is one draft that decoded all prompts: one for each method of a benchmark, or one for each seed of a
sweep's choice, in folders CHOICE/seed-N. Trainings are paired by their seed, which gives the same order of data.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from poss_lightning.evaluation.records import BASELINES, Record
from poss_lightning.reports import statistics
from poss_lightning.reports.statistics import Comparison, Estimate, Floats, Jackknife, Sums

ALL = "all"  # the name given to all suites together
LOGS = ("tokens_per_second", "speed_up")  # measures that are averaged and compared in logarithms, so as ratios
SHARES = ("pos_acc", "identical")  # measures, or their beginnings, that lie between 0 and 1
Answers = dict[tuple, Record]  # one method's records, by suite, id, turn and repeat
Cells = Mapping[tuple[str, int], list[Record]]  # (choice, training seed) -> what its folder holds


class Training(NamedTuple):
    """One training's answers, and those of the baselines that were decoded beside it, by name."""

    answers: Answers
    beside: dict[str, Answers]


@dataclass(frozen=True)
class MethodSummary:
    """One method over the prompts of one suite, or of all.

    Measures are `tau_macro` (the mean over prompts of each prompt's tokens a round, the published measure), `tau_micro`
    (over all rounds), `pos_acc_1` and so on (the share of rounds that accept position k, of those that accept k-1),
    `tokens_per_second` (prefill included), `speed_up` (tokens per second over the baseline's beside it) and `identical`
    (share of prompts whose tokens, in all turns and repeats, are the baseline's). Those not defined are absent.

    Attributes:
        seeds: of its trainings.
        rounds: how many were decoded, in all trainings.
        values: by measure, the mean over trainings.
        gains: by measure, the comparison with the reference over the seeds of both; Holm-corrected for all methods.
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
    trainings: Mapping[str, Mapping[int, Training]],
    *,
    baseline: str | None = None,
    reference: str | None = None,
    depths: Mapping[str, int] | None = None,
) -> list[MethodSummary]:
    """Every method over all prompts, then over each suite if there are several.

    Args:
        trainings: of each method, by seed: `by_method` or `by_choice`.
        baseline: what `speed_up` and `identical` are relative to, where every training has it beside itself.
        reference: the method that the gains compare the others with.
        depths: K by method; for other methods the most tokens ever accepted in a round.

    Raises:
        ValueError: `reference` is not a method, a depth is exceeded, or the trainings do not cover the same prompts.
    """
    if reference is not None and reference not in trainings:
        raise ValueError(f"reference is {reference!r}; these records have the methods {', '.join(trainings)}")
    every = [one for by_seed in trainings.values() for one in by_seed.values()]
    check_same_prompts(
        {
            (f"{name!r}, seed {seed}" if len(by_seed) > 1 else f"{name!r}"): one.answers
            for name, by_seed in trainings.items()
            for seed, one in by_seed.items()
        }
    )
    beside = baseline if baseline and all(baseline in one.beside for one in every) else None
    most = {
        name: max(choose_depth(name, one.answers, (depths or {}).get(name)) for one in by_seed.values())
        for name, by_seed in trainings.items()
    }
    suites = sorted({key[0] for one in every for key in one.answers})
    return [
        row
        for suite in ([ALL, *suites] if len(suites) > 1 else [ALL])
        for row in _summarise_suite(suite, trainings, most, beside, reference)
    ]


def by_method(records: Iterable[Record]) -> dict[str, dict[int, Training]]:
    """Methods that were each trained once, and decoded beside one another."""
    methods = group(records)
    return {name: {0: Training(answers, methods)} for name, answers in methods.items()}


def by_choice(cells: Cells) -> dict[str, dict[int, Training]]:
    """A sweep's choices by seed; baselines were decoded beside each.

    Raises:
        ValueError: a cell lacks its choice.
    """
    trainings: dict[str, dict[int, Training]] = {}
    for (choice, seed), records in cells.items():
        methods = group(record for record in records if record.method in (choice, *BASELINES))
        if choice not in methods:
            names = ", ".join(dict.fromkeys(record.method for record in records))
            raise ValueError(f"choice {choice!r}, seed {seed}: no record has this method; there are {names}")
        trainings.setdefault(choice, {})[seed] = Training(methods[choice], methods)
    return {choice: dict(sorted(by_seed.items())) for choice, by_seed in trainings.items()}


def group(records: Iterable[Record]) -> dict[str, Answers]:
    """The records by method, baselines first, each in one order of prompts.

    Raises:
        ValueError: an answer is there twice, missing for one of the methods, or one to another prompt.
    """
    methods: dict[str, Answers] = {}
    for record in sorted(records, key=lambda record: record.method not in BASELINES):
        key = (record.suite, record.id, record.turn, record.repeat)
        if key in methods.setdefault(record.method, {}):
            drafts = record.method not in BASELINES
            how = "name the methods of several runs apart" if drafts else "decode all drafts in one benchmark"
            raise ValueError(f"{record.method!r} answers {describe_answer(key)} twice; {how}")
        methods[record.method][key] = record
    check_same_prompts({f"{name!r}": answers for name, answers in methods.items()})
    order = sorted(next(iter(methods.values()), {}), key=lambda key: (key[0], str(key[1]), *key[2:]))
    return {name: {key: answers[key] for key in order} for name, answers in methods.items()}


def check_same_prompts(named: Mapping[str, Answers]) -> None:
    """Refuse answers to different prompts.

    Prompts of the first turn must have the same length. Prompts of later turns hold the target's answers, which ties
    may change. Replayed rounds were read from an answer, so the tokens that both have must be the same too.

    Raises:
        ValueError: the message names an answer, and whose it is.
    """
    first = next(iter(named), "")
    for name, answers in named.items():
        if differing := sorted(map(describe_answer, answers.keys() ^ named[first].keys())):
            raise ValueError(
                f"{name} and {first} differ in {len(differing)} answers, such as {differing[0]}. Methods are compared "
                "on the same prompts"
            )
        for key, record in answers.items():
            if differ := _difference(named[first][key], record):
                where = f"{first} and {name} have {differ} at {describe_answer(key)}"
                raise ValueError(f"{where}; methods are compared on the same texts")


def _difference(one: Record, other: Record) -> str:
    both = min(one.new_tokens, other.new_tokens) if not (one.seconds or other.seconds) else 0
    if one.turn == 0 and one.prompt_tokens != other.prompt_tokens:
        return f"prompts of {one.prompt_tokens} and {other.prompt_tokens} tokens"
    return "replays of different answers" if one.tokens[:both] != other.tokens[:both] else ""


def _summarise_suite(
    suite: str,
    trainings: Mapping[str, Mapping[int, Training]],
    depths: Mapping[str, int],
    baseline: str | None,
    reference: str | None,
) -> list[MethodSummary]:
    measured = {  # method -> measure -> seed
        name: _transposed({seed: _measure(one, suite, depths[name], baseline) for seed, one in by_seed.items()})
        for name, by_seed in trainings.items()
    }
    for measure in ("speed_up", "identical"):  # the baseline compared with itself says nothing
        measured.get(baseline or "", {}).pop(measure, None)
    gains = _compare(measured, reference) if reference else {}
    rows = []
    for name, measures in measured.items():
        answers = [_select(suite, one.answers) for one in trainings[name].values()]
        values = {measure: _estimate(measure, [*by_seed.values()]) for measure, by_seed in measures.items()}
        each = {measure: {seed: float(one.values[0]) for seed, one in own.items()} for measure, own in measures.items()}
        rounds = sum(len(record.accepted) for one in answers for record in one.values())
        prompts, own = len({key[:2] for key in answers[0]}), gains.get(name, {})
        rows.append(MethodSummary(suite, name, prompts, tuple(trainings[name]), rounds, values, own, each))
    return rows


def _compare(measured: dict[str, dict[str, dict[int, Jackknife]]], reference: str) -> dict[str, dict[str, Comparison]]:
    """Each method's measures compared with the reference's, over the seeds of both; baselines with a baseline alone."""
    gains: dict[str, dict[str, Comparison]] = {name: {} for name in measured}
    others = [name for name in measured if name != reference and (reference in BASELINES or name not in BASELINES)]
    for measure, theirs in measured[reference].items():
        means, logs = {}, measure in LOGS
        for name in others:
            own = measured[name].get(measure, {})
            if seeds := [seed for seed in own if seed in theirs]:
                pairs = [own[seed] for seed in seeds], [theirs[seed] for seed in seeds]
                means[name] = statistics.mean_over(*pairs, logs=logs)
        for name, gain in statistics.compare(means, logs).items():
            gains[name][measure] = gain
    return gains


def _measure(training: Training, suite: str, depth: int, baseline: str | None) -> dict[str, Jackknife]:
    """Every measure of one training that its records define."""
    answers = _select(suite, training.answers)
    sums = sum_by_prompt(answers, depth)
    counts, reached = statistics.leave_one_out(len(sums.tokens)), sums.reach.T > 0  # (K+1, Q)
    every, measures = np.ones_like(reached[0]), {}
    if reached[0].any():
        measures["tau_macro"] = Jackknife(statistics.tau_macro(counts, sums), reached[0])
        measures["tau_micro"] = Jackknife(statistics.tau_micro(counts, sums), reached[0])
        shares = statistics.pos_acc(counts, sums).T
        measures |= {f"pos_acc_{k + 1}": Jackknife(share, reached[k]) for k, share in enumerate(shares)}
    if np.isfinite(sums.seconds).all():
        speed = statistics.tokens_per_second(counts, sums)
        measures["tokens_per_second"] = Jackknife(speed, every)
        if baseline is not None:
            beside = _select(suite, training.beside[baseline])
            plain = statistics.tokens_per_second(counts, sum_by_prompt(beside, 0))
            same = statistics.ratio(counts @ same_tokens(answers, beside), counts.sum(1))
            measures |= {"speed_up": Jackknife(speed / plain, every), "identical": Jackknife(same, every)}
    return measures


def _transposed(by_seed: Mapping[int, dict[str, Jackknife]]) -> dict[str, dict[int, Jackknife]]:
    names = dict.fromkeys(name for measures in by_seed.values() for name in measures)
    return {name: {seed: own[name] for seed, own in by_seed.items() if name in own} for name in names}


def _estimate(measure: str, trainings: list[Jackknife]) -> Estimate:
    logs = measure in LOGS
    found = statistics.interval(statistics.mean_over(trainings, logs=logs), logs)
    return found.within_share() if measure.startswith(SHARES) else found


def sum_by_prompt(answers: Answers, depth: int) -> Sums:
    """One training's sums; `depth` is K."""
    rows = _rows(answers)
    prompts = max(rows, default=-1) + 1
    sums = Sums(np.zeros((prompts, depth + 1)), np.zeros(prompts), np.zeros(prompts))
    for row, record in zip(rows, answers.values(), strict=True):
        accepted = np.array(record.accepted, dtype=int)
        sums.reach[row] += (accepted[:, None] >= np.arange(depth + 1)).sum(0)
        sums.tokens[row] += record.new_tokens
        sums.seconds[row] += record.seconds.get("total", np.nan)
    return sums


def same_tokens(answers: Answers, others: Answers) -> Floats:
    """(Q,) 1 where all of a prompt's answers have the same tokens in both."""
    rows = _rows(answers)
    same = np.ones(max(rows, default=-1) + 1)
    for row, key in zip(rows, answers, strict=True):
        same[row] *= answers[key].tokens == others[key].tokens
    return same


def _select(suite: str, answers: Answers) -> Answers:
    """The answers of one suite, or of `ALL`."""
    return {key: record for key, record in answers.items() if suite in (ALL, record.suite)}


def _rows(answers: Answers) -> list[int]:
    """The row of each answer's prompt; prompts (suite, id) are numbered in their order."""
    order = {prompt: row for row, prompt in enumerate(dict.fromkeys(key[:2] for key in answers))}
    return [order[key[:2]] for key in answers]


def choose_depth(name: str, answers: Answers, depth: int | None) -> int:
    """K: `depth`, or else the most tokens ever accepted in a round.

    Raises:
        ValueError: more tokens were accepted than `depth`.
    """
    most = max((accepted for record in answers.values() for accepted in record.accepted), default=0)
    if depth is not None and most > depth:
        raise ValueError(f"{name!r} accepted {most} tokens in a round; its run.json gives it the depth {depth}")
    return most if depth is None else depth


def describe_answer(key: tuple) -> str:
    """An answer's key in words."""
    suite, prompt, turn, repeat = key
    return f"{suite}/{prompt} turn {turn} repeat {repeat}"
