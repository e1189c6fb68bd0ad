"""The one entry point, `poss`. A command's constructor or function is its configuration, and its docstring the help.

Nothing heavy is imported before the command is known, so `poss --help` answers at once.
"""

import logging
import os
import re
import sys
import warnings
from argparse import ArgumentError
from collections.abc import Callable
from importlib import import_module
from inspect import signature
from pathlib import Path

from poss_lightning.files import conf
from poss_lightning.versions import versions

TRAINER = {
    "fit": "train specialists on a feature store",
    "validate": "losses, pos-acc and drift of a checkpoint, by depth",
    "test": "the same, at the end of an experiment",
}
VALUES = ("true", "false", "null")  # of a switch
TOOLS = {
    "synthesize": ("poss_lightning.corpus.synthesize", "the target writes its own conversations"),
    "answer": ("poss_lightning.evaluation.answer", "the target answers prompts of yours, as a corpus"),
    "extract": ("poss_lightning.features.extract", "precompute the target's features of a corpus"),
    "merge": ("poss_lightning.features.merge", "several feature stores of one target as one"),
    "plan": ("poss_lightning.training.plan", "memory, store and time of a training, before it starts"),
    "export": ("poss_lightning.training.export", "the draft of a training checkpoint, as a folder, in any dtype"),
    "convert": ("poss_lightning.interop.convert", "drafts in published layouts, and for engines"),
    "vocabulary": ("poss_lightning.draft.vocabulary", "cut a draft's head to the commonest tokens of a corpus"),
    "generate": ("poss_lightning.evaluation.generate", "answer one prompt, and say how fast"),
    "benchmark": ("poss_lightning.evaluation.benchmark", "decode suites with every method and record it"),
    "replay": ("poss_lightning.evaluation.replay", "acceptance of drafts on stored answers, without the target"),
    "sweep": ("poss_lightning.sweep", "an experiment: choices and seeds, trained, measured, summed up"),
    "allocate": ("poss_lightning.reports.allocate", "an allocation from the drift of a single layer"),
    "compare": ("poss_lightning.reports.compare", "tables of records, with intervals"),
    "report": ("poss_lightning.reports.report", "one HTML page of records and runs"),
    "demo": ("poss_lightning.demo", "the whole of it on the embedded target, in minutes"),
}


def main() -> None:
    """Run one command; an error that a user can mend is one line, and exit code 1."""
    command = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if command in ("-h", "--help"):
        return print(_help())
    if command == "--version":
        return print("\n".join(f"{name} {number}" for name, number in versions().items()))
    if command not in TRAINER and command not in TOOLS:
        sys.exit(f"poss: no command {command!r}; there are {', '.join([*TRAINER, *TOOLS])}")
    logger = logging.getLogger("poss_lightning")
    logger.setLevel(logging.INFO)
    logger.handlers = [Lines()]
    try:
        run(command, sys.argv[2:])
    except ArgumentError as error:
        sys.exit(f"poss {command}: {_line(error)} (poss {command} --help tells its options)")
    except (ValueError, OSError, NotImplementedError) as error:  # the last is of a target that is not supported
        sys.exit(f"poss {command}: {_line(error)}")
    except KeyboardInterrupt:
        sys.exit(f"poss {command}: interrupted")


def run(command: str, arguments: list[str]) -> None:
    """Run a command with its arguments, as the terminal gives them."""
    import jsonargparse

    from poss_lightning.configs import explain, files_of, locate_configs, read

    jsonargparse.set_parsing_settings(
        docstring_parse_attribute_docstrings=False, omegaconf_absolute_to_relative_paths=True
    )
    arguments = locate_configs(arguments)
    for file in files_of(arguments):
        read(file)  # a broken one is named
    if command in TRAINER:
        return trainer([command, *arguments])
    tool = getattr(import_module(TOOLS[command][0]), command)
    arguments = _switched(arguments, tool)
    try:
        jsonargparse.auto_cli(tool, args=arguments, prog=f"poss {command}", as_positional=True, exit_on_error=False)
    except ArgumentError as error:
        raise explain(error, arguments, signature(tool).parameters) from error


