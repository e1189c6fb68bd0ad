"""Callbacks that write draft folders and checkpoints, and measure throughput."""

import logging
import math
import os
import signal
import subprocess
import sys
import time

import lightning
import torch
from lightning.pytorch.callbacks import Checkpoint, TQDMProgressBar
from lightning.pytorch.utilities import rank_zero_warn

from poss_lightning.features.stream import Batch
from poss_lightning.ranges import Count, check_numbers
from poss_lightning.training.module import DraftModule
from poss_lightning.training.run_folder import LAST, check_trainer_folder, folder_of
from poss_lightning.training.stopping import Stop
from poss_lightning.training.strategies import save_draft

TAU = "val/tau_tree"  # of trees on held-out answers, which `Replay` logs
CHECKPOINT_STEPS, GPU_CHECKPOINT_STEPS = 200, 2000  # between two checkpoints

logger = logging.getLogger(__name__)


class DraftFolders(lightning.Callback):
    """Writes `draft-last/` into the run's folder after every validation and at the end, `draft-best/` when τ rises."""

    def __init__(self):
        self.best = -math.inf

    def on_train_start(self, trainer: lightning.Trainer, pl_module: DraftModule) -> None:
        """Forget the best score where the folder has no best draft, as in a training that resumes elsewhere."""
        check_trainer_folder(trainer)
        if not trainer.strategy.broadcast((folder_of(trainer) / "draft-best").is_dir()):
            self.best = -math.inf

    def on_validation_end(self, trainer: lightning.Trainer, pl_module: DraftModule) -> None:
        if trainer.sanity_checking or trainer.fast_dev_run or trainer.state.fn != "fit":  # pyright: ignore[reportAttributeAccessIssue]
            return
        self._save(trainer, pl_module, "draft-last")
        logged = trainer.callback_metrics
        tau = float(logged.get(TAU, math.nan))
        if math.isnan(tau):
            rank_zero_warn(f"nothing was logged as {TAU!r}, so no draft-best is written: add the callback Replay")
            return
        tau = trainer.strategy.broadcast(tau)  # processes may differ by rounding, and all save
        if improves := tau > self.best:
            self.best = tau
            self._save(trainer, pl_module, "draft-best")
        if trainer.is_global_zero:
            line = f"step {trainer.global_step}: {TAU} {tau:#.3g}" + " (best)" * improves
            logger.info(line + f", val/loss {float(logged['val/loss']):#.3g}" + " → draft-best" * improves)

    def on_train_end(self, trainer: lightning.Trainer, pl_module: DraftModule) -> None:
        if trainer.fast_dev_run:  # pyright: ignore[reportAttributeAccessIssue]
            return
        pl_module.guard.check()  # Lightning calls the module's own `on_train_end` later
        self._save(trainer, pl_module, "draft-last")
        folder = folder_of(trainer)
        if trainer.is_global_zero:
            best = folder / "draft-best"
            draft = best if best.is_dir() else folder / "draft-last"
            target = pl_module.draft.config.target.name
            logger.info('draft written to %s; next: poss generate "Hi" --target %s --draft %s', draft, target, draft)

    def _save(self, trainer: lightning.Trainer, pl_module: DraftModule, name: str) -> None:
        save_draft(pl_module.draft, folder_of(trainer) / name, writes=trainer.is_global_zero)

    def state_dict(self) -> dict:
        return {"best": self.best}

    def load_state_dict(self, state_dict: dict) -> None:
        self.best = state_dict["best"]


