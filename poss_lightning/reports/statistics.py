"""The measures of METHOD.md section 7 over sums by prompt, with 95 % intervals, tests and minimum detectable effects.

A measure m of one training gives each of its Q prompts a pseudo-value of the jackknife (Tukey 1958),

    d[q] = Q · m(all prompts) - (Q - 1) · m(all but q)

which for a mean over prompts is the prompt's own value. A difference between two methods has the differences of their
pseudo-values: it is paired by prompt, so prompts that are easy for both cancel. Ratios are compared in logarithms. With
S trainings, paired by their seed, d is (S, Q), and both seeds and prompts are random: the crossed analysis of variance
(Clark 1973, with subjects and words in place of seeds and prompts), with mean squares S, Q and I of seeds, prompts and
their interaction,

    variance of the mean of d = (I + max(S - I, 0) + max(Q - I, 0)) / (seeds · prompts)
    degrees of freedom by Satterthwaite (1946), S, Q and I all counted

One training is the case S = I = 0: the t-interval over prompts. Its interval is for other prompts alone; that of
several trainings is for other trainings too, which often differ by more than two configurations do.

`make coverage` says how often 95 % intervals hold the truth: over 5, 12 and 60 prompts .94 to .96 for every measure;
over 5 trainings .95 to .99 (the share of seeds is never below 0, so where nothing but rounds varies they are too wide).
With fewer than 5 trainings do not trust a p just below 0.05.

A test uses the same t, so p < 0.05 exactly where the interval does not contain "no effect", before Holm's correction
(1979) for several methods that are compared with one; it is not made for several measures or positions. Prompts without
a round that the measure looks at do not count; fewer than three have no interval, nor do values without any spread.

Letters: S seeds, Q prompts, K draft positions; a row of counts says which prompts are in. 0/0 is nan, shown as a dash.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray
from scipy import stats
from scipy.optimize import root_scalar

Floats = NDArray[np.float64]
LEVEL, POWER = 0.05, 0.8  # of two-sided tests and of intervals; of detectable effects
FEWEST = 3  # prompts with a round that have an interval or a test


@dataclass(frozen=True)
class Estimate:
    """A value and its 95 % interval; nan where the records do not define it."""

    value: float
    low: float = math.nan
    high: float = math.nan

    def text(self, form: str = ".2f") -> str:
        """The value, or a dash."""
        return "–" if math.isnan(self.value) else format(self.value, form)

    def interval(self, form: str = ".2f") -> str:
        """The interval, or nothing."""
        return "" if math.isnan(self.low) else f"{self.low:{form}}…{self.high:{form}}"

    def with_interval(self, form: str = ".2f") -> str:
        """The value and, where there is one, its interval."""
        return self.text(form) + (f" ({self.interval(form)})" if self.interval(form) else "")

    def within_share(self) -> Self:
        """A share, whose interval ends at 0 and 1."""
        return replace(self, low=max(self.low, 0.0), high=min(self.high, 1.0)) if self.interval() else self

    def percent(self) -> Self:
        """The same share in per cent."""
        return replace(self, value=100 * self.value, low=100 * self.low, high=100 * self.high)


@dataclass(frozen=True)
class Comparison(Estimate):
    """A difference between two methods (no effect: 0), or a ratio (no effect: 1).

    Attributes:
        p: of the two-sided test that there is no effect, by Holm's correction for all methods that are compared with
            the same one.
        detectable: minimum detectable effect, in either direction from "no effect": the smallest true effect that such
            a sample finds with 80 % power at 5 % two-sided, by Holm's first step, the strictest. 0.03 is a ratio of
            1.03. It is an estimate from the spread of this sample: over 5 seeds the true one may well be two thirds of
            it, or half as large again.
        no_effect: 0 or 1.
    """

    p: float = math.nan
    detectable: float = math.nan
    no_effect: float = 0.0

    @property
    def identical(self) -> bool:
        """Whether there is no effect in any prompt or seed, so that nothing varies."""
        return self.detectable == 0 and self.value == self.no_effect

    @property
    def direction(self) -> str:
        """`larger` or `smaller` where p is below 0.05, else nothing."""
        return "" if not self.p < LEVEL else "larger" if self.value > self.no_effect else "smaller"

    def significance(self) -> str:
        """The p, or nothing."""
        return "" if math.isnan(self.p) else "p < 0.001" if self.p < 0.001 else f"p {self.p:.3f}"

    def percent(self) -> Self:
        """The same difference of shares in percentage points."""
        return replace(super().percent(), detectable=100 * self.detectable)


# --- measures: (R, Q) counts and sums by prompt -> (R,) values ---


@dataclass(frozen=True)
class Sums:
    """One training's records of one method, summed by prompt.

    Attributes:
        reach: (Q, K+1) rounds that accepted at least k tokens, k = 0..K; column 0 counts them all.
        tokens: (Q,) new tokens.
        seconds: (Q,) total seconds; nan where none were measured.
    """

    reach: Floats
    tokens: Floats
    seconds: Floats


def tau_micro(counts: Floats, sums: Sums) -> Floats:
    """Mean over rounds of accepted + 1: a round that accepts a tokens is counted in columns 0..a of `reach`."""
    reach = counts @ sums.reach  # (R, K+1)
    return ratio(reach.sum(1), reach[:, 0])


def tau_macro(counts: Floats, sums: Sums) -> Floats:
    """Mean over prompts of each prompt's mean; a prompt without a round has none."""
    means = ratio(sums.reach.sum(1), sums.reach[:, 0])  # (Q,)
    return ratio(counts @ np.nan_to_num(means), counts @ np.isfinite(means).astype(float))


