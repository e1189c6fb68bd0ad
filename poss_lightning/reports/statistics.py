"""The measures of METHOD.md section 7 over sums by prompt, with 95 % intervals, tests and minimum detectable effects.

**Prompts.** The bootstrap draws prompts, not rounds or turns: a drawn prompt counts with all its turns and repeats. In
each draw every method gets the same prompts, and a ratio or difference between methods is taken within the draw. So the
effect of prompts that are easy for all methods cancels. A draw is a row of counts: how often each prompt was drawn. Row
0 is the sample itself, each prompt once. So each measure is written once, as counts times sums by prompt, and gives its
value and its draws together. The interval is for these drafts on prompts like these; `seeds.py` is for other trainings.

**The interval** is value ± t(Q-1) · the spread of the draws · sqrt(Q / (Q-1)); ratios in logarithms. The middle 95 % of
the draws would be too narrow with few prompts. Coverage of both, measured on drawn rounds of prompts of known hardness
(macro τ of a method; in brackets its difference to another; `make coverage`):

    prompts             3            5           12           40          120
    percentiles     .75 (.74)    .81 (.82)    .90 (.89)    .94 (.93)    .95 (.92)
    this one        .94 (.95)    .93 (.96)    .94 (.94)    .96 (.95)    .96 (.94)

**A test** uses the same t, so p < 0.05 exactly where the interval does not contain "no effect". Holm's correction
(1979) is for several methods that are compared with one; it is not made for several measures, positions or suites.

Q counts only the prompts that have rounds where a measure looks: of pos-acc at that position, of τ at that output
position, input length or category. They may be few. Where 2, 3 or 5 of 60 prompts had any, intervals with Q = 60
covered .64, .78 and .89, and with Q = 2, 3 and 5 they covered .95, .95 and .96 (`make coverage`). Those of two prompts
reach below 1 and beyond K + 1, so fewer than three have none, nor a test.

Letters: R draws, Q prompts, K draft positions. 0/0 is nan, shown as a dash. Where nothing varies between prompts, which
few may do by chance, there is no interval either; but a share that is 0 or 1 in every prompt has one of width 0: it
describes this sample, and proves nothing about others.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import ClassVar, Self, TypeVar

import numpy as np
from numpy.typing import NDArray
from scipy import stats
from scipy.optimize import root_scalar

Floats = NDArray[np.float64]
LEVEL = 0.05  # of two-sided tests and of intervals
FEWEST = 3  # prompts with a round that have an interval or a test


@dataclass(frozen=True)
class Estimate:
    """A value and its 95 % interval; nan where the records do not define it."""

    value: float
    low: float
    high: float

    def text(self, form: str = ".2f") -> str:
        """The value, or a dash."""
        return "–" if math.isnan(self.value) else format(self.value, form)

    def interval(self, form: str = ".2f") -> str:
        """The interval, or nothing."""
        return "" if math.isnan(self.low) else f"{self.low:{form}}…{self.high:{form}}"

    def with_interval(self, form: str = ".2f") -> str:
        """The value and, where there is one, its interval."""
        return self.text(form) + (f" ({self.interval(form)})" if self.interval(form) else "")

    def percent(self) -> Self:
        """The same share in per cent."""
        return replace(self, value=100 * self.value, low=100 * self.low, high=100 * self.high)


@dataclass(frozen=True)
class Comparison(Estimate):
    """A difference between two methods (no effect: 0) or a ratio (no effect: 1).

    Attributes:
        p: of the two-sided test that there is no effect.
        holm: the same, corrected for all methods that are compared with the same one.
        detectable: minimum detectable effect, in either direction from "no effect": the smallest true effect that such
            a sample finds with 80 % power at 5 % two-sided, by Holm's first step, the strictest. 0.03 is a ratio of
            1.03. It is an estimate from the spread of this sample: over 5 seeds the true one may well be two thirds of
            it, or half as large again.
        error: standard error of the difference, or of the ratio's logarithm.
        freedom: its degrees of freedom.
    """

    p: float
    holm: float
    detectable: float
    error: float
    freedom: float

    no_effect: ClassVar[float] = 0.0

    @property
    def identical(self) -> bool:
        """Whether there is no effect in any prompt or seed, so that nothing varies."""
        return self.error == 0 and self.value == self.no_effect

    @property
    def direction(self) -> str:
        """`larger` or `smaller` where the corrected p is below 0.05, else nothing."""
        return "" if not self.holm < LEVEL else "larger" if self.value > self.no_effect else "smaller"

    def significance(self) -> str:
        """The corrected p, or nothing."""
        return "" if math.isnan(self.holm) else "p < 0.001" if self.holm < 0.001 else f"p {self.holm:.3f}"

    def detectable_text(self, form: str = ".2f") -> str:
        """The minimum detectable effect, or nothing."""
        return "" if math.isnan(self.detectable) else f"±{self.detectable:{form}}"

    def percent(self) -> Self:
        """The same difference of shares in percentage points."""
        return replace(super().percent(), detectable=100 * self.detectable, error=100 * self.error)

    def correct(self, tests: int, holm: float) -> Self:
        """The same as one of several comparisons with one method, and its corrected p."""
        return replace(self, holm=holm, detectable=detectable(self.error, self.freedom, tests))


class Ratio(Comparison):
    """A comparison whose `detectable` is of the ratio, and whose `error` of its logarithm."""

    no_effect: ClassVar[float] = 1.0

    def correct(self, tests: int, holm: float) -> Self:
        corrected = super().correct(tests, holm)
        return replace(corrected, detectable=math.expm1(corrected.detectable))


Compared = TypeVar("Compared", bound=Comparison)


@dataclass(frozen=True)
class Sums:
    """One method's records, summed by prompt.

    Attributes:
        reach: (Q, K+1) rounds that accepted at least k tokens, k = 0..K; column 0 counts them all.
        tokens: (Q,) new tokens.
        seconds: (Q,) total seconds.
    """

    reach: Floats
    tokens: Floats
    seconds: Floats


# --- measures: (1+R, Q) counts and sums by prompt -> (1+R,) values ---


def tau_micro(counts: Floats, sums: Sums) -> Floats:
    """Mean over rounds of accepted + 1: a round that accepts a tokens is counted in columns 0..a of `reach`."""
    reach = counts @ sums.reach  # (1+R, K+1)
    return ratio(reach.sum(1), reach[:, 0])


def tau_macro(counts: Floats, sums: Sums) -> Floats:
    """Mean over prompts of each prompt's mean; a prompt without a round has none."""
    means = ratio(sums.reach.sum(1), sums.reach[:, 0])  # (Q,)
    return ratio(counts @ np.nan_to_num(means), counts @ np.isfinite(means).astype(float))


