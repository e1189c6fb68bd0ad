"""`poss fit`, `validate` and `test`: Lightning's command line over the module and the data of this package.

Everything that trains takes this road: the terminal, a sweep's cell, the demo, a user's Python (`training/fit.py`).
"""

import logging
import signal
import sys
import threading
import warnings
from argparse import ArgumentError
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from contextvars import copy_context
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import yaml
from lightning import Trainer
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI, SaveConfigCallback
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.exceptions import SIGTERMException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from omegaconf.resolvers import oc

from poss_lightning.configs import config_files, explain, set_up_parser
from poss_lightning.features.datamodule import FeatureData
from poss_lightning.files import atomic, conf
from poss_lightning.machine import choose_precision
from poss_lightning.ranges import Seed
from poss_lightning.terminal import is_verbose
from poss_lightning.training.callbacks import StepLines
from poss_lightning.training.export import load_checkpoint
from poss_lightning.training.folder import check_unused, expand_home, name_folder, only_training
from poss_lightning.training.help import PRECISION, SAID, choose_help
from poss_lightning.training.module import SpecialistTraining
from poss_lightning.training.resume import fetch_checkpoint, stay_in_folder
from poss_lightning.training.strategies import prepare

BASE = "trainer/base.yaml"  # what every training reads first
COMMANDS = ("fit", "validate")

logger = logging.getLogger(__name__)


