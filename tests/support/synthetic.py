"""Made-up rows of benchmarks, and rounds drawn with known acceptance, for the tests of statistics and report."""

from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from scipy.special import expit

from poss_lightning.evaluation.rounds import BASELINES, read_rounds, write_rounds
from poss_lightning.reports.comparable import label_trainings
from poss_lightning.reports.results import ALL, measure

SHARES = {"eagle": (0.6, 0.4, 0.2), "poss-1": (0.6, 0.6, 0.6)}  # pos-acc by position


def make_rows(
    methods: tuple[str, ...] = ("plain", "generate", "eagle", "poss-1"),
    suites: tuple[str, ...] = ("chat", "code"),
    prompts: int = 5,
    rounds: int = 20,
    seed: int = 0,
) -> list[dict]:
    """Every method on `prompts` prompts a suite, two turns, two repeats; prompts differ in how hard they are."""
    draw, rows = np.random.default_rng(seed), []
    for suite, prompt in product(suites, range(prompts)):
        hardness = draw.normal(0, 0.05)
        for turn, repeat, method in product(range(2), range(2), methods):
            drafted = 0 if method in BASELINES else rounds
            held = [[draw.random() < share + hardness for share in SHARES[method]] for _ in range(drafted)]
            accepted = [[*positions, False].index(False) for positions in held]
            length = 1 + (sum(accepted) + drafted or rounds)
            total = 0.05 * (drafted or length) * draw.uniform(0.9, 1.1)
            row = {
                "suite": suite,
                "id": str(prompt),
                "turn": turn,
                "method": method,
                "repeat": repeat,
                "prompt_tokens": 10,
                "new_tokens": length,
                "accepted": accepted,
                "seconds": {"verify": 0.8 * total, "total": total},
                "tokens": list(range(length)),
                "pieces": [f"w{place} " for place in range(length)],
                "question": f"What is {suite} {prompt}, asked the {turn + 1}. time?",
            }
            rows.append(row)
    return rows


def frame(rows: list[dict], choice: str | None = None, seed: int | None = None) -> pd.DataFrame:
    """The rounds of a run, or of a sweep's cell."""
    with TemporaryDirectory() as folder:
        place = Path(folder, f"choice={choice}", f"seed={seed}") if choice else Path(folder)
        write_rounds(place, rows)
        return read_rounds(folder)


class Found(NamedTuple):
    """Results over all suites, by method and by measure; pos-acc as `pos_acc_1`, `pos_acc_2` and so on."""

    values: dict[str, dict[str, Any]]
    gains: dict[str, dict[str, Any]]


def by_method(results: pd.DataFrame) -> Found:
    names = results["method"].unique()
    found = Found({name: {} for name in names}, {name: {} for name in names})
    for row in results[results["suite"] == ALL].itertuples():
        measured = (found.gains if row.against else found.values)[row.method]
        measured[row.measure + f"_{row.position}" * bool(row.position)] = row
    return found


def rows_of(rows, **options) -> Found:
    return by_method(measure(label_trainings(frame(rows)), **({"baseline": "plain"} | options)))


def make_cells(seeds=(0, 1, 2)):
    return {
        (choice, seed): make_rows(("plain", choice), seed=10 * seed + place, prompts=4)
        for place, choice in enumerate(SHARES)
        for seed in seeds
    }


def over_seeds(cells) -> Found:
    rounds = pd.concat([frame(rows, *cell) for cell, rows in cells.items()])
    return by_method(measure(label_trainings(rounds), baseline="plain", reference="eagle"))


# --- rounds alone, many experiments at once ---

LOGITS = {"eagle": np.array([2.2, 1.4, 1.1, 1.0]), "poss-1": np.array([2.2, 1.5, 1.3, 1.2])}  # pos-acc by position


def draw_reach(draw: np.random.Generator, method: str, ease: np.ndarray, rounds: int = 40) -> np.ndarray:
    """Rounds that accept at least k tokens: (..., K+1) from what is added to the logits (...)."""
    reach = [np.full(ease.shape, rounds)]
    for logit in LOGITS[method]:
        reach.append(draw.binomial(reach[-1], expit(logit + ease)))
    return np.stack(reach, -1).astype(float)


def true_reach(method: str, deviation: float) -> np.ndarray:
    """Share of its rounds over all prompts that accept at least k tokens, (K+1,), where the ease is normal around 0."""
    points, weights = np.polynomial.hermite_e.hermegauss(60)
    shares = expit(LOGITS[method][:, None] + deviation * points)  # (K, points)
    return np.append(1, np.cumprod(shares, 0) @ weights / weights.sum())
