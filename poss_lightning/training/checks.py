"""What of Lightning a training works with: strategies, precisions and callbacks; the rest is refused before it begins.

Everything else of Lightning's trainer works: its other flags and callbacks only watch or end a training, or set a
number before it is read.
"""

import lightning
from lightning.pytorch import callbacks
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy

from poss_lightning.features.datamodule import FeatureDataModule
from poss_lightning.target_model.spec import TargetSpec
from poss_lightning.training.strategies import DeepSpeed

PRECISIONS = ("bf16-mixed", "32-true", "64-true")
AVERAGES = "draft folders would not have the weights that it averages: leave it out"
CHANGES: dict[type[callbacks.Callback], str] = {  # of callbacks that change what has been read by then
    callbacks.WeightAveraging: AVERAGES,
    callbacks.StochasticWeightAveraging: AVERAGES,
    callbacks.GradientAccumulationScheduler: "losses are means over planned steps: set trainer.accumulate_grad_batches",
    callbacks.BatchSizeFinder: "batches are planned by then: set data.batch_tokens",
    callbacks.ModelPruning: "a draft folder has no place for its masks: leave it out",
    callbacks.BaseFinetuning: "the schedule is made by then: set `requires_grad` of `module.draft` before fit",
}


def check_trainer(trainer: lightning.Trainer, optimizer: str) -> None:
    """Raise ValueError for a strategy, precision or callback with which a draft, or this optimizer, cannot train."""
    strategy, divides = trainer.strategy, isinstance(trainer.strategy, DeepSpeed)
    if optimizer == "muon" and divides:
        raise ValueError("optimizer is muon, which needs whole matrices on every process: take adamw, or ddp")
    if not isinstance(strategy, SingleDeviceStrategy) and not divides and type(strategy) is not DDPStrategy:
        raise ValueError(
            f"trainer.strategy is {type(strategy).__name__}, whose weights and gradients are not checked, nor "
            "written as one file: take ddp, or poss_lightning.training.strategies.DeepSpeed as conf/trainer/zero2.yaml"
        )
    for callback in trainer.callbacks:  # pyright: ignore[reportAttributeAccessIssue]
        for kind, change in CHANGES.items():
            if isinstance(callback, kind):
                raise ValueError(f"trainer.callbacks has {type(callback).__name__}, but {change}")


def check_precision(precision: str) -> None:
    """Raise ValueError for a `trainer.precision` that rounds weights and sums to 16 bits, or scales the loss."""
    if precision not in PRECISIONS:
        reason = "small steps of the weights are rounded away, or the first gradients overflow"
        raise ValueError(f"trainer.precision is {precision}, in which {reason}: take {', '.join(PRECISIONS)}")


def check_target(target: TargetSpec, data: FeatureDataModule | None) -> None:
    """Raise ValueError if a datamodule has features of a different target than that of the draft."""
    if data and (difference := target.difference(data.source.target)):
        raise ValueError(f"the module's draft is for a different target than the features of its data: {difference}")
