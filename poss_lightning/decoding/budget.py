"""How large a tree is worth its time: fixed, or chosen by expected tokens a second (the idea of arXiv 2606.01813).

A round that drafts k steps and verifies n nodes costs c(k) + v(n) seconds and brings 1 + Σ a tokens, where a is the
chance that a node is accepted. Over a long text the most tokens a second come of taking, in each round, whatever adds
more tokens than its seconds would bring elsewhere: with λ the rate reached so far,

    one more node       a           against   λ · (v(n + 1) - v(n))
    one more step       Σ a · r     against   λ · c              over the frontier; r: how often a child of it is taken

Where drafting has brought less than plain decoding would, nothing is drafted until that is all but forgotten, so that
what trials cost stays within a few per cent.

The chances come of the draft's path probabilities, corrected by how often nodes of such a probability were accepted.
"""

from itertools import pairwise
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from poss_lightning.decoding.trees import ABSENT, Tree
from poss_lightning.decoding.verification import Verdict

SIZES = (1, 2, 3, 4, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 60, 80, 100, 128)  # nodes a tree may have, root included
MEASURED = (1, 2, 4, 8, 16, 32, 60, 128)  # those of them that are timed
EDGES = (0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.75, 1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 8.0)  # of -log path probability
TRUST = 6.0  # nodes seen after which counts weigh as much as the draft's own word
MEMORY = 0.98  # of what was seen, a round later: texts change
PAYS = 0.98  # of plain decoding's tokens a second: with less, nothing is drafted
SETTLE = 16  # rounds to look at before depth and size are settled, where they are not chosen anew in every round


class Budget(Protocol):
    """Says when drafting ends and how many nodes are verified.

    Attributes:
        asks: whether it looks at scores while a round goes on, which asks the device.
        plan: what depth and size depend on, where it does not.
    """

    asks: bool
    plan: tuple[int, int] | None

    def begin(self, going: list[int]) -> None:
        """A round begins, in which only these rows count."""
        ...

    def deeper(self, depth: int, scores: Tensor) -> bool:
        """Whether to draft below the frontier at `depth`, whose path scores are (B, M); the root's depth is 0."""
        ...

    def size(self, scores: Tensor) -> int:
        """How many nodes to verify of those grown, with path scores (B, n), root included."""
        ...

    def learn(self, tree: Tree, above: Tensor, verdict: Verdict) -> None:
        """Take note of a round.

        Args:
            tree: that was verified.
            above: (B, N, N) its ancestors.
            verdict: on it.
        """
        ...


class Fixed:
    """Every tree has all its depth, and as many nodes.

    Raises:
        ValueError: too few for one path.
    """

    asks = False

    def __init__(self, depth: int, nodes: int):
        if nodes < depth + 1:
            raise ValueError(
                f"nodes is {nodes}, which cannot hold a path of depth {depth} and its root: give at least {depth + 1}"
            )
        self.nodes, self.plan = nodes, (depth, nodes)

    def begin(self, going: list[int]) -> None:
        """All rounds are alike."""

    def deeper(self, depth: int, scores: Tensor) -> bool:
        return True

    def size(self, scores: Tensor) -> int:
        return min(self.nodes, scores.shape[1])

    def learn(self, tree: Tree, above: Tensor, verdict: Verdict) -> None:
        """Nothing to learn."""


class Costs(NamedTuple):
    """Seconds that a round is made of, on this machine and for one size of batch."""

    draft_step: float
    verify: dict[int, float]  # of n nodes a row, for every n that a tree may have; 1 is a step of plain decoding

    @classmethod
    def measured(cls, draft_step: float, timed: dict[int, float]) -> "Costs":
        """From the times of some sizes; those between lie on the line between their neighbours.

        Noise only adds, and more nodes never cost less: a size costs no more than any larger one.
        """
        knots = sorted(timed)
        level = [min(timed[m] for m in knots if m >= n) for n in knots]
        sizes = sorted({*knots, *(n for n in SIZES if n < knots[-1])})
        return cls(draft_step, {n: float(np.interp(n, knots, level)) for n in sizes})

    def verify_seconds(self, nodes: int) -> float:
        """Of any number of nodes: as of the next larger one that a tree may have, or of the largest."""
        return self.verify[min((n for n in self.verify if n >= nodes), default=max(self.verify))]

    def break_even(self, steps: int, nodes: int) -> float:
        """Tokens a round at which drafting `steps` and verifying `nodes` is as fast as plain decoding."""
        return (steps * self.draft_step + self.verify_seconds(nodes)) / self.verify[1]


class Calibration:
    """How often nodes are accepted, by the path probability that the draft gave them."""

    def __init__(self, device: torch.device):
        self.edges = torch.tensor(EDGES, device=device)
        middles = [0.0, *((low + high) / 2 for low, high in pairwise(EDGES)), 1.5 * EDGES[-1]]
        self.claimed = (-torch.tensor(middles, device=device)).exp()  # what the draft's own word comes to
        self.seen = torch.zeros(len(middles), device=device)
        self.taken = torch.zeros_like(self.seen)

    def chance(self, scores: Tensor) -> Tensor:
        """Path scores -> chances of acceptance, of the same shape."""
        table = (self.taken + TRUST * self.claimed) / (self.seen + TRUST)
        return table[torch.bucketize(-scores, self.edges)]

    def learn(self, scores: Tensor, taken: Tensor) -> None:
        """Nodes with path scores (n,) were verified, and `taken` (n,) or not."""
        bins = torch.bucketize(-scores, self.edges)
        self.seen.mul_(MEMORY).scatter_add_(0, bins, torch.ones_like(scores))
        self.taken.mul_(MEMORY).scatter_add_(0, bins, taken.to(scores.dtype))


