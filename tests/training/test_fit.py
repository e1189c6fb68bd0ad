"""A training and its validation as functions: their folders, messages, and what they refuse."""

import csv
import gc
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
import yaml

from poss_lightning.reports.scalars import read_scalars
from poss_lightning.training.command import Training
from poss_lightning.training.fit import command_line, fit, fit_once
from poss_lightning.training.module import DraftModule
from poss_lightning.training.run_folder import FINISHED
from tests.support.command import left, unchanged

pytestmark = pytest.mark.usefixtures("short_replays")

CPU = "trainer/cpu.yaml"
LAST = "lightning_logs/version_0/checkpoints/last.ckpt"
OTHER = "cell was trained with other settings, or with configs that have changed"


def cut(store, **trainer):
    """Options of a training of a step, without validation."""
    short = {"precision": "32-true", "max_steps": 1, "limit_val_batches": 0, "enable_progress_bar": False}
    return {"model": {"allocation": [1]}, "data": {"store": store, "validation": 0.2}, "trainer": short | trainer}


def test_a_training_and_its_validation_are_functions(store, tmp_path, monkeypatch, capsys):
    """A validation writes nothing, and warns about conversations that were trained on."""
    monkeypatch.chdir(tmp_path)
    options = cut(store)
    fit(CPU, options)  # in lightning_logs/version_0
    fit(CPU, options, {"ckpt_path": LAST, "trainer": {"max_steps": 2}})  # there, too
    assert [path.name for path in (tmp_path / "lightning_logs").iterdir()] == ["version_0"]
    config = yaml.safe_load((tmp_path / "lightning_logs/version_0/config.yaml").read_text())
    assert config["model"]["kind"] == "eagle2" and config["ckpt_path"] is None  # defaults included
    last = {"ckpt_path": LAST, "trainer": {"limit_val_batches": 1}}
    logs = {"trainer": {"logger": {"class_path": "CSVLogger", "init_args": {"save_dir": ".", "version": 0}}}}

    half = {"data": {"validation": 0.5, "split_seed": 3}}
    with unchanged(tmp_path), pytest.warns(UserWarning, match=r"was trained on \d+ of these 20 conversations"):
        Training("validate", command_line(CPU, options, logs, last, half))
    assert "val/loss" in capsys.readouterr().out


@pytest.fixture
def wandb(monkeypatch) -> dict:
    """What is logged to a stand-in for the package."""
    run, logged = Mock(id="1"), {}
    run.log = logged.update
    parts = {"wandb": {"run": None, "init": lambda **_: run}, "wandb.sdk": {}}
    parts |= {"wandb.sdk.lib": {"RunDisabled": Mock}, "wandb.wandb_run": {"Run": Mock}}
    for name, members in parts.items():
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(**members))
    monkeypatch.setattr("lightning.pytorch.loggers.wandb._WANDB_AVAILABLE", True)
    return logged


WRITTEN = {"hparams.yaml", "config.yaml", "checkpoints", "draft-best", "draft-last"}


@pytest.mark.parametrize("logger", ["CSVLogger", "TensorBoardLogger", "WandbLogger"])
def test_a_logger_by_its_name_gets_the_scalars_and_a_requeued_training_its_folder(
    store, tmp_path, monkeypatch, wandb, logger
):
    """With all default callbacks."""
    monkeypatch.chdir(tmp_path)
    steps = {"log_every_n_steps": 1, "limit_val_batches": 1, "val_check_interval": 1, "logger": logger}
    for number in (1, 2):
        again = {"name": "a", "ckpt_path": "auto", "trainer": {"max_steps": number}}
        fit(CPU, cut(store, **steps), {"model": {"allocation": [1, 1]}}, again)
    assert [path.name for path in tmp_path.iterdir()] == ["runs"] and left(tmp_path / "runs")[0] == "a"
    assert torch.load("runs/a/checkpoints/last.ckpt", weights_only=True)["global_step"] == 2
    written = {path.name for path in Path("runs/a").iterdir() if "tfevents" not in path.name}
    assert written == WRITTEN | ({"metrics.csv"} if logger == "CSVLogger" else set())
    expected = {"train/loss", "train/learning_rate", "val/loss", "val/tau_tree", "val_drift_l2/depth_2"}
    expected |= {"throughput/slots_per_second", "val_pos_acc_unroll/depth_1"}
    if logger == "CSVLogger":
        with Path("runs/a/metrics.csv").open() as file:
            scalars = set(next(csv.reader(file)))
    else:
        scalars = {*wandb} if logger == "WandbLogger" else {*read_scalars("runs")["runs/a"]}
    assert expected <= scalars


