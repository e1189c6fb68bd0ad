"""The measures of METHOD.md section 7, of one training: one list, over which results, tables, plots and page iterate.

A measure is a function of sums over prompts. Applied to the sums without one prompt it gives the jackknife, and to one
prompt alone it says whether that prompt has what it measures (nan where not).
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any, Literal, NamedTuple

import numpy as np
import pandas as pd

from poss_lightning.reports.statistics import Estimate, Floats, Jackknife, interval, leave_one_out, mean_over, ratio

TRAINING, PROMPT = ["method", "seed"], ["suite", "id"]
# The columns of `sum_by_prompt`, each a value for every prompt, or for every set of prompts: (Q,).
Sums = Mapping[Any, Floats]


class Measure(NamedTuple):
    """A measure.

    Methods are compared by difference where `scale` is "tokens" or "share" (shares in per cent, within 0 and 1), and by
    ratio, with means of logarithms, where it is "ratio".
    """

    name: str  # in results
    title: str  # in tables; `{baseline}` stands for the baseline's name
    scale: Literal["tokens", "ratio", "share"]
    from_sums: Callable[[Sums], Floats]  # its value for each prompt or set of prompts, (Q,); nan where not defined
    form: str = ".2f"  # of its values in tables; a share's ends in %
    position: int = 0  # of a pos-acc; 0 of any other

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

    def jackknife(self, sums: pd.DataFrame) -> Jackknife:
        """Return the measure of all prompts and without each in turn."""
        by_prompt = sums.to_numpy().T  # (columns, Q)
        but_one = by_prompt @ leave_one_out(len(sums)).T  # (columns, 1+Q)
        values, alone = (self.from_sums(dict(zip(sums, part, strict=True))) for part in (but_one, by_prompt))
        return Jackknife(values, np.isfinite(alone))

    def estimate(self, trainings: Sequence[Jackknife]) -> Estimate:
        """Return its mean over trainings, with the interval."""
        estimate = interval(mean_over(trainings, logs=self.logs), self.logs)
        if self.scale != "share":
            return estimate
        return Estimate(estimate.value, *np.clip([estimate.low, estimate.high], 0.0, 1.0).tolist())


def _speed(sums: Sums) -> Floats:
    return ratio(sums["tokens"], sums["seconds"])


SPEED_UP = Measure(
    "speed_up",
    "speed-up over {baseline}",
    "ratio",
    lambda sums: _speed(sums) / ratio(sums["plain_tokens"], sums["plain_seconds"]),
)
SPEED = Measure("tokens_per_second", "tokens/s", "ratio", _speed, ".1f")
TAU_MACRO = Measure("tau_macro", "τ macro", "tokens", lambda sums: ratio(sums["mean"], sums["drafted"]))
TAU_MICRO = Measure("tau_micro", "τ micro", "tokens", lambda sums: ratio(sums[0] + sums["accepted"], sums[0]))
IDENTICAL = Measure(
    "identical", "same tokens as {baseline}, %", "share", lambda sums: ratio(sums["same"], sums["prompts"]), ".0%"
)
MEASURES = [SPEED_UP, SPEED, TAU_MACRO, TAU_MICRO, IDENTICAL]  # in the order of the table of methods
PROMPTS = Measure("prompts", "prompts", "tokens", lambda sums: sums["prompts"], ".0f")
ROUNDS = Measure("rounds", "rounds", "tokens", lambda sums: sums[0], ".0f")
TRAININGS = Measure("trainings", "trainings", "tokens", lambda sums: np.sign(sums["prompts"]), ".0f")
SPREAD = TAU_MACRO._replace(name="sd", title="sd of a training, τ macro", form=".3f")
TIMED = ["prefill", "draft", "verify", "commit", "round"]  # a CUDA graph is timed as one part, `round`


def _milliseconds(part: str, sums: Sums) -> Floats:
    seconds = sums[part] if part in TIMED else sums["seconds"] - sum(sums[each] for each in TIMED)
    return ratio(1000 * seconds, np.where(seconds > 0, sums["tokens"], 0))  # nan where nothing was timed


# Per new token; `rest` is the time outside the named parts.
MILLISECONDS = [Measure(f"ms_{part}", part, "ratio", partial(_milliseconds, part), ".1f") for part in (*TIMED, "rest")]


@cache
def pos_acc(k: int) -> Measure:
    """pos-acc of position k: the share of rounds that accept it, of those that accept k-1."""
    return Measure("pos_acc", f"{k}", "share", lambda sums: ratio(sums[k], sums[k - 1]), ".1%", k)


def sum_by_prompt(answers: pd.DataFrame, depth: int) -> pd.DataFrame:
    """Sum answers by training and prompt: a row for each method, seed, suite and id.

    Args:
        answers: a row for each answer, with `plain_tokens`, `plain_seconds` and `plain_answer` of the baseline, nan
            without one.
        depth: K, at least the most tokens that a round accepted.

    Returns:
        columns 0 to K: rounds that accepted at least k tokens, 0 counts them all; `accepted`, `tokens`, `seconds` (nan
        where none were timed) and those of `TIMED` parts, `plain_tokens`, `plain_seconds`; `mean`, tokens per round of
        the prompt, 0 without a round; `drafted`, 1 where it has a round; `prompts`, 1; `same`, 1 where all answers are
        the baseline's.
    """
    reach = [(accepted[:, None] >= np.arange(depth + 1)).sum(0) for accepted in answers["accepted"]]
    parts = answers[[*TRAINING, *PROMPT, "seconds", "plain_tokens", "plain_seconds"]].assign(
        tokens=answers["new_tokens"],
        accepted=[accepted.sum() for accepted in answers["accepted"]],
        others=(answers["answer"] != answers["plain_answer"]).where(answers["plain_answer"].notna()),
    )
    parts[[*range(depth + 1)]] = np.array(reach, dtype=float).reshape(len(parts), depth + 1)
    parts[TIMED] = answers[TIMED].fillna(0)
    sums = parts.groupby([*TRAINING, *PROMPT]).sum(min_count=1).astype(float)
    sums["mean"] = np.nan_to_num(ratio((sums[0] + sums["accepted"]).to_numpy(), sums[0].to_numpy()))
    sums["same"] = (sums.pop("others") == 0).where(sums["plain_tokens"].notna()).astype(float)
    return sums.assign(drafted=np.sign(sums[0]), prompts=1.0)
