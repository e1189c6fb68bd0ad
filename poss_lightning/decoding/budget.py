"""How large a tree is worth its time: fixed, or chosen by expected tokens per second (the idea of arXiv 2606.01813).

A round that drafts k steps and verifies n nodes costs c(k) + v(n) seconds and brings 1 + Σ a tokens, where a is the
chance that a node is accepted. Over a long text, tokens per second are highest if each round takes whatever adds more
tokens than its seconds would bring elsewhere. With λ the rate reached so far:

    one more node       a           against   λ · (v(n + 1) - v(n))
    one more step       Σ a · r     against   λ · c              over the frontier; r: how often a child is accepted

Where drafting has brought less than plain decoding would, or lookups alone, nothing is drafted until that is all but
forgotten, so trials cost no more than a few per cent.

Chances come from the draft's path probabilities, corrected by how often nodes of such a probability were accepted.
"""

from abc import ABC, abstractmethod
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor

from poss_lightning.decoding.costs import Costs
from poss_lightning.decoding.plans import Plan
from poss_lightning.decoding.rounds import Calibration, Round, RoundStatistics, Worth

TRIALS = 16  # rounds observed before a plan is settled on
NEW_TRIALS = 8  # of them that are new when it decides again
SETTLED_ROUNDS = 64  # rounds until then; four times as many where nothing is drafted, as observing costs more there
BETTER = 1.03  # a new plan must be so many times as fast as the earlier: it takes new graphs


class Budget(ABC):
    """Says when drafting ends and how many nodes are verified.

    Attributes:
        needs_sync: whether it reads scores in the middle of a round, which synchronises with the device.
        plan: depth, drafted nodes and looked-up tokens of every round; None where they vary.
    """

    needs_sync = False
    plan: tuple[int, int, int] | None = None

    def begin(self, active: list[int]) -> None:
        """A round begins, in which only these rows count."""
        self.active = active

    @abstractmethod
    def go_deeper(self, depth: int, scores: Tensor) -> bool:
        """Whether to draft below the frontier at `depth`, whose path scores are (B, M); the root's depth is 0."""

    @abstractmethod
    def node_count(self, scores: Tensor) -> int:
        """How many of the drafted nodes to verify, root included; their path scores are (B, n)."""

    @abstractmethod
    def lookup_count(self, found: Tensor, most: int) -> int:
        """How many looked-up tokens join the tree, of so many at most; `found` (B,) as of `Lookup.find`."""

    @abstractmethod
    def learn(self, done: Round) -> None:
        """Take a round into account."""

    def why_plain(self) -> str | None:
        """Why it stopped drafting, for some rounds or for good; None where it did not."""
        return None


class Fixed(Budget):
    """Every tree has its full depth, as many nodes, and as many looked-up tokens."""

    def __init__(self, plan: Plan):
        self.nodes, self.plan = plan.nodes, (plan.depth or 0, plan.nodes, plan.lookup)

    def go_deeper(self, depth: int, scores: Tensor) -> bool:
        return depth < self.plan[0]

    def node_count(self, scores: Tensor) -> int:
        return min(self.nodes, scores.shape[1])

    def lookup_count(self, found: Tensor, most: int) -> int:
        return most

    def learn(self, done: Round) -> None:
        """Nothing: all rounds are alike."""


class AutoBudget(Budget):
    """What the two kinds of `tree: auto` share.

    Args:
        depth: the deepest tree.
        nodes: the most drafted nodes, root included.
        costs: measured here, for sizes up to that of the largest tree with all looked-up tokens.
        calibration: of the draft's path probabilities.
        lookup: the most looked-up tokens of a round.
    """

    def __init__(self, depth: int, nodes: int, costs: Costs, calibration: Calibration, lookup: int = 0):
        self.depth, self.nodes, self.calibration = depth, nodes, calibration
        self.costs = costs  # of the current round; they change with the length of the texts
        self.beyond, self.alone = Worth(lookup), Worth(lookup)  # the drafted tree, and without one
        self.statistics = RoundStatistics(depth, calibration)
        self.active = [0]  # rows that count

    @property
    def sizes(self) -> list[int]:
        """Of drafted trees, as they were timed."""
        return [n for n in self.costs.verify if n <= self.nodes]

    @property
    def rate(self) -> float:
        """λ of all rows that count, tokens per second by the measured costs."""
        return len(self.active) * (self.statistics.speed / self.costs.verify[1])

    def _add(self, done: Round, steps: int) -> None:
        """Count a round of `steps` draft steps."""
        alone = 1.0, 1.0
        if done.found is not None and done.path is not None:
            found, continued, path, tokens, accepted = (
                x[self.active].cpu() for x in (done.found, done.path, *done.verdict)
            )
            gains = self.alone.expected(found).tolist()
            count = self._most_worth(gains, 1)
            alone = 1 + gains[count] / len(found), self.costs.break_even(0, 1 + count)
            places = torch.arange(continued.shape[1])
            joined = (path[:, 1:] >= done.drafted)[:, : len(places)] & (places < accepted[:, None])
            self.beyond.learn(found, (places < done.looked_up).expand_as(joined), joined)
            right = (continued == tokens[:, : len(places)]).cumprod(1) > 0
            ends = ~right.gather(1, accepted.clamp(max=len(places) - 1)[:, None])  # within what the target said
            self.alone.learn(found, (places <= accepted[:, None]) | ends, right)
        plain_steps = self.costs.break_even(steps, done.tree.tokens.shape[1])
        self.statistics.add(done, self.active, steps, plain_steps, alone)

    def _most_worth(self, gains: list[float], nodes: int) -> int:
        """How many looked-up tokens to add to so many nodes, where the first 0, 1, … would bring these gains."""
        rate, verify = self.rate, self.costs.verify_seconds
        worth = [gain - rate * (verify(nodes + n) - verify(nodes)) for n, gain in enumerate(gains)]
        return worth.index(max(worth))


