"""A training as a function of its options: how they are put together, and that each command takes them."""

import csv
import errno
import inspect
import os
import shutil
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from lightning.pytorch.callbacks import model_checkpoint
from lightning.pytorch.trainer.connectors.logger_connector import result

from poss_lightning.configs import merge_options
from poss_lightning.training.fit import FitOptions, _quieten, fit, parse, validate
from poss_lightning.training.fit import test as look_at_test
from poss_lightning.training.module import SpecialistTraining
from tests.support.command import unchanged

PROBE = {"class_path": "poss_lightning.evaluation.probe.Replay"}
SPEED = {"class_path": "poss_lightning.training.callbacks.Throughput"}
LOGGER = {"class_path": "lightning.pytorch.loggers.TensorBoardLogger", "init_args": {"save_dir": "runs", "name": "a"}}


@pytest.mark.parametrize(
    ("below", "above", "expected"),
    [
        ({"trainer": {"max_steps": 1, "devices": 2}}, {"trainer": {"max_steps": 3}}, {"max_steps": 3, "devices": 2}),
        ({"trainer": {"max_steps": 1}}, {"trainer.max_steps": 3}, {"max_steps": 3}),
        ({"trainer": {"callbacks": [PROBE]}}, {"trainer": {"callbacks+": [SPEED]}}, {"callbacks": [PROBE, SPEED]}),
        ({"trainer": {"callbacks": [PROBE]}}, {"trainer": {"callbacks+": SPEED}}, {"callbacks": [PROBE, SPEED]}),
        ({"trainer": {"callbacks": [PROBE]}}, {"trainer": {"callbacks": [SPEED]}}, {"callbacks": [SPEED]}),
        (
            {"trainer": {"logger": LOGGER}},
            {"trainer": {"logger": {"class_path": "TensorBoardLogger", "init_args": {"name": "b"}}}},
            {"logger": {"class_path": "TensorBoardLogger", "init_args": {"save_dir": "runs", "name": "b"}}},
        ),
        (
            {"trainer": {"logger": LOGGER}},
            {"trainer": {"logger": {"class_path": "CSVLogger", "init_args": {"save_dir": "x"}}}},
            {"logger": {"class_path": "CSVLogger", "init_args": {"save_dir": "x"}}},
        ),
    ],
    ids=["nested", "dotted", "appended", "one appended", "replaced", "of the same class", "of another class"],
)
def test_options_are_merged_as_the_command_line_merges_files(below, above, expected):
    assert merge_options(below, above)["trainer"] == expected


def test_an_option_may_stand_for_another_and_unknown_ones_are_named():
    options = FitOptions.compose([], {"trainer": {"max_steps": 7, "val_check_interval": "${trainer.max_steps}"}})
    assert options.trainer["val_check_interval"] == 7 and options.trainer["precision"] == "auto"
    with pytest.raises(ValueError, match="a training has no option 'trainr'; it has model, data, trainer"):
        FitOptions.compose([], {"trainr": {"max_steps": 7}})
    with pytest.raises(ValueError, match=r"lab\.yaml: .*trainer\.max_steps"):
        FitOptions.compose(["lab.yaml"])


def test_a_training_and_its_validation_are_functions(store, tmp_path, capsys):
    trainer = {
        "accelerator": "cpu",
        "devices": 1,
        "precision": "32-true",
        "max_steps": 2,
        "limit_val_batches": 1,
        "callbacks": [{"class_path": "poss_lightning.training.callbacks.LastCheckpoint"}],
        "logger": {"class_path": "TensorBoardLogger", "init_args": {"save_dir": str(tmp_path), "name": "run"}},
        "enable_progress_bar": False,
    }
    options = {"model": {"allocation": [1, 1]}, "data": {"store": store, "validation": 0.2}, "trainer": trainer}
    assert parse([], options).model["kind"] == "eagle2"  # defaults included
    fit(FitOptions.compose([], options))
    (last,) = tmp_path.rglob("last.ckpt")
    capsys.readouterr()
    with unchanged(tmp_path):
        validate(FitOptions.compose([], options | {"ckpt_path": str(last)}))
    assert "val/loss" in capsys.readouterr().out


