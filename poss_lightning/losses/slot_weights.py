"""How much a slot counts in the loss of a pass, by what the chain that the slot is in can still gain there.

The chain that begins at slot t reads pass k at slot t + k - 1. All here is (K, B, T), pass by pass and slot by slot.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

ALPHA = 0.5  # the least that a chance is taken for, as published


def draw_chains(begins: Tensor, most: int, seed: int) -> Tensor:
    """Weights (B, T) of chains: of those that may begin, (B, T), at most so many a row are drawn, and the others are 0.

    Each drawn one counts for as many as it stands for, so a sum over all is right on average (DFlash's anchors).
    """
    generator = torch.Generator(begins.device).manual_seed(seed)
    order = torch.rand(begins.shape, generator=generator, device=begins.device).masked_fill(~begins, 2).argsort(1)
    drawn = begins & torch.zeros_like(begins).scatter(1, order[:, :most], True)
    return drawn * (begins.sum(1, keepdim=True) / drawn.sum(1, keepdim=True).clamp(min=1))


def dpace(chances: Tensor, counted: Tensor) -> Tensor:
    """Weights w_k = Σ_{j >= k} Π_{i <= j} q̃_i of a chain, q̃ = (1 - α) q + α (D-PACE, 2605.18810, 7 and 8).

    That is the slope of the expected accepted length by log q̃_k.

    Args:
        chances: the draft's probability of the target's most likely token.
        counted: whether the pass counts there; where it does not, weights mean nothing.
    """
    reached = _chains(((1 - ALPHA) * chances + ALPHA) * counted).cumprod(0)  # Π_{i <= k}
    return slots_of(reached.flip(0).cumsum(0).flip(0))


def _chains(by_slot: Tensor) -> Tensor:
    """(K, B, T) by slot -> by the slot where the chain begins; 0 beyond the row."""
    shifts = _shifts(by_slot)
    return torch.stack([pad(of_pass[:, k:], (0, k)) for k, of_pass in zip(shifts, by_slot, strict=True)])


def slots_of(by_chain: Tensor) -> Tensor:
    """(K, B, T) by the slot where the chain begins -> by the slot that it reads in each pass; 0 where none does."""
    count, shifts = by_chain.shape[-1], _shifts(by_chain)
    return torch.stack([pad(of_pass[:, : count - k], (k, 0)) for k, of_pass in zip(shifts, by_chain, strict=True)])


def _shifts(passes: Tensor) -> list[int]:
    """By how many slots each pass stands behind its chain's first, or the whole row if that is shorter."""
    return [min(k, passes.shape[-1]) for k in range(len(passes))]
