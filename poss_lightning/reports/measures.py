"""The measures of METHOD.md section 7, of one training: one list, over which summary, tables, plots and page iterate.

A measure is a function of sums over prompts. Applied to the sums without one prompt it gives the jackknife, and to one
prompt alone it says whether that prompt has what it measures (nan where not).
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, Literal, NamedTuple

import numpy as np
import pandas as pd

from poss_lightning.reports.statistics import Estimate, Floats, Jackknife, interval, leave_one_out, mean_over, ratio


class Sums(NamedTuple):
    """The rounds of one method in one training, summed: a row per prompt, or per set of prompts."""

    reach: Floats  # (Q, K+1) rounds that accepted at least k tokens; column 0 counts them all
    means: Floats  # (Q,) tokens per round of each prompt, 0 where it has no round
    drafted: Floats  # (Q,) prompts with a round
    prompts: Floats  # (Q,) their number
    tokens: Floats  # (Q,) new tokens
    seconds: Floats  # (Q,) in all; nan where none were measured
    plain_tokens: Floats  # (Q,) of the baseline; nan without one
    plain_seconds: Floats  # (Q,) of the baseline; nan without one
    identical: Floats  # (Q,) prompts whose answers all have the baseline's tokens; nan without one

    @classmethod
    def by_prompt(cls, reach: Floats, tokens: Floats, seconds: Floats, beside: list[Floats] | None = None) -> "Sums":
        """Return sums whose rows are prompts; `beside` are tokens, seconds and equality of the baseline."""
        every = np.ones(len(reach))
        means = np.nan_to_num(ratio(reach.sum(1), reach[:, 0]))
        return cls(reach, means, np.sign(reach[:, 0]), every, tokens, seconds, *(beside or [every * np.nan] * 3))

    def of(self, prompts: list[int]) -> "Sums":
        """Return the rows of some prompts."""
        return Sums(*(column[prompts] for column in self))


class Measure(NamedTuple):
    """A measure.

    Methods are compared by difference where `scale` is "tokens" or "share" (shares in per cent, within 0 and 1), and by
    ratio, with means of logarithms, where it is "ratio".
    """

    name: str  # in `MethodSummary`
    title: str  # in tables; `{baseline}` stands for the baseline's name
    scale: Literal["tokens", "ratio", "share"]
    from_sums: Callable[[Sums], Floats]  # its value for each row of sums, (Q,); nan where it is not defined
    form: str = ".2f"  # of its values in tables; a share's ends in %
    k: int = 0  # of a pos-acc, its position; 0 of any other

    @property
    def logs(self) -> bool:
        """Whether means are of logarithms."""
        return self.scale == "ratio"

    @property
    def gain_form(self) -> str:
        """The form of a comparison."""
        return {"tokens": "+z.3f", "ratio": ".3f", "share": "+z.1%"}[self.scale]

    @property
    def compared_title(self) -> str:
        """The title of a comparison: × for a ratio, − for a difference."""
        return f"{self.title.removesuffix(' over {baseline}')} {'×' if self.logs else '−'}"

    def jackknife(self, sums: Sums) -> Jackknife:
        """Return the measure of all prompts and without each in turn."""
        counts = leave_one_out(len(sums.prompts))  # (1+Q, Q)
        values = self.from_sums(Sums(*(counts @ column for column in sums)))
        return Jackknife(values, np.isfinite(self.from_sums(sums)))

    def estimate(self, trainings: Sequence[Jackknife]) -> Estimate:
        """Return its mean over trainings, with the interval."""
        found = interval(mean_over(trainings, logs=self.logs), self.logs)
        if self.scale != "share":
            return found
        return Estimate(found.value, *np.clip([found.low, found.high], 0.0, 1.0).tolist())


SPEED_UP = Measure(
    "speed_up",
    "speed-up over {baseline}",
    "ratio",
    lambda sums: ratio(sums.tokens, sums.seconds) / ratio(sums.plain_tokens, sums.plain_seconds),
)
SPEED = Measure("tokens_per_second", "tokens/s", "ratio", lambda sums: ratio(sums.tokens, sums.seconds), ".1f")
TAU_MACRO = Measure("tau_macro", "τ macro", "tokens", lambda sums: ratio(sums.means, sums.drafted))
# A round that accepts a tokens counts in columns 0 to a.
TAU_MICRO = Measure("tau_micro", "τ micro", "tokens", lambda sums: ratio(sums.reach.sum(1), sums.reach[:, 0]))
IDENTICAL = Measure(
    "identical", "same tokens as {baseline}, %", "share", lambda sums: ratio(sums.identical, sums.prompts), ".0%"
)
MEASURES = [SPEED_UP, SPEED, TAU_MACRO, TAU_MICRO, IDENTICAL]  # in the order of the table of methods


@cache
def position(k: int) -> Measure:
    """pos-acc of position k: the share of rounds that accept it, of those that accept k-1."""
    return Measure(
        f"pos_acc_{k}", f"{k}", "share", lambda sums: ratio(sums.reach[:, k], sums.reach[:, k - 1]), ".1%", k
    )


def sum_by_prompt(answers: pd.DataFrame, depth: int, plain: pd.DataFrame | None = None) -> Sums:
    """Sum the answers of a method by prompt, beside those of a baseline, both indexed alike; `depth` is K."""
    accepted = [np.concatenate([*each]) for _, each in _by_prompt(answers["accepted"])]
    reach = np.array([(counts[:, None] >= np.arange(depth + 1)).sum(0) for counts in accepted], dtype=float)
    if plain is None:
        return Sums.by_prompt(reach, *_totals(answers))
    same = _by_prompt(answers["answer"] == plain["answer"]).all().to_numpy(float)
    return Sums.by_prompt(reach, *_totals(answers), [*_totals(plain), same])


def _totals(answers: pd.DataFrame) -> tuple[Floats, Floats]:
    """Return new tokens and seconds by prompt."""
    tokens, seconds = (_by_prompt(answers[name]).sum(min_count=1) for name in ("new_tokens", "seconds"))
    return tokens.to_numpy(float), seconds.to_numpy(float)


def _by_prompt(column: pd.Series) -> Any:
    return column.groupby(level=["suite", "id"], sort=False)
