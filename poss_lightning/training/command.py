"""`poss fit` and `poss validate`: Lightning's command line for the module and the data of this package.

Every training starts here: from the terminal, a sweep's cell, the demo or a user's Python (`training/fit.py`).
"""

import logging
import os
import re
import warnings
from argparse import ArgumentError
from contextlib import ExitStack
from contextvars import copy_context
from pathlib import Path
from typing import Any, Literal

import torch
import yaml
from lightning import Trainer
from lightning.pytorch.callbacks import Callback, ProgressBar
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI, SaveConfigCallback

from poss_lightning.configs import config_files, explain_option, files_with, set_up_parser
from poss_lightning.draft.folder import load_checkpoint
from poss_lightning.features.datamodule import FeatureDataModule
from poss_lightning.files import atomic, conf
from poss_lightning.machine import choose_precision
from poss_lightning.ranges import Seed
from poss_lightning.training.callbacks import StepBar
from poss_lightning.training.module import DraftModule
from poss_lightning.training.run_folder import (
    AUTO,
    LAST,
    check_unused,
    folder_of,
    only_training,
    place_training,
    was_killed_early,
)
from poss_lightning.training.strategies import prepare

BASE = "trainer/base.yaml"  # the defaults of every training
CALLBACKS = {  # that a list of `trainer.callbacks` does not replace
    "replay": "what measures τ in validations; null for none",
    "drafts": "what writes draft-best/ and draft-last/; null for none",
    "checkpoint": "what writes checkpoints/last.ckpt, to resume from; null for none",
}
COMMANDS = ("fit", "validate")
NAME = "folder of this training, in runs/ or trainer.default_root_dir; null for lightning_logs/version_N"
CHECKPOINT = "a training's checkpoints/last.ckpt, to resume or to validate; auto: that of --name, if there is one"
SEED = "seed for the initial weights (--data.seed: data order and noise); true draws one"
PRECISION = "bf16-mixed, 32-true, 64-true, or auto: bf16-mixed where the device multiplies bfloat16 fast, else 32-true"

# A class that cannot be made, in the parser's text, which also has each type that the option may have.
PROBLEM = re.compile(r"Problem with given class_path (.*\n.*)")


