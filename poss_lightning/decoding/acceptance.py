"""What a round of a batch did, and how often its nodes are accepted, for `tree: auto`."""

from itertools import pairwise
from typing import NamedTuple, Self

import torch
from torch import Tensor

from poss_lightning.decoding.trees import Tree
from poss_lightning.decoding.verification import Verdict

EDGES = (0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.75, 1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 8.0)  # of -log path probability
PRIOR = (0.0, 0.2, 0.4, 0.7)  # chance of each looked-up token at first, by how many tokens matched
PRIOR_WEIGHT = 6.0  # observations as many as which a prior counts
DECAY = 0.98  # weight of an observation one round later: texts change


class Round(NamedTuple):
    """What one round of a batch did, on the device."""

    tree: Tree  # drafted nodes, then looked-up ones
    ancestors: Tensor  # (B, N, N)
    verdict: Verdict
    candidates: Tree  # that its drafted nodes are the best of
    looked_up: int = 0  # nodes, the first of the continuation
    matched: Tensor | None = None  # (B,) tokens that matched in the lookup; None without lookups
    continuation: Tensor | None = None  # (B, L) what it found; -1 for no token

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
        self.prior = (-torch.tensor(middles, device=device)).exp()  # what the draft itself says
        self.verified = torch.zeros(len(middles), device=device)
        self.accepted = torch.zeros_like(self.verified)

    def chance(self, scores: Tensor) -> Tensor:
        """Map path scores to chances of acceptance, of the same shape."""
        table = (self.accepted + PRIOR_WEIGHT * self.prior) / (self.verified + PRIOR_WEIGHT)
        return table[torch.bucketize(-scores, self.edges)]

    def learn(self, scores: Tensor, accepted: Tensor, weights: Tensor) -> None:
        """Nodes with path scores (B, n) were verified, and `accepted` (B, n) or not; rows count by `weights` (B,)."""
        bins = torch.bucketize(-scores, self.edges).flatten()
        weight = weights[:, None].expand_as(scores)
        self.verified.mul_(DECAY).scatter_add_(0, bins, weight.flatten())
        self.accepted.mul_(DECAY).scatter_add_(0, bins, (weight * accepted).flatten())


class LookupAcceptance:
    """How many tokens each place of a continuation adds, by how many tokens matched.

    Args:
        count: L, tokens of a continuation.
        device: of what it learns from.
    """

    def __init__(self, count: int, device: torch.device):
        self.prior = (torch.tensor(PRIOR)[:, None] ** torch.arange(1, count + 1)).to(device)  # (NGRAM + 1, L)
        self.attempts, self.accepted = torch.zeros_like(self.prior), torch.zeros_like(self.prior)

    def expected_tokens(self) -> Tensor:
        """Return how many tokens the first 0, 1, … L places add: (NGRAM + 1, L + 1)."""
        chances = (self.accepted + PRIOR_WEIGHT * self.prior) / (self.attempts + PRIOR_WEIGHT)
        return torch.nn.functional.pad(chances.cumsum(1), (1, 0))

    def learn(self, matched: Tensor, attempts: Tensor, accepted: Tensor, weights: Tensor) -> None:
        """After a round: which of the first n places (B, n) showed whether they add a token, and which did."""
        for table, seen in ((self.attempts, attempts), (self.accepted, attempts & accepted)):
            table.mul_(DECAY)[:, : seen.shape[1]].index_add_(0, matched, seen * weights[:, None])
