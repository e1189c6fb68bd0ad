"""A training as a function of its options: what sweeps, the demo and a user's Python call.

    fit("trainer/gpu.yaml", "draft/poss2.yaml", {"data": {"store": "runs/features"}})

is, option for option, what the terminal trains with

    poss fit --config trainer/gpu.yaml --config draft/poss2.yaml --data.store runs/features

A training's folder, which is that of its logger:

  config.yaml, hparams.yaml, events.out.tfevents.*   options and TensorBoard file
  checkpoints/last.ckpt, checkpoints/best-*.ckpt     to go on from
  draft-best/, draft-last/                           the draft, as decoding loads it
  fit.yaml, finished                                 of `fit_once`: what it was asked for, and a mark that it is done
"""

import ctypes
import gc
import os
import signal
import sys
from collections.abc import Mapping
from math import inf
from pathlib import Path
from subprocess import Popen
from typing import Any

import yaml

from poss_lightning.configs import locate_configs
from poss_lightning.draft.folder import CONFIG, WEIGHTS
from poss_lightning.draft.specialists import DraftConfig
from poss_lightning.files import atomic, find_config, remove, sha256
from poss_lightning.training.command import Training
from poss_lightning.training.folder import only_training
from poss_lightning.training.resume import FINISHED, has_outputs

OPTIONS, EVENTS = "fit.yaml", "events.out.tfevents.[0-9]*.*.[0-9]*"

Layer = str | Mapping[str, Any]  # a YAML file, by path or by its name in conf/; or options as in one


def fit(*layers: Layer) -> None:
    """Train: as `poss fit` with each of the layers as a `--config`, in their order.

    Raises:
        ArgumentError: an option that a part does not have, or a value that it does not take.
        FileExistsError: the logger's folder holds another training.
        OSError, ValueError: as the parts say.
    """
    Training("fit", command_line(*layers))


def validate(*layers: Layer) -> None:
    """Losses, pos-acc and drift of a checkpoint on the held-out conversations, by depth. Raises as `fit` does."""
    Training("validate", command_line(*layers))


def run_command(command: str, arguments: list[str]) -> None:
    """`poss fit` or `poss validate`, with the arguments of the terminal. Raises as `fit` does."""
    Training(command, arguments)


def command_line(*layers: Layer) -> list[str]:
    """The arguments of `poss fit` for these layers; options stand in the line itself, as YAML."""
    given = (
        layer if isinstance(layer, str) else yaml.safe_dump(dict(layer), default_flow_style=True, width=inf)
        for layer in layers
    )
    return locate_configs([word for each in given for word in ("--config", each)])


def compose(*layers: Layer) -> dict[str, Any]:
    """All options that a training of these layers has, as `poss fit --print_config` prints them. Raises as `fit`."""
    return Training("fit", command_line(*layers), until="parsed").printed()


def build(*layers: Layer) -> DraftConfig | None:
    """The draft that `fit` would train, once its data are opened and module and trainer are made. Raises as `fit`.

    None where the target makes features online: only the options are parsed, as the target would have to be loaded.
    """
    data = compose(*layers)["data"]
    if data["corpus"] and not data["store"]:
        return None
    return Training("fit", command_line(*layers), until="built").model.draft.config


# --- once ---


def fit_once(folder: Path, *layers: Layer) -> Path:
    """Train, resume after a kill, or do nothing where it is done; return the folder of the draft.

    Checkpoints, which serve to resume, are removed at the end. On several devices it is a process of its own.

    Args:
        folder: of this training.
        layers: as of `fit`.

    Raises:
        FileExistsError: the folder holds a training that this function did not begin.
        ValueError: it holds a draft or a checkpoint of other settings, or one on several devices failed.
    """
    noted = [
        {"config": layer, "sha256": sha256(find_config(layer))} if isinstance(layer, str) else dict(layer)
        for layer in layers
    ]
    settings = f"# what `poss fit` was given, in this order; config.yaml is what it comes to\n{yaml.safe_dump(noted)}"
    note, finished, last = folder / OPTIONS, folder / FINISHED, folder / "checkpoints" / "last.ckpt"
    draft = folder / "draft-last"
    if has_outputs(folder) and not note.exists():
        raise FileExistsError(f"{folder} holds a training that was begun by another command: choose another folder")
    if has_outputs(folder) and note.read_text() != settings:
        raise ValueError(
            f"{folder} was trained with other settings, or with configs that have changed since: see what {note} "
            "has; choose another folder or remove it"
        )
    if not finished.exists():
        with only_training(folder):
            if note.exists():
                _clear(folder, anew=not last.exists())
            with atomic(note) as path:
                path.write_text(settings)
        place = {"save_dir": str(folder.parent), "name": folder.name, "version": ""}
        more = {"trainer": {"logger": {"class_path": "TensorBoardLogger", "init_args": place}}}
        more |= {"ckpt_path": str(last)} if last.exists() else {}
        if compose(*layers, more)["trainer"]["devices"] == 1:
            fit(*layers, more)
            gc.collect()  # trainer and module refer to each other: a sweep's next training would stand beside them
        else:
            _fit_apart(command_line(*layers, more))
        if not draft.is_dir():
            raise ValueError(f"{folder} has no {draft.name}: DraftFolders must be among the callbacks")
        finished.touch()
    remove(last.parent, last.name, "epoch=*-step=*.ckpt")  # of one that was killed before it did, too
    return draft


def _clear(folder: Path, anew: bool) -> None:
    """Remove what a killed training left and this one would not write over; `anew`, all but its checkpoints."""
    (folder / "hparams.yaml").unlink(missing_ok=True)  # the logger writes it only where there is none, and this is torn
    if anew:
        remove(folder, EVENTS)  # else what was logged then counts as this training's
        for name in ("draft-best", "draft-last"):
            remove(folder / name, CONFIG, WEIGHTS)


def _fit_apart(arguments: list[str]) -> None:
    """`poss fit` as a process of its own.

    Lightning starts the processes of the other devices with the command line of the first. Were that `poss sweep`, each
    of them would go on to measure. On Linux it is told to end, after its batch, when this process does, however that
    ends: else it would train on, while the same command, started again, begins to write into its folder.
    """
    parent, libc = os.getpid(), ctypes.CDLL(None) if sys.platform == "linux" else None

    def end_with_parent() -> None:
        if libc:
            libc.prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG; Lightning passes it on to its other processes
        if os.getppid() != parent:  # it ended before that
            os._exit(1)

    command = [sys.executable, "-P", "-m", "poss_lightning.cli", "fit", *arguments]
    safe = os.environ | {"PYTHONSAFEPATH": "1"}  # -P of the processes that it starts: no module of the current folder
    training = Popen(command, env=safe, preexec_fn=end_with_parent if libc else None)
    try:
        code = training.wait()
    except KeyboardInterrupt:  # the terminal told both, and the training ends behind its step
        training.wait()
        raise
    if code:
        raise ValueError(f"the training ended with exit code {code}; it says above why")
