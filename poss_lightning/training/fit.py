"""A training as a function of its options: `poss fit`, the demo, sweeps and a user's Python all call it.

    fit(FitOptions.compose(["trainer/gpu.yaml", "draft/poss2.yaml"], {"data": {"store": "runs/features"}}))

A training's folder, which is that of its logger:

  config.yaml, hparams.yaml, events.out.tfevents.*   options and TensorBoard file
  checkpoints/last.ckpt, checkpoints/best-*.ckpt     to go on from
  draft-best/, draft-last/                           the draft, as decoding loads it
  fit.yaml, finished                                 of `fit_once`: the options, and a mark that it is done
"""

import ctypes
import gc
import logging
import os
import shutil
import signal
import sys
import threading
import warnings
from argparse import ArgumentError
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field, fields, replace
from functools import reduce
from pathlib import Path
from subprocess import Popen
from typing import Any

import yaml
from lightning import Trainer
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI, SaveConfigCallback
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.exceptions import SIGTERMException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from poss_lightning.configs import config_files, explain, merge_options, read_config
from poss_lightning.draft.config import DraftConfig
from poss_lightning.features.datamodule import FeatureData
from poss_lightning.files import atomic, conf, find_config, sha256
from poss_lightning.machine import choose_precision
from poss_lightning.ranges import Seed, refuse_numbers
from poss_lightning.terminal import is_verbose
from poss_lightning.training.callbacks import StepLines
from poss_lightning.training.export import load_checkpoint
from poss_lightning.training.help import PRECISION, choose_help
from poss_lightning.training.module import SpecialistTraining
from poss_lightning.training.resume import folder_of, stay_in_folder
from poss_lightning.training.strategies import prepare
from poss_lightning.work import Work

BASE = "trainer/base.yaml"  # what every training reads first
OPTIONS, FINISHED, EVENTS = "fit.yaml", "finished", "events.out.tfevents.*"
CONFIG = "config.yaml"
COMMANDS = ("fit", "validate", "test")
HELD_OUT = ("store", "corpus", "validation", "split_seed")  # of the data: what decides which conversations are

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class FitOptions:
    """What a training is made of. Classes stand as `class_path` and `init_args`, as in YAML.

    Args:
        model: arguments of `SpecialistTraining`, but its store.
        data: arguments of `FeatureData`.
        trainer: arguments of `lightning.Trainer`.
        seed_everything: of new random weights; `seed` of `data` is of order and noise.
        ckpt_path: a checkpoint to go on from, or to measure.
        weights_only: whether a checkpoint is read without unpickling.
    """

    model: dict[str, Any] = field(default_factory=dict)
    data: dict[str, Any] = field(default_factory=dict)
    trainer: dict[str, Any] = field(default_factory=dict)
    seed_everything: Seed | bool = 0
    ckpt_path: str | None = None
    weights_only: bool | None = True

    @classmethod
    def compose(cls, configs: Sequence[str] = (), options: dict[str, Any] | None = None) -> "FitOptions":
        """conf/trainer/base.yaml, then each of the YAML files, by path or by name in conf/, then `options`.

        `${trainer.max_steps}` stands for another option that one of these gives, and `callbacks+` appends to a list.

        Raises:
            FileNotFoundError: no such config.
            ValueError: a config is no YAML, or an option is none of these.
        """
        layers = [read_config(find_config(name)) for name in (BASE, *configs)] + [options or {}]
        try:
            merged: Any = OmegaConf.to_container(OmegaConf.create(reduce(merge_options, layers, {})), resolve=True)
        except OmegaConfBaseException as error:
            raise ValueError(f"{', '.join(configs)}: {str(error).splitlines()[0]}") from error
        known = [option.name for option in fields(cls)]
        if unknown := [name for name in merged if name not in known]:
            raise ValueError(f"a training has no option {unknown[0]!r}; it has {', '.join(known)}")
        return cls(**merged)


def fit(options: FitOptions) -> None:
    """Train.

    Raises:
        ArgumentError: an option that a part does not have, or a value that it does not take.
        FileExistsError: the logger's folder holds another training.
        OSError, ValueError: as the parts say.
    """
    _Cli("fit", options)


def validate(options: FitOptions) -> None:
    """Losses, pos-acc and drift of a checkpoint on the held-out conversations, by depth. Raises as `fit` does."""
    _Cli("validate", options)


