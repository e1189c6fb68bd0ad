"""A made-up sweep for the report: records and event files of two choices, in folders choice=NAME/seed=N."""

import json
from collections.abc import Sequence
from pathlib import Path

from torch.utils.tensorboard import SummaryWriter

from poss_lightning.evaluation.rounds import AnswerRow, write_rounds
from tests.support.synthetic import make_rows

CHOICES = ("eagle", "poss-1")
SEEDS = 3
DEPTH = 3  # of synthetic records
STEPS = range(10, 160, 10)  # more than a chart marks, so that it draws a band


def write_lab(folder: Path) -> None:
    """A sweep's folder; what was there is overwritten."""
    for choice in CHOICES:
        for seed in range(SEEDS):
            cell = folder / f"choice={choice}" / f"seed={seed}"
            own = make_rows(methods=("plain", "generate", choice), seed=seed)
            write_run(cell, own, {"methods": {choice: {"depth": DEPTH}}, "config": {"seed": seed}})
            write_events(cell, seed, gain=0.1 * CHOICES.index(choice))


def write_run(folder: Path, rows: Sequence[AnswerRow], facts: dict) -> None:
    """`rounds.parquet`, `answers.parquet` and `run.json`."""
    write_rounds(folder, rows)
    (folder / "run.json").write_text(json.dumps(facts))


def write_events(folder: Path, seed: int, gain: float) -> None:
    """What a training logs at its validations, as far as the report reads it."""
    with SummaryWriter(str(folder)) as writer:
        for step in STEPS:
            done = step / STEPS[-1]
            writer.add_scalar("val/loss", 3 - done - gain - 0.05 * seed, step)
            for depth in range(1, DEPTH + 1):
                good = 0.9 * done + gain - 0.1 * depth + 0.02 * seed
                for tag in ("val_pos_acc_unroll", "val_pos_acc_tree", "val_drift_cosine"):
                    writer.add_scalar(f"{tag}/depth_{depth}", good, step)
                for tag in ("val_loss", "val_drift_l2", "val_drift_norm_ratio"):
                    writer.add_scalar(f"{tag}/depth_{depth}", 1.2 - good, step)
