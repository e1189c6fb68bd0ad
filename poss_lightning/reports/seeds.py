"""Methods trained with several seeds: mean, spread, and which is better for sure.

Training seeds matter as much as prompts: two trainings of one configuration often differ by more than two
configurations do. So a claim about methods needs several trainings of each, on the same prompts. The trainings are
paired by their seed, which gives the same order of data. With d[s, q] the difference at seed s and prompt q there are
three questions, and each has its own interval:

    for                           these prompts                              prompts like these
    these trainings               decided by counting                        `summary.py`, the bootstrap
    trainings like these          `gain_these_prompts`, paired t over seeds  `gain`, seeds and prompts both random

"A has a larger τ than B" is the last question: other trainings, other prompts. The first two leave out a source of
chance, so their intervals are too narrow for it, and `gain` is the default. It is the crossed analysis of variance
(Clark 1973, with subjects and words in place of seeds and prompts), with mean squares S, Q and I of seeds, prompts and
their interaction:

    variance of the mean of d = (I + max(S - I, 0) + max(Q - I, 0)) / (seeds · prompts)
    degrees of freedom by Satterthwaite (1946), S, Q and I all counted

For a measure that is no mean over prompts (micro τ, pos-acc, speed), d are its jackknife pseudo-values (Tukey 1958).
Prompts without a round that the measure looks at, in any training of the two, are not counted, as in `statistics.py`.
How often the 95 % interval contains the true difference, for 5 seeds and 120 prompts, by the standard deviations of the
parts of d (`make coverage`):

    seed, prompt, interaction    this one    crossed bootstrap    paired t over seeds    prompts alone
    0     0     0.3                 .99            .996                  .95                 .95
    0.03  0.1   0.3                 .96            .975                  .93                 .86
    0.1   0.1   0.3                 .95            .895                  .95                 .48
    0.03  0.3   0.3                 .96            .97                   .82                 .94

The bootstrap that draws seeds and prompts (the pigeonhole bootstrap, Owen 2007) counts the interaction three times, and
underestimates the spread of a few seeds. Where nothing differs, `gain` finds 1 to 6 of 100 simulated experiments
significant with 5 seeds, and up to 7 with 3. So take at least 5 seeds, and do not trust a p just below 0.05.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from poss_lightning.evaluation.records import BASELINES, Record
from poss_lightning.reports import statistics
from poss_lightning.reports.statistics import (
    Comparison,
    Estimate,
    Floats,
    correct,
    difference,
    interval,
    quotient,
)
from poss_lightning.reports.summary import (
    ALL,
    Answers,
    check_same,
    choose_depth,
    describe_answer,
    group,
    select_suite,
    sum_by_prompt,
)

Cells = dict[tuple[str, int], list[Record]]  # (choice, training seed) -> what its folder holds
Values = dict[str, dict[int, "Jackknife"]]  # choice -> seed -> one measure
RATIOS = ("tokens_per_second", "speed_up")  # measures that are compared by ratio; all others by difference


@dataclass(frozen=True)
class Jackknife:
    """One measure of one training, for its jackknife over prompts.

    Attributes:
        values: (1+Q,) of all prompts, then without each in turn.
        counted: (Q,) bool, which prompts have what it measures.
    """

    values: Floats
    counted: NDArray[np.bool_]

    @property
    def value(self) -> float:
        return float(self.values[0])


@dataclass(frozen=True)
class SeedSummary:
    """One choice in one measure, over its training seeds.

    Attributes:
        suite: the suite, or `ALL`.
        measure: "tau_macro", "tau_micro", "pos_acc_1" … "pos_acc_K", "tokens_per_second" or "speed_up" (over the
            baseline of the same folder).
        values: by training seed.
        mean: over seeds, with its t-interval: these prompts, other trainings.
        deviation: standard deviation over seeds; nan for one.
        gain: compared with the reference, seeds and prompts both random; a ratio (geometric mean over seeds) for the
            measures in `RATIOS`, else a difference. None for the reference itself, and without a seed in common.
        gain_these_prompts: the same by the paired t-test over seeds, for these prompts.
        pairs: the seeds that both have, from which both gains are computed; a single one gives no interval.
    """

    suite: str
    choice: str
    measure: str
    values: dict[int, float]
    mean: Estimate
    deviation: float
    gain: Comparison | None
    gain_these_prompts: Comparison | None
    pairs: tuple[int, ...]


def summarise_seeds(
    cells: Cells, reference: str | None = None, baseline: str = "autoregressive", depths: dict[str, int] | None = None
) -> list[SeedSummary]:
    """Every choice in every measure, over all prompts, then over each suite if there are several.

    Args:
        cells: the records of each (choice, training seed). The choice is the name of its method in the records; other
            methods than this and the baseline are ignored.
        reference: the choice that the others are compared with.
        baseline: "speed_up" is relative to its speed, where every cell has it.
        depths: K by choice; for other choices the most tokens ever accepted in a round.

    Raises:
        ValueError: no choice is called `reference`, a cell lacks its choice, a depth is exceeded, or the cells do not
            cover the same prompts.
    """
    methods = {cell: _methods(*cell, records, baseline) for cell, records in cells.items()}
    choices = list(dict.fromkeys(choice for choice, _ in cells))
    if reference is not None and reference not in choices:
        raise ValueError(f"reference is {reference!r}; these records have the choices {', '.join(choices)}")
    _check_prompts({cell: by_method[cell[0]] for cell, by_method in methods.items()})
    most = dict.fromkeys(choices, 0)
    for (choice, _), by_method in methods.items():
        most[choice] = max(most[choice], choose_depth(choice, by_method[choice], (depths or {}).get(choice)))
    over = baseline if all(baseline in by_method for by_method in methods.values()) else None
    known = {record.method for records in cells.values() for record in records} & set(BASELINES)
    if known and not any(baseline in by_method for by_method in methods.values()):
        raise ValueError(f"baseline is {baseline!r}; these records have the baselines {', '.join(sorted(known))}")
    suites = sorted({record.suite for records in cells.values() for record in records})
    summaries = []
    for suite in [ALL, *suites] if len(suites) > 1 else [ALL]:
        values: dict[str, Values] = {}  # by measure
        for (choice, seed), by_method in methods.items():
            for measure, measured in _measure(select_suite(suite, by_method), choice, over, most[choice]).items():
                values.setdefault(measure, {}).setdefault(choice, {})[seed] = measured
        for measure, by_choice in values.items():
            summaries += _summarise(suite, measure, by_choice, reference)
    return summaries


def leave_one_out(prompts: int) -> Floats:
    """Counts like those of bootstrap draws, (1+Q, Q): all prompts, then all but one."""
    return np.concatenate([np.ones((1, prompts)), 1 - np.eye(prompts)])


def pseudo_values(values: Floats) -> Floats:
    """From the value of all prompts and without each (..., 1+Q), that of each prompt (..., Q); for a mean, its own."""
    prompts = values.shape[-1] - 1
    return prompts * values[..., :1] - (prompts - 1) * values[..., 1:]


def crossed_error(effects: Floats) -> tuple[Floats, Floats]:
    """Standard error of the mean of effects (..., S, Q), both seeds and prompts random, and its degrees of freedom."""
    seeds, prompts = effects.shape[-2:]
    mean = effects.mean((-2, -1), keepdims=True)
    by_seed, by_prompt = effects.mean(-1, keepdims=True), effects.mean(-2, keepdims=True)  # (..., S, 1), (..., 1, Q)
    rest = effects - by_seed - by_prompt + mean
    freedom = (seeds - 1, prompts - 1, (seeds - 1) * (prompts - 1))
    squares = (prompts * (by_seed - mean) ** 2, seeds * (by_prompt - mean) ** 2, rest**2)
    s, q, i = (part.sum((-2, -1)) / free for part, free in zip(squares, freedom, strict=True))
    variance = i + np.maximum(s - i, 0) + np.maximum(q - i, 0)
    below = s**2 / freedom[0] + q**2 / freedom[1] + i**2 / freedom[2]
    satterthwaite = statistics.ratio(variance**2, below)
    return np.sqrt(variance / (seeds * prompts)), np.fmax(satterthwaite, min(freedom))


def _measure(methods: dict[str, Answers], choice: str, baseline: str | None, depth: int) -> dict[str, Jackknife]:
    """Every measure of one cell."""
    sums = sum_by_prompt(methods[choice], depth)
    counts, reached = leave_one_out(len(sums.tokens)), sums.reach.T > 0  # (K+1, Q)
    measures = {
        name: Jackknife(tau(counts, sums), reached[0])
        for name, tau in (("tau_macro", statistics.tau_macro), ("tau_micro", statistics.tau_micro))
    }
    shares = statistics.pos_acc(counts, sums).T
    measures |= {f"pos_acc_{k + 1}": Jackknife(share, reached[k]) for k, share in enumerate(shares)}
    if np.isfinite(sums.seconds).all():
        every = np.ones_like(reached[0])
        speed = statistics.tokens_per_second(counts, sums)
        measures["tokens_per_second"] = Jackknife(speed, every)
        if baseline is not None:
            plain = statistics.tokens_per_second(counts, sum_by_prompt(methods[baseline], 0))
            measures["speed_up"] = Jackknife(speed / plain, every)
    return measures


def _summarise(suite: str, measure: str, values: Values, reference: str | None) -> list[SeedSummary]:
    """A row for each choice; the gains are corrected for all choices that are compared with the reference."""
    others = {} if reference is None else values.get(reference, {})
    paired = {choice: sorted(trainings.keys() & others) for choice, trainings in values.items() if choice != reference}
    change, compare = (np.log, quotient) if measure in RATIOS else (np.asarray, difference)
    gains, gains_these = {}, {}
    for choice, seeds in paired.items():
        if seeds:
            pairs = [(values[choice][seed], others[seed]) for seed in seeds]
            effects = np.stack([change(own.values) - change(other.values) for own, other in pairs])  # (S, 1+Q)
            counted = np.any([own.counted | other.counted for own, other in pairs], axis=0)
            effects = effects[:, np.append(True, counted)]
            mean = float(effects[:, 0].mean())
            gains_these[choice] = compare(mean, _deviation(effects[:, 0]) / len(seeds) ** 0.5, len(seeds) - 1)
            gains[choice] = compare(mean, *_error(pseudo_values(effects)))
    gains, gains_these = correct(gains), correct(gains_these)
    rows = []
    for choice, trainings in values.items():
        by_seed = {seed: trainings[seed].value for seed in sorted(trainings)}
        value, deviation = float(np.mean([*by_seed.values()])), _deviation(np.array([*by_seed.values()]))
        mean = interval(value, deviation / len(by_seed) ** 0.5, len(by_seed) - 1)
        row = SeedSummary(
            suite=suite,
            choice=choice,
            measure=measure,
            values=by_seed,
            mean=statistics.within_share(mean) if measure.startswith("pos_acc_") else mean,
            deviation=deviation,
            gain=gains.get(choice),
            gain_these_prompts=gains_these.get(choice),
            pairs=tuple(paired.get(choice, ())),
        )
        rows.append(row)
    return rows


def _error(effects: Floats) -> tuple[float, float]:
    """`crossed_error` of one comparison's (S, Q); nan with one seed, or with too few prompts."""
    seeds, prompts = effects.shape
    if seeds < 2 or prompts < statistics.FEWEST:
        return math.nan, math.nan
    error, freedom = crossed_error(effects)
    return float(error), float(freedom)