def test_a_later_look_logs_nothing_into_a_trainings_folder(store, tmp_path, monkeypatch, caplog):
    """`report` and `allocate` would take what it measured for the training's; into another folder it may."""
    caplog.set_level("INFO", "poss_lightning")
    monkeypatch.chdir(tmp_path)
    options = cut(store, limit_val_batches=1)
    fit(FitOptions.compose(["trainer/cpu.yaml"], options))  # in lightning_logs/version_0
    folder = tmp_path / "lightning_logs" / "version_0"
    numbered = {"class_path": "TensorBoardLogger", "init_args": {"save_dir": "."}}
    same = {"class_path": "CSVLogger", "init_args": {"save_dir": ".", "version": 0}}
    last = {"ckpt_path": str(folder / "checkpoints/last.ckpt")}
    start = {"model": options["model"] | {"start_from": str(folder / "draft-last")}}
    for look, logger, more in [
        (validate, None, last),
        (look_at_test, None, last),
        (validate, None, start),
        (validate, numbered, last),
        (validate, [same], last),
        (validate, same, start),
    ]:
        caplog.clear()
        with unchanged(tmp_path):
            trainer = options["trainer"] | {"logger": logger}
            look(FitOptions.compose(["trainer/cpu.yaml"], options | {"trainer": trainer} | more))
        where = "lightning_logs/version_0 is a training's, so nothing is logged there"
        assert (where in caplog.text) == (logger is not None)
    other = {"class_path": "TensorBoardLogger", "init_args": {"save_dir": ".", "name": "look"}}
    trainer = options["trainer"] | {"logger": other}
    with unchanged(folder):
        validate(FitOptions.compose(["trainer/cpu.yaml"], options | {"trainer": trainer} | last))
    assert list((tmp_path / "look" / "version_0").glob("events.*"))