class Auto:
    """Trees sized by expected tokens a second.

    Args:
        depth: the deepest tree.
        nodes: the largest.
        costs: measured here, for sizes up to `nodes`.
        calibration: of the draft's path probabilities.
        asks: choose anew in every round, which asks the device in the middle of it; else settle on one depth and size
            after a few full rounds.
    """

    def __init__(
        self,
        depth: int,
        nodes: int,
        costs: Costs,
        calibration: Calibration,
        asks: bool = True,
    ):
        self.depth, self.nodes, self.costs = depth, nodes, costs
        self.asks, self.calibration = asks, calibration
        self.going = [0]  # rows that count
        self.steps, self.chosen = 1, 1  # of this round: steps drafted, nodes verified
        self.deepened = [2.0 * 0.6] * depth  # rounds whose path went on below depth k, and those in which it could
        self.reached = [2.0] * depth
        self.step = costs.verify[1]  # seconds of a round without a draft
        self.tokens, self.seconds = 4 * 1.5, 4 * self.step  # of a row; to begin with, a hopeful guess
        self.looked: list[tuple[Tensor, Tensor]] = []  # scores and depths of whole trees, until it is settled
        self.plan: tuple[int, int] | None = None

    @property
    def rate(self) -> float:
        """λ, tokens a second of all rows by the measured costs; at least plain decoding's."""
        return len(self.going) * max(self.tokens / self.seconds, 1 / self.step)

    def begin(self, going: list[int]) -> None:
        self.going = going

    def deeper(self, depth: int, scores: Tensor) -> bool:
        if self.asks and depth == 0:
            further = self.tokens / self.seconds >= PAYS / self.step
        elif self.asks:
            onward = self.deepened[depth] / self.reached[depth]
            further = (
                float(self.calibration.chance(scores[self.going]).sum()) * onward > self.rate * self.costs.draft_step
            )
        else:
            further = self.plan is None or depth < self.plan[0]
        self.steps = depth + further
        return further

    def size(self, scores: Tensor) -> int:
        if not self.asks:
            self.chosen = self.plan[1] if self.plan else max(n for n in self.costs.verify if n <= scores.shape[1])
            return self.chosen
        chances = self.calibration.chance(scores[self.going][:, 1:])  # the root is sure
        likely = chances.sort(dim=1, descending=True).values.sum(0)
        gains = torch.cat([likely.new_zeros(1), likely.cumsum(0)]).tolist()  # by nodes - 1
        worth = {n: gains[n - 1] - self.rate * cost for n, cost in self.costs.verify.items() if n <= len(gains)}
        self.chosen = max(worth, key=worth.__getitem__)
        return self.chosen

    def learn(self, tree: Tree, above: Tensor, verdict: Verdict) -> None:
        if not self.asks and self.plan:
            return
        going = self.going
        accepted = verdict.accepted[going].tolist()
        self.tokens = MEMORY * self.tokens + 1 + sum(accepted) / len(accepted)
        self.seconds = MEMORY * self.seconds + self.steps * self.costs.draft_step + self.costs.verify[self.chosen]
        if self.steps == 0:
            return
        levels = above.sum(-1)[going] - 1  # (B, N)
        end = verdict.path[going].max(dim=1).values  # the deepest node accepted: parents come before children
        taken = above[going, end]  # (B, N)
        verified = tree.tokens[going] != ABSENT
        verified[:, 0] = False  # the root is no guess
        self.calibration.learn(tree.scores[going][verified], taken[verified])
        tried = ((tree.parents[going] == end[:, None]) & verified).any(dim=1)  # something below the end
        ends = list(zip(accepted, tried.tolist(), strict=True))
        for k in range(self.steps):
            self.reached[k] = MEMORY * self.reached[k] + sum(count > k or (count == k and more) for count, more in ends)
            self.deepened[k] = MEMORY * self.deepened[k] + sum(count > k for count in accepted)
        if not self.asks and self.plan is None:
            self.looked.append((tree.scores[going], levels))
            if len(self.looked) == SETTLE:
                self.plan = self._settle()

    def _settle(self) -> tuple[int, int]:
        """The depth and the size with the most tokens a second over the trees looked at."""
        rates = {(0, 1): len(self.looked[0][0]) / self.step}
        for depth in range(1, self.depth + 1):
            gains = torch.zeros(max(self.nodes, *(scores.shape[1] for scores, _ in self.looked)))
            for scores, levels in self.looked:
                chances = self.calibration.chance(scores).masked_fill((levels > depth) | (levels == 0), 0)
                likely = chances.sort(dim=1, descending=True).values.sum(0).cpu()
                gains[1 : len(likely)] += likely[:-1].cumsum(0) / len(self.looked)
            rows = len(self.looked[0][0])
            for n, cost in self.costs.verify.items():
                rates[depth, n] = (rows + float(gains[n - 1])) / (depth * self.costs.draft_step + cost)
        return max(rates, key=rates.__getitem__)
