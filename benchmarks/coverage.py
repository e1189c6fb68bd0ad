"""`make coverage`: how often 95 % intervals hold the truth, by ways to make them. On drawn experiments, a minute.

Ways over prompts: the middle 95 % of bootstrap draws, t with the bootstrap's spread, and the jackknife with t, which
`reports/statistics.py` uses. Ways over seeds and prompts: crossed errors, which it uses, and three others.
"""

import math
from collections.abc import Callable

import numpy as np
from scipy import stats
from scipy.special import expit

from poss_lightning.reports.statistics import (
    Floats,
    Sums,
    crossed_error,
    leave_one_out,
    pos_acc,
    pseudo_values,
    tau_macro,
    tau_micro,
    tokens_per_second,
)

LOGITS = np.array([[2.2, 1.4, 1.1, 1.0], [2.2, 1.5, 1.3, 1.2]])  # pos-acc of two methods, by position
EASE, OWN = 0.6, 0.2  # deviations between prompts, of both methods and of one alone
ROUNDS, DRAWS, EXPERIMENTS = 40, 400, 1000
SPREADS = ((0, 0, 0.3), (0.03, 0.1, 0.3), (0.1, 0.1, 0.3), (0.03, 0.3, 0.3))  # of seeds, prompts, and their interaction
Bounds = tuple[float, float]


def over_prompts(prompts: int, reached: int | None = None) -> dict[str, list[float]]:
    """How often percentiles, t with the bootstrap's spread, and the jackknife hold the true value, by measure.

    Args:
        prompts: that are asked.
        reached: of them, those that have rounds; all by default.
    """
    draw, counts = np.random.default_rng(0), leave_one_out(prompts)
    bags = draw.multinomial(prompts, np.full(prompts, 1 / prompts), DRAWS)
    both = np.concatenate([counts, bags])  # (1 + Q + R, Q)
    rows = np.r_[: 1 + prompts] if reached is None else np.r_[: 1 + reached]
    hits: dict[str, list[list[bool]]] = {}
    for _ in range(EXPERIMENTS):
        ease = draw.normal(0, EASE, prompts)
        a, b = (_sums(draw, logits, ease + draw.normal(0, OWN, prompts)) for logits in LOGITS)
        if reached is not None:
            a.reach[reached:] = b.reach[reached:] = 0
        for name, (measure, true) in MEASURES.items():
            found = measure(both, a, b)
            ways = _bootstrap(found[0], found[1 + prompts :], prompts), _jackknife(found[rows])
            hits.setdefault(name, []).append([low <= true <= high for low, high in (*ways[0], ways[1])])
    return {name: np.mean(held, 0).tolist() for name, held in hits.items()}


def _bootstrap(value: float, drawn: Floats, prompts: int) -> tuple[Bounds, Bounds]:
    """The middle 95 % of the draws; value ± t · their spread · sqrt(Q / (Q-1))."""
    drawn = drawn[np.isfinite(drawn)]
    half = stats.t.ppf(0.975, prompts - 1) * drawn.std(ddof=1) * math.sqrt(prompts / (prompts - 1))
    low, high = np.quantile(drawn, (0.025, 0.975))
    return (low, high), (value - half, value + half)


def _jackknife(values: Floats) -> Bounds:
    """Value ± t · the spread of pseudo-values."""
    said = pseudo_values(values)
    half = stats.t.ppf(0.975, len(said) - 1) * said.std(ddof=1) / math.sqrt(len(said))
    return values[0] - half, values[0] + half


def _sums(draw: np.random.Generator, logits: Floats, ease: Floats) -> Sums:
    """Rounds of prompts of this ease; a round takes 1 second, and 0.1 of each is chance."""
    reach = [np.full(len(ease), ROUNDS)]
    for logit in logits:
        reach.append(draw.binomial(reach[-1], expit(logit + ease)))
    reach = np.stack(reach, -1).astype(float)
    return Sums(reach, reach.sum(1), ROUNDS * draw.normal(1, 0.1, len(ease)))


def _true() -> tuple[Floats, Floats]:
    """Reach (2, K) of both methods over all prompts, and their τ (2,)."""
    points, weights = np.polynomial.hermite_e.hermegauss(60)
    shares = expit(LOGITS[..., None] + math.hypot(EASE, OWN) * points)  # (2, K, points)
    reach = np.cumprod(shares, 1) @ weights / weights.sum()
    return reach, 1 + reach.sum(1)


REACH, TAU = _true()
MEASURES: dict[str, tuple[Callable[[Floats, Sums, Sums], Floats], float]] = {
    "τ macro": (lambda counts, a, _: tau_macro(counts, a), TAU[0]),
    "τ micro": (lambda counts, a, _: tau_micro(counts, a), TAU[0]),
    "τ macro, b − a": (lambda counts, a, b: tau_macro(counts, b) - tau_macro(counts, a), TAU[1] - TAU[0]),
    "log speed, b / a": (
        lambda counts, a, b: np.log(tokens_per_second(counts, b) / tokens_per_second(counts, a)),
        math.log(TAU[1] / TAU[0]),
    ),
    "pos-acc 4": (lambda counts, a, _: pos_acc(counts, a)[:, 3], REACH[0, 3] / REACH[0, 2]),
}


def over_seeds(spread: tuple[float, ...], prompts: int, seeds: int = 5) -> list[float]:
    """How often four ways hold the true difference: crossed, pigeonhole bootstrap, t over seeds, prompts alone."""
    draw, hits = np.random.default_rng(0), []
    for _ in range(EXPERIMENTS):
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
    print("one training, over prompts: percentiles, t with the bootstrap's spread, jackknife")
    for prompts in (5, 12, 60):
        for name, shares in over_prompts(prompts).items():
            print(f"{prompts:5} prompts  {name:18} " + "  ".join(f"{share:.3f}" for share in shares))
    print("\nof 60 prompts some have rounds: the same, the jackknife with those alone")
    for reached in (3, 5, 20):
        shares = over_prompts(60, reached)["τ micro"]
        print(f"{reached:5} of 60    {'τ micro':18} " + "  ".join(f"{share:.3f}" for share in shares))
    print(
        "\n5 trainings, by deviations of seeds, prompts, both: crossed, bootstrap of both, t over seeds, prompts alone"
    )
    for prompts in (5, 12, 60):
        for spread in SPREADS:
            shares = over_seeds(spread, prompts)
            print(f"{prompts:5} prompts  {spread!s:18} " + "  ".join(f"{share:.3f}" for share in shares))


if __name__ == "__main__":
    main()