def trainer(arguments: list[str]) -> None:
    """`fit`, `validate` and `test` through LightningCLI, which reads conf/trainer/base.yaml before all else."""
    from lightning import Trainer
    from lightning.fabric.plugins.environments import SLURMEnvironment
    from lightning.fabric.utilities.exceptions import MisconfigurationException
    from lightning.pytorch.cli import LightningCLI, SaveConfigCallback
    from lightning.pytorch.utilities import rank_zero_warn

    from poss_lightning.configs import explain, files_of
    from poss_lightning.features.datamodule import FeatureData
    from poss_lightning.machine import choose_precision
    from poss_lightning.training.export import load_checkpoint
    from poss_lightning.training.module import SpecialistTraining

    class Cli(LightningCLI):
        @staticmethod
        def subcommands() -> dict[str, set[str]]:
            return {name: skipped for name, skipped in LightningCLI.subcommands().items() if name in TRAINER}

        def add_core_arguments_to_parser(self, parser) -> None:
            """In the order of the help: what is ours goes first."""
            parser.add_lightning_class_args(SpecialistTraining, "model")
            parser.add_lightning_class_args(FeatureData, "data")
            own = {"skip": {"precision"}, "fail_untyped": False, "instantiate": False, "sub_configs": True}
            parser.add_class_arguments(Trainer, "trainer", **own)
            known = "auto: bf16-mixed where the device multiplies bfloat16 fast, else 32-true; or one of Lightning's"
            parser.add_argument("--trainer.precision", type=str, default="auto", help=known)
            parser.set_defaults({"trainer.use_distributed_sampler": False})  # FeatureData shares its batches out itself

        def add_arguments_to_parser(self, parser) -> None:
            parser.link_arguments("data.source", "model.store", apply_on="instantiate")

        def parse_arguments(self, parser, args) -> None:
            try:
                super().parse_arguments(parser, args)
            except ArgumentError as error:
                raise explain(error, args, [each.dest for each in self._parser(args[0])._actions]) from error
            given = self.config[self.config.subcommand].ckpt_path
            if given and Path(given).exists():
                load_checkpoint(Path(given))  # Lightning reads it next, and would not name a torn one

        def instantiate_trainer(self, **more):
            for config in (self.config, self.config_init):  # of which the first goes into config.yaml
                trainer = self._get(config, "trainer")
                if trainer.precision == "auto":
                    trainer.precision = choose_precision(str(trainer.accelerator))
            return super().instantiate_trainer(**more)

        def before_fit(self) -> None:
            left = any(Path(self.trainer.default_root_dir).glob("hpc_ckpt_*.ckpt"))  # by a job that SLURM ended
            by_itself = left and SLURMEnvironment.detect()  # Lightning goes on with it
            if not self._goes_on() and not self.trainer.fast_dev_run and not by_itself:
                _unused(Path(self.trainer.log_dir or self.trainer.default_root_dir), files_of(arguments))

        def after_fit(self) -> None:
            if any(isinstance(each, Settings) and not each.began for each in self.trainer.callbacks):
                reached = f"step {self.trainer.global_step}, epoch {self.trainer.current_epoch}"
                rank_zero_warn(f"nothing was left to train at {reached}")

        def before_validate(self) -> None:
            if not self._goes_on():
                start = self._get(self.config, "model").start_from
                if start is None:
                    raise ValueError(
                        "no --ckpt_path: this is the draft before training, of random weights; give a training's "
                        "checkpoints/last.ckpt"
                    )
                rank_zero_warn(f"no --ckpt_path: this is the draft before training, as {start} has it")

        before_test = before_validate

        def _goes_on(self) -> bool:
            """Whether it begins with a checkpoint; one that is there was looked at when the command was read."""
            given = self._get(self.config, "ckpt_path")
            if given and given not in ("best", "last", "hpc") and "://" not in given and not Path(given).exists():
                raise FileNotFoundError(f"{given}: no such file")  # "best" and addresses are Lightning's to find
            return bool(given)

    class Settings(SaveConfigCallback):
        """config.yaml is of the training that runs: not of one that could not go on, nor of a later look at it.

        It does not say where that one went on: another training of these settings begins at its own beginning.
        """

        began = False

        def setup(self, trainer, pl_module, stage: str) -> None:
            pass

        def on_train_start(self, trainer, pl_module) -> None:
            self.began, self.config.ckpt_path = True, None
            super().setup(trainer, pl_module, "fit")

    warnings.filterwarnings("ignore", "LightningCLI's args parameter")  # they are the command line, or the demo's
    warnings.filterwarnings("ignore", "`isinstance.treespec, LeafSpec")  # lightning's own business with torch
    warnings.filterwarnings("ignore", "`torch.distributed")  # DeepSpeed calls what torch has since renamed
    warnings.filterwarnings("ignore", "`ModelCheckpoint.* could not find the monitored key")  # DraftFolders says why
    rooms = "fabric.utilities.seed", "pytorch.utilities.rank_zero", "pytorch.trainer.connectors.checkpoint_connector"
    for room in rooms:  # config.yaml tells it; the rest advertises
        logging.getLogger(f"lightning.{room}").setLevel(logging.WARNING)
    parser = {"parser_mode": "omegaconf+", "prog": "poss", "exit_on_error": False}
    begins = parser | {"default_config_files": [str(conf("trainer/base.yaml"))]}
    try:
        Cli(
            SpecialistTraining,
            FeatureData,
            args=arguments,
            parser_kwargs=parser | dict.fromkeys(TRAINER, begins),
            save_config_callback=Settings,
            save_config_kwargs={"overwrite": True},
            seed_everything_default=0,
        )
    except MisconfigurationException as error:
        raise ValueError(str(error)) from error


