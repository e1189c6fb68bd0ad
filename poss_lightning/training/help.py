"""`poss fit --help`: the options of this package, and those of the trainer that most trainings set."""

from argparse import SUPPRESS, Action

from jsonargparse import ArgumentParser, DefaultHelpFormatter

PRECISION = "bf16-mixed, 32-true, 64-true, or auto: bf16-mixed where the device multiplies bfloat16 fast, else 32-true"
# The options in the short help, besides those of model and data.
SHORT_HELP = {
    "name": "folder of this training, in runs/ or trainer.default_root_dir (default: lightning_logs/version_N)",
    "seed_everything": "seed for the initial weights (--data.seed: data order and noise); true draws one (default: "
    "%(default)s)",
    "trainer.accelerator": "auto, cpu, gpu or mps (default: %(default)s)",
    "trainer.devices": "number of this machine's devices, or auto for all (default: %(default)s)",
    "trainer.num_nodes": "machines (default: %(default)s)",
    "trainer.strategy": "how devices share the work: auto, ddp, or a class, as in conf/trainer/ for ZeRO "
    "(default: %(default)s)",
    "trainer.precision": f"{PRECISION} (default: %(default)s)",
    "trainer.max_steps": "optimizer steps; -1 for as many as the epochs have (default: %(default)s)",
    "trainer.max_epochs": "passes over the store (default: %(default)s)",
    "trainer.max_time": "time limit, DD:HH:MM:SS (default: %(default)s)",
    "trainer.accumulate_grad_batches": "batches per optimizer step, in each process (default: %(default)s)",
    "trainer.gradient_clip_val": "maximum norm of the gradient (default: %(default)s)",
    "trainer.val_check_interval": "batches between validations, or a fraction of an epoch (default: %(default)s)",
    "trainer.check_val_every_n_epoch": "null lets the interval count batches across epochs (default: %(default)s)",
    "trainer.log_every_n_steps": "steps between two points in TensorBoard (default: %(default)s)",
    "trainer.logger": "a Lightning logger by its class, such as CSVLogger or WandbLogger (default: TensorBoard's)",
    "ckpt_path": "a training's checkpoints/last.ckpt, to resume or to validate; auto: that of --name, if there is one "
    "(default: %(default)s)",
}


class ShortHelp(DefaultHelpFormatter):
    """Prints the text of `SHORT_HELP`, without types."""

    def _get_help_string(self, action: Action) -> str:
        return SHORT_HELP.get(action.dest) or super()._get_help_string(action)


def choose_help(parser: ArgumentParser, arguments: list[str]) -> list[str]:
    """Shorten the parser's help for `--help`, and return arguments that it knows: it has no `--help all`."""
    command, *given = arguments
    if given[-2:] in (["--help", "all"], ["-h", "all"]):
        return arguments[:-1]
    if {"--help", "-h"}.isdisjoint(given):
        return arguments
    for action in parser._actions:
        ours = action.dest.startswith(("model", "data", "help", "config"))
        if action.dest == "model.store" or not (ours or action.dest in SHORT_HELP):  # the data name the store
            action.help = SUPPRESS
    parser.formatter_class = ShortHelp
    parser.usage = f"poss {command} [--config FILE ...] [--option value ...]"
    parser.epilog = f"poss {command} --help all has the rest of the trainer's options."
    return arguments
