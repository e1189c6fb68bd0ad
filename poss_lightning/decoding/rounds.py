"""What the rounds of a text did, brought and cost, and what is learnt from them, for `tree: auto`."""

from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from poss_lightning.decoding.trees import Tree
from poss_lightning.decoding.verification import Verdict

EDGES = (0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.75, 1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 8.0)  # of -log path probability
CLAIMED = (0.0, 0.2, 0.4, 0.7)  # chance of each looked-up token at first, by how many tokens matched
TRUST = 6.0  # observations after which counts weigh as much as what was claimed
MEMORY = 0.98  # weight of an observation one round later: texts change
WORTHWHILE = 0.98  # of the tokens per second without a draft: below it, nothing is drafted
HOPE = 1.5  # times as much is what drafting is first believed to bring


class Round(NamedTuple):
    """What one round of a batch did, on the device."""

    tree: Tree  # drafted nodes, then looked-up ones
    ancestors: Tensor  # (B, N, N)
    verdict: Verdict
    found: Tensor | None = None  # (B,) how many tokens of a lookup matched; None without lookups
    path: Tensor | None = None  # (B, N) its continuation; -1 for no token
    looked_up: int = 0  # nodes, the first of the continuation

    @property
    def drafted(self) -> int:
        """Nodes, root included."""
        return self.tree.tokens.shape[1] - self.looked_up


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


class RoundStatistics:
    """Tokens and costs of the rounds so far; old ones fade, because texts change.

    Args:
        depth: the deepest tree.
        calibration: of the draft's path probabilities.
    """

    def __init__(self, depth: int, calibration: Calibration):
        self.calibration = calibration
        self.continued = [2.0 * 0.6] * depth  # rounds whose path continued below depth k, and those in which it could
        self.reached = [2.0] * depth
        # Rounds, their tokens and plain steps, per row. Plain steps, not seconds: those grow with the text.
        self.guess = 4.0  # plain steps of drafting that are only imagined
        self.drafted, self.undrafted, self.alone = torch.zeros(3, 3, dtype=torch.float64)  # alone: expected of lookups

    @property
    def tokens(self) -> float:
        return float(HOPE * self.guess + self.drafted[1] + self.undrafted[1])

    @property
    def plain_steps(self) -> float:
        return float(self.guess + self.drafted[2] + self.undrafted[2])

    @property
    def speed(self) -> float:
        """Tokens per plain step and row; at least plain decoding's."""
        return max(self.tokens / self.plain_steps, 1)

    @property
    def without_draft(self) -> float:
        """Tokens per plain step of lookups alone, as far as expected; at least plain decoding's."""
        return max(1.0, float(self.alone[1] / self.alone[2].clamp(min=1e-9)))

    @property
    def worthwhile(self) -> bool:
        """Whether drafting has brought about as much as plain decoding would, or lookups alone.

        What is forgotten counts as if it had brought that much.
        """
        alone = self.without_draft
        drafting = float(self.drafted[1] + (HOPE * self.guess + self.undrafted[2]) * alone)
        return drafting >= WORTHWHILE * alone * self.plain_steps

    def continuing(self, depth: int) -> float:
        """How often a path that reaches `depth` continues."""
        return self.continued[depth] / self.reached[depth]

    def add(self, done: Round, active: list[int], steps: int, plain_steps: float, alone: tuple[float, float]) -> None:
        """Add a round of `steps` draft steps, which took as long as `plain_steps`; only the active rows count.

        `alone` is what lookups alone were expected to bring, and their plain steps.
        """
        (tree, ancestors, verdict), nodes = done[:3], done.drafted
        tokens = 1 + float(verdict.accepted[active].float().mean())
        self.guess *= MEMORY
        for account in (self.drafted, self.undrafted, self.alone):
            account *= MEMORY
        self.alone += torch.tensor([1, *alone])
        account = self.drafted if steps else self.undrafted
        account += torch.tensor([1, tokens, plain_steps])
        if steps == 0:
            return
        path = verdict.path[active]
        end = path.where(path < nodes, 0).max(dim=1).values  # the deepest drafted one: parents come before children
        on_path = ancestors[active, end, :nodes]  # (B, N)
        accepted = (on_path.sum(-1) - 1).tolist()
        self.calibration.learn(tree.scores[active, 1:nodes].flatten(), on_path[:, 1:].flatten())  # the root is certain
        tried = (tree.parents[active, 1:nodes] == end[:, None]).any(dim=1)  # something below the end
        ends = list(zip(accepted, tried.tolist(), strict=True))
        for k in range(steps):
            self.reached[k] = MEMORY * self.reached[k] + sum(count > k or (count == k and more) for count, more in ends)
            self.continued[k] = MEMORY * self.continued[k] + sum(count > k for count in accepted)

    def why_plain(self) -> str | None:
        """What a round with drafting cost and brought lately, as plain decoding is faster; None if it never drafted."""
        rounds, tokens, plain_steps = self.drafted.tolist()
        if not rounds:
            return None
        needed = self.without_draft * plain_steps / rounds
        return (
            "tree: auto gave up drafting: on this machine a round with drafting takes as long as "
            f"{plain_steps / rounds:.2f} tokens of plain decoding, and gave {tokens / rounds:.2f} tokens"
            + (f", where lookups alone give {needed:.2f}" if needed > plain_steps / rounds else "")
        )