def pos_acc(counts: Floats, sums: Sums) -> Floats:
    """#(accepted >= k) / #(accepted >= k-1) over rounds: (1+R, K)."""
    reach = counts @ sums.reach  # (1+R, K+1)
    return ratio(reach[:, 1:], reach[:, :-1])


def tokens_per_second(counts: Floats, sums: Sums) -> Floats:
    """New tokens over total seconds."""
    return ratio(counts @ sums.tokens, counts @ sums.seconds)


def share(counts: Floats, holds: Floats) -> Floats:
    """Share of prompts for which `holds` (Q,) is 1."""
    return ratio(counts @ holds, counts.sum(1))


def ratio(above: Floats, below: Floats) -> Floats:
    """Quotients, nan where `below` is 0."""
    return np.divide(above, below, out=np.full(np.shape(below), np.nan), where=np.not_equal(below, 0))


# --- the bootstrap ---


def draw_counts(prompts: int, resamples: int, seed: int) -> Floats:
    """How often each draw has each prompt: (1+R, Q), row 0 all ones. With one prompt there is no spread, and R is 0."""
    sample = np.ones((1, prompts))
    if prompts < 2:
        return sample
    drawn = np.random.default_rng(seed).multinomial(prompts, np.full(prompts, 1 / prompts), size=resamples)
    return np.concatenate([sample, drawn.astype(float)])


