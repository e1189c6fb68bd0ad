"""Draft folders written while training runs."""

import math
from pathlib import Path

import lightning
from lightning.pytorch.utilities import rank_zero_warn

from poss_lightning.training.module import SpecialistTraining
from poss_lightning.training.strategies import whole


class DraftFolders(lightning.Callback):
    """Writes `draft-last/` after every validation and at the end, and `draft-best/` when `monitor` improves.

    Both stand in the run's own folder.

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
        if trainer.sanity_checking or trainer.state.fn != "fit":
            return
        self._save(trainer, pl_module, "draft-last")
        value = trainer.callback_metrics.get(self.monitor)
        if value is None:
            rank_zero_warn(f"nothing was logged as {self.monitor!r}, so no draft-best is written")
        elif self.sign * float(value) > self.best:
            self.best = self.sign * float(value)
            self._save(trainer, pl_module, "draft-best")

    def on_train_end(self, trainer: lightning.Trainer, pl_module: SpecialistTraining) -> None:
        self._save(trainer, pl_module, "draft-last")

    def _save(self, trainer: lightning.Trainer, pl_module: SpecialistTraining, name: str) -> None:
        folder = Path(trainer.log_dir or trainer.default_root_dir)  # asks all ranks, so all must ask
        draft = whole(pl_module.draft)  # asks all ranks too
        if trainer.is_global_zero:
            draft.save_pretrained(folder / name)

    def state_dict(self) -> dict:
        return {"best": self.best}

    def load_state_dict(self, state_dict: dict) -> None:
        self.best = state_dict["best"]