def pos_acc(counts: Floats, sums: Sums) -> Floats:
    """#(accepted >= k) / #(accepted >= k-1) over rounds: (R, K)."""
    reach = counts @ sums.reach  # (R, K+1)
    return ratio(reach[:, 1:], reach[:, :-1])


def tokens_per_second(counts: Floats, sums: Sums) -> Floats:
    """New tokens over total seconds."""
    return ratio(counts @ sums.tokens, counts @ sums.seconds)


def ratio(above: Floats, below: Floats) -> Floats:
    """Quotients, nan where `below` is 0."""
    return np.divide(above, below, out=np.full(np.shape(below), np.nan), where=np.not_equal(below, 0))


# --- the jackknife, and errors that are crossed ---


class Jackknife(NamedTuple):
    """One measure of one training.

    Attributes:
        values: (1+Q,) of all prompts, then without each in turn.
        counted: (Q,) bool, which prompts have what it measures.
    """

    values: Floats
    counted: NDArray[np.bool_]


class Mean(NamedTuple):
    """A value, its standard error (nan where it is not known), and the error's degrees of freedom."""

    value: float
    error: float
    freedom: float


def leave_one_out(prompts: int) -> Floats:
    """Counts (1+Q, Q): all prompts, then all but one."""
    return np.concatenate([np.ones((1, prompts)), 1 - np.eye(prompts)])


def pseudo_values(values: Floats) -> Floats:
    """From the value of all prompts and without each (..., 1+Q), that of each prompt (..., Q); for a mean, its own."""
    prompts = values.shape[-1] - 1
    return prompts * values[..., :1] - (prompts - 1) * values[..., 1:]


def crossed_error(effects: Floats) -> tuple[Floats, Floats]:
    """Standard error of the mean of effects (..., S, Q), and its degrees of freedom; S may be 1."""
    seeds, prompts = effects.shape[-2:]
    mean = effects.mean((-2, -1), keepdims=True)
    by_seed, by_prompt = effects.mean(-1, keepdims=True), effects.mean(-2, keepdims=True)  # (..., S, 1), (..., 1, Q)
    rest = effects - by_seed - by_prompt + mean
    freedom = (seeds - 1, prompts - 1, (seeds - 1) * (prompts - 1))
    squares = (prompts * (by_seed - mean) ** 2, seeds * (by_prompt - mean) ** 2, rest**2)
    s, q, i = (part.sum((-2, -1)) / max(free, 1) for part, free in zip(squares, freedom, strict=True))
    variance = i + np.maximum(s - i, 0) + np.maximum(q - i, 0)
    below = sum(part**2 / max(free, 1) for part, free in zip((s, q, i), freedom, strict=True))
    satterthwaite = ratio(variance**2, np.asarray(below))
    return np.sqrt(variance / (seeds * prompts)), np.fmax(satterthwaite, min(free for free in freedom if free))