def standard_error(values: Floats, prompts: int) -> float:
    """Spread of the draws (1+R,) that have a value; their variance falls short by 1/Q. nan of fewer than `FEWEST`."""
    drawn = values[1:][np.isfinite(values[1:])]
    if not np.isfinite(values[0]) or drawn.size < 2 or prompts < FEWEST:
        return math.nan
    return float(drawn.std(ddof=1)) * math.sqrt(prompts / (prompts - 1))


def estimate(values: Floats, prompts: int) -> Estimate:
    """The value of row 0 and, where it varies, its interval; `values` (1+R,), of `prompts` that have rounds."""
    return interval(float(values[0]), standard_error(values, prompts) or math.nan, prompts - 1)


def estimate_share(values: Floats, prompts: int) -> Estimate:
    """The same for a share, also where it does not vary."""
    return within_share(interval(float(values[0]), standard_error(values, prompts), prompts - 1))


def within_share(share: Estimate) -> Estimate:
    """A share whose interval ends at 0 and 1."""
    return replace(share, low=max(share.low, 0.0), high=min(share.high, 1.0)) if share.interval() else share


# --- from a standard error to intervals and tests ---


def interval(value: float, error: float, freedom: float) -> Estimate:
    """The t-interval of a value with a standard error of so many degrees of freedom."""
    half = error * _quantile(freedom)
    return Estimate(value, value - half, value + half)


def difference(value: float, error: float, freedom: float) -> Comparison:
    """A difference compared with 0; not yet corrected for other comparisons."""
    error = _spread(value, error)
    ends, p = interval(value, error, freedom), _p(value, error, freedom)
    return Comparison(value, ends.low, ends.high, p, p, detectable(error, freedom), error, freedom)


def quotient(logarithm: float, error: float, freedom: float) -> Ratio:
    """A ratio compared with 1, from its logarithm and the logarithm's standard error; not yet corrected for others."""
    logs = difference(logarithm, error, freedom)
    value, low, high = math.exp(logs.value), math.exp(logs.low), math.exp(logs.high)
    return Ratio(value, low, high, logs.p, logs.p, math.expm1(logs.detectable), logs.error, freedom)


def detectable(error: float, freedom: float, tests: int = 1) -> float:
    """The true effect found with 80 % power at 5 % two-sided, over several tests; for one test about 2.8 errors."""
    return error * _factor(freedom, LEVEL / max(tests, 1))


def holm(p: list[float]) -> list[float]:
    """Holm's step-down correction: each p times the number of those not smaller, never decreasing; nan stays nan."""
    order = sorted((value, place) for place, value in enumerate(p) if not math.isnan(value))
    corrected, least = [math.nan] * len(p), 0.0
    for passed, (value, place) in enumerate(order):
        least = max(least, min(1.0, value * (len(order) - passed)))
        corrected[place] = least
    return corrected


def correct(comparisons: Mapping[str, Compared]) -> dict[str, Compared]:
    """Comparisons with the same method, by the other one's name, each corrected for the others."""
    corrected = holm([comparison.p for comparison in comparisons.values()])
    tests = sum(not math.isnan(p) for p in corrected)
    return {name: one.correct(tests, p) for (name, one), p in zip(comparisons.items(), corrected, strict=True)}


@lru_cache
def _quantile(freedom: float, level: float = LEVEL) -> float:
    return float(stats.t.isf(level / 2, freedom)) if freedom > 0 else math.nan


def _spread(value: float, error: float) -> float:
    """The error; but nan for an error of 0, as two prompts may give by chance, unless the value is 0 too."""
    return math.nan if error == 0 and value != 0 else error


def _p(value: float, error: float, freedom: float) -> float:
    if error == 0:
        return 1.0
    return float(2 * stats.t.sf(abs(value) / error, freedom))


@lru_cache
def _factor(freedom: float, level: float) -> float:
    """The noncentrality at which t exceeds the upper critical value with probability 0.8, without the other tail."""
    if not freedom > 0:
        return math.nan
    point = _quantile(freedom, level)
    return root_scalar(lambda shift: stats.nct.sf(point, freedom, shift) - 0.8, bracket=(0, 2 * point)).root
