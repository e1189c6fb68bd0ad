"""The folder of a training: its name and place, what it holds, and that only one training writes there."""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import lightning
from jsonargparse import Namespace
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger

from poss_lightning.work import Work

LAST = Path("checkpoints", "last.ckpt")
FINISHED = "finished"  # mark of `fit_once`


def name_folder(options: Any) -> None:
    """Apply `--name NAME`: the folder runs/NAME of TensorBoard's logger, or the name of the loggers that are given."""
    if (name := options.name) is None:
        return
    trainer, options.name = options.trainer, None  # config.yaml has it as the logger's
    if trainer.logger in (None, True):
        place = Namespace(save_dir=trainer.default_root_dir or "runs", version="")
        trainer.logger = Namespace(class_path="lightning.pytorch.loggers.TensorBoardLogger", init_args=place)
    for logger in _loggers(options):
        if not hasattr(logger, "init_args"):
            raise ValueError(f"name is {name!r}, but trainer.logger is {logger}: a folder needs a logger")
        logger.init_args.name = name


def expand_home(options: Any) -> None:
    """Expand `~` in paths, which Lightning does for TensorBoard alone, and there it would expand `$NAME`, too."""
    places = [(logger.init_args, "save_dir") for logger in _loggers(options) if hasattr(logger, "init_args")]
    for owner, name in [(options, "ckpt_path"), (options.trainer, "default_root_dir"), *places]:
        if "$" in (place := str(owner.get(name) or "")):
            raise ValueError(f"{name} is {place!r}: a config takes nothing from the environment: write the path")
        if place:
            owner[name] = os.path.expanduser(place)


def _loggers(options: Any) -> list[Any]:
    given = options.trainer.logger
    return given if isinstance(given, list) else [given]


def folder_of(trainer: lightning.Trainer) -> Path:
    """The folder of a training. All processes must call this, as a logger broadcasts its name."""
    return Path(trainer.log_dir or trainer.default_root_dir)


def has_outputs(folder: Path) -> bool:
    """Whether a training left a draft or a checkpoint there."""
    return any(any(folder.glob(name)) for name in ("draft-best", "draft-last", "checkpoints/*", FINISHED))


def check_unused(folder: Path) -> None:
    """Raise FileExistsError where a training has left something."""
    last = folder / LAST
    if has_outputs(folder) and (last.is_file() or "SLURM_RESTART_COUNT" not in os.environ):  # a requeued job restarts
        other = "choose another --name"
        how = f"resume with --ckpt_path {last}, or {other}" if last.is_file() else f"remove it, or {other}"
        raise FileExistsError(f"{folder} holds a training already: {how}")


@contextmanager
def only_training(folder: Path) -> Iterator[None]:
    """Keep other processes from training in the folder: a second one gets ValueError before it writes anything."""
    work, new = Work(folder / "unfinished"), [place for place in (folder, *folder.parents) if not place.exists()]
    with work.exclusive(wait=False):
        try:
            yield
        finally:
            work.clear()
            for place in new:
                with suppress(OSError):  # it is not empty
                    place.rmdir()


def stay_in_folder(trainer: lightning.Trainer, checkpoint: str | Path) -> None:
    """Let a logger that numbers its folders use the one of the checkpoint to resume from, and not the next number."""
    folder = Path(checkpoint).resolve().parent.parent
    for logger in trainer.loggers:
        if not isinstance(logger, CSVLogger | TensorBoardLogger) or logger._version is not None:
            continue
        if Path(logger.root_dir or "").resolve() == folder.parent:
            number = re.fullmatch(r"version_(0|[1-9]\d*)", folder.name)
            logger._version = int(number[1]) if number else folder.name
