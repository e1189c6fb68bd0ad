"""A training as a function of its options, for sweeps, the demo and a user's Python.

    fit("trainer/gpu.yaml", "draft/poss2.yaml", {"data": {"store": "runs/features"}})

trains with the same options as

    poss fit --config trainer/gpu.yaml --config draft/poss2.yaml --data.store runs/features

The folder of a training, which is that of its logger, holds

  config.yaml, hparams.yaml, events.out.tfevents.*   options and TensorBoard file
  checkpoints/last.ckpt                              to resume from
  draft-best/, draft-last/                           the draft, as decoding loads it
  fit.yaml, finished                                 of `fit_once`: what it was given, and a mark that it is done
"""

import gc
import os
import sys
from math import inf
from pathlib import Path
from subprocess import Popen
from typing import Any

import yaml

from poss_lightning.configs import ConfigSource, locate_configs
from poss_lightning.draft.config import DraftConfig
from poss_lightning.files import atomic, find_config, remove, sha256
from poss_lightning.training.command import Training
from poss_lightning.training.run_folder import AUTO, CHECKPOINTS, FINISHED, LAST, clear, has_outputs, only_training
from poss_lightning.training.stopping import forwarded_signals

OPTIONS = "fit.yaml"


def fit(*configs: ConfigSource) -> None:
    """Train as `poss fit` does with each of these as a `--config`, in their order.

    Raises:
        ArgumentError: an unknown option, or a value that it does not take.
        FileExistsError: the logger's folder holds a different training.
        OSError, ValueError: from the module, the data or the trainer.
    """
    Training("fit", command_line(*configs))


def command_line(*configs: ConfigSource) -> list[str]:
    """Return the arguments of `poss fit` for these configs; a mapping becomes YAML in the line itself."""
    values = (
        config if isinstance(config, str) else yaml.safe_dump(dict(config), default_flow_style=True, width=inf)
        for config in configs
    )
    return locate_configs([argument for value in values for argument in ("--config", value)])


def compose(*configs: ConfigSource) -> dict[str, Any]:
    """All options of a training with these configs, as `poss fit --print_config` prints them. Raises as `fit` does."""
    return Training("fit", command_line(*configs), until="parsed").printed()


def build(*configs: ConfigSource) -> DraftConfig | None:
    """Return the config of the draft that `fit` would train, after building all that it needs. Raises as `fit` does.

    None for online features, whose target would have to be loaded: then only the options are parsed.
    """
    data = compose(*configs)["data"]
    if data["corpus"] and not data["store"]:
        return None
    return Training("fit", command_line(*configs), until="built").model.draft.config


def fit_once(folder: Path, *configs: ConfigSource) -> Path:
    """Train in a folder, resume after a kill, or do nothing if it is finished; return the folder of the draft.

    Checkpoints are removed at the end. A training on several devices runs in a process of its own.

    Raises:
        FileExistsError: the folder holds a training that this function did not start.
        ValueError: it was started with other settings, or a training on several devices failed.
    """
    noted = [
        {"config": config, "sha256": sha256(find_config(config))} if isinstance(config, str) else dict(config)
        for config in configs
    ]
    settings = f"# what `poss fit` was given, in this order; config.yaml is what it comes to\n{yaml.safe_dump(noted)}"
    note, finished, last, draft = folder / OPTIONS, folder / FINISHED, folder / LAST, folder / "draft-last"
    if has_outputs(folder) and not note.exists():
        raise FileExistsError(f"{folder} holds a training that `poss fit` started: choose a different folder")
    if has_outputs(folder) and note.read_text() != settings:
        raise ValueError(
            f"{folder} was trained with other settings, or with configs that have changed since: see what {note} "
            "has; choose a different folder or remove it"
        )
    if not finished.exists():
        with only_training(folder, last):
            (folder / "hparams.yaml").unlink(missing_ok=True)  # a kill may have torn it, and no logger replaces it
            if note.exists() and not last.exists():
                clear(folder)
            with atomic(note) as path:
                path.write_text(settings)
        more = {"name": folder.name, "trainer": {"default_root_dir": str(folder.parent)}, "ckpt_path": AUTO}
        if compose(*configs, more)["trainer"]["devices"] == 1:
            fit(*configs, more)
            gc.collect()  # trainer and module refer to each other, and a sweep's next training needs their memory
        else:
            _fit_apart(command_line(*configs, more))
        if not draft.is_dir():
            raise ValueError(f"{folder} has no {draft.name}: drafts is null in the options of this training")
        finished.touch()
    remove(last.parent, *CHECKPOINTS)  # also where a kill came right after the mark
    return draft


def _fit_apart(arguments: list[str]) -> None:
    """Run `poss fit` as a process of its own.

    Lightning starts the processes of the other devices with the command line of the first. Were that `poss sweep`, each
    would sweep, too.
    """
    command = [sys.executable, "-P", "-m", "poss_lightning.cli", "fit", *arguments]
    safe = os.environ | {"PYTHONSAFEPATH": "1"}  # -P for the processes it starts: no modules of the current folder
    safe.pop("SLURM_NTASKS", None)  # else Lightning takes the sweep's tasks for this training's processes
    training = Popen(command, env=safe)
    with forwarded_signals(training):
        code = training.wait()
    if code:
        raise ValueError(f"the training ended with exit code {code}: see its message above")
