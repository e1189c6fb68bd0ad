"""The optimizer of a draft, the schedule of its learning rate, and a guard against gradients that are not finite."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import lightning
import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from poss_lightning.draft.specialists import DraftModel
from poss_lightning.training.strategies import DeepSpeed

MAX_NAMED = 64  # conversations in a message


def make_optimizer(draft: DraftModel, options: Mapping[str, Any], trainer: lightning.Trainer) -> Optimizer:
    """AdamW or Muon; `options` are those of `DraftModule`."""
    adamw_args: dict[str, Any] = {
        "lr": options["learning_rate"],
        "betas": tuple(options["betas"]),
        "weight_decay": options["weight_decay"],
    }
    if runs_fused(trainer):
        adamw_args["fused"] = True
    if options["optimizer"] == "adamw":
        return torch.optim.AdamW(draft.parameters(), **adamw_args)
    heads = [draft.lm_head.weight] if draft.config.own_head else []
    return Muon(draft.parameters(), **adamw_args, heads=heads)


def runs_fused(trainer: lightning.Trainer) -> bool:
    """Return whether AdamW updates all weights in one kernel: on a GPU, unless DeepSpeed divides its state."""
    return trainer.strategy.root_device.type not in ("cpu", "mps") and not isinstance(trainer.strategy, DeepSpeed)


def restore_fused(checkpoint: Mapping[str, Any], trainer: lightning.Trainer) -> None:
    """Let AdamW resume with the kernel of this device, not of the checkpoint's."""
    for group in (group for each in checkpoint["optimizer_states"] for group in each["param_groups"]):
        group["fused"] = runs_fused(trainer) or None


def schedule_rate(optimizer: Optimizer, warmup: float, trainer: lightning.Trainer) -> LambdaLR:
    """Raise the rate over that fraction of the steps, then lower it linearly to 0; ValueError without a last step."""
    total = trainer.estimated_stepping_batches
    if total == float("inf"):
        raise ValueError("the learning rate falls to the last step: give trainer.max_steps or trainer.max_epochs")
    if total < trainer.max_steps:
        rank_zero_warn(
            f"trainer.max_steps is {trainer.max_steps}, but trainer.max_epochs is {trainer.max_epochs}, "
            f"which ends this training at step {total}: give trainer.max_epochs -1 for all steps"
        )
    rise = max(1, round(warmup * total))
    return LambdaLR(optimizer, lambda step: min((step + 1) / rise, max(total - step, 0) / max(total - rise, 1)))


class Muon(torch.optim.Optimizer):
    """`torch.optim.Muon` for matrices, and AdamW for vectors and heads, as one optimizer.

    Muon (Jordan et al. 2024, kellerjordan.github.io/posts/muon) is momentum whose steps are orthogonal matrices. The
    gradient of a draft's matrix has a few large singular values, from the few large dimensions of the features, so a
    step along it learns the other directions slowly. Muon's step has the same length in all directions, that of a usual
    step of AdamW (2502.16982), so one learning rate fits both. AdamW takes vectors and, as usual, heads: their rows are
    tokens, many of them rare, whose steps should not have the same length.

    Args:
        params: undivided parameters.
        lr, weight_decay: of both.
        heads: matrices among `params` that AdamW takes.
        adamw: other arguments of AdamW.
    """

    def __init__(
        self,
        params: Iterable[Tensor],
        lr: float,
        weight_decay: float = 0.0,
        heads: Sequence[Tensor] = (),
        **adamw,
    ):
        params, head_ids = list(params), {id(head) for head in heads}
        matrices = [p for p in params if p.ndim == 2 and id(p) not in head_ids]
        others = [p for p in params if p.ndim != 2 or id(p) in head_ids]
        self.adamw = torch.optim.AdamW(others, lr=lr, weight_decay=weight_decay, **adamw)
        self.muon = torch.optim.Muon(matrices, lr=lr, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw")
        super().__init__([*self.adamw.param_groups, *self.muon.param_groups], {})

    def step(self, closure: Callable | None = None) -> Tensor | None:
        """One step; see `torch.optim.Optimizer`."""
        loss = None
        if closure is not None:  # it clips the gradients of all groups
            with torch.enable_grad():
                loss = closure()
        vectors, matrices = self.param_groups  # a checkpoint that was loaded has replaced groups and state
        self.adamw.state = self.muon.state = self.state
        self.adamw.param_groups, self.muon.param_groups = [vectors], [matrices]
        self.adamw.step()
        self.muon.step()
        return loss


class NormGuard:
    """Keeps the norms of gradients on the device, so that a step does not wait for its own.

    They are checked when a step is logged, and before anything is validated or written.

    Attributes:
        ids: conversations of the current step.
    """

    def __init__(self):
        self.ids: list[str] = []
        self.steps: list[tuple[Tensor, int, list[str]]] = []  # norm, number and conversations of each since the check

    def end_step(self, norm: Tensor, step: int) -> None:
        """Keep the norm of the current step for `check`."""
        self.steps.append((norm, step, self.ids))
        self.ids = []

    def check(self) -> None:
        """Raise ValueError for the first step since the last check whose gradient was not finite."""
        norms = torch.stack([norm for norm, *_ in self.steps]).tolist() if self.steps else []
        for norm, (_, step, ids) in zip(norms, self.steps, strict=True):
            if not math.isfinite(norm):
                more = f" and {len(ids) - MAX_NAMED} more" if len(ids) > MAX_NAMED else ""
                raise ValueError(
                    f"step {step}: the norm of the gradient is {norm}, in {', '.join(ids[:MAX_NAMED])}{more}. "
                    "Checkpoints and drafts are from before it"
                )
        self.steps.clear()
