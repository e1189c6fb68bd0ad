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
UNMET = 0.25  # of `rounds`: the weight of what no round meets; ours, and no other was tried

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


def rounds(chances: Tensor, hits: Tensor, counted: Tensor) -> Tensor:
    """1 for what the draft meets when it drafts chains of this text, round by round, and `UNMET` for all else.

    The idea is that of on-policy replay (Draft-OPD, 2605.29343): learn most where drafting goes. A round is met up to
    its first miss, which is included; the next round begins behind it. Of texts that the target wrote greedily, these
    are the rounds of decoding with a tree width of 1, and they follow the draft as it learns. Where the draft's
    vocabulary is cut they are so only nearly: `hits` knows no token that the draft cannot propose.
    """
    chains = _chains(hits * counted)
    alive = torch.cat([torch.ones_like(chains[:1]), chains.cumprod(0)])  # (K+1, B, T): all k hit before
    accepted = alive[1:].sum(0).long()  # (B, T) of a round that begins at the slot
    began = _reach(_firsts(counted[0]), accepted + 1, counted[0])
    return UNMET + (1 - UNMET) * _slots(alive[:-1] * began)


SLOT_WEIGHTS: dict[str, SlotWeights] = {"dpace": dpace, "until_failure": until_failure, "rounds": rounds}


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


def _firsts(counted: Tensor) -> Tensor:
    """Where spans of counted slots begin: (B, T) -> (B, T)."""
    return counted & ~pad(counted[:, :-1], (1, 0))


def _reach(first: Tensor, steps: Tensor, inside: Tensor) -> Tensor:
    """Slots that are reached from the `first` by `steps` to the right, again and again, until they leave their span.

    Each turn doubles the steps that it goes: (B, T) three times -> (B, T).
    """
    count = first.shape[1]
    away = torch.full_like(steps[:, :1], count)
    target = torch.arange(count, device=steps.device) + steps
    jump = torch.cat([target.clamp(max=count).where(inside, away), away], dim=1)  # (B, T+1), the last slot is away
    reached = pad(first.long(), (0, 1))
    for _ in range(count.bit_length()):
        reached = reached | torch.zeros_like(reached).scatter_reduce(1, jump, reached, "amax")
        jump = jump.gather(1, jump)
    return reached[:, :count] * inside
