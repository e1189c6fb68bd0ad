"""Loss terms that compare the target's distribution p with the draft's q, by name (docs/METHOD.md, 5).

A term takes log p and log q, (s, V) each over the draft's vocabulary, and returns one value per slot, (s,). Autograd
computes its gradient. To add a term, write such a function and a line in `DISTRIBUTION_TERMS`.
"""

from collections.abc import Callable

import torch
from torch import Tensor

DistributionTerm = Callable[[Tensor, Tensor], Tensor]


def acceptance(log_p: Tensor, log_q: Tensor) -> Tensor:
    """-log Σ min(p, q), the negative logarithm of the chance of acceptance (LK losses, arXiv 2602.23881)."""
    return -torch.minimum(log_p, log_q).logsumexp(-1)


DISTRIBUTION_TERMS: dict[str, DistributionTerm] = {"acceptance": acceptance}
