"""The terms of a loss that compare the target's distribution p with the draft's q, by name (docs/METHOD.md, 5).

Each function takes `Distributions` of s slots and returns its value a slot, (s,), and its slope by log q, (s, V), as if
the entries of log q were free: the loss makes the slope by the logits l from it, as slope - q Σ slope.

A new term is a function here and a line in `TERMS`. `by_autograd` makes one of a value alone, for a first try.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

LEAST = 1e-12  # of an acceptance whose logarithm is taken
ETA = 3.0  # how soon `hybrid` turns from cross-entropy to acceptance, as published


class Distributions(NamedTuple):
    """The target's and the draft's, over the draft's vocabulary: (s, V) each, float32 or wider."""

    p: Tensor
    log_p: Tensor
    q: Tensor
    log_q: Tensor


Valued = tuple[Tensor, Tensor]  # (s,) values and (s, V) slopes by log q
Term = Callable[[Distributions], Valued]


def by_autograd(value: Callable[[Tensor, Tensor], Tensor]) -> Term:
    """A term of its value alone, a function of log p and log q: autograd makes the slope, at some cost of time."""

    def term(of: Distributions) -> Valued:
        with torch.enable_grad():
            log_q = of.log_q.detach().requires_grad_()
            values = value(of.log_p, log_q)
            (slope,) = torch.autograd.grad(values.sum(), log_q)
        return values.detach(), slope

    return term


def total_variation(of: Distributions) -> Valued:
    """1 - Σ min(p, q): how often a token drawn from q is rejected, where both are over the same tokens."""
    overlap, slope = _overlap(of)
    return 1 - overlap, slope


def acceptance(of: Distributions) -> Valued:
    """-log Σ min(p, q), the negative logarithm of the chance of acceptance (LK losses, arXiv 2602.23881)."""
    overlap, slope = _overlap(of)
    overlap = overlap.clamp(min=LEAST)
    return -overlap.log(), slope.div_(overlap[:, None])


def hybrid(of: Distributions) -> Valued:
    """λ KL(p | q) + (1 - λ) total variation, λ = exp(-η Σ min(p, q)) without a gradient (2602.23881).

    While little is accepted it is like cross-entropy, whose gradient does not vanish; later it counts acceptance.
    """
    overlap, slope = _overlap(of)
    share = (-ETA * overlap).exp()  # (s,)
    divergence = (of.p * (of.log_p - of.log_q)).sum(-1)
    value = share * divergence + (1 - share) * (1 - overlap)
    return value, slope.mul_(1 - share[:, None]).sub_(share[:, None] * of.p)


def reverse_kl(of: Distributions) -> Valued:
    """KL(q | p) = Σ q log(q / p): leaves out what the target finds unlikely."""
    ratio = of.log_q - of.log_p
    value = (of.q * ratio).sum(-1)
    return value, of.q * (ratio + 1)


def jensen_shannon(of: Distributions) -> Valued:
    """(KL(p | m) + KL(q | m)) / 2 with m = (p + q) / 2; at most log 2."""
    log_m = torch.logaddexp(of.log_p, of.log_q) - torch.log(torch.tensor(2.0, dtype=of.p.dtype))
    value = ((of.p * (of.log_p - log_m)).sum(-1) + (of.q * (of.log_q - log_m)).sum(-1)) / 2
    return value, of.q * (of.log_q - log_m) / 2


def _overlap(of: Distributions) -> Valued:
    """Σ min(p, q), which may be tiny: not made of 1 - it, which rounds; and the slope of its negative."""
    return torch.minimum(of.p, of.q).sum(-1), torch.where(of.q < of.p, of.q, 0.0).neg_()


TERMS: dict[str, Term] = {
    term.__name__: term for term in (total_variation, acceptance, hybrid, reverse_kl, jensen_shannon)
}