def test(options: FitOptions) -> None:
    """The same as `validate`, under the same names. Raises as `fit` does."""
    _Cli("test", options)


def run_command(command: str, arguments: list[str]) -> None:
    """`poss fit`, `validate` or `test`, with the arguments of the terminal. Raises as `fit` does."""
    _Cli(command, arguments)


# --- once ---


def fit_once(folder: Path, configs: list[str], options: dict[str, Any]) -> Path:
    """Train, go on after a kill, or do nothing where it is done; return the folder of the draft.

    `poss fit --config CONFIGS --config fit.yaml` does the same, with the `fit.yaml` that is left in the folder.
    Checkpoints, which serve to go on, are removed at the end. On several devices it is a process of its own.

    Args:
        folder: of this training.
        configs: YAML files, by path or by name in conf/.
        options: on top of them, nested.

    Raises:
        ValueError: the folder holds a draft or a checkpoint of other settings, or one on several devices failed.
    """
    after, digests = f"# after {' '.join(configs)}\n", [sha256(find_config(name))[:12] for name in configs]
    settings = f"{after}# whose digests begin with {' '.join(digests)}\n" + yaml.safe_dump(options, sort_keys=True)
    note, finished, last = folder / OPTIONS, folder / FINISHED, folder / "checkpoints" / "last.ckpt"
    draft = folder / "draft-last"
    if note.exists() and note.read_text() != settings:
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
        # Lightning's logger writes it only where there is none, and a killed one may have left half of it.
        (folder / "hparams.yaml").unlink(missing_ok=True)
        place = {"save_dir": str(folder.parent), "name": folder.name, "version": ""}
        logger = {"class_path": "TensorBoardLogger", "init_args": place}
        more = {"trainer": {"logger": logger}, "ckpt_path": str(last) if last.exists() else None}
        composed = FitOptions.compose(configs, merge_options(options, more))
        if composed.trainer.get("devices") == 1:
            _Cli("fit", composed, anew=True)
            gc.collect()  # trainer and module refer to each other: a sweep's next training would stand beside them
        else:
            _fit_apart(composed, folder)
        if not draft.is_dir():
            raise ValueError(f"{folder} has no {draft.name}: DraftFolders must be among the callbacks")
        finished.touch()
    shutil.rmtree(last.parent, ignore_errors=True)  # of one that was killed before it did, too
    return draft


def has_outputs(folder: Path) -> bool:
    """Whether a training left anything to go on with, or to keep: a draft, a checkpoint."""
    return any(any(folder.glob(name)) for name in ("draft-best", "draft-last", "checkpoints/*", FINISHED))


def dry_run(configs: list[str], options: dict[str, Any]) -> DraftConfig | None:
    """The draft that `fit_once` would train, once its options are parsed, its data opened and its model made.

    None where the target makes features online: only the options are parsed, as the target would have to be loaded.

    Raises:
        ArgumentError, OSError, ValueError: as `fit` does before its first step.
    """
    parsed = parse(configs, options)
    if parsed.data["corpus"] and not parsed.data["store"]:
        return None
    return SpecialistTraining(FeatureData(**parsed.data).source, **parsed.model).draft.config


def parse(configs: list[str], options: dict[str, Any]) -> FitOptions:
    """The options that `fit_once` would train with, all defaults included.

    Raises:
        ArgumentError: an option that a part does not have, or a value that it does not take; it names the config.
    """
    composed = FitOptions.compose(configs, options)
    parser = LightningArgumentParser(parser_mode="omegaconf+", exit_on_error=False)
    _add_parts(parser)
    try:
        parsed = parser.parse_object({part: getattr(composed, part) for part in ("model", "data", "trainer")})
    except ArgumentError as error:
        raise explain(error, map(find_config, configs), _types(parser)) from error
    _check_numbers(vars(composed), parsed)
    return replace(composed, **{part: parsed[part].as_dict() for part in ("model", "data", "trainer")})


def _fit_apart(options: FitOptions, folder: Path) -> None:
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

    composed = folder / f".{OPTIONS}"
    with atomic(composed) as path:
        path.write_text(yaml.safe_dump(asdict(options)))
    command = [sys.executable, "-m", "poss_lightning.cli", "fit", "--config", str(composed)]
    training = Popen(command, preexec_fn=end_with_parent if libc else None)
    try:
        code = training.wait()
    except KeyboardInterrupt:  # the terminal told both, and the training ends behind its step
        training.wait()
        raise
    if code:
        raise ValueError(f"the training ended with exit code {code}; it says above why")
    composed.unlink()


