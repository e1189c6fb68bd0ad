"""Muon (Jordan et al. 2024, kellerjordan.github.io/posts/muon): momentum whose steps are orthogonal matrices.

A gradient of a draft's matrix has a few large singular values, those of the features' few large dimensions; a step that
follows them learns the other directions slowly. Muon gives all directions the same length. Steps are as long as
AdamW's usual ones (2502.16982), so one learning rate does for matrices and for vectors, which AdamW takes. So it does a
head, as is the custom: its rows are tokens, many of them hardly ever seen, and need no steps of one length.
"""

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # steepest at 0 of those that keep singular values near 1
STEPS = 5
LENGTH = 0.2  # root mean square of an AdamW step, in learning rates


class Muon(torch.optim.AdamW):
    """AdamW for vectors and heads; for other matrices (n, m), Nesterov momentum made orthogonal.

    Args:
        params: of one process, whole.
        lr, betas, weight_decay: of AdamW; weight decay of matrices too.
        momentum: of matrices.
        heads: those of `params` that are matrices and that AdamW takes all the same.
    """

    def __init__(
        self,
        params: Iterable[Tensor],
        lr: float,
        betas: tuple[float, float],
        weight_decay: float = 0.0,
        momentum: float = 0.95,
        heads: Sequence[Tensor] = (),
    ):
        params, apart = list(params), {id(head) for head in heads}
        is_matrix = [p.ndim == 2 and id(p) not in apart for p in params]
        groups = [[p for p, own in zip(params, is_matrix, strict=True) if own == kind] for kind in (False, True)]
        super().__init__([{"params": own} for own in groups], lr=lr, betas=betas, weight_decay=weight_decay)
        self.param_groups[1]["momentum"] = momentum

    def step(self, closure: Callable | None = None) -> Tensor | None:
        """One step; see `torch.optim.Optimizer`."""
        loss = None
        if closure is not None:  # clips gradients, of all groups
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
        for p in group["params"]:
            if p.grad is None:
                continue
            if not (state := self.state[p]):
                state |= {"step": torch.zeros(()), "momentum": torch.zeros_like(p.grad)}  # AdamW wants its step
            average = state["momentum"]
            average.lerp_(p.grad, 1 - group["momentum"])
            step = orthogonalize(p.grad.lerp(average, group["momentum"]))
            p.mul_(1 - group["lr"] * group["weight_decay"])
            p.add_(step.to(p.dtype), alpha=-group["lr"] * LENGTH * max(p.shape) ** 0.5)


def orthogonalize(matrix: Tensor) -> Tensor:
    """The nearest matrix with orthonormal rows or columns, nearly: five Newton-Schulz steps in bfloat16, (n, m)."""
    a, b, c = COEFFICIENTS
    x = matrix.bfloat16()
    x = x.mT if len(x) > x.shape[1] else x
    x = x / (x.norm() + 1e-7)  # singular values of at most 1
    for _ in range(STEPS):
        square = x @ x.mT
        x = torch.addmm(x, torch.addmm(square, square, square, beta=b, alpha=c), x, beta=a)
    return x.mT if len(matrix) > matrix.shape[1] else x
