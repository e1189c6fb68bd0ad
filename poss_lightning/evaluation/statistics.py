"""The measures of METHOD.md section 7 over sums by prompt, each with a 95 % interval from a paired bootstrap.

The bootstrap draws prompts, not rounds or turns: a prompt brings all its turns and repeats along. Every method gets the
same drawn prompts, and a ratio or difference between methods is taken inside each draw, so what makes a prompt easy for
all of them cancels. A draw is a row of counts, how often each prompt was drawn; row 0 is the sample itself, one of
each. So each measure is written once, as counts times sums by prompt, and gives its value and its draws together.

Letters: R draws, Q prompts, K draft positions. 0/0 is nan, shown as a dash. A percentile interval of a share that is
0 or 1 in every prompt has no width, however few the prompts: it says what was seen, not what is certain.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


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

    def percent(self) -> "Estimate":
        """The same share in per cent."""
        return Estimate(100 * self.value, 100 * self.low, 100 * self.high)


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
    return np.divide(above, below, out=np.full(np.shape(below), np.nan), where=below != 0)


# --- the bootstrap ---


def draw_counts(prompts: int, resamples: int, seed: int) -> Floats:
    """How often each draw has each prompt: (1+R, Q), row 0 all ones. One prompt shows no spread: R is 0 then."""
    sample = np.ones((1, prompts))
    if prompts < 2:
        return sample
    drawn = np.random.default_rng(seed).multinomial(prompts, np.full(prompts, 1 / prompts), size=resamples)
    return np.concatenate([sample, drawn])


def estimate(values: Floats) -> Estimate:
    """The value of row 0, and the middle 95 % of the draws that have one."""
    drawn = values[1:][np.isfinite(values[1:])]
    if not np.isfinite(values[0]) or not drawn.size:
        return Estimate(float(values[0]), math.nan, math.nan)
    low, high = np.percentile(drawn, [2.5, 97.5])
    return Estimate(float(values[0]), float(low), float(high))