class StepBar(TQDMProgressBar):
    """Shows the steps of the whole training, not an epoch's batches: a bar, or lines where stdout is no terminal."""

    def setup(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        self.lines = trainer.is_global_zero and logger.isEnabledFor(logging.INFO) and not sys.stdout.isatty()
        if self.lines:
            self.disable()

    def on_train_start(self, trainer: lightning.Trainer, *_) -> None:
        super().on_train_start()
        bar, total = self.train_progress_bar, int(trainer.estimated_stepping_batches)
        bar.reset(total=total)
        bar.n = bar.initial = self.first = self.printed = trainer.global_step
        bar.set_description("Steps")
        self.started = time.monotonic()
        if self.lines:
            logger.info("step %d of %d: training begins", self.first, total)

    def on_train_epoch_start(self, *_) -> None:
        """Keep counting across epochs."""

    def on_train_batch_end(self, trainer, pl_module, outputs, batch: Batch, batch_idx: int) -> None:
        step, every = trainer.global_step, trainer.log_every_n_steps  # pyright: ignore[reportAttributeAccessIssue]
        super().on_train_batch_end(trainer, pl_module, outputs, batch, step - 1)
        if not self.lines or not every or step < self.printed + every:
            return
        self.printed = step
        loss = trainer.callback_metrics.get("train/loss")
        rate = (step - self.first) / (time.monotonic() - self.started)
        shown = "" if loss is None else f": loss {float(loss):.3f}"
        logger.info("step %d of %d%s, %.2f steps/s", step, int(trainer.estimated_stepping_batches), shown, rate)


class LastCheckpoint(Checkpoint):
    """Writes `checkpoints/last.ckpt`, to resume from, every so many steps, after each validation and at the end.

    After Ctrl-C, SIGTERM, SIGHUP, or SLURM's SIGUSR1, to any process, all write the checkpoint and end: one process
    after its step, several after the next step that is logged, where they wait for each other in any case; or after a
    batch of a validation, which the resumed training repeats as a whole. The validation after the last step is finished
    first. A second signal ends a process at once, without a checkpoint.

    Args:
        every_n_train_steps: optimizer steps between checkpoints, the most that a killed process loses. None is for
            2,000 on a GPU, where writing a large draft takes as long as hundreds of steps, and 200 elsewhere.
    """

    stop: Stop  # of the training that runs
    step: int  # the last that was seen

    @check_numbers
    def __init__(self, every_n_train_steps: Count | None = None):
        self.every: int = every_n_train_steps or 0

    def setup(self, trainer: lightning.Trainer, pl_module: DraftModule, stage: str) -> None:
        # Lightning's own agreement between processes makes each batch wait for the device, and no flag turns it off.
        trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None

    def on_train_start(self, trainer: lightning.Trainer, pl_module: DraftModule) -> None:
        check_trainer_folder(trainer)
        on_gpu = trainer.strategy.root_device.type == "cuda"
        self.every = self.every or (GPU_CHECKPOINT_STEPS if on_gpu else CHECKPOINT_STEPS)
        self.stop, self.step = Stop(trainer), trainer.global_step

    def on_train_batch_end(self, trainer: lightning.Trainer, *args) -> None:
        """Save or stop after a step, unless a validation follows, which a killed training must repeat."""
        if trainer.global_step == self.step:  # the batch is accumulated
            return
        self.step = trainer.global_step
        logs_every = trainer.log_every_n_steps or CHECKPOINT_STEPS  # pyright: ignore[reportAttributeAccessIssue]
        due, asks = self.step % self.every == 0, trainer.world_size == 1 or self.step % logs_every == 0
        if not (due or asks) or _is_last_step(trainer) or _validates(trainer):
            return
        stops = asks and self.stop.is_agreed()
        if due or stops:
            self._save(trainer)
        if stops:
            self._end(trainer)

    def on_validation_batch_end(self, trainer: lightning.Trainer, *args, **kwargs) -> None:
        if _is_between_steps(trainer) and self.stop.is_agreed():
            self._save(trainer)
            self._end(trainer)

    def on_validation_end(self, trainer: lightning.Trainer, pl_module: DraftModule) -> None:
        if _is_between_steps(trainer):
            self._save(trainer)

    def on_train_end(self, trainer: lightning.Trainer, pl_module: DraftModule) -> None:
        self._save(trainer)
        self.stop.close()
        if self.stop.is_agreed():  # else a sweep would start its next training
            raise self.stop.interrupt()

    def on_exception(self, trainer: lightning.Trainer, pl_module: DraftModule, exception: BaseException) -> None:
        """Handle signals as before; after Ctrl-C, too, as Lightning then lets the process ignore the next one."""
        if hasattr(self, "stop"):
            self.stop.close()

    def _save(self, trainer: lightning.Trainer) -> None:
        if not trainer.fast_dev_run:  # pyright: ignore[reportAttributeAccessIssue]
            trainer.save_checkpoint(folder_of(trainer) / LAST)

    def _end(self, trainer: lightning.Trainer) -> None:
        last = folder_of(trainer) / LAST
        if trainer.is_global_zero:
            logger.info("stopped at step %d: --ckpt_path %s resumes", trainer.global_step, last)
            if self.stop.number == signal.SIGUSR1:
                subprocess.call(["scontrol", "requeue", os.environ["SLURM_JOB_ID"]])
        raise self.stop.interrupt()


def _validates(trainer: lightning.Trainer) -> bool:
    """Return whether a validation follows the step, in any process: a time limit may differ between them.

    Only this private method of Lightning knows: no hook comes between the step and the validation that follows it.
    """
    loop = trainer.fit_loop
    follows = loop.epoch_loop._should_check_val_fx(loop._data_fetcher)  # pyright: ignore[reportArgumentType]
    return trainer.strategy.reduce_boolean_decision(follows, all=False)


def _is_between_steps(trainer: lightning.Trainer) -> bool:
    """Return whether a validation is one of a training, after its first step and before its last."""
    return trainer.state.fn == "fit" and trainer.global_step > 0 and not _is_last_step(trainer)


def _is_last_step(trainer: lightning.Trainer) -> bool:
    """Return whether the training ends after this step, and writes its last checkpoint."""
    return trainer.global_step in (trainer.max_steps, trainer.estimated_stepping_batches)


class Throughput(lightning.Callback):
    """Logs slots/s of all processes, those where pass 1 counts, and peak GPU memory, every `log_every_n_steps`.

    The time of a validation does not count.
    """

    def on_train_start(self, trainer: lightning.Trainer, pl_module: DraftModule) -> None:
        self.step, self.slots, self.started = trainer.global_step, 0, time.monotonic()

    def on_train_batch_end(self, trainer, pl_module: DraftModule, outputs, batch: Batch, batch_idx) -> None:
        self.slots += len(batch.mask.slots)
        every = trainer.log_every_n_steps  # pyright: ignore[reportAttributeAccessIssue]
        if not every or trainer.global_step == self.step or trainer.global_step % every:
            return
        # Tensors of the host: Lightning would copy numbers to the device, and read the bar's after every batch.
        slots = trainer.strategy.reduce(torch.tensor(self.slots, device=pl_module.device), reduce_op="sum").cpu()
        pl_module.log("throughput/slots_per_second", slots / (time.monotonic() - self.started), prog_bar=True)
        if pl_module.device.type == "cuda":  # of this process, since it began
            pl_module.log("throughput/peak_gib", torch.cuda.max_memory_allocated(pl_module.device) / 2**30)
        self.on_train_start(trainer, pl_module)

    def on_validation_start(self, trainer: lightning.Trainer, pl_module: DraftModule) -> None:
        self.validation_started = time.monotonic()

    def on_validation_end(self, trainer: lightning.Trainer, pl_module: DraftModule) -> None:
        if trainer.state.fn == "fit" and not trainer.sanity_checking:
            self.started += time.monotonic() - self.validation_started