def test_epochs_that_end_a_training_before_max_steps_are_named(store, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    trainer = {"limit_train_batches": 3, "max_steps": 5, "max_epochs": 1, "logger": False}
    with pytest.warns(UserWarning, match=r"max_steps is 5, .* ends this training at step 3: give "):
        fit(CPU, cut(store, **trainer), {"data": {"batch_tokens": 256}})
    assert torch.load("checkpoints/last.ckpt", weights_only=True)["global_step"] == 3


def test_a_log_file_gets_lines_of_steps_and_validations_and_no_bar(store, caplog, capsys, monkeypatch, tmp_path):
    """As `poss fit … | tee log` writes it, with a warning once: a bar would write its last state, and count epochs."""
    caplog.set_level("INFO")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setattr(torch._utils, "cpu_count", lambda: 0)
    logger = {"class_path": "CSVLogger", "init_args": {"save_dir": ".", "name": "run", "version": ""}}
    steps = {"max_steps": 4, "log_every_n_steps": 2, "val_check_interval": 2, "check_val_every_n_epoch": None}
    shown = {"logger": logger, "limit_val_batches": 1, "enable_progress_bar": None}
    with warnings.catch_warnings(record=True) as heard:
        fit(CPU, cut(store, **steps | shown), {"data": {"batch_tokens": 128, "workers": 1}})
    assert sum("This DataLoader will create 1 " in str(each.message) for each in heard) == 1
    assert capsys.readouterr().out == ""
    first, *lines = [words for words in caplog.messages if words.startswith("step ") and "val/" not in words]
    assert first == "step 0 of 4: training begins"
    assert [line.split(":")[0] for line in lines] == ["step 2 of 4", "step 4 of 4"]
    assert all("loss " in line and "steps/s" in line for line in lines)
    with (tmp_path / "run/metrics.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["val/loss"]]
    best, validations = 0.0, [words for words in caplog.messages if "val/" in words]
    for row, line in zip(rows, validations, strict=True):
        tau, loss = (float(row[name]) for name in ("val/tau_tree", "val/loss"))
        improves, best = tau > best, max(tau, best)
        words = f"step {int(row['step']) + 1}: val/tau_tree {tau:#.3g}{' (best)' * improves}, val/loss {loss:#.3g}"
        assert line == words + " → draft-best" * improves


@pytest.mark.parametrize("every", [1, 0])  # 0 logs nothing
def test_a_terminals_bar_counts_the_steps_of_the_training(store, capsys, monkeypatch, tmp_path, every):
    """Lightning's own would say "Epoch 2/-2"."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    steps = {"max_epochs": -1, "max_steps": 5, "limit_train_batches": 2, "accumulate_grad_batches": 2}
    fit(CPU, cut(store, enable_progress_bar=None, logger=False, log_every_n_steps=every, **steps))
    drawn = capsys.readouterr().out
    assert "Steps: " in drawn and "| 5/5 [" in drawn and "Epoch" not in drawn
    assert ("train/loss" in drawn) == bool(every)


def test_fit_once_restarts_keeps_or_refuses(store, tmp_path):
    """A kill before the first last.ckpt leaves a draft, perhaps Lightning's checkpoint, and nothing to resume from."""
    config, folder = tmp_path / "rate.yaml", tmp_path / "cell"
    config.write_text("model: {learning_rate: 1.0e-3}")
    layers = (CPU, str(config), cut(store))
    draft = fit_once(folder, *layers)
    written = (draft / "model.safetensors").stat().st_mtime_ns
    assert fit_once(folder, *layers) == draft and (draft / "model.safetensors").stat().st_mtime_ns == written
    (folder / FINISHED).unlink()
    (folder / "events.out.tfevents.1700000000.host.1.0").touch()
    (folder / "checkpoints").mkdir()
    (folder / "checkpoints/epoch=0-step=1.ckpt").touch()
    assert fit_once(folder, *layers) == draft and (draft / "model.safetensors").stat().st_mtime_ns > written
    assert not (folder / "events.out.tfevents.1700000000.host.1.0").exists() and not (folder / "checkpoints").exists()
    with pytest.raises(ValueError, match=OTHER):
        fit_once(folder, *layers, {"model": {"learning_rate": 0.5}})
    config.write_text("model: {learning_rate: 5.0}")
    with pytest.raises(ValueError, match=OTHER):
        fit_once(folder, *layers)
    (folder / "fit.yaml").unlink()
    with unchanged(folder), pytest.raises(FileExistsError, match="cell holds a training that `poss fit` started"):
        fit_once(folder, *layers)


def test_a_finished_training_takes_no_memory(store, tmp_path):
    """A sweep has many in one process. Other tests may have left some."""

    def alive() -> int:
        return sum(isinstance(each, DraftModule) for each in gc.get_objects())

    gc.collect()
    before = alive()
    fit_once(tmp_path / "cell", CPU, cut(store))
    assert alive() == before
