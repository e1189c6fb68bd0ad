"""Muon (Jordan et al. 2024, kellerjordan.github.io/posts/muon): momentum whose steps are orthogonal matrices.

The gradient of a draft's matrix has a few large singular values, from the few large dimensions of the features, so a
step along it learns the other directions slowly. Muon's step has the same length in all directions, that of a usual
step of AdamW (2502.16982), so one learning rate fits both. AdamW takes vectors and, as usual, heads: their rows are
tokens, many of them rare, whose steps should not have the same length.
"""

from collections.abc import Callable, Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

UNDIVIDED = "optimizer is muon, which needs whole matrices on every process: take adamw, or ddp"


class Muon(torch.optim.Optimizer):
    """`torch.optim.Muon` for matrices, and AdamW for vectors and heads, as one optimizer.

    Args:
        params: undivided parameters.
        lr, weight_decay: of both.
        heads: matrices among `params` that AdamW takes.
        rank, world: of the processes that have the same parameters and gradients, and share the work of a step.
        adamw: other arguments of AdamW.
    """

    def __init__(
        self,
        params: Iterable[Tensor],
        lr: float,
        weight_decay: float = 0.0,
        heads: Sequence[Tensor] = (),
        rank: int = 0,
        world: int = 1,
        **adamw,
    ):
        self.rank, self.world = rank, world
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
        self.adamw.param_groups = [vectors]
        self.adamw.step()
        self._step_matrices(matrices)
        return loss

    @torch.no_grad()
    def _step_matrices(self, group: dict) -> None:
        """Take the steps of every `world`-th matrix, and send these matrices to the other processes."""
        matrices = [p for p in group["params"] if p.grad is not None]
        matrices.sort(key=lambda p: min(p.shape) * (2 * p.numel() + min(p.shape) ** 2), reverse=True)  # by FLOPs
        self.muon.param_groups = [group | {"params": matrices[self.rank :: self.world]}]
        self.muon.step()
        sent = []
        for i, p in enumerate(matrices if self.world > 1 else []):
            if (owner := i % self.world) != self.rank:
                if not (state := self.state[p]):
                    state["momentum_buffer"] = torch.zeros_like(p)
                state["momentum_buffer"].lerp_(p.grad, 1 - group["momentum"])  # as any process may write a checkpoint
            sent.append(dist.broadcast(p, owner, async_op=True))
        for work in sent:
            work.wait()  # pyright: ignore[reportOptionalMemberAccess] every process is in the group
