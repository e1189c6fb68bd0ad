"""`tree: auto`: the plan of the next round is the one that should bring the most tokens per second.

A round that drafts k steps and verifies n drafted nodes with m looked-up tokens takes draft(k) + verify(n + m) seconds,
as measured on this machine, and brings 1 + a(k, n) + b(m) tokens. Both are counted: a from the path probabilities of
whole trees, which the first rounds of a text draft, corrected by how often nodes of such a probability were accepted; b
from what looked-up tokens brought, by how many tokens had matched. To draft nothing is one of the plans.
"""

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from poss_lightning.decoding.acceptance import MEMORY, Calibration, Round, Worth
from poss_lightning.decoding.costs import Costs
from poss_lightning.decoding.lookup import NGRAM
from poss_lightning.decoding.plans import TreePlan
from poss_lightning.decoding.trees import Tree, node_depths

SIZES = (1, 2, 3, 4, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 60, 80, 100, 128)  # of trees; few, so that few shapes occur
TRIALS = 2  # rounds of a text that draft to the full depth
SELDOM = 8  # where drafting does not pay, one text in so many has them
LEAST = 8  # nodes that they verify, at least
BETTER = 1.03  # speed-up of a new plan that justifies its new graphs
TREES = 16  # whole trees that the average reaches back to


class Planner:
    """Chooses the plan of each round, and learns from what the rounds brought.

    Its tables lie on the device: learning never waits for it, and choosing waits once.

    Args:
        plan: the largest tree.
        device: where rounds are computed.
    """

    def __init__(self, plan: TreePlan, device: torch.device):
        self.plan, self.depth = plan, plan.depth or 0
        self.sizes = np.array([n for n in SIZES if n < plan.nodes] + [plan.nodes])
        self.more = np.array([n for n in (0, *SIZES) if n < plan.lookup] + [plan.lookup])
        self.places = torch.from_numpy(self.sizes - 1).to(device)  # of the last node, in a sum over the best
        self.calibration = Calibration(device)
        self.beside, self.alone = Worth(plan.lookup, device), Worth(plan.lookup, device)  # with a drafted tree, without
        self.matched = torch.zeros(NGRAM + 1, device=device)  # lookups lately, by how many tokens matched
        self.drafted = torch.zeros(self.depth + 1, len(self.sizes), device=device)  # a(k, n)
        self.trees = self.texts = 0  # drafted whole; begun

    def begin(self, costs: Costs) -> int:
        """Begin a text; return how many of its rounds draft a whole tree."""
        self.texts += 1
        pays = not self.trees or self.why_plain(costs) is None
        return TRIALS if self.depth and (pays or self.texts % SELDOM == 0) else 0

    def choose(
        self, costs: Costs, found: list[int] | None, whole: bool = False, kept: TreePlan | None = None
    ) -> TreePlan:
        """Choose the plan of the next round.

        Args:
            costs: of a round now.
            found: how many tokens matched in each row, see `Lookup.find`; None for what matched lately.
            whole: draft to the full depth.
            kept: a plan of this planner that stays unless another is `BETTER`.
        """
        rates, *_ = self._rates(costs, found)
        if kept:
            rates[kept.depth, self.sizes == kept.nodes, self.more == kept.lookup] *= BETTER
        if whole:
            rates[:-1], rates[-1, self.sizes < min(LEAST, self.plan.nodes)] = 0, 0
        k, n, m = np.unravel_index(rates.argmax(), rates.shape)
        return replace(self.plan, depth=int(k), nodes=int(self.sizes[n]), lookup=int(self.more[m]))

    def why_plain(self, costs: Costs) -> str | None:
        """Say why nothing is drafted, in a line; None where something is."""
        rates, tokens, seconds = self._rates(costs, None)
        if not self.trees or rates[1:].max() >= rates[0].max():
            return None
        places = np.unravel_index(rates[1:].argmax(), rates[1:].shape)
        best = places[0] + 1, *places[1:]
        steps, needed = seconds[best] / costs.verify[1], rates[0].max() * seconds[best]
        return (
            "tree: auto gave up drafting: on this machine a round with drafting takes as long as "
            f"{steps:.2f} tokens of plain decoding, and gives {tokens[best]:.2f} tokens"
            + (f", where lookups alone give {needed:.2f}" if needed > 1.001 * steps else "")
        )

    def _rates(self, costs: Costs, found: list[int] | None) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return tokens per second of a row, and both, by depth, nodes and looked-up tokens: (K+1, n, m) each."""
        tables = self.drafted, self.beside.brings(), self.alone.brings(), self.matched
        copied = torch.cat([table.flatten() for table in tables]).cpu().split([table.numel() for table in tables])
        drafted, beside, alone, matched = (
            part.view(table.shape).numpy() for part, table in zip(copied, tables, strict=True)
        )
        share = matched if found is None else np.bincount(found, minlength=len(matched))
        share = share / max(share.sum(), 1)
        looked_up = np.stack([share @ alone] + [share @ beside] * self.depth)[:, None, self.more]
        tokens = 1 + drafted[:, :, None] + looked_up
        seconds = costs.round_seconds(np.arange(self.depth + 1)[:, None, None], np.add.outer(self.sizes, self.more))
        rates = tokens / seconds
        rates[self.sizes <= np.arange(self.depth + 1)[:, None]] = 0  # they hold no path so deep
        rates[0, 1:] = 0  # the root is all there is
        return rates, tokens, seconds

    def learn(self, done: Round, mask: Tensor, whole: bool = False) -> None:
        """Take a round into account; `mask` (B,) is 1 for rows that count, `whole` as given to `choose`."""
        (tree, ancestors, (path, tokens, accepted)), nodes, weights = done[:3], done.drafted, mask.float()
        if nodes > 1:
            end = path.where(path < nodes, 0).amax(1)  # the deepest drafted one: parents come before children
            on_path = ancestors[torch.arange(len(end), device=end.device), end, 1:nodes]  # (B, n-1), without the root
            self.calibration.learn(tree.scores[:, 1:nodes], on_path, weights)
        if whole:
            self.trees += 1
            self.drafted.lerp_(self._expected(done.candidates, weights), 1 / min(self.trees, TREES))
        if done.found is not None and done.continued is not None:
            self.matched.mul_(MEMORY).index_add_(0, done.found, weights)
            count = min(done.continued.shape[1], tokens.shape[1])
            places = torch.arange(count, device=path.device)
            right = (done.continued[:, :count] == tokens[:, :count]).cumprod(1) > 0
            # What the target says next is known as far as it accepted, or to the first token that is wrong.
            known = (places <= accepted[:, None]) | ~right.gather(1, accepted.clamp(max=count - 1)[:, None])
            self.alone.learn(done.found, known, right, weights)
            if nodes > 1 and done.looked_up:
                places = places[: done.looked_up]
                joined = (path[:, 1 : 1 + len(places)] >= nodes) & (places < accepted[:, None])
                self.beside.learn(done.found, torch.ones_like(joined), joined, weights)

    def _expected(self, whole: Tree, weights: Tensor) -> Tensor:
        """Return a(k, n) of trees of which all nodes (B, M) that were scored are given."""
        depths, levels = node_depths(whole.parents, self.depth), torch.arange(self.depth + 1, device=weights.device)
        chances = self.calibration.chance(whole.scores)
        chances = chances * ((depths > 0) & (depths <= levels[:, None, None]))  # (K+1, B, M)
        best = torch.nn.functional.pad(chances.sort(descending=True).values.cumsum(-1), (1, 0))
        return weights @ best[..., self.places.clamp(max=depths.shape[1])] / weights.sum().clamp(min=1)
