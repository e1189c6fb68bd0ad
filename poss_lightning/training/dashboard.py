"""TensorBoard's other tabs: charts by depth, histograms, figures and hyperparameters."""

from collections.abc import Callable, Mapping
from functools import partial

import lightning
import numpy as np
from lightning.pytorch.loggers import TensorBoardLogger
from matplotlib.figure import Figure
from torch import Tensor
from torch.utils.tensorboard import SummaryWriter
from torch.utils.tensorboard.summary import hparams

from poss_lightning import plots
from poss_lightning.features.datamodule import FeatureData
from poss_lightning.metrics import BINS
from poss_lightning.training.module import SpecialistTraining
from poss_lightning.training.plan import count_parameters

COLUMNS = ("val/tau_tree", "val/tau_chain", "val/loss")  # scalars in the table of runs, besides pos-acc in trees
HIDDEN = ("target", "store", "depth", "chunk", "betas")  # hyperparameters that no run is looked up by
KINDS = ("unroll", "chain", "tree")  # of pos-acc
DRIFT = {"cosine (1 is none)": "val_drift_cosine", "relative L2 (0 is none)": "val_drift_l2"}

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
    """Fills TensorBoard's other tabs; with a different logger, or none, it does nothing.

    Each validation writes a figure and a histogram for each depth; training steps write nothing.
    """

    def __init__(self):
        self.start: dict[str, float] = {}  # scalars before the first step

    def setup(self, trainer: lightning.Trainer, pl_module: SpecialistTraining, stage: str) -> None:
        for logger in trainer.loggers:
            if isinstance(logger, TensorBoardLogger):
                # Else it writes hyperparameters with a placeholder metric first, and TensorBoard takes the first.
                logger._default_hp_metric = False
                logger.log_metrics = partial(_log_all_but_epoch, logger.log_metrics)

    def on_train_start(self, trainer: lightning.Trainer, pl_module: SpecialistTraining) -> None:
        if (writer := writer_of(trainer)) is None:
            return
        writer.add_custom_scalars(lay_out_charts(pl_module.eval_depth))
        by_depth = [f"val_pos_acc_tree/depth_{k}" for k in range(1, pl_module.eval_depth + 1)]
        # Not the writer's `add_hparams`, which would start a new run. TensorBoard takes the newest of each scalar.
        *start, self.end = hparams(collect_hyperparameters(trainer, pl_module), dict.fromkeys([*COLUMNS, *by_depth]))
        for summary in start:
            writer._get_file_writer().add_summary(summary)

    def on_validation_epoch_end(self, trainer: lightning.Trainer, pl_module: SpecialistTraining) -> None:
        if (drift := pl_module.val_metrics.drift) is None:  # the draft predicts no feature
            return
        counts = drift.compute()["histogram"]  # all processes must join; the module resets it later
        if (writer := writer_of(trainer)) is None:
            return
        for depth, values in count_histograms(counts).items():
            tag = f"val_drift_cosine_by_slot/depth_{depth}"
            writer.add_histogram_raw(tag, **values, global_step=trainer.global_step)

    def on_validation_end(self, trainer: lightning.Trainer, pl_module: SpecialistTraining) -> None:
        if (writer := writer_of(trainer)) is None:
            return
        logged = {name: float(value) for name, value in trainer.callback_metrics.items()}
        if trainer.global_step == 0:
            self.start = logged
            return
        step, depth = trainer.global_step, pl_module.eval_depth
        writer.add_figure("val_pos_acc/by_position", draw_acceptance(logged, depth, step, self.start), step)
        if pl_module.val_metrics.drift is not None:
            writer.add_figure("val_drift/by_depth", draw_drift(logged, depth, step, self.start), step)

    def on_train_end(self, trainer: lightning.Trainer, pl_module: SpecialistTraining) -> None:
        if (writer := writer_of(trainer)) is not None:
            writer._get_file_writer().add_summary(self.end)


def lay_out_charts(depth: int) -> dict[str, dict[str, list]]:
    """Describe charts of TensorBoard's custom scalars: a regular expression each, matched from the beginning of a tag.

    A chart shows one scalar, so that a line is a run: TensorBoard draws all lines of a run in one colour.
    """
    layout = {}
    for category, charts in CHARTS.items():
        tags = {chart: tag for chart, tag in charts.items() if not tag.endswith("/")}
        for chart, tag in charts.items():
            if tag.endswith("/"):
                tags |= {f"{chart}, depth {k}": f"{tag}depth_{k}" for k in (1, depth)} | {
                    f"{chart}, mean": f"{tag}mean"
                }
        layout[category] = {chart: ["Multiline", [f"{tag}$"]] for chart, tag in tags.items()}
    return layout


