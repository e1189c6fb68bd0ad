"""The folder of a training: where it is, what it holds, and that only one training writes there."""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import lightning
from jsonargparse import Namespace
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment

from poss_lightning.draft.folder import CONFIG, WEIGHTS
from poss_lightning.files import remove
from poss_lightning.work import Work

LAST = Path("checkpoints", "last.ckpt")
AUTO = "auto"  # of ckpt_path: the folder's last.ckpt, if there is one
FINISHED = "finished"  # mark of `fit_once`
TENSORBOARD = "lightning.pytorch.loggers.TensorBoardLogger"
HERE, UNNAMED = ".", "lightning_logs"  # where it writes by default (conf/trainer/base.yaml)
EVENTS = "events.out.tfevents.[0-9]*.*.[0-9]*"
CHECKPOINTS = (LAST.name, "epoch=*-step=*.ckpt")  # as ours and Lightning's callbacks name them

logger = logging.getLogger(__name__)


def place_training(options: Any) -> Path | None:
    """Return the folder of a training, if it is known before it begins, and let its loggers write there.

    If there are loggers, the first becomes one that writes files, since its folder is that of Lightning's trainer.
    Raises ValueError if `ckpt_path` is auto, but the folder would be a new one each time.
    """
    trainer = options.trainer
    listed = trainer.logger if isinstance(trainer.logger, list) else [trainer.logger]
    loggers = [_tensorboard() if each in (None, True) else each for each in listed if each is not False]
    writers = [each for each in loggers if each.class_path.endswith(("TensorBoardLogger", "CSVLogger"))]
    others = [each for each in loggers if each not in writers]
    is_new = bool(loggers) and (not writers or writers[0].init_args.version is None)  # each time
    folder = _known_folder(options, is_new)
    options.name = None  # config.yaml has it as the logger's
    place = None if folder and _is_written(folder, writers) else folder  # that loggers must be told
    if place is not None or (others and not writers):
        writers = writers or [_tensorboard()] * bool(others)
        trainer.logger = [*writers, *others] or False
    for logger in writers:
        if place is not None:
            logger.init_args.update(Namespace(save_dir=str(place.parent), name=place.name, version=""))
        elif logger.init_args.save_dir == HERE:
            logger.init_args.save_dir = trainer.default_root_dir or HERE
    for args in (each.init_args for each in others):
        for name, default, value in (("save_dir", HERE, place), ("name", UNNAMED, place and place.name)):
            if name in args and value is not None:
                args[name] = str(value)
            elif args.get(name) == default:  # of the default logger
                del args[name]
    return folder


def _known_folder(options: Any, is_new: bool) -> Path | None:
    """Return runs/NAME; without a name the folder of the checkpoint that a training resumes, or of a job of SLURM.

    The config.yaml of a training that was moved or copied names the old folder, which may hold a different training.
    """
    name, resumed = options.name, Path(os.path.abspath(options.ckpt_path or ""))
    job = os.environ.get("SLURM_JOB_ID") if SLURMEnvironment.detect() else None
    if name is None and options.ckpt_path and resumed.parent.name == LAST.parent.name:
        return resumed.parents[1]
    if name is None and job and is_new:  # a requeued job keeps this one
        name = f"slurm-{job}.{os.environ.get('SLURM_STEP_ID', 0)}"
    if name is not None:
        return Path(options.trainer.default_root_dir or "runs", name)
    if options.ckpt_path == AUTO and is_new:
        raise ValueError(f"ckpt_path is {AUTO}, but every training gets a new folder: give --name")
    return None


def _is_written(folder: Path, writers: list[Namespace]) -> bool:
    """Whether the loggers write to a folder as they are."""
    args = [each.init_args for each in writers if each.init_args.version == ""]
    return bool(args) and all(Path(os.path.abspath(each.save_dir), each.name) == folder.absolute() for each in args)


def _tensorboard() -> Namespace:
    return Namespace(class_path=TENSORBOARD, init_args=Namespace(save_dir=HERE, name=UNNAMED, version=None))


def folder_of(trainer: lightning.Trainer) -> Path:
    """Return the folder of a training. All processes must call this, as a logger broadcasts its name."""
    return Path(trainer.log_dir or trainer.default_root_dir)


def has_outputs(folder: Path) -> bool:
    """Return whether a training left a draft or a checkpoint there."""
    return any(any(folder.glob(name)) for name in ("draft-best", "draft-last", "checkpoints/*", FINISHED))


def was_killed_early(folder: Path) -> bool:
    """Return whether a training there has no checkpoint yet, or was killed before its first."""
    return _work(folder).folder.is_dir() and not (folder / LAST).is_file()


def check_unused(folder: Path, checkpoint: str | Path | None) -> None:
    """Raise FileExistsError where a training has left something, unless `checkpoint` is its own."""
    if not has_outputs(folder):
        return
    if checkpoint and folder.resolve() in [each.resolve() for each in Path(os.path.abspath(checkpoint)).parents[:2]]:
        return
    last, other = folder / LAST, "choose another --name"
    how = f"resume with --ckpt_path {last}, or {other}" if last.is_file() else f"remove it, or {other}"
    which = f"a training already, and not that of {checkpoint}" if checkpoint else "a training already"
    raise FileExistsError(f"{folder} holds {which}: {how}")


def check_trainer_folder(trainer: lightning.Trainer) -> None:
    """Raise FileExistsError where a trainer that begins, or resumes, would overwrite a different training."""
    folder, dry = folder_of(trainer), trainer.fast_dev_run  # pyright: ignore[reportAttributeAccessIssue]
    if trainer.is_global_zero and (trainer.ckpt_path or trainer.global_step == 0) and not dry:
        check_unused(folder, trainer.ckpt_path)


@contextmanager
def only_training(folder: Path, checkpoint: str | Path | None = None) -> Iterator[None]:
    """Keep other processes from training in the folder, and start over where one was killed early.

    Raises:
        FileExistsError: the folder holds a different training than that of the checkpoint.
        ValueError: another process trains there.
    """
    work, killed = _work(folder), was_killed_early(folder)
    new = [parent for parent in (folder, *folder.parents) if not parent.exists()]
    with work.exclusive(wait=False):
        try:
            if killed and has_outputs(folder) and not (folder / LAST).is_file():
                logger.info("%s: a training was killed here before its first checkpoint: starting over", folder)
                clear(folder)
            check_unused(folder, checkpoint)
            yield
        finally:
            work.clear()
            for parent in new:
                with suppress(OSError):  # it is not empty
                    parent.rmdir()


def clear(folder: Path) -> None:
    """Remove all that a training wrote: its scalars would count as the next one's."""
    for name in ("draft-best", "draft-last"):
        remove(folder / name, CONFIG, WEIGHTS)
    remove(folder / LAST.parent, *CHECKPOINTS)  # Lightning's may be written before the first last one
    remove(folder, EVENTS)


def _work(folder: Path) -> Work:
    return Work(folder / "unfinished")