def _deviation(values: Floats) -> float:
    """Standard deviation, over n - 1; nan for one value."""
    return float(values.std(ddof=1)) if len(values) > 1 else math.nan


def _methods(choice: str, seed: int, records: list[Record], baseline: str) -> dict[str, Answers]:
    """One cell's answers by the choice, and by the baseline where there is one."""
    check_choice(choice, seed, records)
    return group([record for record in records if record.method in (choice, baseline)])


def check_choice(choice: str, seed: int, records: list[Record]) -> None:
    """Raise ValueError unless some of a cell's records are of its choice."""
    names = dict.fromkeys(record.method for record in records)
    if choice not in names:
        raise ValueError(f"choice {choice!r}, seed {seed}: no record has this method; there are {', '.join(names)}")


def _check_prompts(answers: dict[tuple[str, int], Answers]) -> None:
    first = next(iter(answers), ("", 0))
    for cell, these in answers.items():
        if differing := sorted(map(describe_answer, these.keys() ^ answers[first].keys())):
            raise ValueError(
                f"choice {cell[0]!r}, seed {cell[1]} and choice {first[0]!r}, seed {first[1]} differ in "
                f"{len(differing)} answers, such as {differing[0]}. Choices are compared on the same prompts"
            )
        for key, record in these.items():
            check_same(
                (f"{first[0]!r}, seed {first[1]},", answers[first][key]), (f"{cell[0]!r}, seed {cell[1]},", record)
            )
