"""Callbacks and flags of Lightning change no weight, do what they say, or are refused."""

import pytest
import torch
from lightning.pytorch import callbacks
from lightning.pytorch.loggers import CSVLogger

from poss_lightning.evaluation.probe import Replay
from poss_lightning.features.datamodule import FeatureDataModule
from poss_lightning.training.callbacks import DraftFolders, LastCheckpoint
from poss_lightning.training.checks import CHANGES
from poss_lightning.training.module import DraftModule
from tests.support.ranks import QUIET
from tests.support.talks import BLOCK, EAGLE3
from tests.support.tiny import tiny_target
from tests.support.training import quiet_trainer

pytestmark = pytest.mark.usefixtures("short_replays")

WATCHING = {  # callbacks of Lightning that only watch or end a training
    "DeviceStatsMonitor": {},
    "EarlyStopping": {"monitor": "val_pos_acc_tree/depth_4", "mode": "max", "patience": 9},
    "LambdaCallback": {"on_train_start": print},
    "LearningRateMonitor": {"log_momentum": True, "log_weight_decay": True},
    "ModelCheckpoint": {"monitor": "val_pos_acc_chain/depth_4", "mode": "max", "save_top_k": 2},
    "ModelSummary": {},
    "OnExceptionCheckpoint": {"dirpath": "."},
    "RichModelSummary": {},
    "SpikeDetection": {},
    "ThroughputMonitor": {"batch_size_fn": lambda batch: len(batch.ids)},
    "Timer": {"duration": {"days": 1}},
    "TQDMProgressBar": {},
}
REFUSED = [name for name in callbacks.__all__ if issubclass(getattr(callbacks, name), tuple(CHANGES))]
OTHERS = ["Callback", "Checkpoint", "ProgressBar", "BasePredictionWriter"]  # do nothing by themselves
OTHERS += ["RichProgressBar", "LearningRateFinder"]  # a trainer has one bar; below
FLAGS = {  # that change nothing either
    "min_epochs": 1,
    "min_steps": 1,
    "limit_val_batches": 1,
    "limit_test_batches": 1,
    "limit_predict_batches": 1,
    "val_check_interval": 2,
    "num_sanity_val_steps": 1,
    "log_every_n_steps": 3,
    "enable_checkpointing": True,
    "enable_progress_bar": True,
    "enable_model_summary": True,
    "deterministic": True,
    "benchmark": True,
    "inference_mode": False,
    "use_distributed_sampler": False,
    "profiler": "simple",
    "detect_anomaly": True,
    "sync_batchnorm": True,
    "reload_dataloaders_every_n_epochs": 1,
    "enable_autolog_hparams": False,
    "model_registry": "mine",
}


def test_every_callback_of_lightning_is_tried_or_refused():
    assert {*callbacks.__all__} <= {*WATCHING, *REFUSED, *OTHERS}


def fit(store, folder, given=(), before=None, model=(), batch_tokens=512, **flags):
    """Train for two epochs; return the weights and the trainer."""
    torch.manual_seed(0)
    module = DraftModule(store=store, **{"allocation": [2, 2], "learning_rate": 1e-3} | dict(model))
    data = FeatureDataModule(store, batch_tokens=batch_tokens, validation_store=store, test_store=store)
    trainer = quiet_trainer(callbacks=[*given], **{"max_epochs": 2, "default_root_dir": folder} | flags)
    if before:
        before(trainer, module, data)
    trainer.fit(module, data)
    return module.draft.state_dict(), trainer


@pytest.fixture(scope="module")
def plain(store, tmp_path_factory):
    return fit(store, tmp_path_factory.mktemp("plain"))[0]


def same(one, other) -> bool:
    return all(torch.equal(value, other[name]) for name, value in one.items())


def test_what_watches_or_might_end_a_training_changes_no_weight(store, tmp_path, plain, monkeypatch):
    monkeypatch.chdir(tmp_path)
    watching = [Replay(), *(getattr(callbacks, name)(**options) for name, options in WATCHING.items())]
    weights, trainer = fit(store, tmp_path, watching, **FLAGS, logger=CSVLogger(tmp_path))
    assert same(plain, weights) and trainer.global_step > 0
    assert same(plain, fit(store, tmp_path, barebones=True, **dict.fromkeys(BAREBONES))[0])
    dry = {"fast_dev_run": 2, "enable_checkpointing": True}
    assert fit(store, tmp_path, [DraftFolders(), LastCheckpoint()], **dry)[1].global_step == 2
    assert not (tmp_path / "draft-last").exists()


BAREBONES = ("default_root_dir", "enable_checkpointing", "num_sanity_val_steps", *QUIET)


def test_what_changes_what_was_read_before_is_refused(store, tmp_path):
    with pytest.raises(ValueError, match=r"^trainer\.callbacks has BatchSizeFinder, .*: set data\.batch_tokens"):
        fit(store, tmp_path, [DraftFolders(), callbacks.BatchSizeFinder()])
    assert not [*tmp_path.iterdir()]


def test_a_rate_that_lightning_finds_is_the_one_that_is_trained_with(store, tmp_path):
    finder = callbacks.LearningRateFinder(min_lr=1e-5, max_lr=1e-2, num_training_steps=40, early_stop_threshold=None)
    found, trainer = fit(store, tmp_path, [finder], batch_tokens=64)
    rate = trainer.lightning_module.hparams["learning_rate"]
    assert rate == finder.optimal_lr.suggestion() != 1e-3
    assert same(found, fit(store, tmp_path, model={"learning_rate": rate}, batch_tokens=64)[0])


def measure(trainer, module, data) -> None:
    """By the trainer of the fit, and by a different one; and a test store twice."""
    for each in (trainer, quiet_trainer()):
        each.validate(module, data, verbose=False)
        each.test(module, data, verbose=False)
    trainer.test(module, data, verbose=False)


@pytest.mark.parametrize("options", [{}, EAGLE3, BLOCK | {"allocation": [4]}], ids=["eagle2", "eagle3", "block"])
def test_what_is_measured_before_a_fit_changes_nothing(inner, tmp_path, options):
    first, trainer = fit(inner, tmp_path, before=measure, model=options)
    trainer.test(trainer.lightning_module, trainer.datamodule, verbose=False)
    assert same(first, fit(inner, tmp_path, model=options)[0])


def test_data_of_a_different_target_are_refused(store, make_store):
    """Of the same sizes, whose features would go through the head of the other."""
    module, other = DraftModule([1], store), FeatureDataModule(other_store := make_store(tiny_target(1)))
    with pytest.raises(ValueError, match=r"test_store .* is of a different target than what is trained on: "):
        FeatureDataModule(store, test_store=other_store)
    trainer = quiet_trainer(max_steps=1)
    for run in (trainer.fit, trainer.validate):
        with pytest.raises(ValueError, match="for a different target than the features of its data: fingerprint"):
            run(module, other)