def test_a_look_at_other_held_out_conversations_warns(store, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    options = cut(store)
    fit(FitOptions.compose(["trainer/cpu.yaml"], options))
    last = {"ckpt_path": "lightning_logs/version_0/checkpoints/last.ckpt"}
    options["trainer"]["limit_val_batches"] = 1

    def warned(**data) -> list[str]:
        with warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter("always")
            data = {"data": options["data"] | data}
            validate(FitOptions.compose(["trainer/cpu.yaml"], options | data | last))
        return [words for each in heard if "trained on" in (words := str(each.message))]

    assert not warned() and not warned(seed=1, batch_tokens=512) and not warned(store=os.path.relpath(store))
    (said,) = warned(validation=0.5, split_seed=3)
    assert "data.validation is 0.5 where it was 0.2 and data.split_seed is 3 where it was 0 (" in said
    shutil.copytree(store, "other")
    (said,) = warned(store="other")
    assert f"data.store is other where it was {store} (" in said and "version_0/config.yaml" in said


def test_a_logger_that_is_not_tensorboards_gets_the_scalars(store, tmp_path):
    """With all callbacks of a training; the folder has what it has with TensorBoard."""
    trainer = {
        "precision": "32-true",
        "max_steps": 2,
        "log_every_n_steps": 1,
        "logger": {"class_path": "CSVLogger", "init_args": {"save_dir": str(tmp_path), "name": "run", "version": ""}},
        "enable_progress_bar": False,
    }
    model, data = {"allocation": [1, 1]}, {"store": store, "validation": 0.2}
    fit(FitOptions.compose(["trainer/cpu.yaml"], {"model": model, "data": data, "trainer": trainer}))
    folder = tmp_path / "run"
    with (folder / "metrics.csv").open() as file:
        scalars = set(next(csv.reader(file)))
    assert {"train/loss", "train/learning_rate", "val/loss", "val/tau_tree", "val_drift_l2/depth_2"} <= scalars
    assert {"throughput/slots_per_second", "val_pos_acc_unroll/depth_1"} <= scalars
    written = {path.name for path in folder.iterdir()}
    assert written == {"metrics.csv", "hparams.yaml", "config.yaml", "checkpoints", "draft-best", "draft-last"}


def cut(store, **trainer):
    """Options of a training of a step, without validation."""
    short = {"precision": "32-true", "max_steps": 1, "limit_val_batches": 0, "enable_progress_bar": False}
    return {"model": {"allocation": [1]}, "data": {"store": store, "validation": 0.2}, "trainer": short | trainer}


@pytest.mark.parametrize(
    ("home", "name"), [("~", "TensorBoardLogger"), ("$HOME", "TensorBoardLogger"), ("~", "CSVLogger"), ("~", None)]
)
def test_a_training_below_the_home_folder_has_one_folder(store, tmp_path, monkeypatch, home, name):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    logger = {"class_path": name, "init_args": {"save_dir": f"{home}/runs", "name": "a", "version": ""}}
    where = {"logger": [logger]} if name else {"logger": False, "default_root_dir": f"{home}/runs/a"}
    options = cut(store, **where)
    fit(FitOptions.compose(["trainer/cpu.yaml"], options))
    assert [path.name for path in tmp_path.iterdir()] == ["home"]
    last = "home/runs/a/checkpoints/last.ckpt"
    places = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")}
    assert {last, "home/runs/a/draft-last", "home/runs/a/config.yaml"} <= places
    options["trainer"]["max_steps"] = 2
    go_on = {"ckpt_path": last.replace("home", home, 1)}
    fit(FitOptions.compose(["trainer/cpu.yaml"], options | go_on))
    assert torch.load(tmp_path / last, weights_only=True)["global_step"] == 2


@pytest.mark.parametrize("epochs", [1, -1])
def test_steps_that_epochs_do_not_have_are_named_when_the_training_begins(store, tmp_path, monkeypatch, epochs):
    monkeypatch.chdir(tmp_path)
    options = cut(store, limit_train_batches=3, max_steps=5, max_epochs=epochs, logger=False)
    options["data"]["batch_tokens"] = 256
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        fit(FitOptions.compose(["trainer/cpu.yaml"], options))
    said = [words for each in heard if (words := str(each.message)).startswith("trainer.max_steps")]
    reached = torch.load("checkpoints/last.ckpt", weights_only=True)["global_step"]
    ends = "trainer.max_steps is 5, but trainer.max_epochs is 1, which ends this training at step 3: give trainer."
    assert (said, reached) == (([f"{ends}max_epochs -1 for all steps"], 3) if epochs == 1 else ([], 5))


def test_a_config_on_a_full_disk_leaves_the_one_before(store, tmp_path, monkeypatch):
    """It may be all that tells how to go on."""
    logger = {"class_path": "CSVLogger", "init_args": {"save_dir": str(tmp_path), "name": "run", "version": ""}}
    trainer = {"precision": "32-true", "max_steps": 1, "logger": logger, "limit_val_batches": 0}
    options = {"model": {"allocation": [1]}, "data": {"store": store, "validation": 0.2}, "trainer": trainer}
    fit(FitOptions.compose(["trainer/cpu.yaml"], options))
    file = tmp_path / "run" / "config.yaml"
    before = file.read_bytes()
    assert yaml.safe_load(before)["model"]["allocation"] == [1]

    def full(self, *arguments, **options):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    go_on = {"ckpt_path": str(file.parent / "checkpoints" / "last.ckpt")}
    with pytest.raises(OSError, match="No space left"):
        fit(FitOptions.compose(["trainer/cpu.yaml"], options | {"trainer": trainer | {"max_steps": 2}} | go_on))
    assert file.read_bytes() == before and not [path for path in file.parent.iterdir() if "config" in path.name][1:]


def test_float16_with_scaled_gradients_is_refused(store):
    module = SpecialistTraining(store, [1])
    module._trainer = SimpleNamespace(
        strategy=None, precision="16-mixed", precision_plugin=SimpleNamespace(scaler=object())
    )
    with pytest.raises(ValueError, match=r"trainer\.precision is 16-mixed, whose first steps overflow by design"):
        module.on_fit_start()


def test_weights_and_biases_go_by_the_loggers_name():
    """Its options parse where wandb is not installed, too."""
    logger = {"class_path": "WandbLogger", "init_args": {"project": "poss", "save_dir": "runs/a", "offline": True}}
    model, data = {"allocation": [1]}, {"store": "any"}
    parsed = parse([], {"model": model, "data": data, "trainer": {"logger": logger}}).trainer["logger"]
    assert parsed["class_path"] == "lightning.pytorch.loggers.WandbLogger"
    assert parsed["init_args"].items() >= logger["init_args"].items()


def test_nobody_is_advised_to_sum_what_is_summed():
    """Lightning would, some fifty times a run of several processes."""
    words = inspect.getsource(result)
    assert "exists and is not empty." in inspect.getsource(model_checkpoint)  # as each training that goes on is told
    assert "It is recommended to use `self.log({" in words and "sync_dist=True)`" in words
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        _quieten()
        warnings.warn("It is recommended to use `self.log('val/loss', ..., sync_dist=True)` when logging", stacklevel=1)
        warnings.warn("Checkpoint directory run/checkpoints exists and is not empty.", stacklevel=1)
        warnings.warn("another", stacklevel=1)
    assert [str(each.message) for each in heard] == ["another"]


def test_a_log_file_gets_a_line_every_so_many_steps(inputs, caplog, monkeypatch, tmp_path):
    caplog.set_level("INFO")
    monkeypatch.chdir(tmp_path)  # where config.yaml goes
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)  # `poss fit … | tee log`
    model = {"allocation": [2]}
    quiet = {"logger": False, "enable_checkpointing": False, "callbacks": None, "limit_val_batches": 0}
    steps = {"max_steps": 4, "log_every_n_steps": 2, "accelerator": "cpu", "precision": "32-true"}
    data = {"store": str(inputs / "store"), "validation": 0.2, "batch_tokens": 64}
    fit(FitOptions(model=model, data=data, trainer=quiet | steps | {"enable_progress_bar": False}))
    lines = [record.getMessage() for record in caplog.records if record.getMessage().startswith("step ")]
    assert [line.split(":")[0] for line in lines] == ["step 0 of 4", "step 2 of 4", "step 4 of 4"]
    assert all("loss " in line and "steps/s" in line for line in lines[1:])
