"""95 % intervals, tests and minimum detectable effects of measures over prompts and trainings.

A measure m of one training gives each of its Q prompts a pseudo-value of the jackknife (Tukey 1958),

    d[q] = Q · m(all prompts) - (Q - 1) · m(all but q)

which for a mean over prompts is the prompt's own value. A difference of two methods is that of their pseudo-values: it
is paired by prompt, so prompts that are easy for both cancel. Ratios are compared in logarithms. With S trainings,
paired by their seed, d is (S, Q), and both seeds and prompts are random: a crossed analysis of variance (Clark 1973,
subjects and words in place of seeds and prompts), with mean squares S, Q and I of seeds, prompts and their interaction,

    variance of the mean of d = (I + max(S - I, 0) + max(Q - I, 0)) / (seeds · prompts)
    degrees of freedom by Satterthwaite (1946), from S, Q and I

One training is the case S = I = 0: the t-interval over prompts. Its interval is for other prompts alone; that of
several trainings is for other trainings too, which often differ by more than two configurations do.

`make coverage` measures how often 95 % intervals contain the truth: .94 to .97 over 5, 12 and 60 prompts for every
measure; .95 to .99 over 5 trainings (they are too wide where nothing but rounds varies, as the share of seeds is never
negative). With fewer than 5 trainings do not trust a p just below 0.05.

A test uses the same t, so p < 0.05 exactly where the interval excludes "no effect", before Holm's correction (1979) for
several methods that are compared with one; not for several measures or positions. Prompts without a round
that the measure looks at do not count. Fewer than three prompts, or values without any spread, have no interval.

Letters: S seeds, Q prompts, K draft positions; a row of counts says which prompts are in. 0/0 is nan, shown as a dash.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import special

Floats = NDArray[np.float64]
LEVEL, POWER = 0.05, 0.8  # of two-sided tests and of intervals; of detectable effects
MIN_PROMPTS = 3  # prompts with a round that have an interval or a test


@dataclass(frozen=True)
class Estimate:
    """A value and its 95 % interval; nan where the records do not define it.

    A form that ends in % writes a share in per cent, without the sign.
    """

    value: float
    low: float = math.nan
    high: float = math.nan

    def text(self, form: str = ".2f") -> str:
        """Return the value, or a dash."""
        return "–" if math.isnan(self.value) else format(self.value, form).removesuffix("%")

    def interval(self, form: str = ".2f") -> str:
        """Return the interval, or nothing."""
        ends = (format(end, form).removesuffix("%") for end in (self.low, self.high))
        return "" if math.isnan(self.low) else "…".join(ends)

    def with_interval(self, form: str = ".2f") -> str:
        """Return the value and, where there is one, its interval."""
        ends = self.interval(form)
        return f"{self.text(form)} ({ends})" if ends else self.text(form)


@dataclass(frozen=True)
class Comparison(Estimate):
    """A difference between two methods (no effect: 0), or a ratio (no effect: 1).

    Attributes:
        p: two-sided, by Holm's correction for all methods that are compared with the same one.
        detectable: minimum detectable effect: the smallest true effect, in either direction from `no_effect`, that such
            a sample finds with 80 % power at 5 % two-sided, by Holm's first and strictest step; 0.03 is a ratio of
            1.03. Estimated from this sample's spread: over 5 seeds the true one may be 2/3 or 3/2 of it.
    """

    p: float = math.nan
    detectable: float = math.nan
    no_effect: float = 0.0

    @property
    def identical(self) -> bool:
        """Whether no prompt of any seed shows an effect."""
        return self.detectable == 0 and self.value == self.no_effect

    @property
    def direction(self) -> str:
        """`larger` or `smaller` where p is below 0.05, else nothing."""
        return "" if not self.p < LEVEL else "larger" if self.value > self.no_effect else "smaller"


class Jackknife(NamedTuple):
    """One measure of one training."""

    values: Floats  # (1+Q,) of all prompts, then without each in turn
    counted: NDArray[np.bool_]  # (Q,) whether a prompt has what it measures


def ratio(above: Floats, below: Floats) -> Floats:
    """Divide, nan where `below` is 0."""
    return np.divide(above, below, out=np.full(np.shape(below), np.nan), where=np.not_equal(below, 0))


# --- the jackknife, and crossed errors ---


class Mean(NamedTuple):
    """A value, its standard error (nan where unknown), and the error's degrees of freedom."""

    value: float
    error: float
    freedom: float