# --- how Lightning runs it ---


def _add_parts(parser: LightningArgumentParser) -> None:
    """Arguments of model, data and trainer, in the order of the help: what is ours goes first."""
    parser.add_lightning_class_args(SpecialistTraining, "model")
    parser.add_lightning_class_args(FeatureData, "data")
    parser.add_class_arguments(
        Trainer, "trainer", skip={"precision"}, fail_untyped=False, instantiate=False, sub_configs=True
    )
    trainer = (parser.groups or {})["trainer"]
    trainer.add_argument("--trainer.precision", type=str, default="auto", help=PRECISION)
    parser.set_defaults({"trainer.use_distributed_sampler": False})  # FeatureData shares its batches out itself
    parser.link_arguments("data.source", "model.store", apply_on="instantiate")


def _types(parser: LightningArgumentParser) -> dict[str, Any]:
    """The options of a parser, and their types."""
    return {action.dest: getattr(action, "_typehint", action.type) for action in parser._actions}


def _check_numbers(options: Mapping[str, Any], parts: Any) -> None:
    """Raise ValueError for a number of the model, of the data or of `FitOptions` that is out of its range."""
    refuse_numbers(FitOptions, options)
    for name, part in (("model", SpecialistTraining), ("data", FeatureData)):
        refuse_numbers(part, vars(parts[name]), f"{name}.")


def _expand_home(parsed: Any) -> None:
    """Put the home folder for `~`, and values for `$NAME`: Lightning does so for TensorBoard alone."""
    loggers = parsed.trainer.logger if isinstance(parsed.trainer.logger, list) else [parsed.trainer.logger]
    places = [(logger.init_args, "save_dir") for logger in loggers if hasattr(logger, "init_args")]
    for options, name in [(parsed, "ckpt_path"), (parsed.trainer, "default_root_dir"), *places]:
        if options.get(name):
            options[name] = os.path.expanduser(os.path.expandvars(options[name]))


def _place(value: Any) -> Any:
    """A path as it is from everywhere, and other values as they are."""
    return os.path.abspath(value) if isinstance(value, str) else value


def _leave_trainings(trainer: Trainer) -> None:
    """Drop loggers whose folder is a training's: what a later look logs there would count as that training's."""
    for each in trainer.loggers:
        if isinstance(each, CSVLogger | TensorBoardLogger) and has_outputs(Path(each.log_dir)):
            trainer.loggers = [other for other in trainer.loggers if other is not each]
            if trainer.is_global_zero:
                how = "to log this, give the logger another name or save_dir"
                logger.info("%s is a training's, so nothing is logged there; %s", each.log_dir, how)