class Training(LightningCLI):
    """Runs a command, or the first part of it.

    Args:
        command: one of `COMMANDS`.
        arguments: of the command line.
        until: stop when options are "parsed", or when module, data and trainer are "built"; or run until "done".

    It raises what `training.fit.fit` does.
    """

    def __init__(self, command: str, arguments: list[str], until: Literal["parsed", "built", "done"] = "done"):
        self.until = until
        parser = {"parser_mode": "omegaconf+", "prog": "poss", "exit_on_error": False, "allow_abbrev": False}
        subparser = parser | {"default_config_files": [str(conf(BASE))]}
        set_up_parser()
        _drop_false_alarms()
        try:
            with ExitStack() as self._held:
                super().__init__(
                    DraftModule,
                    FeatureDataModule,
                    args=[command, *arguments],
                    parser_kwargs=parser | dict.fromkeys(COMMANDS, subparser),
                    save_config_callback=_SaveConfig,
                    save_config_kwargs={"overwrite": True},
                    auto_configure_optimizers=False,  # the module makes its own, and their schedule
                )
        except SystemExit as ended:  # Lightning's, also of Ctrl-C, which should end a sweep, too
            if ended.code == 1 and hasattr(self, "trainer") and self.trainer.interrupted:
                raise KeyboardInterrupt from None
            raise

    @property
    def options(self) -> Any:
        """All options of the command, defaults included."""
        return self.config[self.config.subcommand]

    def printed(self) -> dict[str, Any]:
        """Return the options as `--print_config` prints them."""
        return yaml.safe_load(self._parser(self.config.subcommand).dump(self.options, skip_unset=False))

    # --- options ---

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        """Without `weights_only`, as nothing is ever unpickled, and `verbose`, without which nothing is printed."""
        ours = {"ckpt_path", "weights_only", "verbose"}
        return {name: LightningCLI.subcommands()[name] | ours for name in COMMANDS}

    def add_default_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.add_argument("--name", type=str | None, default=None, help=NAME)
        parser.add_argument("--ckpt_path", type=str | None, default=None, help=CHECKPOINT)
        parser.add_argument("--seed_everything", type=Seed | bool, default=0, help=SEED)

    def add_core_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add model, data and trainer, in this order, which is that of the help."""
        parser.add_lightning_class_args(DraftModule, "model")
        parser.add_lightning_class_args(FeatureDataModule, "data")
        parser.add_class_arguments(
            Trainer, "trainer", skip={"precision"}, fail_untyped=False, instantiate=False, sub_configs=True
        )
        trainer = (parser.groups or {})["trainer"]
        trainer.add_argument("--trainer.precision", type=str, default="auto", help=PRECISION)
        for name, text in CALLBACKS.items():
            parser.add_argument(f"--{name}", type=Callback | None, help=text)
        parser.link_arguments("data.source", "model.store", apply_on="instantiate")

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        self.files = config_files(args)
        try:
            # In its own context: jsonargparse would keep the parser in this one, and with it all that is trained.
            self.config = copy_context().run(parser.parse_args, args)
        except ArgumentError as error:
            raise explain_option(error, self._parser(args[0]), self.files) from error
        self.folder = place_training(self.options)

    def _parse_ckpt_path(self) -> None:
        """Do nothing: Lightning would replace the given options by those of the checkpoint."""

    # --- construction ---

    def _set_seed(self) -> None:
        if self.until == "done":
            super()._set_seed()

    def before_instantiate_classes(self) -> None:
        """Refuse a broken checkpoint before anything is loaded; Lightning reads it much later."""
        if self.until == "done" and self.options.ckpt_path not in (None, AUTO):
            load_checkpoint(Path(self.options.ckpt_path))

    def instantiate_classes(self) -> None:
        try:
            if self.until != "parsed":
                super().instantiate_classes()
        except ValueError as error:
            if problem := PROBLEM.search(str(error)):
                raise ValueError(problem[1]) from error
            raise

    def instantiate_trainer(self, **more: Any) -> Trainer:
        if (accelerator := self.options.trainer.accelerator) in ("gpu", "cuda") and not torch.cuda.is_available():
            files = "; see ".join(["", *files_with("trainer.accelerator", self.files)])
            problem = f"trainer.accelerator is {accelerator}, and torch finds no GPU here; it must be cpu or auto"
            raise ValueError(f"{problem}, as in trainer/cpu.yaml{files}")
        for config in (self.config, self.config_init):  # the first is written to config.yaml
            trainer = self._get(config, "trainer")
            if self.config.subcommand != "fit":  # its scalars would count as the training's, in whose folder they are
                trainer.logger = False
            if trainer.precision == "auto":
                trainer.precision = choose_precision(str(trainer.accelerator))
        if self.folder is not None:  # where Lightning looks for checkpoints of its own on SLURM, too
            more["default_root_dir"] = str(self.folder)
        try:
            trainer = super().instantiate_trainer(callbacks=self._callbacks(trainer.callbacks or []), **more)
        except TypeError as error:
            if "devices" not in str(error):
                raise
            raise ValueError(f"trainer.devices is {self.options.trainer.devices}: {error}") from error
        devices, nodes, world = trainer.num_devices, trainer.num_nodes, trainer.world_size
        if self.until == "done" and world != devices * nodes:
            raise ValueError(
                f"trainer.devices is {devices} and trainer.num_nodes {nodes}, but the processes started are {world}: "
                f"srun --ntasks-per-node {devices}, or unset SLURM_NTASKS"
            )
        prepare(trainer.strategy)
        return trainer

    def _callbacks(self, listed: list[Callback] | Callback) -> list[Callback]:
        """Add those of every training to the ones that are listed, which may have one of their kinds."""
        callbacks = listed if isinstance(listed, list) else [listed]
        own = [self._get(self.config_init, name) for name in CALLBACKS]
        has_bar = any(isinstance(each, ProgressBar) for each in callbacks)
        if not has_bar and self.options.trainer.enable_progress_bar is not False:
            own.append(StepBar())
        kinds = {type(each) for each in callbacks}
        return callbacks + [each for each in own if each is not None and type(each) not in kinds]

    # --- the run ---

    def _run_subcommand(self, subcommand: str) -> None:
        if self.until == "done":
            super()._run_subcommand(subcommand)

    def _prepare_subcommand_kwargs(self, subcommand: str) -> dict[str, Any]:
        """Lightning's own default would unpickle a checkpoint at an address."""
        always = {"ckpt_path": self.options.ckpt_path, "weights_only": True}
        return super()._prepare_subcommand_kwargs(subcommand) | always

    def before_fit(self) -> None:
        if self.trainer.fast_dev_run:  # pyright: ignore[reportAttributeAccessIssue]
            return
        options, folder = self.options, folder_of(self.trainer)
        if options.ckpt_path == AUTO or (not options.ckpt_path and "SLURM_RESTART_COUNT" in os.environ):
            options.ckpt_path = str(folder / LAST) if (folder / LAST).is_file() else None
        if self.trainer.is_global_zero:
            self._held.enter_context(only_training(folder, options.ckpt_path))
        elif not was_killed_early(folder):
            check_unused(folder, options.ckpt_path)

    def before_validate(self) -> None:
        if not self.options.ckpt_path and self.options.model.start_from is None:
            raise ValueError("no --ckpt_path, and a draft of random weights: give a training's checkpoints/last.ckpt")


class _SaveConfig(SaveConfigCallback):
    """Writes config.yaml once the training runs: one that cannot resume must not replace it, nor must `validate`.

    It leaves out `ckpt_path`, so that the file starts a new training.
    """

    def setup(self, trainer, pl_module, stage: str) -> None:
        pass

    def on_train_start(self, trainer, pl_module) -> None:
        self.config.ckpt_path = None
        folder = folder_of(trainer)
        if trainer.is_global_zero:  # atomically: the old one may be all that a training can resume with
            with atomic(folder / self.config_filename) as path:
                path.write_text(self.parser.dump(self.config, skip_unset=False), encoding="utf-8")


def _drop_false_alarms() -> None:
    """Drop what Lightning says of itself, and warns of though it is right here."""
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)  # "`weights_only` was not set" at each checkpoint
    for pattern in (
        "LightningCLI's args parameter",  # here it is the command line, or made of options
        "`isinstance.treespec, LeafSpec",  # between Lightning and torch
        "The number of training batches .* is smaller than the logging",  # steps are counted across epochs
    ):
        warnings.filterwarnings("ignore", pattern)
    warnings.filterwarnings("once", "This DataLoader will create")  # of training and validation alike
