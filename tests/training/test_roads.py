"""The terminal, a sweep's cell and Python train with the same options."""

import random
from types import SimpleNamespace

import pytest
import yaml

from poss_lightning.files import conf_names
from poss_lightning.sweep import Sweep
from poss_lightning.training import fit as roads
from poss_lightning.training.callbacks import LastCheckpoint
from poss_lightning.training.command import Training
from poss_lightning.training.fit import command_line, compose, fit_once
from tests.support.command import run_in

CALLBACK = {"class_path": "poss_lightning.training.callbacks.Throughput"}
PROBE = {"class_path": "poss_lightning.evaluation.probe.Replay", "init_args": {"answers": 3}}
TENSORBOARD = {"class_path": "TensorBoardLogger", "init_args": {"save_dir": "runs", "name": "a"}}
OTHER = {"class_path": "TensorBoardLogger", "init_args": {"save_dir": "other", "version": 3}}
CSV = {"class_path": "lightning.pytorch.loggers.CSVLogger", "init_args": {"save_dir": "x"}}
VALUES = {
    "model.allocation": [[2], [1, 1], [3, 3]],
    "model.loss": [None, {"feature": 1, "acceptance": 1}, {"token": 0.1}, {"token": 1.0e-7, "topk": 2}],
    "model.betas": [[0.9, 0.999], [0.5, 0.5]],
    "model.learning_rate": [1.0e-5, 1, 3.0e-4],
    "model.start_from": [None, "embedded-hass", "7"],
    "data.store": ["runs/features", "a/b", "on"],
    "data.limit": [None, 9],
    "seed_everything": [5, True],
    "trainer.max_steps": [7, 20],
    "trainer.val_check_interval": ["${trainer.max_steps}", 5, 0.5],
    "trainer.logger": [None, False, TENSORBOARD, OTHER, CSV],
    "trainer.callbacks": [None, [CALLBACK], [PROBE, CALLBACK]],
    "replay": [None, PROBE],
    "trainer.callbacks+": [[PROBE], CALLBACK],
    "trainer.devices": [1, 1, 1, 2, "auto"],
    "trainer.precision": ["auto", "bf16-mixed"],
}
CONFIGS = sorted(name for name in conf_names() if name.startswith(("draft/", "trainer/", "data/")) or "/" not in name)


def some_options(draw: random.Random) -> dict:
    """A few options, nested or with dots, one of them in each group."""
    options: dict = {}
    for name in draw.sample(sorted(VALUES), draw.randint(0, 5)):
        value, (group, _, rest) = draw.choice(VALUES[name]), name.partition(".")
        if not rest or ("${" not in str(value) and draw.random() < 0.3 and group not in options):
            options[name] = value
        elif not any(given.startswith(f"{group}.") for given in options):
            options.setdefault(group, {})[rest] = value
    return options


@pytest.fixture
def trained(monkeypatch) -> list[dict]:
    """The options of what trains, where nothing does: here, and in processes of their own."""
    seen: list[dict] = []

    def start(command, *, env, **options) -> SimpleNamespace:
        assert "SLURM_NTASKS" not in env  # Lightning would take them for the processes of this training
        seen.append(Training("fit", command[command.index("fit") + 1 :], until="parsed").printed())
        return SimpleNamespace(wait=lambda: 0)

    monkeypatch.setenv("SLURM_NTASKS", "1")
    monkeypatch.setattr(roads, "fit", lambda *configs: seen.append(compose(*configs)))
    monkeypatch.setattr(roads, "Popen", start)
    return seen