class Training(LightningCLI):
    """Runs a command, or the first part of it.

    Args:
        command: one of `COMMANDS`.
        arguments: of the command line.
        until: "parsed", the options are there; "built", module, data and trainer too; "done".

    Attributes:
        options: all of them, defaults included.

    Raises:
        ArgumentError: an option that a part does not have, or a value that it does not take.
        FileExistsError: the logger's folder holds another training.
        OSError, ValueError: as the parts say.
    """

    def __init__(self, command: str, arguments: list[str], until: Literal["parsed", "built", "done"] = "done"):
        self.arguments, self.until = arguments, until
        parser = {"parser_mode": "omegaconf+", "prog": "poss", "exit_on_error": False, "allow_abbrev": False}
        begins = parser | {"default_config_files": [str(conf(BASE))]}
        set_up_parser()
        _quieten()
        try:
            with ExitStack() as self._held:
                super().__init__(
                    SpecialistTraining,
                    FeatureData,
                    args=[command, *arguments],
                    parser_kwargs=parser | dict.fromkeys(COMMANDS, begins),
                    save_config_callback=_SaveConfig,
                    save_config_kwargs={"overwrite": True},
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

    @property
    def options(self) -> Any:
        return self.config[self.config.subcommand]

    def printed(self) -> dict[str, Any]:
        """The options as `--print_config` prints them."""
        return yaml.safe_load(self._parser(self.config.subcommand).dump(self.options, skip_unset=False))

    # --- its options ---

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        """Whether a checkpoint is unpickled is nobody's to choose: it never is."""
        return {name: LightningCLI.subcommands()[name] | {"weights_only"} for name in COMMANDS}

    def setup_parser(self, add_subcommands: bool, main_kwargs: dict, subparser_kwargs: dict) -> None:
        """What only parses shares one parser: a sweep has many trainings."""
        if self.until != "parsed":
            return super().setup_parser(add_subcommands, main_kwargs, subparser_kwargs)
        if not (shared := _shared_parser()):
            super().setup_parser(add_subcommands, main_kwargs, subparser_kwargs)
            names = ("parser", "_subcommand_method_arguments", "_subcommand_parsers")
            shared.update({name: getattr(self, name) for name in names})
        vars(self).update(shared)

    def add_default_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.add_argument("--name", type=str | None, default=None, help=SAID["name"])
        parser.add_argument("--seed_everything", type=Seed | bool, default=0, help=SAID["seed_everything"])

    def add_core_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Of model, data and trainer, in the order of the help: what is ours goes first."""
        parser.add_lightning_class_args(SpecialistTraining, "model")
        parser.add_lightning_class_args(FeatureData, "data")
        parser.add_class_arguments(
            Trainer, "trainer", skip={"precision"}, fail_untyped=False, instantiate=False, sub_configs=True
        )
        trainer = (parser.groups or {})["trainer"]
        trainer.add_argument("--trainer.precision", type=str, default="auto", help=PRECISION)
        parser.link_arguments("data.source", "model.store", apply_on="instantiate")

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        command, *rest = choose_help(self._parser(args[0]), args)
        files, types = config_files(rest), _types(self._parser(command))
        try:
            with _no_environment():
                # In a context of its own: jsonargparse leaves the parser in this one, and with it all that is trained.
                self.config = copy_context().run(parser.parse_args, [command, *rest])
        except ArgumentError as error:
            if str(error).startswith("argument data.source"):  # as the parser puts it that both are given
                raise ArgumentError(None, "model.store is the store of the data: name it as --data.store") from error
            raise explain(error, files, types, rest) from error
        except OmegaConfBaseException as error:  # a reference to an option that is not there
            option = str(error.full_key).removeprefix(f"{command}.")
            reason = str(error).splitlines()[0].removeprefix("ValueError raised while resolving interpolation: ")
            raise explain(ArgumentError(None, f'Option "{option}": {reason}'), files, types, rest) from error
        name_folder(self.options)
        expand_home(self.options)

    def _parse_ckpt_path(self) -> None:
        """Options count as they are given: Lightning would put those of the checkpoint in their place."""

    # --- what it is made of ---

    def _set_seed(self) -> None:
        if self.until == "done":
            super()._set_seed()

    def before_instantiate_classes(self) -> None:
        """A torn checkpoint, which Lightning reads much later, is named before anything is loaded."""
        path = self.options.ckpt_path
        if self.until != "done" or not path or path in ("best", "last", "hpc"):  # these Lightning finds
            return
        if "://" in path:
            place = self._held.enter_context(TemporaryDirectory())
            path = self.options.ckpt_path = str(fetch_checkpoint(path, Path(place)))
        load_checkpoint(Path(path))

    def instantiate_classes(self) -> None:
        if self.until != "parsed":
            super().instantiate_classes()

    def instantiate_trainer(self, **more: Any) -> Trainer:
        for config in (self.config, self.config_init):  # of which the first goes into config.yaml
            trainer = self._get(config, "trainer")
            if self.config.subcommand != "fit":  # in a training's folder it would count as that training's
                trainer.logger = False
            if trainer.precision == "auto":
                trainer.precision = choose_precision(str(trainer.accelerator))
        trainer = super().instantiate_trainer(**more)
        prepare(trainer.strategy)
        if self.options.ckpt_path:
            stay_in_folder(trainer, self.options.ckpt_path)
        return trainer

    # --- before and after it runs ---

    def _run_subcommand(self, subcommand: str) -> None:
        if self.until == "done":
            super()._run_subcommand(subcommand)

    def _prepare_subcommand_kwargs(self, subcommand: str) -> dict[str, Any]:
        """With Lightning's own default a checkpoint at an address would be unpickled."""
        return super()._prepare_subcommand_kwargs(subcommand) | {
            "ckpt_path": self.options.ckpt_path,
            "weights_only": True,
        }

    def before_fit(self) -> None:
        if self.trainer.fast_dev_run:  # pyright: ignore[reportAttributeAccessIssue]
            return
        checkpoint = any(Path(self.trainer.default_root_dir).glob("hpc_ckpt_*.ckpt"))  # by a job that SLURM ended
        begins = not self.options.ckpt_path and not (checkpoint and SLURMEnvironment.detect())  # Lightning resumes
        folder = Path(self.trainer.log_dir or self.trainer.default_root_dir)
        if begins:
            check_unused(folder)
        if self.trainer.is_global_zero:
            self._held.enter_context(only_training(folder))
            if begins:  # again: another process may have ended a training meanwhile
                check_unused(folder)

    def after_fit(self) -> None:
        callbacks = self.trainer.callbacks  # pyright: ignore[reportAttributeAccessIssue]
        if any(isinstance(callback, _SaveConfig) and not callback.began for callback in callbacks):
            reached = f"step {self.trainer.global_step}, epoch {self.trainer.current_epoch}"
            rank_zero_warn(f"nothing was left to train at {reached}")

    def before_validate(self) -> None:
        if self.options.ckpt_path:
            return
        if (start := self.options.model.start_from) is None:
            raise ValueError(
                "no --ckpt_path: this is the draft before training, of random weights; give a training's "
                "checkpoints/last.ckpt"
            )
        rank_zero_warn(f"no --ckpt_path: this is the draft before training, as {start} has it")

    def _say_how_to_go_on(self) -> None:
        """A line, where a training was stopped."""
        last = Path(self.trainer.log_dir or self.trainer.default_root_dir) / "checkpoints" / "last.ckpt"
        if self.trainer.state.fn == "fit" and self.trainer.is_global_zero:
            how = f"--ckpt_path {last} resumes" if last.exists() else "there is no checkpoint yet to resume from"
            how = "the training is finished" if self.trainer.fit_loop.done else how
            logger.info("stopped at step %d: %s", self.trainer.global_step, how)


@cache
def _shared_parser() -> dict[str, Any]:
    return {}


def _types(parser: LightningArgumentParser) -> dict[str, Any]:
    """The options of a parser, and their types."""
    return {action.dest: getattr(action, "_typehint", action.type) for action in parser._actions}


@contextmanager
def _no_environment() -> Iterator[None]:
    """A config is often somebody else's: what it names may be sent elsewhere, and it is written into config.yaml."""
    register = getattr(OmegaConf, "register_resolver", None) or OmegaConf.register_new_resolver  # before 2.4

    def refuse(*name: Any) -> None:
        raise ValueError("a config takes nothing from the environment: write the value, or give it in the terminal")

    register("oc.env", refuse, replace=True)
    try:
        yield
    finally:
        register("oc.env", oc.env, replace=True)


class _SaveConfig(SaveConfigCallback):
    """config.yaml is of the training that runs: not of one that could not resume, nor of a later look at it.

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
        elif trainer.is_global_zero:  # the one before may be all that is left of a training that resumes
            with atomic(Path(folder) / self.config_filename) as path:
                path.write_text(self.parser.dump(self.config, skip_unset=False), encoding="utf-8")


def _show_thread_error(args: threading.ExceptHookArgs, show=threading.excepthook) -> None:
    """Of any thread but TensorBoard's that writes: it raises its error in ours, too."""
    if type(args.thread).__name__ != "_AsyncWriterThread":
        show(args)


def _quieten() -> None:
    """Drop warnings and lines of Lightning that say what config.yaml tells, or advertise, unless the user asks."""
    threading.excepthook = _show_thread_error
    if is_verbose():
        return
    for words in (
        "LightningCLI's args parameter",  # it is the command line's, or the options
        "`isinstance.treespec, LeafSpec",  # lightning's own business with torch
        "`torch.distributed",  # DeepSpeed calls what torch has since renamed
        "It is recommended to use `self.log.*sync_dist=True",  # metrics sum by themselves
        "The number of training batches .* is smaller than the logging",  # steps count on
        "`ModelCheckpoint.* could not find the monitored key",  # DraftFolders says why
        "Checkpoint directory .* exists and is not empty",  # of a training that resumes
    ):
        warnings.filterwarnings("ignore", words)
    modules = "fabric.utilities.seed", "pytorch.utilities.rank_zero", "pytorch.trainer.connectors.checkpoint_connector"
    for module in modules:
        logging.getLogger(f"lightning.{module}").setLevel(logging.WARNING)
