"""One process of some trainings; tests/training/test_strategies.py forks as many as they have.

A run leaves the weights, a checkpoint of every second step, what the callbacks wrote, and how much a step reduced.
"""

import json
import warnings
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import lightning
import torch.distributed as dist
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from safetensors.torch import load_file, save_file
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from poss_lightning import cli
from poss_lightning.evaluation.probe import Replay
from poss_lightning.features.datamodule import FeatureDataModule
from poss_lightning.training.callbacks import DraftFolders
from poss_lightning.training.module import DraftModule
from poss_lightning.training.strategies import DeepSpeed, gather_draft, prepare

STEPS, CLIP = 4, 3.2  # some gradients are longer, some are not: so their scale is seen, too
DATA = {"batch_tokens": 160, "noise": 0.0, "validation": 0.2}
MODEL = {"allocation": [2, 1], "learning_rate": 1e-3, "betas": (0.9, 0.95), "warmup": 0.0, "gamma": 0.9}
MODEL |= {"weight_decay": 0.1, "vocabulary_size": 200}
EAGLE3 = {"kind": "eagle3", "loss": {"token": 1.0}, "detach": False}
QUIET = dict.fromkeys(("enable_progress_bar", "enable_model_summary", "logger"), False)


def deepspeed(stage: int, **options: bool) -> DeepSpeed:
    strategy = DeepSpeed(stage, **options)
    strategy.config["zero_optimization"]["param_persistence_threshold"] = 0  # tiny as they are, stage 3 divides them
    return strategy


STRATEGIES = {"one": lambda: "auto", "ddp": DDPStrategy}
STRATEGIES |= {f"zero{stage}": partial(deepspeed, stage) for stage in (1, 2, 3)}
STRATEGIES |= {"zero3-offload": partial(deepspeed, 3, offload_optimizer=True, offload_parameters=True)}


class Reductions(lightning.Callback):
    """Counts the numbers that were summed over the processes in every step."""

    def __init__(self):
        self.step, self.steps = 0, Counter()
        for name in dir(dist):
            if name.startswith(("all_reduce", "reduce")) and name != "reduce_op":
                setattr(dist, name, self.counted(getattr(dist, name), place=int("scatter" in name)))

    def counted(self, function, place: int):
        def reduce(*args, **kwargs):
            tensors = args[place] if len(args) > place else kwargs.get("input", kwargs.get("tensor"))
            self.steps[self.step] += sum(t.numel() for t in (tensors if isinstance(tensors, list) else [tensors]))
            return function(*args, **kwargs)

        return reduce

    def on_train_start(self, trainer, pl_module):
        self.steps = Counter()
        if type(trainer.strategy) is DDPStrategy:
            trainer.strategy.model.register_comm_hook(None, allreduce_hook)  # the same in Python, so that it is counted

    def on_train_batch_start(self, trainer, pl_module, *_):
        self.step = trainer.global_step + 1
        self.steps[self.step] += 0  # a process alone reduces nothing

    def on_train_batch_end(self, trainer, pl_module, *_):
        self.step = 0  # what checkpoints gather is not counted

    def on_train_end(self, trainer, pl_module):
        self.draft = gather_draft(pl_module.draft)  # afterwards Lightning takes the module from the GPU


def keeps_no_copy(trainer: lightning.Trainer) -> None:
    """Where processes share weights and moments, only the first has a copy of all at a checkpoint."""
    save = trainer.strategy.save_checkpoint

    def checked(checkpoint: dict, *where: Any, **options: Any) -> None:
        moments = [state for optimizer in checkpoint["optimizer_states"] for state in optimizer.get("state", {})]
        shares = isinstance(trainer.strategy, DeepSpeed) and not trainer.is_global_zero
        assert bool(checkpoint["state_dict"] and moments) is not shares
        save(checkpoint, *where, **options)

    trainer.strategy.save_checkpoint = checked


def main(store: str, initial: str, runs: list[dict]) -> None:
    """Do the runs, one after the other: {"strategy": "ddp", "world": 2, …}, or {"fit": arguments, "last": path}."""
    warnings.filterwarnings("error", ".*sync_dist")  # Lightning's, of a value that processes might not have alike
    reductions = Reductions()
    for run in runs:
        if "fit" in run:
            cli.run("fit", run["fit"])
            cli.run("validate", [*run["fit"], f"--ckpt_path={run['last']}"])
            continue
        folder, steps = Path(run["folder"]), run["accumulate"] * STEPS
        source, weights = run.get("store", store), run.get("initial", initial)
        module = DraftModule(store=source, **MODEL | run.get("model", {}))
        module.draft.load_state_dict(load_file(weights))
        trainer = lightning.Trainer(
            strategy=STRATEGIES[run["strategy"]](),
            accelerator=run.get("accelerator", "cpu"),
            devices=run["world"],
            precision=run.get("precision", "32-true"),
            max_steps=STEPS,
            accumulate_grad_batches=run["accumulate"],
            gradient_clip_val=run.get("clip", CLIP),
            num_sanity_val_steps=0,
            val_check_interval=steps,
            check_val_every_n_epoch=None,
            default_root_dir=folder,
            callbacks=[
                reductions,
                Replay(),
                DraftFolders(),
                EarlyStopping("val/tau_tree", mode="max", patience=9),  # every process must have it
                ModelCheckpoint(folder, "{step}", every_n_train_steps=2, save_top_k=-1),
            ],
            **QUIET,
        )
        prepare(trainer.strategy)
        keeps_no_copy(trainer)
        trainer.fit(module, FeatureDataModule(source, **DATA), ckpt_path=run.get("resume"), weights_only=True)
        if trainer.is_global_zero:
            save_file(reductions.draft.state_dict(), folder / "weights.safetensors")
            del reductions.steps[0]
            (folder / "reduced.json").write_text(json.dumps(reductions.steps))