def mean_over(trainings: Sequence[Jackknife], others: Sequence[Jackknife] = (), logs: bool = False) -> Mean:
    """The mean of a measure over trainings, or of its difference to others of the same seeds; `logs`: of logarithms."""
    values = np.stack([own.values for own in trainings])  # (S, 1+Q)
    values = np.log(values) if logs else values
    if others:
        theirs = np.stack([other.values for other in others])
        values = values - (np.log(theirs) if logs else theirs)
    every = [one.counted for one in (*trainings, *others)]
    counted, fewest = np.any(every, axis=0), min(int(one.sum()) for one in every)
    value = float(values[:, 0].mean())
    if fewest < FEWEST:
        return Mean(value, math.nan, math.nan)
    error, freedom = crossed_error(pseudo_values(values[:, np.append(True, counted)]))
    most = math.inf if fewest == counted.sum() else fewest - 1
    return Mean(value, float(error), min(float(freedom), most))


# --- from a standard error to intervals and tests ---


def interval(mean: Mean, logs: bool = False) -> Estimate:
    """The t-interval; none without any spread. `logs`: of what the mean is the logarithm of."""
    half = (mean.error or math.nan) * _quantile(mean.freedom)
    found = Estimate(mean.value, mean.value - half, mean.value + half)
    return Estimate(*map(math.exp, (found.value, found.low, found.high))) if logs else found


def compare(means: Mapping[str, Mean], logs: bool = False) -> dict[str, Comparison]:
    """Methods that are all compared with the same one: differences, or ratios from their logarithms (`logs`)."""
    means = {name: mean._replace(error=mean.error or _sure(mean)) for name, mean in means.items()}
    p = {name: _p(mean) for name, mean in means.items()}
    tests = sum(not math.isnan(each) for each in p.values())
    found = {}
    for (name, mean), corrected in zip(means.items(), holm(list(p.values())), strict=True):
        ends, least = interval(mean, logs), detectable(mean.error, mean.freedom, tests)
        least = math.expm1(least) if logs else least
        found[name] = Comparison(ends.value, ends.low, ends.high, corrected, least, float(logs))
    return found


def detectable(error: float, freedom: float, tests: int = 1) -> float:
    """The true effect found with 80 % power at 5 % two-sided, over several tests; for one test about 2.8 errors."""
    return error * _noncentrality(freedom, LEVEL / max(tests, 1))


def holm(p: Sequence[float]) -> list[float]:
    """Holm's step-down correction: each p times the number of those not smaller, never decreasing; nan stays nan."""
    order = sorted((value, place) for place, value in enumerate(p) if not math.isnan(value))
    corrected, least = [math.nan] * len(p), 0.0
    for passed, (value, place) in enumerate(order):
        least = max(least, min(1.0, value * (len(order) - passed)))
        corrected[place] = least
    return corrected


def _sure(mean: Mean) -> float:
    """The error of a mean without any spread: 0 of no effect, else not known, as a few prompts may agree by chance."""
    return 0.0 if mean.value == 0 else math.nan


def _p(mean: Mean) -> float:
    return 1.0 if mean.error == 0 else float(2 * stats.t.sf(abs(mean.value) / mean.error, mean.freedom))


@lru_cache
def _quantile(freedom: float, level: float = LEVEL) -> float:
    return float(stats.t.isf(level / 2, freedom)) if freedom > 0 else math.nan


@lru_cache
def _noncentrality(freedom: float, level: float) -> float:
    """That at which t exceeds the upper critical value with probability 0.8; the other tail is left out."""
    if not freedom > 0:
        return math.nan
    point = _quantile(freedom, level)
    return root_scalar(lambda shift: stats.nct.sf(point, freedom, shift) - POWER, bracket=(0, 2 * point)).root
