"""A training that is done once: begun, gone on with after a kill, and not done again."""

import ctypes
import io
import os
import shutil
import signal
import subprocess
import sys
from argparse import ArgumentError
from contextlib import redirect_stdout, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import yaml
from omegaconf import OmegaConf

from poss_lightning import cli
from poss_lightning.configs import read
from poss_lightning.draft.config import DraftConfig
from poss_lightning.files import atomic, find_config, sha256
from poss_lightning.reports.scalars import EVENTS

SETTINGS, FINISHED = "fit.yaml", "finished"


def fit_once(folder: Path, configs: list[str], options: dict) -> Path:
    """Train as `poss fit --config ...` does, and return the folder of the draft.

    Beside it lie the TensorBoard file and `fit.yaml`, with which `poss fit --config CONFIGS --config fit.yaml` does the
    same. Checkpoints, there to go on from, are removed at the end. On several devices it is a process of its own.

    Args:
        folder: of this training.
        configs: YAML files, by path or by their name in conf/.
        options: on top of them, nested as they are.

    Raises:
        ValueError: the folder holds a draft or a checkpoint of other settings, or one on several devices failed.
    """
    after, digests = f"# after {' '.join(configs)}\n", [sha256(find_config(name))[:12] for name in configs]
    plain = after + yaml.safe_dump(options, sort_keys=True)  # as it was before it had digests
    settings = plain.replace(after, f"{after}# whose digests begin with {' '.join(digests)}\n", 1)
    note, finished, last = folder / SETTINGS, folder / FINISHED, folder / "checkpoints" / "last.ckpt"
    draft = folder / "draft-last"
    if note.exists() and note.read_text() not in (settings, plain):
        if has_outputs(folder):
            raise ValueError(
                f"{folder} was trained with other settings, or with configs that have changed since: see what {note} "
                "has; choose another folder or remove it"
            )
        for events in folder.glob(EVENTS):  # else what those settings logged counts as this training's
            events.unlink()
    if not finished.exists():
        with atomic(note) as path:
            path.write_text(settings)
        going_on = ["--ckpt_path", str(last)] if last.exists() else []
        place = {"save_dir": folder.parent, "name": folder.name, "version": ""}
        logger = [f"--trainer.logger.{name}={value}" for name, value in place.items()]
        logger = ["--trainer.logger=TensorBoardLogger", *logger]
        arguments = [*_configs(configs, note), *logger, *going_on]
        if option("trainer.devices", configs, options) == 1:
            cli.run("fit", arguments)
        else:
            _fit_apart(arguments)
        if not draft.is_dir():
            raise ValueError(f"{folder} has no {draft.name}: DraftFolders must be among the callbacks")
        finished.touch()
        shutil.rmtree(last.parent, ignore_errors=True)
    return draft


def has_outputs(folder: Path) -> bool:
    """Whether a training left anything to go on with, or to keep: a draft, a checkpoint."""
    return any(any(folder.glob(name)) for name in ("draft-best", "draft-last", "checkpoints/*", FINISHED))


def dry_run(configs: list[str], options: dict) -> DraftConfig | None:
    """The draft that `fit_once` would train, once its settings are parsed, its data opened and its model made.

    None where the target makes features online: only the settings are parsed, for it would have to be loaded.

    Raises:
        OSError, ValueError: as `poss fit` does before its first step.
    """
    from poss_lightning.features.datamodule import FeatureData  # slow to import, and a sweep may only sum up
    from poss_lightning.training.module import SpecialistTraining

    with TemporaryDirectory() as place:
        note = Path(place) / SETTINGS
        note.write_text(yaml.safe_dump(options))
        try:
            given = parsed("fit", _configs(configs, note))
        except ArgumentError as error:
            raise ValueError(str(error).replace(str(note), "its own options")) from error
    if given["model"]["allocation"] is None:
        raise ValueError("model has no allocation, e.g. [2, 2, 2]")
    if (data := given["data"])["corpus"] and not data["store"]:
        return None
    return SpecialistTraining(FeatureData(**data).source, **given["model"]).draft.config


def parsed(command: str, arguments: list[str]) -> dict:
    """A command's options, defaults included, as its own parser takes them; nothing is run.

    Raises:
        ArgumentError, ValueError: it does not take them.
    """
    said = io.StringIO()
    with redirect_stdout(said), suppress(SystemExit):
        cli.run(command, [*arguments, "--print_config"])
    return yaml.safe_load(said.getvalue())


def option(name: str, configs: list[str], options: dict) -> Any:
    """An option of `fit_once`, for example trainer.devices, as the last that names it has it; None where none does.

    What `poss fit` itself reads first, conf/trainer/base.yaml and defaults, does not count.
    """
    whole = OmegaConf.merge(*(read(find_config(config)) for config in configs), options)
    return OmegaConf.select(whole, name)


def _configs(configs: list[str], note: Path) -> list[str]:
    return [argument for name in [*configs, note] for argument in ("--config", find_config(str(name)))]


def _fit_apart(arguments: list[str]) -> None:
    """`poss fit` as a process of its own.

    Lightning starts the processes of the other devices with the command line of the first. Were that `poss sweep`, each
    of them would go on to measure. On Linux it is told to end, after its batch, when this process does, however that
    ends: else it would train on, while the same command, given again, begins to write into its folder.
    """
    own, libc = os.getpid(), ctypes.CDLL(None) if sys.platform == "linux" else None

    def end_with_parent() -> None:
        libc.prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG; Lightning passes it on to its other processes
        if os.getppid() != own:  # it ended before that
            os._exit(1)

    command = [sys.executable, "-m", "poss_lightning.cli", "fit", *arguments]
    done = subprocess.run(command, preexec_fn=end_with_parent if libc else None)
    if done.returncode:
        raise ValueError(f"the training ended with exit code {done.returncode}; it says above why")
