"""`make coverage`: how often 95 % intervals contain the truth, in simulated experiments; less than a minute.

What these intervals replaced, and how often that contained the truth, is in experiments/LOG.md.
"""

import math

import numpy as np
import pandas as pd
from scipy import stats

from poss_lightning.reports.measures import SPEED, TAU_MACRO, TAU_MICRO, pos_acc
from poss_lightning.reports.statistics import crossed_error, interval, mean_over
from tests.support.synthetic import draw_reach, true_reach

METHODS = ("eagle", "poss-1")
EASE, OWN = 0.6, 0.2  # deviations between prompts, of both methods and of one alone
EXPERIMENTS = 1000
SPREADS = ((0, 0, 0.3), (0.03, 0.1, 0.3), (0.1, 0.1, 0.3), (0.03, 0.3, 0.3))  # of seeds, prompts, and their interaction


def over_prompts(prompts: int, reached: int | None = None) -> dict[str, float]:
    """How often the intervals of one training contain the truth, by measure; only `reached` prompts have rounds."""
    draw, hits = np.random.default_rng(0), []
    reach = [true_reach(method, math.hypot(EASE, OWN)) for method in METHODS]  # (K+1,)
    taus = [own.sum() for own in reach]
    truth = {
        "τ macro": taus[0],
        "τ micro": taus[0],
        "τ macro, b − a": taus[1] - taus[0],
        "speed, b / a": taus[1] / taus[0],
        "pos-acc 4": reach[0][4] / reach[0][3],
    }
    for _ in range(EXPERIMENTS):
        ease, both = draw.normal(0, EASE, prompts), []
        for method in METHODS:
            rounds = draw_reach(draw, method, ease + draw.normal(0, OWN, prompts))
            seconds = rounds[:, 0] * draw.normal(1, 0.1, prompts)  # a second per round, and 0.1 of each is chance
            rounds[prompts if reached is None else reached :] = 0
            tokens, drafted = rounds.sum(1), rounds[:, 0] > 0
            sums = pd.DataFrame(rounds).assign(accepted=tokens - rounds[:, 0], tokens=tokens, seconds=seconds)
            both.append(sums.assign(mean=np.where(drafted, tokens / rounds[:, 0].clip(1), 0), drafted=drafted * 1.0))
        speed, macro, micro, fourth = (
            [measure.jackknife(sums) for sums in both] for measure in (SPEED, TAU_MACRO, TAU_MICRO, pos_acc(4))
        )
        found = {
            "τ macro": interval(mean_over(macro[:1])),
            "τ micro": interval(mean_over(micro[:1])),
            "τ macro, b − a": interval(mean_over(macro[1:], macro[:1])),
            "speed, b / a": interval(mean_over(speed[1:], speed[:1], logs=True), logs=True),
            "pos-acc 4": interval(mean_over(fourth[:1])),
        }
        hits.append([found[name].low <= true <= found[name].high for name, true in truth.items()])
    return dict(zip(truth, np.mean(hits, 0).tolist(), strict=True))


def over_seeds(spread: tuple[float, ...], prompts: int, seeds: int = 5) -> float:
    """How often the interval of several trainings contains the truth, a difference of 0."""
    draw, hits = np.random.default_rng(0), []
    shapes = ((seeds, 1), (1, prompts), (seeds, prompts))
    for _ in range(EXPERIMENTS):
        effects = sum(draw.normal(0, own, shape) for own, shape in zip(spread, shapes, strict=True))
        error, freedom = crossed_error(effects)
        hits.append(abs(effects.mean()) <= error * stats.t.ppf(0.975, freedom))
    return float(np.mean(hits))


def main() -> None:
    print("one training")
    for prompts in (5, 12, 60):
        for name, share in over_prompts(prompts).items():
            print(f"{prompts:5} prompts  {name:18} {share:.3f}")
    print("\nsome of 60 prompts have rounds")
    for reached in (3, 5, 20):
        print(f"{reached:5} of 60    {'τ micro':18} {over_prompts(60, reached)['τ micro']:.3f}")
    print("\n5 trainings, by deviations of seeds, prompts and both")
    for prompts in (5, 12, 60):
        for spread in SPREADS:
            print(f"{prompts:5} prompts  {spread!s:18} {over_seeds(spread, prompts):.3f}")


if __name__ == "__main__":
    main()
