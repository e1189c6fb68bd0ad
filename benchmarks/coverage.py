"""`make coverage`: how often 95 % intervals hold the truth, by ways to make them. On drawn experiments, half a minute.

The tables of `reports/statistics.py` (prompts) and `reports/seeds.py` (both), whose own intervals the tests hold to
their word.
"""

import math

import numpy as np
from scipy import stats
from scipy.special import expit

from poss_lightning.reports.seeds import crossed_error
from poss_lightning.reports.statistics import Floats, Sums, draw_counts, estimate, tau_macro, tau_micro

LOGITS = np.array([[2.2, 1.4, 1.1, 1.0], [2.2, 1.5, 1.3, 1.2]])  # pos-acc of two methods, by position
EASE, OWN = 0.6, 0.2  # deviations between prompts, of both methods and of one alone
ROUNDS = 40
SPREADS = ((0, 0, 0.3), (0.03, 0.1, 0.3), (0.1, 0.1, 0.3), (0.03, 0.3, 0.3))  # of seeds, prompts, and their interaction


def over_prompts(prompts: int, experiments: int = 1000) -> tuple[list[float], list[float]]:
    """How often the percentiles of the draws, then our interval, hold macro τ and the difference of two."""
    draw, counts, hits = np.random.default_rng(0), draw_counts(prompts, 300, 0), []
    points, weights = np.polynomial.hermite_e.hermegauss(60)
    shares = expit(LOGITS[..., None] + math.hypot(EASE, OWN) * points)  # (2, K, points)
    true = 1 + (np.cumprod(shares, 1).sum(1) @ weights) / weights.sum()
    for _ in range(experiments):
        ease = draw.normal(0, EASE, prompts)
        a, b = (tau_macro(counts, _sums(draw, logits, ease + draw.normal(0, OWN, prompts))) for logits in LOGITS)
        for values, truth in ((a, true[0]), (b - a, true[1] - true[0])):
            low, high = np.quantile(values[1:], (0.025, 0.975))
            ours = estimate(values, prompts)
            hits.append((low <= truth <= high, ours.low <= truth <= ours.high))
    shares = np.array(hits, dtype=float).reshape(experiments, 2, 2).mean(0)  # (τ or difference, way)
    return shares[:, 0].tolist(), shares[:, 1].tolist()


def over_few(reached: int, prompts: int = 60, experiments: int = 1000) -> tuple[float, float]:
    """How often intervals hold τ where only some prompts have rounds: with all as Q, then with those that have some."""
    draw, counts, hits = np.random.default_rng(0), draw_counts(prompts, 300, 0), []
    points, weights = np.polynomial.hermite_e.hermegauss(60)
    true = 1 + (np.cumprod(expit(LOGITS[0][:, None] + EASE * points), 0).sum(0) @ weights) / weights.sum()
    for _ in range(experiments):
        found = _sums(draw, LOGITS[0], draw.normal(0, EASE, prompts))
        found.reach[reached:] = 0
        values = tau_micro(counts, found)
        intervals = [estimate(values, among) for among in (prompts, reached)]
        hits.append([one.low <= true <= one.high for one in intervals])
    every, those = np.mean(hits, 0).tolist()
    return every, those


def _sums(draw: np.random.Generator, logits: Floats, ease: Floats) -> Sums:
    reach = [np.full(len(ease), ROUNDS)]
    for logit in logits:
        reach.append(draw.binomial(reach[-1], expit(logit + ease)))
    return Sums(np.stack(reach, -1).astype(float), np.ones(len(ease)), np.ones(len(ease)))


def over_seeds(spread: tuple[float, ...], seeds: int = 5, prompts: int = 120, experiments: int = 2000) -> list[float]:
    """How often four ways hold the true difference: crossed, pigeonhole bootstrap, t over seeds, prompts alone."""
    draw, hits = np.random.default_rng(0), []
    for _ in range(experiments):
        shapes = ((seeds, 1), (1, prompts), (seeds, prompts))
        parts = [draw.normal(0, own, shape) for own, shape in zip(spread, shapes, strict=True)]
        effects = parts[0] + parts[1] + parts[2]  # the truth is 0
        mean = effects.mean()
        error, freedom = crossed_error(effects)
        by_seed = draw.multinomial(seeds, np.full(seeds, 1 / seeds), 300)  # (R, S)
        by_prompt = draw.multinomial(prompts, np.full(prompts, 1 / prompts), 300)  # (R, Q)
        drawn = np.einsum("rs,sq,rq->r", by_seed, effects, by_prompt) / (seeds * prompts)
        low, high = np.quantile(drawn, (0.025, 0.975))
        over_seeds = effects.mean(1).std(ddof=1) / math.sqrt(seeds)
        over_prompts = effects.mean(0).std(ddof=1) / math.sqrt(prompts)
        ways = [(error, freedom), (over_seeds, seeds - 1), (over_prompts, prompts - 1)]
        held = [abs(mean) <= own * stats.t.ppf(0.975, free) for own, free in ways]
        hits.append([held[0], low <= 0 <= high, *held[1:]])
    return np.mean(hits, 0).tolist()


def main() -> None:
    print("over prompts: τ (difference of two)")
    for prompts in (3, 5, 12, 40, 120):
        percentiles, ours = over_prompts(prompts)
        print(f"{prompts:5} prompts   percentiles {_pair(percentiles)}   ours {_pair(ours)}")
    print("\nof 60 prompts some have rounds: τ with all 60 as Q, with those that have some")
    for reached in (2, 3, 5, 20):
        every, those = over_few(reached)
        print(f"{reached:5} of 60        {every:.2f}   ours {those:.2f}")
    print("\nover 5 seeds and 120 prompts: crossed, bootstrap of both, t over seeds, prompts alone")
    for spread in SPREADS:
        print(f"{spread!s:20} " + "  ".join(f"{share:.3f}" for share in over_seeds(spread)))


def _pair(shares: list[float]) -> str:
    return f"{shares[0]:.2f} ({shares[1]:.2f})"


if __name__ == "__main__":
    main()
