"""What a round drafts and verifies, and how long it takes: ours, and those of neighbouring papers (docs/schedules.md).

A replay (`replay.py`) tries a schedule without an engine for it. Seconds are computed from the costs that a benchmark
measured on this machine: they say what a schedule could gain at best.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from poss_lightning.decoding.budget import Budget, Fixed, PerRound
from poss_lightning.decoding.chances import Calibration
from poss_lightning.decoding.costs import Costs
from poss_lightning.decoding.rounds import Round
from poss_lightning.decoding.trees import Tree, ancestor_mask, rerank
from poss_lightning.decoding.verification import Verdict
from poss_lightning.files import read_json
from poss_lightning.target.fingerprints import same_weights

LEFT_OUT = -1  # the token of a node that is not verified: no target chooses it
FREE = Costs(0.0, {1: 0.0})


class RoundSchedule:
    """Drafts to full depth, verifies a fixed number of nodes, one after the other.

    Args:
        depth: K, positions drafted.
        nodes: nodes of a tree, root included.
        costs: measured on this machine, for a text that is decoded alone.

    Attributes:
        rows: answers that are replayed side by side.
        budget: tells the drafter how deep to go.
        came_true: (B,) whether its assumption about this round was right.
    """

    rows = 16

    def __init__(self, depth: int, nodes: int, costs: Costs = FREE):
        self.depth, self.nodes, self.costs = depth, nodes, costs
        self.budget: Budget = Fixed(depth, nodes)
        self.calibration = Calibration(torch.device("cpu"))

    def begin(self, rows: int) -> None:
        """This many answers begin."""
        self.came_true = torch.zeros(rows, dtype=torch.bool)

    def choose(self, drafted: Tree, active: Tensor) -> Tree:
        """The part of a drafted tree that is verified; `active` (B,) says which rows count."""
        return rerank(drafted, self.nodes)

    def seconds(self, tree: Tree, ancestors: Tensor, verdict: Verdict, active: Tensor) -> Tensor:
        """(B,) what the round took for each row, given the tree that was verified."""
        return self._draft(torch.full_like(verdict.accepted, self.depth)) + self.costs.verify_seconds(self.nodes)

    def select(self, rows: list[int]) -> None:
        """Keep only these rows."""
        self.came_true = self.came_true[rows]

    def _draft(self, depths: Tensor) -> Tensor:
        return torch.tensor([self.costs.draft_seconds(depth) for depth in depths.tolist()])

    def _learn(self, tree: Tree, ancestors: Tensor, verdict: Verdict, active: Tensor) -> None:
        """Calibrate path probabilities by the nodes that were accepted."""
        on_path = ancestors[torch.arange(len(active)), verdict.path[:, -1]]  # (B, N)
        counted = (tree.tokens != LEFT_OUT) & active[:, None]
        counted[:, 0] = False
        self.calibration.learn(tree.scores[counted], on_path[counted])


class OracleDepth(RoundSchedule):
    """Drafts exactly as deep as will be accepted: no choice of depths is faster."""

    def seconds(self, tree: Tree, ancestors: Tensor, verdict: Verdict, active: Tensor) -> Tensor:
        return self._draft(verdict.accepted) + self.costs.verify_seconds(self.nodes)


class Auto(RoundSchedule):
    """`tree: auto`: depth and nodes per round."""

    rows = 1  # it decides for all rows together

    def __init__(self, depth: int, nodes: int, costs: Costs):
        super().__init__(depth, nodes, costs)
        self.budget = self.auto = PerRound(depth, nodes, costs, self.calibration)

    def choose(self, drafted: Tree, active: Tensor) -> Tree:
        return rerank(drafted, self.auto.node_count(drafted.scores))

    def seconds(self, tree: Tree, ancestors: Tensor, verdict: Verdict, active: Tensor) -> Tensor:
        self.auto.learn(Round(tree, ancestors, verdict))
        return self._draft(torch.tensor([self.auto.steps])) + self.costs.verify_seconds(self.auto.chosen)


class Pearl(RoundSchedule):
    """Drafts the next round while the target verifies this one (PEARL, arXiv 2408.11850).

    The next draft assumes that the most probable path is accepted to its end and that the next token is the draft's
    own, so a tree is verified to one position less than it was drafted. Where that comes true, the next round's
    drafting overlapped with this round's verification; otherwise it was wasted, and is repeated.
    """

    adaptive = False

    def begin(self, rows: int) -> None:
        super().begin(rows)
        self.hidden = torch.zeros(rows)  # (B,) seconds of the next round's drafting that overlapped with this one

    def choose(self, drafted: Tree, active: Tensor) -> Tree:
        ancestors, rows = ancestor_mask(drafted.parents, self.depth), torch.arange(len(active))
        levels = ancestors.sum(-1) - 1
        ends = [drafted.scores.masked_fill(levels != depth, -torch.inf).argmax(1) for depth in range(1, self.depth + 1)]
        self.reach = torch.full_like(ends[0], self.depth - 1)  # (B,) positions verified
        if self.adaptive:
            self.reach = torch.stack([self._rate(drafted, levels, *end) for end in enumerate(ends)]).argmax(0)
        on_path = ancestors[rows, torch.stack(ends)[self.reach, rows]]  # (B, N) of the assumed path
        places = levels.where(on_path, self.depth + 1)
        self.path = drafted.tokens.new_full((len(active), self.depth + 2), LEFT_OUT)
        self.path = self.path.scatter(1, places, drafted.tokens)[:, 1:-1]  # (B, K) its tokens
        inside = levels <= self.reach[:, None]
        tokens, scores = drafted.tokens.where(inside, LEFT_OUT), drafted.scores.where(inside, -torch.inf)
        return rerank(drafted._replace(tokens=tokens, scores=scores), self.nodes)

    def _rate(self, drafted: Tree, levels: Tensor, reach: int, end: Tensor) -> Tensor:
        """(B,) tokens per second where `reach` positions are verified; `end` is the node assumed to follow them."""
        chances = self.calibration.chance(drafted.scores)
        inside = chances.masked_fill((levels > reach) | (levels == 0), 0)
        tokens = 1 + inside.topk(min(self.nodes - 1, inside.shape[1]), dim=1).values.sum(1)
        draft, verify = self.costs.draft_seconds(reach + 1), self.costs.verify_seconds(self.nodes)
        return tokens / (draft + verify - chances.gather(1, end[:, None])[:, 0] * min(draft, verify))

    def seconds(self, tree: Tree, ancestors: Tensor, verdict: Verdict, active: Tensor) -> Tensor:
        self._learn(tree, ancestors, verdict, active)
        draft, verify = self._draft(self.reach + 1), self.costs.verify_seconds(self.nodes)
        took = draft + verify - self.hidden.minimum(draft)
        beyond = torch.arange(self.depth) > self.reach[:, None]
        same = (verdict.tokens[:, : self.depth] == self.path) | beyond
        self.came_true = same.all(1) & (verdict.accepted == self.reach)
        self.hidden = self.came_true * verify
        return took

    def select(self, rows: list[int]) -> None:
        super().select(rows)
        self.hidden = self.hidden[rows]


class AdaptivePearl(Pearl):
    """PEARL with as many positions in each round as promise the most tokens per second."""

    adaptive = True


class Equal(RoundSchedule):
    """Eight texts at a time share the nodes of one large tree equally.

    All are verified together, as in engines that pack a batch: that takes as long as one tree of as many nodes, and
    drafting takes as long as for one text. A round's seconds are divided among its rows. Where some have ended, it is
    as if other texts had taken their places: the rest share fewer nodes, at the cost of a full batch.
    """

    rows = 8

    def choose(self, drafted: Tree, active: Tensor) -> Tree:
        tree, total = rerank(drafted, self.nodes), int(active.sum())
        worth = self.worth(tree).masked_fill(~active[:, None], -torch.inf)
        worth[:, 0] = torch.inf  # every root is verified
        ranked = worth.flatten().sort(descending=True, stable=True)
        inactive = len(active) - total
        self.part = total / self.rows  # of a full batch
        self.verified = self.count(ranked.values[len(active) :], total)
        kept = torch.zeros_like(worth, dtype=torch.bool).flatten()
        kept[ranked.indices[: self.verified + inactive]] = True
        return tree._replace(tokens=tree.tokens.where(kept.view_as(worth), LEFT_OUT))

    def worth(self, tree: Tree) -> Tensor:
        """(B, N) how much a node is preferred; never more than its parent."""
        best = tree.scores.sort(dim=1, descending=True, stable=True).indices
        return -best.argsort(dim=1).to(tree.scores.dtype)  # the best of every tree, then the next of every tree

    def count(self, worth: Tensor, active: int) -> int:
        """How many nodes of the active rows are verified, roots included; `worth` is that of all others, descending."""
        return max(round(self.nodes * active / self.rows), active)

    def seconds(self, tree: Tree, ancestors: Tensor, verdict: Verdict, active: Tensor) -> Tensor:
        self._learn(tree, ancestors, verdict, active)
        verify = self.costs.verify_seconds(min(round(self.verified / self.part), self.nodes))
        took = self.costs.draft_seconds(self.depth) + verify
        return torch.full((len(active),), took / self.rows)


class Tetris(Equal):
    """The nodes go to the highest path probabilities of the whole batch (TETRIS, arXiv 2502.15197)."""

    def worth(self, tree: Tree) -> Tensor:
        return tree.scores.clone()


class CalibratedTetris(Equal):
    """The nodes go to the highest chances of acceptance, as learnt from the rounds so far."""

    def worth(self, tree: Tree) -> Tensor:
        ancestors = ancestor_mask(tree.parents, self.depth)
        return self.calibration.chance(tree.scores)[:, None].where(ancestors, torch.inf).amin(-1)


class SizedTetris(CalibratedTetris):
    """As many nodes as promise the most tokens per second of all rows together."""

    def count(self, worth: Tensor, active: int) -> int:
        tokens = active + torch.nn.functional.pad(worth.clamp(min=0).cumsum(0), (1, 0))  # with 0, 1, 2, … more nodes
        draft, part = self.costs.draft_seconds(self.depth), active / self.rows
        rates = {active: 0.0}  # where none of the sizes has a root for every row
        for n, verify in self.costs.verify.items():
            if self.rows <= n <= self.nodes:
                count = max(round(n * part), active)
                rate = float(tokens[min(count - active, len(worth))]) / (draft + verify)
                rates[count] = max(rate, rates.get(count, 0.0))
        return max(rates, key=rates.__getitem__)


SCHEDULES: dict[str, type[RoundSchedule]] = {
    "": RoundSchedule,
    "oracle": OracleDepth,
    "auto": Auto,
    "pearl": Pearl,
    "pearl-adaptive": AdaptivePearl,
    "equal": Equal,
    "tetris": Tetris,
    "tetris-calibrated": CalibratedTetris,
    "tetris-sized": SizedTetris,
}


def read_costs(path: Path, config: dict[str, Any], methods: dict[str, dict[str, Any]]) -> dict[str, Costs]:
    """The costs of each draft, from the run.json of a benchmark.

    Raises:
        ValueError: it lacks a draft or trees of this size, or is of a different target or dtype.
    """
    run = read_json(path)
    stored, measured = run.get("costs") or {}, run.get("config") or {}
    for name, method in methods.items():
        if name not in stored:
            raise ValueError(f"{path} has no costs of {name}: it must be of `poss benchmark --tree auto`, with {name}")
        if method["nodes"] > (most := max(map(int, stored[name]["verify"]))):
            raise ValueError(f"{path} has costs of {name} to {most} nodes, and its trees have {method['nodes']}")
    for field in ("dtype", "fingerprint"):
        if not same_weights(str(measured.get(field)), str(config[field])):
            raise ValueError(f"{path} is of {field} {measured.get(field)}, and here it is {config[field]}")
    return {name: Costs.read(stored[name]) for name in methods}
