"""What TensorBoard shows beside scalars: charts by depth, histograms, figures, hyper-parameters, the projector."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

import lightning
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from torch import Tensor
from torch.utils.tensorboard import SummaryWriter

from poss_lightning.features.stream import Batch
from poss_lightning.ranges import Count, check_numbers
from poss_lightning.training import hyperparameters, panels
from poss_lightning.training.module import SpecialistTraining


class DeepSlots(NamedTuple):
    """Slots of one validation batch at which all K passes count."""

    target: Tensor  # (S, D) the target's features
    draft: Tensor  # (K, S, D) the passes' predictions of them
    tokens: list[int]  # (S,) the last token that each feature has read
    following: list[int]  # (S,) the next token of the text, which the feature predicts


class Dashboard(lightning.Callback):
    """Fills TensorBoard's other tabs; with another logger, or none, it does nothing.

    It does no work in training steps. Each validation writes a figure and a histogram for each depth. The projector is
    written once, when training ends, with about 20 bytes x D x slots x (K + 1).

    Args:
        slots: how many slots of the last validation the projector shows.
    """

    @check_numbers
    def __init__(self, slots: Count = 40):
        self.slots = slots
        self.deep_slots: DeepSlots | None = None
        self.start: dict[str, float] = {}  # what was logged before the first step

    def setup(self, trainer: lightning.Trainer, pl_module: SpecialistTraining, stage: str) -> None:
        for logger in trainer.loggers:
            if isinstance(logger, TensorBoardLogger):
                # Else it writes hyper-parameters with a placeholder metric first, and TensorBoard takes the first.
                logger._default_hp_metric = False
                logger.log_metrics = partial(_log_all_but_epoch, logger.log_metrics)

    def on_train_start(self, trainer: lightning.Trainer, pl_module: SpecialistTraining) -> None:
        if (writer := writer_of(trainer)) is None:
            return
        writer.add_custom_scalars(panels.layout(pl_module.eval_depth))
        values = hyperparameters.collect(trainer, pl_module)
        for summary in hyperparameters.start_summaries(values, pl_module.eval_depth):
            writer._get_file_writer().add_summary(summary)

    def on_validation_batch_end(
        self, trainer, pl_module: SpecialistTraining, outputs: dict, batch: Batch, batch_idx: int, dataloader_idx=0
    ) -> None:
        if batch_idx == 0 and writer_of(trainer) is not None and pl_module.val_metrics.drift is not None:
            self.deep_slots = pick_slots(outputs["predictions"], batch, self.slots)

    def on_validation_epoch_end(self, trainer: lightning.Trainer, pl_module: SpecialistTraining) -> None:
        if (drift := pl_module.val_metrics.drift) is None:  # the draft predicts no feature
            return
        counts = drift.compute()["histogram"]  # all processes must join it; the module resets it later
        if (writer := writer_of(trainer)) is None:
            return
        for depth, values in panels.count_histograms(counts).items():
            tag = f"val_drift_cosine_by_slot/depth_{depth}"
            writer.add_histogram_raw(tag, **values, global_step=trainer.global_step)

    def on_validation_end(self, trainer: lightning.Trainer, pl_module: SpecialistTraining) -> None:
        if (writer := writer_of(trainer)) is None:
            return
        logged = {name: float(value) for name, value in trainer.callback_metrics.items()}
        if trainer.global_step == 0:
            self.start = logged
            return
        figure = panels.draw_acceptance(logged, pl_module.eval_depth, trainer.global_step, self.start)
        writer.add_figure("val_pos_acc/by_position", figure, trainer.global_step)

    def on_train_end(self, trainer: lightning.Trainer, pl_module: SpecialistTraining) -> None:
        if (writer := writer_of(trainer)) is None:
            return
        writer._get_file_writer().add_summary(hyperparameters.end_summary())
        if self.deep_slots is not None:
            spell = panels.load_speller(pl_module.draft.config.target.name)
            features, labels = panels.make_points(*self.deep_slots, spell)
            writer.add_embedding(features, labels, None, trainer.global_step, "features", list(panels.LABELS))


def _log_all_but_epoch(log: Callable[..., None], metrics: Mapping[str, float], step: int | None = None) -> None:
    """Lightning logs the epoch beside everything, and TensorBoard draws a chart of it."""
    log({name: value for name, value in metrics.items() if name != "epoch"}, step)


def writer_of(trainer: lightning.Trainer) -> SummaryWriter | None:
    """The TensorBoard writer of a running training, in the process that writes; else None."""
    if trainer.sanity_checking or trainer.state.fn != "fit" or not trainer.is_global_zero:
        return None
    return next((logger.experiment for logger in trainer.loggers if isinstance(logger, TensorBoardLogger)), None)


def pick_slots(predictions: list[Tensor], batch: Batch, most: int) -> DeepSlots | None:
    """At most `most` slots, spread over a batch; None where no slot is deep enough in its answer."""
    deep = (batch.counts[:, :-1] >= len(predictions)).nonzero()  # (slots, 2)
    if not len(deep):
        return None
    rows, slots = deep[torch.linspace(0, len(deep) - 1, min(most, len(deep)), device=deep.device).long()].unbind(1)
    return DeepSlots(
        batch.features[rows, slots + 1].float().cpu(),
        torch.stack([prediction[rows, slots] for prediction in predictions]).float().cpu(),
        batch.tokens[rows, slots + 1].tolist(),
        batch.tokens[rows, slots + 2].tolist(),
    )