def count_histograms(counts: Tensor) -> dict[int, dict]:
    """Return arguments of `add_histogram_raw` by depth, from the slots by cosine (K, BINS), without empty depths.

    All depths have the same range, so that they can be compared.
    """
    edges = np.linspace(-1, 1, BINS + 1)
    filled = counts.sum(0).nonzero()[:, 0].tolist()
    shown = slice(filled[0], filled[-1] + 1) if filled else slice(0)
    middles = (edges[:-1] + edges[1:])[shown] / 2
    return {
        depth: {
            "min": edges[shown.start],
            "max": edges[shown.stop],
            "num": sum(slots),
            "sum": np.dot(slots, middles),
            "sum_squares": np.dot(slots, np.square(middles)),
            "bucket_limits": edges[1:][shown].tolist(),
            "bucket_counts": slots,
        }
        for depth, slots in enumerate(counts[:, shown].tolist(), 1)
        if sum(slots)
    }


def draw_acceptance(logged: dict[str, float], depth: int, step: int, start: dict[str, float]) -> Figure:
    """Plot pos-acc by position from scalars by name: a curve per kind, and that of trees before the first step."""
    drawn = {}
    for name, kind, values in [(kind, kind, logged) for kind in KINDS] + [("tree at the start", "tree", start)]:
        tau = values.get(f"val/tau_{kind}")
        drawn[name + (f", τ {tau:.2f}" if tau else "")] = _by_depth(values, f"val_pos_acc_{kind}", depth)
    return _draw(drawn, depth, f"Acceptance after {step} steps", "draft position", "accepted, if reached")


def draw_drift(logged: dict[str, float], depth: int, step: int, start: dict[str, float]) -> Figure:
    """Plot feature drift by depth from scalars by name: each measure now, and before the first step."""
    drawn = {}
    for name, tag in DRIFT.items():
        drawn[name], drawn[f"{name} at the start"] = (_by_depth(values, tag, depth) for values in (logged, start))
    return _draw(drawn, depth, f"Feature drift after {step} steps", "depth", "beside the target's feature")


def _by_depth(values: Mapping[str, float], tag: str, depth: int) -> dict[int, plots.Value]:
    by_depth = {k: values.get(f"{tag}/depth_{k}") for k in range(1, depth + 1)}
    return {k: plots.Value(value) for k, value in by_depth.items() if value is not None}


def _draw(drawn: Mapping[str, Mapping[int, plots.Value]], depth: int, title: str, x: str, y: str) -> Figure:
    shown = {name: points for name, points in drawn.items() if points}
    figure = plots.curves({title: shown}, x, y)
    highest = max((point.value for points in shown.values() for point in points.values()), default=1.0)
    figure.axes[0].set(xlim=(0.8, depth + 0.2), ylim=(0, max(1.0, 1.05 * highest)))  # mostly the same at every step
    return figure


def collect_hyperparameters(trainer: lightning.Trainer, training: SpecialistTraining) -> dict[str, str | float]:
    """Return all hyperparameters of a run, defaults included: TensorBoard takes its columns from any one run."""
    config, data = training.draft.config, trainer.datamodule  # pyright: ignore[reportAttributeAccessIssue]
    values = {**vars(config), **training.hparams}
    values |= {"allocation": list(config.allocation), "loss": training.loss_weights}
    values |= {"parameters": count_parameters(config), "steps": trainer.estimated_stepping_batches}
    if isinstance(data, FeatureData):
        tokens = data.batch_tokens * trainer.world_size * trainer.accumulate_grad_batches
        values |= {"conversations": len(data.train), "step_tokens": tokens, "noise": data.noise}
    shown = {name: value for name, value in values.items() if name not in HIDDEN}
    return {name: value if type(value) in (int, float, str) else str(value) for name, value in shown.items()}


def _log_all_but_epoch(log: Callable[..., None], metrics: Mapping[str, float], step: int | None = None) -> None:
    """Lightning logs the epoch with every scalar, and TensorBoard would draw a chart of it."""
    log({name: value for name, value in metrics.items() if name != "epoch"}, step)


def writer_of(trainer: lightning.Trainer) -> SummaryWriter | None:
    """Return the TensorBoard writer of a running training, in the first process; else None."""
    if trainer.sanity_checking or trainer.state.fn != "fit" or not trainer.is_global_zero:
        return None
    return next((logger.experiment for logger in trainer.loggers if isinstance(logger, TensorBoardLogger)), None)