class Lines(logging.Handler):
    """Shows what the package tells as plain lines on stderr."""

    def emit(self, record: logging.LogRecord) -> None:
        print(record.getMessage(), file=sys.stderr, flush=True)


def _unused(folder: Path, configs: list[str]) -> None:
    """Raise where a training has left something.

    Where there is nothing to go on with, `fit_once`, whose note is among the configs, may begin anew, and so may a job
    that SLURM begins once more.
    """
    from poss_lightning.fitting import SETTINGS, has_outputs

    last = folder / "checkpoints" / "last.ckpt"
    own = (folder / SETTINGS).resolve() in [Path(file).resolve() for file in configs]
    if (own or "SLURM_RESTART_COUNT" in os.environ) and not last.is_file():
        return
    if has_outputs(folder):
        how = f"go on with --ckpt_path {last}, or choose another name" if last.is_file() else "choose another name"
        raise FileExistsError(f"{folder} holds a training already: {how}")


def _switched(arguments: list[str], tool: Callable) -> list[str]:
    """What jsonargparse wants: `--chat=true` for a bare `--chat`; and `--from_` for `--from`, no name in Python."""
    kinds = {f"--{name}": given.annotation for name, given in signature(tool).parameters.items()}
    arguments = [
        re.sub(r"^--\w+", lambda found: found[0] + "_" * (found[0] + "_" in kinds), each) for each in arguments
    ]
    following = [*arguments[1:], ""]
    return [
        f"{argument}=true" if kinds.get(argument) in (bool, bool | None) and then.lower() not in VALUES else argument
        for argument, then in zip(arguments, following, strict=False)
    ]


def _line(error: Exception) -> str:
    return "; ".join(line.strip() for line in str(error).splitlines() if line.strip()).replace(":; ", ": ")


def _help() -> str:
    lines = ["usage: poss COMMAND [--config FILE] [--option value ...]; poss COMMAND --help tells its options", ""]
    summaries = TRAINER | {name: summary for name, (_, summary) in TOOLS.items()}
    return "\n".join(lines + [f"  {name:<11} {summary}" for name, summary in summaries.items()])


if __name__ == "__main__":  # how `fitting` starts a training apart
    main()
