"""Feature stores of the tiny target, and a quiet trainer."""

from collections.abc import Callable
from pathlib import Path

import lightning
import pytest
from lightning.pytorch.loggers import TensorBoardLogger

from poss_lightning.features.datamodule import FeatureDataModule
from poss_lightning.features.writing import write_store
from poss_lightning.target_model.model import Target
from poss_lightning.training.module import DraftModule
from tests.support.ranks import QUIET
from tests.support.talks import SIZES, talks


@pytest.fixture(scope="session")
def make_store(tmp_path_factory) -> Callable[..., str]:
    """Writes a store of a target's features of the usual talks, or of the first `limit`."""

    def make(target: Target, limit: int | None = None, **options) -> str:
        folder = tmp_path_factory.mktemp("store")
        write_store(folder, target, talks()[:limit], **SIZES, **options)
        return str(folder)

    return make


@pytest.fixture(scope="module")
def store(make_store, tiny_folder) -> str:
    return make_store(Target.load(tiny_folder, "float32"))


@pytest.fixture(scope="session")
def train() -> Callable[..., lightning.Trainer]:
    """Trains a module on a CPU, on its own store unless there are `data`; returns the trainer."""
    quiet = QUIET | {"accelerator": "cpu", "devices": 1, "num_sanity_val_steps": 0, "enable_checkpointing": False}

    def run(module: lightning.LightningModule, data: FeatureDataModule | None = None, **options) -> lightning.Trainer:
        trainer = lightning.Trainer(**quiet | options)
        trainer.fit(module, data or FeatureDataModule(module.hparams["store"], batch_tokens=256, validation=0.2))
        return trainer

    return run


@pytest.fixture(scope="session")
def learn(train) -> Callable[..., lightning.Trainer]:
    """Trains two specialists, or a draft of other options, with two validations; TensorBoard's file is in `folder`."""

    def run(store: str, steps: int, folder: Path | None = None, callbacks=(), precision="32-true", **draft):
        lightning.seed_everything(0)
        options = {"allocation": [2, 2], "learning_rate": 3e-3, "warmup": 0.05} | draft
        return train(
            DraftModule(store=store, **options),
            FeatureDataModule(store, batch_tokens=512, validation=0.2),
            logger=TensorBoardLogger(folder, name="", version="") if folder else False,
            max_steps=steps,
            precision=precision,
            val_check_interval=steps // 2,
            check_val_every_n_epoch=None,
            gradient_clip_val=0.5,
            log_every_n_steps=1,
            callbacks=[*callbacks],
        )

    return run
