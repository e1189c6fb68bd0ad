"""Records summed up by method and suite, for the tables of `poss compare` and `poss report`.

Each draft is one training, and the prompts are a random sample: intervals are for other prompts, not for other training
seeds. `seeds.py` is for several trainings.
"""

from dataclasses import dataclass

import numpy as np

from poss_lightning.evaluation.records import BASELINES, Record
from poss_lightning.reports import statistics
from poss_lightning.reports.statistics import Comparison, Estimate, Floats, Sums, draw_counts, estimate

ALL = "all"  # the name given to all suites together
Answers = dict[tuple, Record]  # one method's records, by suite, id, turn and repeat


@dataclass(frozen=True)
class MethodSummary:
    """One method over the prompts of one suite, or of all.

    Attributes:
        suite: the suite, or `ALL`.
        rounds: how many were decoded.
        tau_micro: tokens a round, bonus counted, over all rounds.
        tau_macro: the mean over prompts of each prompt's mean (the published measure).
        pos_acc: entry k-1 is the share of rounds that accept position k, of those that accept k-1.
        tokens_per_second: new tokens over total seconds, prefill included.
        speed_up: ratio of tokens per second to each other baseline's, by its name.
        identical: share of prompts whose tokens, in all turns and repeats, are the first baseline's.
        tau_micro_gain: difference to the reference method; None for itself, or if none was named.
        tau_macro_gain: the same for `tau_macro`.
        pos_acc_gain: the same by position, for the positions that both draft; empty where the others are None.
        speed_gain: ratio of tokens per second to the reference method; None likewise, and of what does not
            draft where the reference does.

    Comparisons are Holm-corrected for all methods that are compared with the same one.
    """

    suite: str
    method: str
    prompts: int
    rounds: int
    tau_micro: Estimate
    tau_macro: Estimate
    pos_acc: tuple[Estimate, ...]
    tokens_per_second: Estimate
    speed_up: dict[str, Comparison]
    identical: Estimate
    tau_micro_gain: Comparison | None
    tau_macro_gain: Comparison | None
    pos_acc_gain: tuple[Comparison, ...]
    speed_gain: Comparison | None


def summarise(
    records: list[Record],
    *,
    baseline: str | None = "autoregressive",
    reference: str | None = None,
    depths: dict[str, int] | None = None,
    resamples: int = 2000,
    seed: int = 0,
) -> list[MethodSummary]:
    """Every method over all prompts, then over each suite if there are several; baselines first.

    Args:
        baseline: the method that `speed_up` and `identical` compare the others with; `speed_up` has the `BASELINES`
            that are present as well. None for replayed rounds, which have no times.
        reference: the method that the gains compare the others with.
        depths: K by method; for other methods the most tokens ever accepted in a round.

    Raises:
        ValueError: `baseline` or `reference` is no method of the records, `resamples` is below 1, a depth is exceeded,
            or the methods do not cover the same prompts.
    """
    if resamples < 1:
        raise ValueError(f"resamples is {resamples}; it must be at least 1")
    methods = group(records)
    for role, name in (("baseline", baseline), ("reference", reference)):
        if name is not None and name not in methods:
            raise ValueError(f"{role} is {name!r}; these records have the methods {', '.join(methods)}")
    most = {name: choose_depth(name, answers, (depths or {}).get(name)) for name, answers in methods.items()}
    suites = sorted({record.suite for record in records})
    return [
        summary
        for suite in ([ALL, *suites] if len(suites) > 1 else [ALL])
        for summary in _summarise_suite(
            suite,
            select_suite(suite, methods),
            depths=most,
            baseline=baseline,
            reference=reference,
            resamples=resamples,
            seed=seed,
        )
    ]


def group(records: list[Record]) -> dict[str, Answers]:
    """The records by method, baselines first, each in one order of prompts.

    Raises:
        ValueError: there is none, an answer is there twice, missing for one of the methods, or one to another prompt.
    """
    if not records:
        raise ValueError("there are no records")
    methods: dict[str, Answers] = {}
    for record in sorted(records, key=lambda record: record.method not in BASELINES):
        key = (record.suite, record.id, record.turn, record.repeat)
        if key in methods.setdefault(record.method, {}):
            drafts = record.method not in BASELINES
            how = "name the methods of several runs apart" if drafts else "decode all drafts in one benchmark"
            raise ValueError(f"{record.method!r} answers {describe_answer(key)} twice; {how}")
        methods[record.method][key] = record
    every = sorted(set().union(*methods.values()), key=lambda key: (key[0], str(key[1]), *key[2:]))
    for name, answers in methods.items():
        if missing := [describe_answer(key) for key in every if key not in answers]:
            shown = "; ".join(missing[:5]) + ("; …" if len(missing) > 5 else "")
            raise ValueError(
                f"{name!r} lacks {len(missing)} of {len(every)} answers that other methods have: {shown}. "
                "Methods are compared on the same prompts"
            )
    for key in every:
        check_same(*((f"{name!r}", answers[key]) for name, answers in methods.items()))
    return {name: {key: answers[key] for key in every} for name, answers in methods.items()}


