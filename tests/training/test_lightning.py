"""Callbacks and flags of Lightning change no weight, do what they say, or are refused."""

import warnings

import lightning
import pytest
import torch
from lightning.pytorch import callbacks
from lightning.pytorch.loggers import CSVLogger

from poss_lightning.evaluation.probe import Replay
from poss_lightning.features.datamodule import FeatureDataModule
from poss_lightning.training.callbacks import DraftFolders, LastCheckpoint
from poss_lightning.training.module import DraftModule
from tests.support.processes import forked
from tests.support.ranks import QUIET
from tests.support.talks import BLOCK, EAGLE3
from tests.support.tiny import tiny_target

pytestmark = pytest.mark.usefixtures("short_replays")

AVERAGED = "validates averaged weights, but draft folders would have the weights before"
CALLBACKS = {  # every one of Lightning's: what makes one that only watches or ends, or the words that refuse one
    "BackboneFinetuning": (callbacks.BackboneFinetuning, "whose schedule is made by then"),
    "BaseFinetuning": (type("Own", (callbacks.BaseFinetuning,), {}), "Own, which adds weights to an optimizer"),
    "BatchSizeFinder": (callbacks.BatchSizeFinder, "set data.batch_tokens"),
    "EMAWeightAveraging": (callbacks.EMAWeightAveraging, AVERAGED),
    "GradientAccumulationScheduler": (
        lambda: callbacks.GradientAccumulationScheduler({0: 1, 1: 2}),
        "over which each loss is averaged: set trainer.accumulate_grad_batches",
    ),
    "ModelPruning": (lambda: callbacks.ModelPruning("l1_unstructured"), "has no place for its masks"),
    "StochasticWeightAveraging": (lambda: callbacks.StochasticWeightAveraging(1e-3), AVERAGED),
    "WeightAveraging": (callbacks.WeightAveraging, AVERAGED),
    "DeviceStatsMonitor": callbacks.DeviceStatsMonitor,
    "EarlyStopping": lambda: callbacks.EarlyStopping("val_pos_acc_tree/depth_4", mode="max", patience=9),
    "LambdaCallback": lambda: callbacks.LambdaCallback(on_train_start=print),
    "LearningRateMonitor": lambda: callbacks.LearningRateMonitor(log_momentum=True, log_weight_decay=True),
    "ModelCheckpoint": lambda: callbacks.ModelCheckpoint(monitor="val_pos_acc_chain/depth_4", mode="max", save_top_k=2),
    "ModelSummary": callbacks.ModelSummary,
    "OnExceptionCheckpoint": lambda: callbacks.OnExceptionCheckpoint("."),
    "RichModelSummary": callbacks.RichModelSummary,
    "SpikeDetection": callbacks.SpikeDetection,
    "ThroughputMonitor": lambda: callbacks.ThroughputMonitor(lambda batch: len(batch.ids)),
    "Timer": lambda: callbacks.Timer({"days": 1}),
    "TQDMProgressBar": callbacks.TQDMProgressBar,
    "RichProgressBar": None,  # a trainer has one bar
    "LearningRateFinder": None,  # below
} | dict.fromkeys(("Callback", "Checkpoint", "ProgressBar", "BasePredictionWriter"))  # they do nothing by themselves
WATCH = {
    "logger": None,  # in the test
    "callbacks": None,
    "default_root_dir": None,
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


def test_the_table_has_every_callback_of_lightning():
    assert {*CALLBACKS} >= {*callbacks.__all__}


def fit(store, folder, given=(), before=None, model=(), batch_tokens=512, **flags):
    """Train for two epochs; return the weights and the trainer."""
    torch.manual_seed(0)
    module = DraftModule(store=store, **{"allocation": [2, 2], "learning_rate": 1e-3} | dict(model))
    data = FeatureDataModule(store, batch_tokens=batch_tokens, validation_store=store, test_store=store)
    options = {"max_epochs": 2, "num_sanity_val_steps": 0, "enable_checkpointing": False, "default_root_dir": folder}
    trainer = lightning.Trainer(accelerator="cpu", callbacks=[*given], **QUIET | options | flags)
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
    watching = [Replay(), *(make() for make in CALLBACKS.values() if callable(make))]
    flags = {name: value for name, value in WATCH.items() if value is not None} | {"logger": CSVLogger(tmp_path)}
    weights, trainer = fit(store, tmp_path, watching, **flags)
    assert same(plain, weights) and trainer.global_step > 0
    assert same(plain, fit(store, tmp_path, barebones=True, **dict.fromkeys(BAREBONES))[0])
    assert (
        fit(store, tmp_path, [DraftFolders(), LastCheckpoint()], fast_dev_run=2, enable_checkpointing=True)[
            1
        ].global_step
        == 2
    )
    assert not (tmp_path / "draft-last").exists()


BAREBONES = ("default_root_dir", "enable_checkpointing", "num_sanity_val_steps", *QUIET)


@pytest.mark.parametrize("name", [name for name, given in CALLBACKS.items() if isinstance(given, tuple)])
def test_what_changes_what_was_read_before_is_refused(store, tmp_path, name):
    make, words = CALLBACKS[name]
    with pytest.raises(ValueError, match=rf"^trainer\.callbacks has .*{words}"):
        fit(store, tmp_path, [DraftFolders(), make()])
    assert not [*tmp_path.iterdir()]


def test_a_rate_that_lightning_finds_is_the_one_that_is_trained_with(store, tmp_path):
    finder = callbacks.LearningRateFinder(min_lr=1e-5, max_lr=1e-2, num_training_steps=40, early_stop_threshold=None)
    found, trainer = fit(store, tmp_path, [finder], batch_tokens=64)
    rate = trainer.lightning_module.hparams["learning_rate"]
    assert rate == finder.optimal_lr.suggestion() != 1e-3
    assert same(found, fit(store, tmp_path, model={"learning_rate": rate}, batch_tokens=64)[0])


def validate(trainer, module, data) -> None:
    trainer.validate(module, data, verbose=False)


def measure(trainer, module, data) -> None:
    """By the trainer of the fit, and by a different one; and a test store twice."""
    for each in (trainer, lightning.Trainer(accelerator="cpu", **QUIET)):
        validate(each, module, data)
        each.test(module, data, verbose=False)
    trainer.test(module, data, verbose=False)


def test_a_validation_before_a_fit_changes_nothing(store, tmp_path, plain):
    assert same(plain, fit(store, tmp_path, before=measure)[0])


@pytest.mark.parametrize("options", [EAGLE3, BLOCK | {"allocation": [4]}], ids=["eagle3", "block"])
def test_a_draft_of_another_kind_is_validated_fitted_and_tested_too(make_store, tmp_path, options):
    inner = make_store(tiny_target(num_hidden_layers=7), layers=(2, 3, 4))
    first, trainer = fit(inner, tmp_path, before=validate, model=options)
    trainer.test(trainer.lightning_module, trainer.datamodule, verbose=False)
    assert same(first, fit(inner, tmp_path, model=options)[0])


def test_data_of_a_different_target_are_refused(store, make_store):
    """Of the same sizes, whose features would go through the head of the other."""
    module, other = DraftModule([1], store), FeatureDataModule(other_store := make_store(tiny_target(1)))
    with pytest.raises(ValueError, match=r"test_store .* is of a different target than what is trained on: "):
        FeatureDataModule(store, test_store=other_store)
    trainer = lightning.Trainer(accelerator="cpu", max_steps=1, **QUIET)
    for run in (trainer.fit, trainer.validate):
        with pytest.raises(ValueError, match="for a different target than the features of its data: fingerprint"):
            run(module, other)


def warn_of_nothing(store, folder) -> None:
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        best = callbacks.ModelCheckpoint(folder / "best", monitor="val/tau_tree", mode="max")
        _, trainer = fit(store, folder, [Replay(), best], strategy="ddp", devices=2, enable_checkpointing=True)
        trainer.test(trainer.lightning_module, trainer.datamodule, verbose=False)
    assert not [str(each.message) for each in heard if "sync_dist" in str(each.message)]
    assert best.best_model_score >= 1


@pytest.mark.nightly
def test_processes_of_an_own_trainer_are_not_told_to_average(store, tmp_path):
    forked(2, warn_of_nothing, store, tmp_path)
