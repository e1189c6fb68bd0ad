"""Terms of a loss that compare the target's distribution p with the draft's q, by name (docs/METHOD.md, 5).

A term is a function of log p and log q, (s, V) each over the draft's vocabulary, and returns its value a slot, (s,).
Autograd makes its gradient. A new one is such a function, and a line in `TERMS`.
"""

from collections.abc import Callable

import torch
from torch import Tensor

Term = Callable[[Tensor, Tensor], Tensor]


def acceptance(log_p: Tensor, log_q: Tensor) -> Tensor:
    """-log Σ min(p, q), the negative logarithm of the chance of acceptance (LK losses, arXiv 2602.23881)."""
    return -torch.minimum(log_p, log_q).logsumexp(-1)


TERMS: dict[str, Term] = {"acceptance": acceptance}
