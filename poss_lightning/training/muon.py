"""Muon (Jordan et al. 2024, kellerjordan.github.io/posts/muon): momentum whose steps are orthogonal matrices.

The gradient of a draft's matrix has a few large singular values, from the few large dimensions of the features. A step
along this gradient learns the other directions slowly. Muon's step has the same length in all directions. It is as long
as a usual step of AdamW (2502.16982), so one learning rate serves matrices and vectors. Vectors are left to AdamW.
So is a head, as is usual: its rows are tokens, many of them rare, and their steps need not have the same length.
"""

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # steepest at 0 of those that keep singular values near 1
STEPS = 5
LENGTH = 0.2  # root mean square of an AdamW step, in learning rates


class Muon(torch.optim.AdamW):
    """AdamW for vectors and heads; for other matrices (n, m), orthogonalized Nesterov momentum.

    Args:
        params: undivided, of one process.
        lr, betas, weight_decay: as in AdamW; learning rate and weight decay hold for matrices too.
        momentum: of matrices.
        heads: matrices among `params` that are left to AdamW.
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
        for p in group["params"]:
            if p.grad is None:
                continue
            if not (state := self.state[p]):
                state |= {
                    "step": torch.zeros(()),
                    "momentum": torch.zeros_like(p.grad),
                }  # AdamW's state_dict has a step
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
