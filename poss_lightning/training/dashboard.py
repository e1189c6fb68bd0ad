"""TensorBoard's custom charts, and histograms of feature drift, besides the scalars that every logger gets."""

import lightning
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from torch.utils.tensorboard import SummaryWriter

from poss_lightning.metrics import BINS
from poss_lightning.training.module import DraftModule

CHARTS = {  # category, chart and tag; a tag that ends in / has a chart for the first depth, the last, and the mean
    "τ: tokens per round": {
        "in trees (replayed)": "val/tau_tree",
        "in chains (replayed)": "val/tau_chain",
    },
    "Loss": {
        "validation, all depths": "val/loss",
        "training, all depths": "train/loss",
        "validation": "val_loss/",
    },
    "Acceptance by position": {
        "in trees (replayed)": "val_pos_acc_tree/",
        "unrolled (teacher-forced)": "val_pos_acc_unroll/",
    },
    "Feature drift by depth": {
        "cosine (1 is none)": "val_drift_cosine/",
        "relative L2 (0 is none)": "val_drift_l2/",
        "norm ratio (1 is none)": "val_drift_norm_ratio/",
    },
}


class Dashboard(lightning.Callback):
    """Lays out TensorBoard's charts, and writes a histogram of drift for each depth after each validation.

    With a different logger, or none, it does nothing.
    """

    def on_train_start(self, trainer: lightning.Trainer, pl_module: DraftModule) -> None:
        if (writer := writer_of(trainer)) is not None:
            writer.add_custom_scalars(lay_out_charts(pl_module.eval_depth))

    def on_validation_epoch_end(self, trainer: lightning.Trainer, pl_module: DraftModule) -> None:
        if trainer.state.fn != "fit" or (drift := pl_module.val_metrics.drift) is None:
            return
        counts = drift.compute()["histogram"]  # all processes must join; the module resets it later
        if (writer := writer_of(trainer)) is not None:
            edges = torch.linspace(-1, 1, BINS + 1)
            middles = (edges[:-1] + edges[1:]) / 2
            for depth, slots in enumerate(counts.cpu(), 1):
                if slots.any():
                    tag, cosines = f"val_drift_cosine_by_slot/depth_{depth}", middles.repeat_interleave(slots)
                    writer.add_histogram(tag, cosines, trainer.global_step, bins=edges.numpy())  # pyright: ignore[reportArgumentType]


def lay_out_charts(depth: int) -> dict[str, dict[str, list]]:
    """Describe charts of TensorBoard's custom scalars: a regular expression each, matched from the beginning of a tag.

    A chart shows one scalar, so that a line is a run: TensorBoard draws all lines of a run in one colour.
    """
    layout: dict[str, dict[str, list]] = {}
    for category, charts in CHARTS.items():
        layout[category] = {}
        for chart, tag in charts.items():
            suffixes = {f", depth {k}": f"depth_{k}" for k in (1, depth)} | {", mean": "mean"}
            for label, suffix in suffixes.items() if tag.endswith("/") else [("", "")]:
                layout[category][f"{chart}{label}"] = ["Multiline", [f"{tag}{suffix}$"]]
    return layout


def writer_of(trainer: lightning.Trainer) -> SummaryWriter | None:
    """Return the TensorBoard writer of a running training, in the first process; else None."""
    if trainer.sanity_checking or trainer.state.fn != "fit" or not trainer.is_global_zero:
        return None
    return next((logger.experiment for logger in trainer.loggers if isinstance(logger, TensorBoardLogger)), None)
