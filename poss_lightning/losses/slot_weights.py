"""How much a slot counts in the loss of a pass, from how sure the draft is along the chain that the slot is in.

The chain that begins at slot t reads pass k at slot t + k - 1. All here is (K, B, T), pass by pass and slot by slot,
and has no gradient: `chances`, the draft's probability of the target's likeliest token; `hits`, whether it is the
draft's likeliest too; `counted`, whether the pass counts; and the weights, which mean nothing where it does not.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import pad

ALPHA = 0.5  # of D-PACE: the least that a chance is taken for, as published

SlotWeights = Callable[[Tensor, Tensor, Tensor], Tensor]


def dpace(chances: Tensor, hits: Tensor, counted: Tensor) -> Tensor:
    """What a chain still gains by a position: w_k = Σ_{j >= k} Π_{i <= j} q̃_i, q̃ = (1 - α) q + α (2605.18810, 7 and 8).

    It is the slope of the expected accepted length by log q̃_k.
    """
    chains = _chains(((1 - ALPHA) * chances + ALPHA) * counted)
    reached = chains.cumprod(0)  # (K, B, T): Π_{i <= k}
    return _slots(reached.flip(0).cumsum(0).flip(0))


def until_failure(chances: Tensor, hits: Tensor, counted: Tensor) -> Tensor:
    """1 up to a chain's first miss, the miss included, and 0 behind it (Spec-AUF, 2607.01893)."""
    chains = _chains(hits.to(chances.dtype))
    before = torch.cat([torch.ones_like(chains[:1]), chains[:-1].cumprod(0)])
    return _slots(before)


SLOT_WEIGHTS: dict[str, SlotWeights] = {"dpace": dpace, "until_failure": until_failure}


def _chains(by_slot: Tensor) -> Tensor:
    """(K, B, T) by slot -> by the slot where the chain begins; 0 beyond the row."""
    shifts = _shifts(by_slot)
    return torch.stack([pad(of_pass[:, k:], (0, k)) for k, of_pass in zip(shifts, by_slot, strict=True)])


def _slots(by_chain: Tensor) -> Tensor:
    """The way back."""
    count, shifts = by_chain.shape[-1], _shifts(by_chain)
    return torch.stack([pad(of_pass[:, : count - k], (k, 0)) for k, of_pass in zip(shifts, by_chain, strict=True)])


def _shifts(passes: Tensor) -> list[int]:
    """By how many slots each pass stands behind its chain's first, or the whole row if that is shorter."""
    return [min(k, passes.shape[-1]) for k in range(len(passes))]
