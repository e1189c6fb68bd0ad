"""The one entry point, `poss`. A command's constructor or function is its configuration, and its docstring the help.

Nothing heavy is imported before the command is known, so `poss --help` answers at once.
"""

import logging
import re
import sys
import warnings
from argparse import ArgumentError
from collections.abc import Callable
from importlib import import_module
from inspect import signature

from poss_lightning.files import conf, named
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
    try:
        run(command, sys.argv[2:])
    except ArgumentError as error:
        sys.exit(f"poss {command}: {_line(error)} (poss {command} --help tells its options)")
    except (ValueError, OSError) as error:
        sys.exit(f"poss {command}: {_line(error)}")
    except KeyboardInterrupt:
        sys.exit(f"poss {command}: interrupted")


def run(command: str, arguments: list[str]) -> None:
    """Run a command with its arguments, as the terminal gives them."""
    import jsonargparse

    jsonargparse.set_parsing_settings(
        docstring_parse_attribute_docstrings=False, omegaconf_absolute_to_relative_paths=True
    )
    arguments = _located(arguments)
    if command in TRAINER:
        return trainer([command, *arguments])
    tool = getattr(import_module(TOOLS[command][0]), command)
    arguments = _switched(arguments, tool)
    jsonargparse.auto_cli(tool, args=arguments, prog=f"poss {command}", as_positional=True, exit_on_error=False)


def trainer(arguments: list[str]) -> None:
    """`fit`, `validate` and `test` through LightningCLI, which reads conf/trainer/base.yaml before all else."""
    from lightning.fabric.utilities.exceptions import MisconfigurationException
    from lightning.pytorch.cli import LightningCLI, SaveConfigCallback

    from poss_lightning.features.datamodule import FeatureData
    from poss_lightning.training.module import SpecialistTraining

    class Cli(LightningCLI):
        @staticmethod
        def subcommands() -> dict[str, set[str]]:
            return {name: skipped for name, skipped in LightningCLI.subcommands().items() if name in TRAINER}

        def add_arguments_to_parser(self, parser) -> None:
            parser.link_arguments("data.source", "model.store", apply_on="instantiate")

    class Settings(SaveConfigCallback):
        """config.yaml is the training's: what looks at a checkpoint of it later leaves it as it is."""

        def setup(self, trainer, pl_module, stage: str) -> None:
            if stage == "fit":
                super().setup(trainer, pl_module, stage)

    warnings.filterwarnings("ignore", "LightningCLI's args parameter")  # they are the command line, or the demo's
    warnings.filterwarnings("ignore", "`isinstance.treespec, LeafSpec")  # lightning's own business with torch
    warnings.filterwarnings("ignore", "`torch.distributed")  # DeepSpeed calls what torch has since renamed
    for room in ("fabric.utilities.seed", "pytorch.utilities.rank_zero"):  # config.yaml tells it; the rest advertises
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
            trainer_defaults={"use_distributed_sampler": False},  # the DataModule shares its batches out itself
        )
    except MisconfigurationException as error:
        raise ValueError(str(error)) from error


def _located(arguments: list[str]) -> list[str]:
    """`--config` with files of conf/ by their path, which who installed a wheel does not have beside him."""

    def place(name: str) -> str:
        try:
            return named(name)
        except OSError:  # the parser says so, of what the user typed
            return name

    return [
        place(each) if before == "--config" else re.sub("^--config=(.*)", lambda own: f"--config={place(own[1])}", each)
        for before, each in zip(["", *arguments], arguments, strict=False)
    ]


def _switched(arguments: list[str], tool: Callable) -> list[str]:
    """What jsonargparse wants: `--chat=true` for a bare `--chat`; and `--from_` for `--from`, no name in Python."""
    kinds = {f"--{name}": given.annotation for name, given in signature(tool).parameters.items()}
    arguments = [
        re.sub(r"^--\w+", lambda found: found[0] + "_" * (found[0] + "_" in kinds), each) for each in arguments
    ]
    following = [*arguments[1:], ""]
    return [
        f"{argument}=true" if kinds.get(argument) in (bool, bool | None) and then not in VALUES else argument
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