class _Cli(LightningCLI):
    """Runs `fit`, `validate` or `test`: from options, or from arguments of the terminal.

    Args:
        command: one of `COMMANDS`.
        options: the training's.
        anew: whether it may begin in a folder that holds outputs which nobody can go on with.
    """

    def __init__(self, command: str, options: FitOptions | list[str], anew: bool = False):
        self.configs = config_files(options) if isinstance(options, list) else []
        self.anew = anew
        parser = {"parser_mode": "omegaconf+", "prog": "poss", "exit_on_error": False, "allow_abbrev": False}
        begins = parser | {"default_config_files": [str(conf(BASE))]}
        _quieten()
        args = [command, *options] if isinstance(options, list) else {"subcommand": command, command: asdict(options)}
        try:
            with ExitStack() as self._held:
                super().__init__(
                    SpecialistTraining,
                    FeatureData,
                    args=args,
                    parser_kwargs=parser | dict.fromkeys(COMMANDS, begins),
                    save_config_callback=_SaveConfig,
                    save_config_kwargs={"overwrite": True},
                    seed_everything_default=0,
                    trainer_defaults={"callbacks": [StepLines()]},
                    auto_configure_optimizers=False,  # the module makes its own, and their schedule
                )
        except MisconfigurationException as error:
            raise ValueError(str(error)) from error
        except SystemExit as ended:  # of Lightning, which would end a process that SIGTERM stopped with 0
            if not (hasattr(self, "trainer") and self.trainer.interrupted):
                raise
            self._say_how_to_go_on()
            if isinstance(ended, SIGTERMException):
                sys.exit(128 + signal.SIGTERM)
            raise KeyboardInterrupt from None

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        return {name: skipped for name, skipped in LightningCLI.subcommands().items() if name in COMMANDS}

    def add_core_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        _add_parts(parser)

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        if isinstance(args, list):
            args = choose_help(self._parser(args[0]), args)
        try:
            super().parse_arguments(parser, args)
        except ArgumentError as error:
            if isinstance(args, list):
                raise explain(error, self.configs, _types(self._parser(args[0])), args) from error
            raise
        parsed = self.config[self.config.subcommand]
        _check_numbers(vars(parsed), parsed)
        _expand_home(parsed)
        checkpoint = parsed.ckpt_path
        if checkpoint and Path(checkpoint).exists():
            load_checkpoint(Path(checkpoint))  # Lightning reads it next, and would not name a torn one

    def _parse_ckpt_path(self) -> None:
        """Options count as they are given: Lightning would put those of the checkpoint in their place."""

    def instantiate_trainer(self, **more: Any) -> Trainer:
        measures = self.config.subcommand != "fit"
        for config in (self.config, self.config_init):  # of which the first goes into config.yaml
            trainer = self._get(config, "trainer")
            if measures and trainer.logger is None:
                trainer.logger = False
            if trainer.precision == "auto":
                trainer.precision = choose_precision(str(trainer.accelerator))
        trainer = super().instantiate_trainer(**more)
        prepare(trainer.strategy)
        if checkpoint := self._get(self.config, "ckpt_path"):
            stay_in_folder(trainer, checkpoint)
        if measures:
            _leave_trainings(trainer)
        return trainer

    def before_fit(self) -> None:
        checkpoint = any(Path(self.trainer.default_root_dir).glob("hpc_ckpt_*.ckpt"))  # by a job that SLURM ended
        by_itself = checkpoint and SLURMEnvironment.detect()  # Lightning goes on with it
        trial = self.trainer.fast_dev_run  # pyright: ignore[reportAttributeAccessIssue]
        has_checkpoint = self._has_checkpoint()
        if trial:
            return
        folder = Path(self.trainer.log_dir or self.trainer.default_root_dir)
        begins = not has_checkpoint and not by_itself
        if begins:
            self._check_unused(folder)
        if self.trainer.is_global_zero:
            self._held.enter_context(_only_training(folder))
            if begins:  # again: another process may have ended a training meanwhile
                self._check_unused(folder)
            self._say_where(folder)

    def after_fit(self) -> None:
        callbacks = self.trainer.callbacks  # pyright: ignore[reportAttributeAccessIssue]
        if any(isinstance(callback, _SaveConfig) and not callback.began for callback in callbacks):
            reached = f"step {self.trainer.global_step}, epoch {self.trainer.current_epoch}"
            rank_zero_warn(f"nothing was left to train at {reached}")

    def before_validate(self) -> None:
        if self._has_checkpoint():
            self._compare_data()
        else:
            start = self._get(self.config, "model").start_from
            if start is None:
                raise ValueError(
                    "no --ckpt_path: this is the draft before training, of random weights; give a training's "
                    "checkpoints/last.ckpt"
                )
            rank_zero_warn(f"no --ckpt_path: this is the draft before training, as {start} has it")

    before_test = before_validate

    def _has_checkpoint(self) -> bool:
        """Whether it begins with a checkpoint; one that is there was looked at when the command was read."""
        path = self._get(self.config, "ckpt_path")
        if path and path not in ("best", "last", "hpc") and "://" not in path and not Path(path).exists():
            raise FileNotFoundError(f"{path}: no such file")  # "best" and addresses are Lightning's to find
        return bool(path)

    def _compare_data(self) -> None:
        """Warn where the data are other ones than the config.yaml beside the checkpoint says."""
        config = folder_of(self._get(self.config, "ckpt_path")) / CONFIG
        before, now = read_config(str(config)).get("data") or {}, self._get(self.config, "data")
        changed = [name for name in HELD_OUT if name in before and _place(before[name]) != _place(now[name])]
        if changed:
            differ = " and ".join(f"data.{name} is {now[name]} where it was {before[name]}" for name in changed)
            rank_zero_warn(f"{differ} ({config}): conversations that it was trained on may be among these")

    def _say_where(self, folder: Path) -> None:
        """A line, where somebody may look for this training in the folder of another one."""
        checkpoint = self._get(self.config, "ckpt_path")
        others = sorted(folder.parent.glob("version_*/checkpoints/last.ckpt"), key=os.path.getmtime)
        if checkpoint and Path(checkpoint).exists() and folder_of(checkpoint) != folder.resolve():
            logger.info("the training of %s goes on in another folder, %s", checkpoint, folder)
        elif not checkpoint and others and folder.name.startswith("version_"):
            logger.info("a new training begins in %s; --ckpt_path %s goes on with the one there", folder, others[-1])

    def _say_how_to_go_on(self) -> None:
        """A line, where a training was stopped."""
        last = Path(self.trainer.log_dir or self.trainer.default_root_dir) / "checkpoints" / "last.ckpt"
        if self.trainer.state.fn == "fit" and self.trainer.is_global_zero:
            how = f"--ckpt_path {last} goes on" if last.exists() else "there is no checkpoint yet to go on with"
            how = "the training is finished" if self.trainer.fit_loop.done else how
            logger.info("stopped at step %d: %s", self.trainer.global_step, how)

    def _check_unused(self, folder: Path) -> None:
        """Raise where a training has left something.

        Where there is nothing to go on with, `fit_once`, whose options are among the configs, may begin anew, and so
        may a job that SLURM begins once more.
        """
        last, known = folder / "checkpoints" / "last.ckpt", {folder / OPTIONS, folder / f".{OPTIONS}"}
        anew = self.anew or {path.resolve() for path in known} & {Path(file).resolve() for file in self.configs}
        if (anew or "SLURM_RESTART_COUNT" in os.environ) and not last.is_file():
            return
        if has_outputs(folder):
            other = "choose another name or save_dir of its logger"
            how = f"go on with --ckpt_path {last}, or {other}" if last.is_file() else f"remove it, or {other}"
            raise FileExistsError(f"{folder} holds a training already: {how}")


