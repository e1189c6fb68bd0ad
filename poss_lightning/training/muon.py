"""Muon (Jordan et al. 2024, kellerjordan.github.io/posts/muon): momentum whose steps are orthogonal matrices.

The gradient of a draft's matrix has a few large singular values, from the few large dimensions of the features, so a
step along it learns the other directions slowly. Muon's step has the same length in all directions, that of a usual
step of AdamW (2502.16982), so one learning rate fits both. AdamW takes vectors and, as usual, heads: their rows are
tokens, many of them rare, whose steps should not have the same length.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # steepest at 0 of those that keep singular values near 1
STEPS = 5
LENGTH = 0.2  # root mean square of an AdamW step, in learning rates
UNDIVIDED = "optimizer is muon, which needs whole matrices on every process: take adamw, or ddp"
M = TypeVar("M", bound=Tensor)


class Muon(torch.optim.AdamW):
    """AdamW for vectors and heads; for other matrices (n, m), orthogonalized Nesterov momentum.

    Args:
        params: undivided parameters.
        lr, betas, weight_decay: as in AdamW; learning rate and weight decay hold for matrices, too.
        momentum: of matrices.
        heads: matrices among `params` that AdamW takes.
        rank, world: of the processes that have the same parameters and gradients, and share the work of a step.
    """

    def __init__(
        self,
        params: Iterable[Tensor],
        lr: float,
        betas: tuple[float, float],
        weight_decay: float = 0.0,
        momentum: float = 0.95,
        heads: Sequence[Tensor] = (),
        rank: int = 0,
        world: int = 1,
    ):
        self.rank, self.world = rank, world
        params, head_ids = list(params), {id(head) for head in heads}
        matrices = [p for p in params if p.ndim == 2 and id(p) not in head_ids]
        others = [p for p in params if p.ndim != 2 or id(p) in head_ids]
        super().__init__([{"params": others}, {"params": matrices}], lr=lr, betas=betas, weight_decay=weight_decay)
        self.param_groups[1]["momentum"] = momentum

    def step(self, closure: Callable | None = None) -> Tensor | None:
        """One step; see `torch.optim.Optimizer`."""
        loss = None
        if closure is not None:  # it clips the gradients of all groups
            with torch.enable_grad():
                loss = closure()
        vectors, matrices = self.param_groups
        self.param_groups = [vectors]
        try:
            super().step()
        finally:
            self.param_groups = [vectors, matrices]
        self._step_matrices(matrices)
        return loss

    @torch.no_grad()
    def _step_matrices(self, group: dict) -> None:
        """Each process computes the step of one matrix at a time and sends it to the others."""
        matrices = [p for p in group["params"] if p.grad is not None]
        for wave in waves(matrices, self.world):
            steps = [self._orthogonal_step(p, group["momentum"], rank == self.rank) for rank, p in enumerate(wave)]
            if self.world > 1:
                works = [dist.broadcast(step, rank, async_op=True) for rank, step in enumerate(steps)]
                for work in works:
                    work.wait()  # pyright: ignore[reportOptionalMemberAccess] every process is in the group
            for p, step in zip(wave, steps, strict=True):
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_(step.to(p.dtype), alpha=-group["lr"] * LENGTH * max(p.shape) ** 0.5)

    def _orthogonal_step(self, p: Tensor, momentum: float, own: bool) -> Tensor:
        """The step of a matrix, if it is this process's `own`, else an empty tensor; each updates the momentum."""
        assert p.grad is not None
        if not (state := self.state[p]):
            state |= {"step": torch.zeros(()), "momentum": torch.zeros_like(p.grad)}  # AdamW's state_dict has a step
        average = state["momentum"]
        average.lerp_(p.grad, 1 - momentum)
        if not own:
            return torch.empty_like(p, dtype=torch.bfloat16)
        return orthogonalize(p.grad.lerp(average, momentum)).contiguous()


def waves(matrices: Iterable[M], world: int) -> list[list[M]]:
    """Matrices in groups of `world` that take about the same time, the longest first."""

    def flops(matrix: M) -> int:
        """In proportion to those of `orthogonalize`."""
        n, m = min(matrix.shape), max(matrix.shape)
        return n * n * (2 * m + n)

    ordered = sorted(matrices, key=flops, reverse=True)
    return [ordered[start : start + world] for start in range(0, len(ordered), world)]


def orthogonalize(matrix: Tensor) -> Tensor:
    """About the nearest matrix with orthonormal rows or columns: five Newton-Schulz steps in bfloat16, (n, m)."""
    a, b, c = COEFFICIENTS
    x = matrix.bfloat16()
    x = x.mT if len(x) > x.shape[1] else x
    x = x / (x.norm() + 1e-7)  # singular values of at most 1
    for _ in range(STEPS):
        square = x @ x.mT
        x = torch.addmm(x, torch.addmm(square, square, square, beta=b, alpha=c), x, beta=a)
    return x.mT if len(matrix) > matrix.shape[1] else x
