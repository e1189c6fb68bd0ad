"""Acceptance counted by prompt and position: pos-acc and τ with intervals, and paired comparisons.

Letters: Q prompts, K positions.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from poss_lightning.evaluation.serving_metrics import Served
from poss_lightning.reports.statistics import (
    Comparison,
    Estimate,
    Floats,
    Jackknife,
    Mean,
    compare_means,
    interval,
    leave_one_out,
    mean_over,
    ratio,
)


class Counts(NamedTuple):
    """Rounds, or chains, of each prompt that reached, and that passed, each position: (Q, K) each; 0 where none was."""

    reached: Floats
    passed: Floats

    @classmethod
    def of_engine(cls, served: Served) -> "Counts":
        """Count an engine's rounds, by answer, or of all answers in one row; of a mean alone there are none."""
        depth = max((len(own) for own in served.passed), default=1)
        rounds = np.array([[*own, *[0] * (depth - len(own))] for own in served.passed], float).reshape(-1, depth)
        return cls(rounds[:, :-1], rounds[:, 1:])

    def of(self, prompts: NDArray[np.bool_]) -> "Counts":
        """Return the counts of some of the prompts, (Q,)."""
        return Counts(self.reached[prompts], self.passed[prompts])

    def rates(self) -> Floats:
        """Return pos-acc of all prompts, then without each in turn: (1+Q, K)."""
        every = leave_one_out(len(self.reached))
        return ratio(every @ self.passed, every @ self.reached)

    def jackknife(self) -> Jackknife:
        """Return τ, tokens per round."""
        return Jackknife(1 + np.nan_to_num(self.rates()).cumprod(1).sum(1), self.reached[:, 0] > 0)

    def tau(self) -> Estimate:
        """Return τ with its interval over prompts."""
        return interval(mean_over([self.jackknife()]))

    def mean_rates(self) -> list[Mean]:
        """Return pos-acc by position with its standard error: over prompts, or over rounds where prompts are few."""
        means = list[Mean]()
        for rates, reached in zip(self.rates().T, self.reached.T, strict=True):
            mean, rounds, rate = mean_over([Jackknife(rates, reached > 0)]), max(reached.sum(), 1), rates[0]
            by_round = Mean(rate, float(np.sqrt(rate * (1 - rate) / rounds)), rounds - 1)
            means.append(by_round if np.isnan(mean.error) else mean)
        return means


def compare(counts: Counts, base: Counts) -> Comparison:
    """Compare τ with `base`, over the prompts and positions that both have."""
    depth = min(counts.reached.shape[1], base.reached.shape[1])
    both = counts.reached[:, 0] * base.reached[:, 0] > 0
    own, its = (Counts(each.reached[both, :depth], each.passed[both, :depth]).jackknife() for each in (counts, base))
    return compare_means({"": mean_over([own], [its])})[""]


def positions_below(counts: Counts, base: Counts) -> list[int]:
    """Return the positions, from 1, at which pos-acc is significantly lower than in `base`, of other prompts."""
    gaps = {
        str(k): Mean(one.value - other.value, float(np.hypot(one.error, other.error)), min(one.freedom, other.freedom))
        for k, (one, other) in enumerate(zip(counts.mean_rates(), base.mean_rates(), strict=False), 1)
    }
    return [int(k) for k, gap in compare_means(gaps).items() if gap.direction == "smaller"]
