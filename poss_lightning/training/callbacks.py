"""Draft folders written while training runs."""

import math
from pathlib import Path

import lightning

from poss_lightning.training.module import SpecialistTraining


class DraftFolders(lightning.Callback):
    """Writes `draft-last/` after every validation and `draft-best/` whenever `monitor` improves, in the run's folder.

    Args:
        monitor: logged value that tells the best draft; the probe's τ by default.
        mode: "max" or "min".
    """

    def __init__(self, monitor: str = "probe/tau", mode: str = "max"):
        if mode not in ("max", "min"):
            raise ValueError(f"mode is {mode!r}; it must be max or min")
        self.monitor, self.sign = monitor, 1 if mode == "max" else -1
        self.best = -math.inf

    def on_validation_end(self, trainer: lightning.Trainer, pl_module: SpecialistTraining) -> None:
        if trainer.sanity_checking or not trainer.is_global_zero or trainer.state.fn != "fit":
            return
        folder = Path(trainer.log_dir or trainer.default_root_dir)
        pl_module.draft.save_pretrained(folder / "draft-last")
        value = trainer.callback_metrics.get(self.monitor)
        if value is not None and self.sign * float(value) > self.best:
            self.best = self.sign * float(value)
            pl_module.draft.save_pretrained(folder / "draft-best")

    def state_dict(self) -> dict:
        return {"best": self.best}

    def load_state_dict(self, state_dict: dict) -> None:
        self.best = state_dict["best"]
