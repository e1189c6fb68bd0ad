"""Weights of slots in the loss, by what the chain that reads them can still gain.

The chain that begins at slot t reads pass k at slot t + k - 1. Tensors are (K, B, T), by pass and slot.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

ALPHA = 0.5  # smoothing: the lower bound of a probability, as published


def draw_chains(begins: Tensor, most: int, seed: int) -> Tensor:
    """Weights (B, T) of chains: at most `most` per row are drawn of those that may begin, (B, T); the others weigh 0.

    A drawn chain is weighted by how many it stands for, so a sum over all is unbiased (DFlash's anchors).
    """
    generator = torch.Generator(begins.device).manual_seed(seed)
    order = torch.rand(begins.shape, generator=generator, device=begins.device).masked_fill(~begins, 2).argsort(1)
    drawn = begins & torch.zeros_like(begins).scatter(1, order[:, :most], True)
    return drawn * (begins.sum(1, keepdim=True) / drawn.sum(1, keepdim=True).clamp(min=1))


def chain_slots(passes: Tensor, depth: int, chains: Tensor) -> tuple[Tensor, Tensor]:
    """Return the slots where drawn chains begin, and all that they read, of the rows end to end: (N,), (S,).

    Args:
        passes: (B, T) that count at each slot.
        depth: passes of a chain.
        chains: (B, T) weights of `draw_chains`.
    """
    read = to_slots(chains.expand(depth, -1, -1)).any(0)
    begin, all_read = ((passes > 0) & where for where in (chains > 0, read))
    return tuple(where.flatten().nonzero()[:, 0] for where in (begin, all_read))  # pyright: ignore[reportReturnType]


def dpace(target_token_probs: Tensor, counted: Tensor) -> Tensor:
    """Return weights w_k = Σ_{j >= k} Π_{i <= j} q̃_i of a chain, q̃ = (1 - α) q + α (D-PACE, 2605.18810, 7 and 8).

    This is the slope of the expected accepted length by log q̃_k.

    Args:
        target_token_probs: the draft's probability of the target's most likely token.
        counted: whether the pass counts there; elsewhere the weights mean nothing.
    """
    reached = _to_chains(((1 - ALPHA) * target_token_probs + ALPHA) * counted).cumprod(0)  # Π_{i <= k}
    return to_slots(reached.flip(0).cumsum(0).flip(0))


def _to_chains(values: Tensor) -> Tensor:
    """(K, B, T) by slot -> by the slot where the chain begins; 0 beyond the row."""
    return torch.stack([pad(row[:, k:], (0, k)) for k, row in zip(_shifts(values), values, strict=True)])


def to_slots(values: Tensor) -> Tensor:
    """(K, B, T) by the slot where the chain begins -> by the slot that each pass reads; 0 where no chain reads."""
    count = values.shape[-1]
    return torch.stack([pad(row[:, : count - k], (k, 0)) for k, row in zip(_shifts(values), values, strict=True)])


def _shifts(passes: Tensor) -> list[int]:
    """Return the distance of each pass from the first slot of its chain, at most the length of the row."""
    return [min(k, passes.shape[-1]) for k in range(len(passes))]
