"""How likely a proposed token is to be accepted, learnt from the rounds so far: of a draft, and of a lookup."""

from itertools import pairwise

import torch
from torch import Tensor

EDGES = (0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.75, 1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 8.0)  # of -log path probability
CLAIMED = (0.0, 0.2, 0.4, 0.7)  # chance of each looked-up token at first, by how many tokens matched
TRUST = 6.0  # observations after which counts weigh as much as what was claimed
MEMORY = 0.98  # weight of an observation one round later: texts change


class Calibration:
    """How often nodes are accepted, by their path probability in the draft."""

    def __init__(self, device: torch.device):
        self.edges = torch.tensor(EDGES, device=device)
        middles = [0.0, *((low + high) / 2 for low, high in pairwise(EDGES)), 1.5 * EDGES[-1]]
        self.claimed = (-torch.tensor(middles, device=device)).exp()  # by the draft itself
        self.verified = torch.zeros(len(middles), device=device)
        self.accepted = torch.zeros_like(self.verified)

    def chance(self, scores: Tensor) -> Tensor:
        """Path scores -> chances of acceptance, of the same shape."""
        table = (self.accepted + TRUST * self.claimed) / (self.verified + TRUST)
        return table[torch.bucketize(-scores.to(table.device), self.edges)]

    def learn(self, scores: Tensor, accepted: Tensor) -> None:
        """Nodes with path scores (n,) were verified, and `accepted` (n,) or not."""
        bins = torch.bucketize(-scores, self.edges)
        self.verified.mul_(MEMORY).scatter_add_(0, bins, torch.ones_like(scores))
        self.accepted.mul_(MEMORY).scatter_add_(0, bins, accepted.to(scores.dtype))


class Worth:
    """How many tokens each place of a continuation brings, by how many tokens matched.

    Args:
        count: N, tokens of a continuation.
    """

    def __init__(self, count: int):
        self.claimed = torch.tensor(CLAIMED)[:, None] ** torch.arange(1, count + 1)  # (NGRAM + 1, N)
        self.tried, self.brought = torch.zeros_like(self.claimed), torch.zeros_like(self.claimed)

    def expected(self, found: Tensor) -> Tensor:
        """Tokens that the first 0, 1, … N places bring, summed over the texts: found (B,) -> (N + 1,)."""
        table = (self.brought + TRUST * self.claimed) / (self.tried + TRUST)
        return torch.nn.functional.pad(table[found].sum(0).cumsum(0), (1, 0))

    def learn(self, found: Tensor, tried: Tensor, brought: Tensor) -> None:
        """After a round: at which places (B, N) it showed whether they bring a token, and at which they did."""
        for table, seen in ((self.tried, tried), (self.brought, tried & brought)):
            table.mul_(MEMORY).index_add_(0, found, seen.float())
