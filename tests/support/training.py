"""Quiet trainings of the tiny target's drafts, also such that end early, and resume."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning
import torch

from poss_lightning.features.datamodule import FeatureDataModule
from poss_lightning.training.callbacks import LastCheckpoint
from poss_lightning.training.module import DraftModule
from tests.support.ranks import QUIET

LAST = "checkpoints/last.ckpt"


def quiet_trainer(**options: Any) -> lightning.Trainer:
    """A trainer on a CPU that writes nothing by itself."""
    usual = {"accelerator": "cpu", "devices": 1, "num_sanity_val_steps": 0, "enable_checkpointing": False}
    return lightning.Trainer(**QUIET | usual | options)


def train(module: DraftModule, data: FeatureDataModule | None = None, **options: Any) -> lightning.Trainer:
    """Train a module on its own store, unless there are `data`; return the trainer."""
    trainer = quiet_trainer(**options)
    trainer.fit(module, data or FeatureDataModule(module.hparams["store"], batch_tokens=256, validation=0.2))
    return trainer


class Killed(Exception):
    pass


class Watch(lightning.Callback):
    """Keeps epoch and conversations of each batch, and the steps of validations.

    It raises after `killed_after` batches, before other callbacks save a checkpoint.
    """

    def __init__(self, killed_after: int | None = None):
        self.killed_after = killed_after
        self.seen: list[tuple[int, list[str]]] = []
        self.validated: list[int] = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.seen.append((trainer.current_epoch, [] if batch.mask.is_empty else batch.ids))
        if len(self.seen) == self.killed_after:
            raise Killed

    def on_validation_end(self, trainer, pl_module):
        self.validated.append(trainer.global_step)


def fit(
    store: str, folder: Path, *callbacks: lightning.Callback, resume: str | None = None, model=None, watch=None, **flags
) -> SimpleNamespace:
    """Train from the same seed, without callbacks with a checkpoint after each step; return what there was to see."""
    lightning.seed_everything(0)
    options: dict[str, Any] = {"allocation": [1, 2], "learning_rate": 3e-3}
    module, watch = DraftModule(store=store, **options | (model or {})), watch or Watch()
    usual = {"max_epochs": 3, "gradient_clip_val": 0.5, "enable_checkpointing": True, "default_root_dir": folder}
    trainer = quiet_trainer(**usual | {"callbacks": [watch, *(callbacks or [LastCheckpoint(1)])]} | flags)
    data = FeatureDataModule(store, batch_tokens=256, validation=0.2)
    trainer.fit(module, data, ckpt_path=resume and folder / resume)
    return SimpleNamespace(module=module, trainer=trainer, seen=watch.seen, validated=watch.validated)


def same_weights(one: DraftModule, other: DraftModule) -> bool:
    return all(map(torch.equal, one.draft.parameters(), other.draft.parameters()))
