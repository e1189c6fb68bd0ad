"""The folder that a training writes: its name and place, and that no other training stands or writes there."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from jsonargparse import Namespace

from poss_lightning.training.resume import has_outputs
from poss_lightning.work import Work


def name_folder(options: Any) -> None:
    """Let `--name NAME` be the folder runs/NAME of TensorBoard's logger, or the name that another logger gives."""
    if (name := options.name) is None:
        return
    trainer, options.name = options.trainer, None  # config.yaml has it as the logger's
    if trainer.logger in (None, True):
        place = Namespace(save_dir=trainer.default_root_dir or "runs", version="")
        trainer.logger = Namespace(class_path="lightning.pytorch.loggers.TensorBoardLogger", init_args=place)
    for each in trainer.logger if isinstance(trainer.logger, list) else [trainer.logger]:
        if not hasattr(each, "init_args"):
            raise ValueError(f"name is {name!r}, but trainer.logger is {each}: a folder needs a logger")
        each.init_args.name = name


def expand_home(options: Any) -> None:
    """Put the home folder for `~`: Lightning does so for TensorBoard alone, where it would put in `$NAME` too."""
    loggers = options.trainer.logger if isinstance(options.trainer.logger, list) else [options.trainer.logger]
    places = [(logger.init_args, "save_dir") for logger in loggers if hasattr(logger, "init_args")]
    for owner, name in [(options, "ckpt_path"), (options.trainer, "default_root_dir"), *places]:
        if "$" in (place := str(owner.get(name) or "")):
            raise ValueError(f"{name} is {place!r}: a config takes nothing from the environment: write the path")
        if place:
            owner[name] = os.path.expanduser(place)


def check_unused(folder: Path) -> None:
    """Raise FileExistsError where a training has left something."""
    last = folder / "checkpoints" / "last.ckpt"
    if has_outputs(folder) and (last.is_file() or "SLURM_RESTART_COUNT" not in os.environ):  # a job may begin once more
        other = "choose another --name"
        how = f"resume with --ckpt_path {last}, or {other}" if last.is_file() else f"remove it, or {other}"
        raise FileExistsError(f"{folder} holds a training already: {how}")


@contextmanager
def only_training(folder: Path) -> Iterator[None]:
    """No second process trains in the folder: it raises ValueError before it writes anything."""
    work, new = Work(folder / "unfinished"), [place for place in (folder, *folder.parents) if not place.exists()]
    with work.exclusive(wait=False):
        try:
            yield
        finally:
            work.clear()
            for place in new:
                with suppress(OSError):  # it holds something
                    place.rmdir()
