"""A training that is done once: begun, gone on with after a kill, and not done again."""

import ctypes
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf

from poss_lightning import cli
from poss_lightning.files import atomic, named, sha256

SETTINGS, FINISHED = "fit.yaml", "finished"


def fitted(folder: Path, configs: list[str], options: dict) -> Path:
    """Train as `poss fit --config ...` does, and return the folder of the draft.

    Beside it lie the TensorBoard file and `fit.yaml`, with which `poss fit --config CONFIGS --config fit.yaml` does the
    same. Checkpoints, there to go on from, are removed at the end. On several devices it is a process of its own.

    Args:
        folder: of this training.
        configs: YAML files, by path or by their name in conf/.
        options: on top of them, nested as they are.

    Raises:
        ValueError: the folder holds a training of other settings, or one on several devices failed.
    """
    after, digests = f"# after {' '.join(configs)}\n", [sha256(named(name))[:12] for name in configs]
    plain = after + yaml.safe_dump(options, sort_keys=True)  # as it was before it had digests
    settings = plain.replace(after, f"{after}# whose digests begin with {' '.join(digests)}\n", 1)
    note, finished, last = folder / SETTINGS, folder / FINISHED, folder / "checkpoints" / "last.ckpt"
    draft = folder / "draft-last"
    if note.exists() and note.read_text() not in (settings, plain):
        raise ValueError(
            f"{folder} was trained with other settings, or with configs that have changed since: see what {note} has; "
            "choose another folder or remove it"
        )
    if not finished.exists():
        with atomic(note) as path:
            path.write_text(settings)
        files = [argument for name in configs for argument in ("--config", named(name))]
        going_on = ["--ckpt_path", str(last)] if last.exists() else []
        place = {"save_dir": folder.parent, "name": folder.name, "version": ""}
        logger = [f"--trainer.logger.{name}={value}" for name, value in place.items()]
        logger = ["--trainer.logger=TensorBoardLogger", *logger]
        arguments = [*files, "--config", str(note), *logger, *going_on]
        if option("trainer.devices", configs, options) == 1:
            cli.run("fit", arguments)
        else:
            _fit_apart(arguments)
        if not draft.is_dir():
            raise ValueError(f"{folder} has no {draft.name}: DraftFolders must be among the callbacks")
        finished.touch()
        shutil.rmtree(last.parent, ignore_errors=True)
    return draft


def option(name: str, configs: list[str], options: dict) -> Any:
    """An option of `fitted`, for example trainer.devices, as the last that names it has it; None where none does.

    What `poss fit` itself reads first, conf/trainer/base.yaml and defaults, does not count.
    """
    whole = OmegaConf.merge(*(OmegaConf.load(named(config)) for config in configs), options)
    return OmegaConf.select(whole, name)


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