@contextmanager
def _only_training(folder: Path) -> Iterator[None]:
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


class _SaveConfig(SaveConfigCallback):
    """config.yaml is of the training that runs: not of one that could not go on, nor of a later look at it.

    It does not say where that one went on: another training of these settings begins at its own beginning.
    """

    began = False

    def setup(self, trainer, pl_module, stage: str) -> None:
        pass

    def on_train_start(self, trainer, pl_module) -> None:
        self.began, self.config.ckpt_path = True, None
        folder = str(trainer.log_dir)  # which all processes ask for together
        if "://" in folder:
            super().setup(trainer, pl_module, "fit")
        elif trainer.is_global_zero:  # the one before may be all that is left of a training that goes on
            with atomic(Path(folder) / self.config_filename) as path:
                path.write_text(self.parser.dump(self.config, skip_none=False), encoding="utf-8")


def _show_thread_error(args: threading.ExceptHookArgs, show=threading.excepthook) -> None:
    """Of any thread but TensorBoard's that writes: it raises its error in ours, too."""
    if type(args.thread).__name__ != "_AsyncWriterThread":
        show(args)


def _quieten() -> None:
    """Drop warnings and lines of Lightning that say what config.yaml tells, or advertise, unless the user asks."""
    threading.excepthook = _show_thread_error
    if is_verbose():
        return
    warnings.filterwarnings("ignore", "LightningCLI's args parameter")  # it is the command line's, or the options
    warnings.filterwarnings("ignore", "`isinstance.treespec, LeafSpec")  # lightning's own business with torch
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view")  # which nobody changes in place
    warnings.filterwarnings("ignore", "`torch.distributed")  # DeepSpeed calls what torch has since renamed
    warnings.filterwarnings("ignore", "It is recommended to use `self.log.*sync_dist=True")  # metrics sum by themselves
    warnings.filterwarnings("ignore", "The number of training batches .* is smaller than the logging")  # steps count on
    warnings.filterwarnings("ignore", "Precision .* is not supported by the model summary")  # of megabytes
    warnings.filterwarnings("ignore", "`ModelCheckpoint.* could not find the monitored key")  # DraftFolders says why
    warnings.filterwarnings("ignore", "Checkpoint directory .* exists and is not empty")  # of a training that goes on
    modules = "fabric.utilities.seed", "pytorch.utilities.rank_zero", "pytorch.trainer.connectors.checkpoint_connector"
    for module in modules:
        logging.getLogger(f"lightning.{module}").setLevel(logging.WARNING)