@pytest.mark.parametrize("number", [3, pytest.param(200, marks=pytest.mark.nightly)])
def test_everything_trains_with_the_options_of_print_config(number, tmp_path, trained):
    """Random options over every config and random others, some of which set the same."""
    draw = random.Random(number)
    for i in range(number):
        (place := tmp_path / str(i)).mkdir()
        (place / "first.yaml").write_text("model: {allocation: [4]}")
        configs = [str(place / "first.yaml"), *CONFIGS[i::number], *draw.sample(CONFIGS, draw.randint(0, 2))]
        common, special = some_options(draw), some_options(draw)
        seed = {"seed_everything": 11, "data": {"seed": 11}}
        files = [place / f"{i}.yaml" for i in range(3)]
        for file, options in zip(files, (seed, common, special), strict=True):
            file.write_text(yaml.safe_dump(options))
        words = [word for name in (*configs, *files) for word in ("--config", name)]
        expected = yaml.safe_load(run_in(place, "fit", *words, "--print_config").out)
        assert compose(*configs, seed, common, special) == expected, (configs, common, special)
        assert compose(*configs, *map(str, files)) == expected

        own = Sweep({"a": special}, [11], fit=common | {"config": configs}, replay={"store": "x"})
        (cell,) = own.cells(place / "experiment")
        assert cell.training == expected
        with pytest.raises(ValueError, match="has no draft-last"):
            fit_once(cell.folder, *cell.configs)
        cell_options = trained.pop()
        for options in (cell_options, expected):
            del options["trainer"]["logger"], options["trainer"]["default_root_dir"]
        assert cell_options.pop("ckpt_path") == "auto" and expected.pop("ckpt_path") is None
        assert cell_options == expected


WANDB, MLFLOW = ({"class_path": f"lightning.pytorch.loggers.{name}Logger"} for name in ("Wandb", "MLFlow"))


@pytest.mark.parametrize(
    "logger",
    [None, True, "CSVLogger", CSV, OTHER, "WandbLogger", [WANDB], [WANDB, OTHER], [CSV, MLFLOW], MLFLOW, False],
)
def test_a_name_gives_the_folder_whatever_the_logger(logger):
    """Which is that of the first logger, as Lightning's trainer has it."""
    options = {} if logger is None else {"trainer": {"logger": logger}}
    trainer = compose("draft/hass.yaml", {"name": "a"}, options)["trainer"]
    if logger is False:
        assert trainer["logger"] is False
        return
    first, *others = trainer["logger"]
    assert first["class_path"].endswith(("TensorBoardLogger", "CSVLogger"))
    assert [first["init_args"][name] for name in ("save_dir", "name", "version")] == ["runs", "a", ""]
    assert {each["init_args"]["save_dir"] for each in others} <= {"runs/a"}
    assert {each["init_args"].get("name", "a") for each in others} == ({"a"} if others else set())
    if logger == "CSVLogger":
        assert not others and first["class_path"].endswith(logger)


def test_without_a_name_every_training_gets_a_new_folder():
    """No logger writes drafts into the current one."""
    for logger in ("CSVLogger", "WandbLogger", [WANDB]):
        given = compose("draft/hass.yaml", {"trainer": {"logger": logger}})["trainer"]["logger"]
        first, *others = given if isinstance(given, list) else [given]
        assert [first["init_args"][name] for name in ("save_dir", "name", "version")] == [".", "lightning_logs", None]
        assert not {"save_dir", "name"} & {name for each in others for name in each["init_args"]}


def test_callbacks_of_a_user_replace_none_that_a_training_needs(store, tmp_path):
    """But may be one of their kinds, in its place; and null leaves one out."""
    stops = {"class_path": "EarlyStopping", "init_args": {"monitor": "val/tau_tree"}}
    more = {"class_path": "poss_lightning.training.callbacks.LastCheckpoint", "init_args": {"every_n_train_steps": 7}}
    base = {"model": {"allocation": [1]}, "data": {"store": store, "validation": 0.2}}
    for listed, without, expected in (
        (stops, {}, ["EarlyStopping", "Replay", "DraftFolders", "LastCheckpoint", "StepBar"]),
        ([stops, more], {}, ["EarlyStopping", "LastCheckpoint", "Replay", "DraftFolders", "StepBar"]),
        (None, {"replay": None, "checkpoint": None}, ["DraftFolders", "StepBar"]),
    ):
        options = base | without | {"trainer": {"callbacks": listed, "logger": False, "enable_checkpointing": True}}
        trainer = Training("fit", command_line("trainer/cpu.yaml", options), until="built").trainer
        names = [type(each).__name__ for each in trainer.callbacks]
        ours = [name for name in names if name in {*expected, "Replay", "LastCheckpoint"}]
        assert sorted(ours) == sorted(expected)
        kept = [each.every for each in trainer.callbacks if isinstance(each, LastCheckpoint)]
        assert kept == ([] if without else [7] if isinstance(listed, list) else [0])
