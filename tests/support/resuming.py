"""Trainings that end early, and resume."""

import json
import shutil
from pathlib import Path

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from poss_lightning.features.datamodule import FeatureDataModule
from poss_lightning.files import atomic
from poss_lightning.training.module import DraftModule
from tests.support.ranks import QUIET

LAST = "checkpoints/last.ckpt"


class Killed(Exception):
    pass


class Kill(lightning.Callback):
    """Raises after so many batches of the run, before the checkpoint of the last."""

    def __init__(self, after: int | None = None):
        self.after = after
        self.seen: list[tuple[int, list[str]]] = []  # epoch and conversations of each batch

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.seen.append((trainer.current_epoch, [] if batch.mask.is_empty else batch.ids))
        if len(self.seen) == self.after:
            with atomic(Path(trainer.default_root_dir, f"seen-{trainer.global_rank}.json")) as path:
                path.write_text(json.dumps(self.seen))
            raise Killed


class Left(Kill):
    """Keeps what a kill after batch n would leave as n.ckpt, which takes less time than to train up to each n."""

    def on_train_batch_end(self, trainer, *rest):
        super().on_train_batch_end(trainer, *rest)
        if (last := Path(trainer.default_root_dir, "last.ckpt")).exists():
            shutil.copy(last, last.with_name(f"{len(self.seen)}.ckpt"))


def fit(store, folder, kill=None, resume=None, every=1, model=None, **options):
    lightning.seed_everything(0)
    module = DraftModule(store=store, **({"allocation": [1, 2], "learning_rate": 3e-3} | (model or {})))
    kill = kill or Kill()
    keep = ModelCheckpoint(folder, save_last=True, save_top_k=0, every_n_train_steps=every)
    usual = {"accelerator": "cpu", "max_epochs": 3, "num_sanity_val_steps": 0, "gradient_clip_val": 0.5}
    usual |= {"default_root_dir": folder, "callbacks": [kill, keep]}
    trainer = lightning.Trainer(**QUIET | usual | options)
    data = FeatureDataModule(store, batch_tokens=256, validation=0.2)
    trainer.fit(module, data, ckpt_path=resume and folder / resume)
    return module, trainer, kill.seen


def same_weights(one: DraftModule, other: DraftModule) -> bool:
    return all(map(torch.equal, one.draft.parameters(), other.draft.parameters()))