def leave_one_out(prompts: int) -> Floats:
    """Return counts (1+Q, Q): all prompts, then all but one."""
    return np.concatenate([np.ones((1, prompts)), 1 - np.eye(prompts)])


def crossed_error(effects: Floats) -> tuple[Floats, Floats]:
    """Return the standard error of the mean of effects (..., S, Q), and its degrees of freedom; S may be 1."""
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
    """Mean of a measure over trainings, or of its difference from others with the same seeds; `logs`: of logarithms."""
    every = [*trainings, *others]
    values = np.stack([one.values for one in every])  # (S or 2S, 1+Q)
    counted = np.stack([one.counted for one in every])  # (S or 2S, Q)
    if logs:
        values = np.log(values)
    if others:
        values = values[: len(trainings)] - values[len(trainings) :]  # (S, 1+Q)
    value, fewest, prompts = float(values[:, 0].mean()), int(counted.sum(1).min()), int(counted.any(0).sum())
    if fewest < MIN_PROMPTS:
        return Mean(value, math.nan, math.nan)
    pseudo_values = prompts * values[:, :1] - (prompts - 1) * values[:, 1:][:, counted.any(0)]  # (S, Q)
    error, freedom = crossed_error(pseudo_values)
    return Mean(value, float(error), min(float(freedom), math.inf if fewest == prompts else fewest - 1))


# --- from a standard error to intervals and tests ---


def interval(mean: Mean, logs: bool = False) -> Estimate:
    """Return the t-interval, none without any spread; of the exponential where the mean is of logarithms."""
    half = (mean.error or math.nan) * special.stdtrit(mean.freedom, 1 - LEVEL / 2)
    ends = mean.value, mean.value - half, mean.value + half
    return Estimate(*map(math.exp if logs else float, ends))


def compare_means(means: Mapping[str, Mean], logs: bool = False) -> dict[str, Comparison]:
    """Compare several methods with the same one: differences, or ratios, from their logarithms."""
    # Without any spread only equality is certain: few prompts may agree by chance.
    errors = [mean.error or (0.0 if mean.value == 0 else math.nan) for mean in means.values()]
    p = [
        float(2 * special.stdtr(mean.freedom, -abs(mean.value) / error)) if error else 1.0
        for mean, error in zip(means.values(), errors, strict=True)
    ]
    tests = sum(not math.isnan(each) for each in p)
    compared = {}
    for (name, mean), error, corrected in zip(means.items(), errors, holm(p), strict=True):
        least = detectable(error, mean.freedom, tests)
        least = math.expm1(least) if logs else least
        compared[name] = Comparison(**vars(interval(mean, logs)), p=corrected, detectable=least, no_effect=float(logs))
    return compared


def detectable(error: float, freedom: float, tests: int = 1) -> float:
    """The true effect found with 80 % power at 5 % two-sided, the first of `tests`; about 2.8 errors for one test.

    The shift with which t exceeds its upper critical value with probability 0.8; the other tail is neglected.
    """
    critical = special.stdtrit(freedom, 1 - LEVEL / max(tests, 1) / 2)
    return float(error * special.nctdtrinc(freedom, 1 - POWER, critical))


def holm(p: Sequence[float]) -> list[float]:
    """Apply Holm's step-down correction: p times the number of those not smaller, never decreasing; nan stays nan."""
    order = sorted((value, place) for place, value in enumerate(p) if not math.isnan(value))
    corrected, least = [math.nan] * len(p), 0.0
    for passed, (value, place) in enumerate(order):
        least = max(least, min(1.0, value * (len(order) - passed)))
        corrected[place] = least
    return corrected
