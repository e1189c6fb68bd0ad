"""The entry point `poss`: a command's function is its configuration, and its docstring the help.

Nothing heavy is imported before the command is known, so `poss --help` answers at once.
"""

import logging
import os
import sys
from argparse import ArgumentError
from collections.abc import Callable
from contextlib import nullcontext
from importlib import import_module
from inspect import signature

from poss_lightning.terminal import announced, is_user_error, one_line, printable
from poss_lightning.versions import versions

TRAINER = {
    "fit": "train specialists on a feature store",
    "validate": "measure losses, pos-acc and drift of a checkpoint, by depth",
}
TOOLS = {
    "list": (
        "poss_lightning.shipped",
        "list configs, drafts and suites that come with the package; print a config to edit",
    ),
    "synthesize": ("poss_lightning.synthesize", "let the target answer your prompts, or write whole conversations"),
    "extract": ("poss_lightning.extraction", "precompute the target's features of a corpus"),
    "convert": (
        "poss_lightning.interop.convert",
        "convert a draft, or a checkpoint, between formats and dtypes",
    ),
    "generate": ("poss_lightning.evaluation.generate", "answer one prompt, and say how fast"),
    "benchmark": (
        "poss_lightning.evaluation.benchmark",
        "decode suites with every method, and record speed and acceptance",
    ),
    "replay": (
        "poss_lightning.evaluation.replay",
        "measure acceptance of drafts on stored answers, without the target",
    ),
    "doctor": ("poss_lightning.doctor.cli", "find why a draft accepts less than it should, and what to change"),
    "sweep": ("poss_lightning.sweep", "train and measure an experiment: choices and seeds, summed up"),
    "compare": (
        "poss_lightning.reports.compare",
        "compare records in tables with intervals, and with --html on a page",
    ),
}


def main() -> None:
    """Run one command; an error that a user can fix is one line, and exit code 1.

    With POSS_TRACEBACK=1 it also shows the place, as any other error does.
    """
    try:
        _run_line()
        sys.stdout.flush()
    except BrokenPipeError:  # the reader, `head` for one, has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else Python complains at exit


def _run_line() -> None:
    command = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if command in ("-h", "--help"):
        return print(_help())
    if command == "--version":
        return print("\n".join(f"{name} {number}" for name, number in versions().items()))
    if command not in TRAINER and command not in TOOLS:
        from poss_lightning.ranges import near

        commands = [*TRAINER, *TOOLS]
        sys.exit(f"poss: no command {command!r}; there are {', '.join(commands)}{near(command, commands)}")
    logger = logging.getLogger("poss_lightning")
    logger.setLevel(logging.INFO)
    logger.handlers = [LineHandler()]
    try:
        run(command, sys.argv[2:])
    except KeyboardInterrupt:
        sys.exit(f"poss {command}: interrupted")
    except BrokenPipeError:
        raise
    except Exception as error:
        if not is_user_error(error) or os.environ.get("POSS_TRACEBACK") == "1":
            raise
        help = f" (poss {command} --help tells its options)" if isinstance(error, ArgumentError) else ""
        sys.exit(f"poss {command}: {one_line(error)}{help}")


def run(command: str, arguments: list[str]) -> None:
    """Run a command with the arguments of a terminal."""
    import jsonargparse

    from poss_lightning.configs import config_files, explain_option, locate_configs, set_up_parser

    set_up_parser()
    arguments = locate_configs(arguments)
    with announced("loading the libraries") if sys.stderr.isatty() else nullcontext():
        module = import_module("poss_lightning.training.command" if command in TRAINER else TOOLS[command][0])
    if command in TRAINER:
        module.Training(command, arguments)
        return
    tool = getattr(module, command)
    arguments = _complete_switches(arguments, tool)
    if command == "list" and arguments and not arguments[0].startswith("-"):
        arguments = ["--name", *arguments]  # jsonargparse has no optional positional arguments
    try:
        options: dict = {"exit_on_error": False, "allow_abbrev": False}
        jsonargparse.auto_cli(tool, args=arguments, prog=f"poss {command}", as_positional=True, **options)
    except ArgumentError as error:
        raise explain_option(error, jsonargparse.auto_parser(tool), config_files(arguments)) from error


class LineHandler(logging.Handler):
    """Shows the package's log records as plain lines on stderr."""

    def emit(self, record: logging.LogRecord) -> None:
        print(printable(record.getMessage()), file=sys.stderr, flush=True)


def _complete_switches(arguments: list[str], tool: Callable[..., None]) -> list[str]:
    """Return `--chat=true` for a bare `--chat`, as jsonargparse wants it."""
    parameters = signature(tool).parameters.values()
    switches = {f"--{each.name}" for each in parameters if each.annotation in (bool, bool | None)}
    return [
        f"{word}=true" if word in switches and following.lower() not in ("true", "false", "null") else word
        for word, following in zip(arguments, [*arguments[1:], ""], strict=False)
    ]


def _help() -> str:
    lines = ["usage: poss COMMAND [--config FILE] [--option value ...]; poss COMMAND --help tells its options", ""]
    summaries = TRAINER | {name: summary for name, (_, summary) in TOOLS.items()}
    return "\n".join(lines + [f"  {name:<11} {summary}" for name, summary in summaries.items()])


if __name__ == "__main__":  # how a training is started as a process of its own
    main()
