"""What a round of a batch did, and how often its nodes are accepted, for `tree: auto`."""

from itertools import pairwise
from typing import NamedTuple, Self

import torch
from torch import Tensor

from poss_lightning.decoding.trees import Tree
from poss_lightning.decoding.verification import Verdict

EDGES = (0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.75, 1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 8.0)  # of -log path probability
CLAIMED = (0.0, 0.2, 0.4, 0.7)  # chance of each looked-up token at first, by how many tokens matched
TRUST = 6.0  # observations after which counts weigh as much as what was claimed
MEMORY = 0.98  # weight of an observation one round later: texts change


class Round(NamedTuple):
    """What one round of a batch did, on the device."""

    tree: Tree  # drafted nodes, then looked-up ones
    ancestors: Tensor  # (B, N, N)
    verdict: Verdict
    candidates: Tree  # that its drafted nodes are the best of
    looked_up: int = 0  # nodes, the first of the continuation
    found: Tensor | None = None  # (B,) how many tokens of a lookup matched; None without lookups
    continued: Tensor | None = None  # (B, L) its continuation; -1 for no token

    @property
    def drafted(self) -> int:
        """Nodes, root included."""
        return self.tree.tokens.shape[1] - self.looked_up


class HostRow(NamedTuple):
    """What the host must know of a text's round."""

    accepted: int
    matched: int  # tokens, in the next lookup
    tokens: list[int]  # the accepted ones and the bonus

    @classmethod
    def of(cls, row: list[int]) -> Self:
        """Read a row of numbers: `accepted`, `matched`, and as many tokens as the longest path has, and one."""
        accepted, matched, *tokens = row
        return cls(accepted, matched, tokens[: accepted + 1])


class Calibration:
    """How often nodes are accepted, by their path probability in the draft."""

    def __init__(self, device: torch.device):
        self.edges = torch.tensor(EDGES, device=device)
        middles = [0.0, *((low + high) / 2 for low, high in pairwise(EDGES)), 1.5 * EDGES[-1]]
        self.claimed = (-torch.tensor(middles, device=device)).exp()  # by the draft itself
        self.verified = torch.zeros(len(middles), device=device)
        self.accepted = torch.zeros_like(self.verified)

    def chance(self, scores: Tensor) -> Tensor:
        """Map path scores to chances of acceptance, of the same shape."""
        table = (self.accepted + TRUST * self.claimed) / (self.verified + TRUST)
        return table[torch.bucketize(-scores, self.edges)]

    def learn(self, scores: Tensor, accepted: Tensor, weights: Tensor) -> None:
        """Nodes with path scores (B, n) were verified, and `accepted` (B, n) or not; rows count by `weights` (B,)."""
        bins = torch.bucketize(-scores, self.edges).flatten()
        weight = weights[:, None].expand_as(scores)
        self.verified.mul_(MEMORY).scatter_add_(0, bins, weight.flatten())
        self.accepted.mul_(MEMORY).scatter_add_(0, bins, (weight * accepted).flatten())


class Worth:
    """How many tokens each place of a continuation brings, by how many tokens matched.

    Args:
        count: L, tokens of a continuation.
        device: of what it learns from.
    """

    def __init__(self, count: int, device: torch.device):
        self.claimed = (torch.tensor(CLAIMED)[:, None] ** torch.arange(1, count + 1)).to(device)  # (NGRAM + 1, L)
        self.tried, self.brought = torch.zeros_like(self.claimed), torch.zeros_like(self.claimed)

    def brings(self) -> Tensor:
        """Return how many tokens the first 0, 1, … L places bring: (NGRAM + 1, L + 1)."""
        chances = (self.brought + TRUST * self.claimed) / (self.tried + TRUST)
        return torch.nn.functional.pad(chances.cumsum(1), (1, 0))

    def learn(self, found: Tensor, tried: Tensor, brought: Tensor, weights: Tensor) -> None:
        """After a round: which of the first n places (B, n) showed whether they bring a token, and which did."""
        for table, seen in ((self.tried, tried), (self.brought, tried & brought)):
            table.mul_(MEMORY)[:, : seen.shape[1]].index_add_(0, found, seen * weights[:, None])