class PerRound(AutoBudget):
    """Chooses depth and size anew in every round, which synchronises with the device; on a CPU that costs nothing."""

    needs_sync = True
    steps, chosen = 0, 1  # of this round: draft steps, and drafted nodes

    def go_deeper(self, depth: int, scores: Tensor) -> bool:
        if depth == 0:
            deeper = self.statistics.worthwhile
        else:
            gain = float(self.calibration.chance(scores[self.active]).sum()) * self.statistics.continuing(depth)
            deeper = gain > self.rate * self.costs.draft_step
        self.steps = depth + deeper
        return deeper

    def node_count(self, scores: Tensor) -> int:
        chances = self.calibration.chance(scores[self.active][:, 1:])  # the root is certain
        best = chances.sort(dim=1, descending=True).values.sum(0)
        gains = torch.cat([best.new_zeros(1), best.cumsum(0)]).tolist()  # by nodes - 1
        worth = {n: gains[n - 1] - self.rate * self.costs.verify[n] for n in self.sizes if n <= len(gains)}
        self.chosen = max(worth, key=worth.__getitem__)
        return self.chosen

    def lookup_count(self, found: Tensor, most: int) -> int:
        worth = self.beyond if self.steps else self.alone
        return self._most_worth(worth.expected(found[self.active].cpu()).tolist(), self.chosen)

    def learn(self, done: Round) -> None:
        self._add(done, self.steps)

    def why_plain(self) -> str | None:
        return self.statistics.why_plain() if self.depth and not self.steps else None


class Trial(NamedTuple):
    """A whole tree of the active rows."""

    scores: Tensor  # (B, n) of the drafted nodes
    depths: Tensor  # (B, n)
    found: Tensor  # (B,) on the host, see `Lookup.find`


class Settled(AutoBudget):
    """Settles on a depth, a size and a number of looked-up tokens after some whole trees, and again now and then.

    No round synchronises with the device but those in which it looks.
    """

    def __init__(self, depth: int, nodes: int, costs: Costs, calibration: Calibration, lookup: int = 0):
        super().__init__(depth, nodes, costs, calibration, lookup)
        self.earlier: tuple[int, int, int] | None = None  # plan, while it looks again
        self.rounds = 0  # since it settled
        self.trials: list[Trial] = []  # until it settles

    def go_deeper(self, depth: int, scores: Tensor) -> bool:
        return self.plan is None or depth < self.plan[0]

    def node_count(self, scores: Tensor) -> int:
        return self.plan[1] if self.plan else max(n for n in self.sizes if n <= scores.shape[1])

    def lookup_count(self, found: Tensor, most: int) -> int:
        return self.plan[2] if self.plan else most

    def learn(self, done: Round) -> None:
        if self.plan:
            self.rounds += 1
            if self.rounds == (SETTLED_ROUNDS if self.plan[0] or not self.depth else 4 * SETTLED_ROUNDS):
                self.earlier, self.plan, self.rounds, self.trials = self.plan, None, 0, self.trials[NEW_TRIALS:]
            return
        self._add(done, self.depth)
        scores, depths = (x[self.active, : done.drafted] for x in (done.tree.scores, done.ancestors.sum(-1) - 1))
        found = torch.zeros(len(scores), dtype=torch.long) if done.found is None else done.found[self.active].cpu()
        self.trials.append(Trial(scores, depths, found))
        if len(self.trials) == TRIALS:
            self.plan = self._best()

    def why_plain(self) -> str | None:
        return self.statistics.why_plain() if self.depth and self.plan and self.plan[0] == 0 else None

    def _best(self) -> tuple[int, int, int]:
        """The depth, nodes and looked-up tokens with the most tokens per second over the trials."""
        trials, rates = self.trials, dict[tuple[int, int, int], float]()
        rows = sum(len(trial.scores) for trial in trials) / len(trials)  # on average: some end meanwhile
        alone, beyond = (
            torch.stack([worth.expected(trial.found) for trial in trials]).mean(0).tolist()  # by tokens
            for worth in (self.alone, self.beyond)
        )
        for depth in range(self.depth + 1):
            drafted = torch.zeros(max(*self.costs.verify, *(trial.scores.shape[1] for trial in trials)))  # by nodes - 1
            for scores, depths, _ in trials:
                chances = self.calibration.chance(scores).masked_fill((depths > depth) | (depths == 0), 0)
                best = chances.sort(dim=1, descending=True).values.sum(0).cpu()
                drafted[1 : len(best)] += best[:-1].cumsum(0) / len(trials)
            for n, (more, gain) in product(self.sizes if depth else [1], enumerate(beyond if depth else alone)):
                seconds = self.costs.draft_seconds(depth) + self.costs.verify_seconds(n + more)
                rates[depth, n, more] = (rows + float(drafted[n - 1]) + gain) / seconds
        best = max(rates, key=rates.__getitem__)
        return self.earlier if self.earlier and rates[self.earlier] * BETTER > rates[best] else best
