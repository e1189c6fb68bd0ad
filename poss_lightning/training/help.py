"""`poss fit --help`: what is ours, and the trainer's options that most trainings set. `--help all` has the rest."""

from argparse import SUPPRESS, Action, ArgumentError
from itertools import pairwise

from jsonargparse import ArgumentParser, DefaultHelpFormatter

PRECISION = "auto: bf16-mixed where the device multiplies bfloat16 fast, else 32-true; or another, but not 16-mixed"
HELP, ASSIGNED = ("--help", "-h"), ("--help=", "-h=")
# The options that the short help has, besides those of model and data.
SAID = {
    "name": "folder of this training, in runs/ or trainer.default_root_dir (default: lightning_logs/version_N)",
    "seed_everything": "seed for the initial weights (--data.seed: data order and noise); true draws one (default: "
    "%(default)s)",
    "trainer.accelerator": "auto, cpu, gpu or mps (default: %(default)s)",
    "trainer.devices": "how many of a machine's devices train, or auto for all (default: %(default)s)",
    "trainer.num_nodes": "machines (default: %(default)s)",
    "trainer.strategy": "how several devices share the work: auto, ddp, or as conf/trainer/ has it for ZeRO "
    "(default: %(default)s)",
    "trainer.precision": f"{PRECISION} (default: %(default)s)",
    "trainer.max_steps": "optimizer steps; -1 for as many as the epochs have (default: %(default)s)",
    "trainer.max_epochs": "passes over the store (default: %(default)s)",
    "trainer.max_time": "DD:HH:MM:SS after which it ends (default: %(default)s)",
    "trainer.accumulate_grad_batches": "batches of an optimizer step, in each process (default: %(default)s)",
    "trainer.gradient_clip_val": "norm that gradients are cut to (default: %(default)s)",
    "trainer.val_check_interval": "batches between two validations, or a fraction of an epoch (default: %(default)s)",
    "trainer.check_val_every_n_epoch": "null lets the interval count batches across epochs (default: %(default)s)",
    "trainer.log_every_n_steps": "steps between two points in TensorBoard (default: %(default)s)",
    "trainer.logger": "a logger of Lightning by its class, such as CSVLogger or WandbLogger (default: TensorBoard's)",
    "ckpt_path": "a training's checkpoints/last.ckpt, to resume or to measure (default: %(default)s)",
}


class ShortHelp(DefaultHelpFormatter):
    """Says of each option in `SAID` what stands there, and no types."""

    def _get_help_string(self, action: Action) -> str:
        return SAID.get(action.dest) or super()._get_help_string(action)


def choose_help(parser: ArgumentParser, arguments: list[str]) -> list[str]:
    """The arguments as the parser of their command takes them: it knows `--help`, but neither short nor `all`.

    Raises:
        ArgumentError: help is asked for with another word than `all`.
    """
    command, *rest = arguments
    given = [word for each in rest for word in (each.split("=", 1) if each.startswith(ASSIGNED) else [each])]
    if not any(word in HELP for word in given):
        return arguments
    free = [word for before, word in pairwise([HELP[0], *given]) if not word.startswith("-") and not _takes_one(before)]
    if free not in ([], ["all"]):
        raise ArgumentError(None, f"help is asked of {' '.join(free)!r}; it must be --help, or --help all")
    if not free:
        _shorten(parser, command)
    return [command, HELP[0]]


def _takes_one(word: str) -> bool:
    """Whether the next word of a command line is the value of this one."""
    return word.startswith("-") and "=" not in word and word not in HELP


def _shorten(parser: ArgumentParser, command: str) -> None:
    """Leave out options of Lightning that most trainings do not set."""
    for action in parser._actions:
        ours = action.dest.startswith(("model", "data", "help", "config"))
        if action.dest == "model.store" or not (ours or action.dest in SAID):  # a store is given by the data
            action.help = SUPPRESS
    parser.formatter_class = ShortHelp
    parser.usage = f"poss {command} [--config FILE ...] [--option value ...]"
    parser.epilog = f"poss {command} --help all has the rest of the trainer's options."