def check_same(first: tuple[str, Record], *others: tuple[str, Record]) -> None:
    """Refuse answers to different prompts under one name; each answer comes with the name of its method.

    Prompts of the first turn must have the same length. Prompts of later turns hold the target's answers, which ties
    may change. Replayed rounds were read from an answer, so the tokens that both have must be the same too.

    Raises:
        ValueError: the message names the answer and its methods.
    """
    name, answer = first
    for other, record in others:
        both = min(answer.new_tokens, record.new_tokens) if not (answer.seconds or record.seconds) else 0
        if answer.turn == 0 and answer.prompt_tokens != record.prompt_tokens:
            differ = f"prompts of {answer.prompt_tokens} and {record.prompt_tokens} tokens"
        elif answer.tokens[:both] != record.tokens[:both]:
            differ = "replays of different answers"
        else:
            continue
        key = (answer.suite, answer.id, answer.turn, answer.repeat)
        where = describe_answer(key)
        raise ValueError(f"{name} and {other} have {differ} at {where}; methods are compared on the same texts")


def sum_by_prompt(answers: Answers, depth: int) -> Sums:
    """One method's sums; `depth` is K."""
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


def _summarise_suite(
    suite: str,
    methods: dict[str, Answers],
    *,
    depths: dict[str, int],
    baseline: str | None,
    reference: str | None,
    resamples: int,
    seed: int,
) -> list[MethodSummary]:
    sums = {name: sum_by_prompt(answers, depths[name]) for name, answers in methods.items()}
    prompts = len(next(iter(sums.values())).tokens)
    counts = draw_counts(prompts, resamples, seed)  # (1+R, Q), the same for every method
    micro = {name: statistics.tau_micro(counts, of_prompts) for name, of_prompts in sums.items()}
    macro = {name: statistics.tau_macro(counts, of_prompts) for name, of_prompts in sums.items()}
    speed = {name: statistics.tokens_per_second(counts, of_prompts) for name, of_prompts in sums.items()}
    shares = {name: statistics.pos_acc(counts, of_prompts).T for name, of_prompts in sums.items()}  # (K, 1+R)
    reached = {name: (of_prompts.reach > 0).sum(0).tolist() for name, of_prompts in sums.items()}  # (K+1,) prompts
    active = {name: having[0] for name, having in reached.items()}  # prompts that have rounds
    # Speeds are compared among those that draft, as τ is, unless the reference does not.
    timed = [name for name in methods if active[name] or not active.get(reference or "")]
    baselines = dict.fromkeys(name for name in (baseline, *BASELINES) if name in methods)
    every = dict.fromkeys(methods, prompts)
    speed_ups = {other: _compare(speed, other, every, ratios=True) for other in baselines}
    micro_gains = _compare(micro, reference, active)
    macro_gains = _compare(macro, reference, active)
    speed_gains = _compare({name: speed[name] for name in timed}, reference, every, ratios=True)
    share_gains = [
        _compare(
            {name: values[k] for name, values in shares.items() if k < len(values)},
            reference,
            {name: having[k] for name, having in reached.items() if k < len(having)},
        )
        for k in range(depths[reference] if reference else 0)
    ]
    return [
        MethodSummary(
            suite=suite,
            method=name,
            prompts=prompts,
            rounds=int(of_prompts.reach[:, 0].sum()),
            tau_micro=estimate(micro[name], active[name]),
            tau_macro=estimate(macro[name], active[name]),
            pos_acc=tuple(map(statistics.estimate_share, shares[name], reached[name][:-1])),
            tokens_per_second=estimate(speed[name], prompts),
            speed_up={other: gains[name] for other, gains in speed_ups.items() if other != name},
            identical=statistics.estimate_share(
                statistics.share(counts, same_tokens(methods[name], methods[baseline or name])), prompts
            ),
            tau_micro_gain=micro_gains.get(name),
            tau_macro_gain=macro_gains.get(name),
            pos_acc_gain=tuple(gains[name] for gains in share_gains if name in gains),
            speed_gain=speed_gains.get(name),
        )
        for name, of_prompts in sums.items()
    ]


def _compare(
    values: dict[str, Floats], reference: str | None, prompts: dict[str, int], ratios: bool = False
) -> dict[str, Comparison]:
    """Compare (1+R,) values of every other method with the reference's: differences or ratios, corrected.

    `prompts` are those that have values, of each method.
    """
    if reference is None:
        return {}
    fewest = {name: min(count, prompts[reference]) for name, count in prompts.items()}
    scaled = {name: np.log(draws) if ratios else draws for name, draws in values.items()}
    gains = {name: draws - scaled[reference] for name, draws in scaled.items() if name != reference}
    compare = statistics.quotient if ratios else statistics.difference
    return statistics.correct(
        {
            name: compare(float(gain[0]), statistics.standard_error(gain, fewest[name]), fewest[name] - 1)
            for name, gain in gains.items()
        }
    )


def select_suite(suite: str, methods: dict[str, Answers]) -> dict[str, Answers]:
    """The answers of one suite, or of `ALL`."""
    return {
        name: {key: record for key, record in answers.items() if suite in (ALL, record.suite)}
        for name, answers in methods.items()
    }


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
