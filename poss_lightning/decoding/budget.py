"""`tree: auto`: the plan of the next round is the one with the most expected tokens per second.

A round that drafts k steps and verifies n drafted nodes with m looked-up tokens takes draft(k) + verify(n + m) seconds,
as measured on this machine, and yields 1 + a(k, n) + b(m) tokens. Both are counted: a from the path probabilities of
whole trees, which the first rounds of a text draft, corrected by how often nodes of such a probability were accepted; b
from how often looked-up tokens were accepted, by how many tokens had matched. To draft nothing is one of the plans.
"""

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from poss_lightning.decoding.acceptance import DECAY, Calibration, LookupAcceptance, Round
from poss_lightning.decoding.costs import Costs
from poss_lightning.decoding.lookup import NGRAM
from poss_lightning.decoding.plans import TreePlan
from poss_lightning.decoding.trees import Tree, node_depths

SIZES = (1, 2, 3, 4, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 60, 80, 100, 128)  # of trees; few, so that few shapes occur
WARMUP_ROUNDS = 2  # of a text, which draft to the full depth
RETRY_EVERY = 8  # texts: where drafting does not pay, one in so many has warm-up rounds
MIN_NODES = 8  # that a warm-up round verifies
MIN_SPEEDUP = 1.03  # of a new plan, which justifies its new graphs
AVERAGING_WINDOW = 16  # whole trees


class Planner:
    """Chooses the plan of each round, and learns from what the rounds yield.

    Its tables lie on the device: learning never waits for it, and choosing waits once.

    Args:
        plan: the largest tree.
        device: where rounds are computed.
    """

    def __init__(self, plan: TreePlan, device: torch.device):
        self.plan, self.depth = plan, plan.depth or 0
        self.sizes = np.array([n for n in SIZES if n < plan.nodes] + [plan.nodes])
        self.lookups = np.array([n for n in (0, *SIZES) if n < plan.lookup] + [plan.lookup])
        self.last_nodes = torch.from_numpy(self.sizes - 1).to(device)  # of each size, in a sum over the best
        self.calibration = Calibration(device)
        self.with_tree, self.alone = (LookupAcceptance(plan.lookup, device) for _ in range(2))
        self.matches = torch.zeros(NGRAM + 1, device=device)  # lookups lately, by how many tokens matched
        self.drafted = torch.zeros(self.depth + 1, len(self.sizes), device=device)  # a(k, n)
        self.trees = self.texts = 0  # drafted whole; begun

    def begin(self, costs: Costs) -> int:
        """Begin a text; return its number of warm-up rounds, which draft a whole tree."""
        self.texts += 1
        pays = not self.trees or self.why_plain(costs) is None
        return WARMUP_ROUNDS if self.depth and (pays or self.texts % RETRY_EVERY == 0) else 0

    def choose(
        self, costs: Costs, matches: list[int] | None, whole: bool = False, current: TreePlan | None = None
    ) -> TreePlan:
        """Choose the plan of the next round.

        Args:
            costs: of a round now.
            matches: how many tokens matched in each row, see `Lookup.find`; None for what matched lately.
            whole: draft to the full depth.
            current: a plan of this planner that stays unless a different one is faster by `MIN_SPEEDUP`.
        """
        rates, *_ = self._rates(costs, matches)
        if current:
            rates[current.depth, self.sizes == current.nodes, self.lookups == current.lookup] *= MIN_SPEEDUP
        if whole:
            rates[:-1], rates[-1, self.sizes < min(MIN_NODES, self.plan.nodes)] = 0, 0
        k, n, m = np.unravel_index(rates.argmax(), rates.shape)
        return replace(self.plan, depth=int(k), nodes=int(self.sizes[n]), lookup=int(self.lookups[m]))

    def why_plain(self, costs: Costs) -> str | None:
        """Say why nothing is drafted, in a line; None where something is."""
        rates, tokens, seconds = self._rates(costs, None)
        if not self.trees or rates[1:].max() >= rates[0].max():
            return None
        rates[0], best_plain = 0, rates[0].max()
        best = np.unravel_index(rates.argmax(), rates.shape)
        steps, needed = seconds[best] / costs.verify[1], best_plain * seconds[best]
        return (
            f"tree=auto disabled drafting: a drafted round costs {steps:.2f} plain steps but yields {tokens[best]:.2f} "
            "tokens" + (f"; lookups alone yield {needed:.2f} in that time" if needed > 1.001 * steps else "")
        )

    def _rates(self, costs: Costs, matches: list[int] | None) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return tokens per second of a row, and both, by depth, nodes and looked-up tokens: (K+1, n, m) each."""
        tables = self.drafted, self.with_tree.expected_tokens(), self.alone.expected_tokens(), self.matches
        copied = torch.cat([table.flatten() for table in tables]).cpu().split([table.numel() for table in tables])
        drafted, with_tree, alone, lately = (
            part.view(table.shape).numpy() for part, table in zip(copied, tables, strict=True)
        )
        share = lately if matches is None else np.bincount(matches, minlength=len(lately))
        share = share / max(share.sum(), 1)
        looked_up = np.stack([share @ alone] + [share @ with_tree] * self.depth)[:, None, self.lookups]
        tokens = 1 + drafted[:, :, None] + looked_up
        seconds = costs.round_seconds(np.arange(self.depth + 1)[:, None, None], np.add.outer(self.sizes, self.lookups))
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
            self.drafted.lerp_(self._expected(done.candidates, weights), 1 / min(self.trees, AVERAGING_WINDOW))
        if done.matched is not None and done.continuation is not None:
            self.matches.mul_(DECAY).index_add_(0, done.matched, weights)
            count = min(done.continuation.shape[1], tokens.shape[1])
            index = torch.arange(count, device=path.device)  # of a token in the continuation
            right = (done.continuation[:, :count] == tokens[:, :count]).cumprod(1) > 0
            # What the target says next is known as far as it accepted, or to the first token that is wrong.
            verified = (index <= accepted[:, None]) | ~right.gather(1, accepted.clamp(max=count - 1)[:, None])
            self.alone.learn(done.matched, verified, right, weights)
            if nodes > 1 and done.looked_up:
                index = index[: done.looked_up]
                joined = (path[:, 1 : 1 + len(index)] >= nodes) & (index < accepted[:, None])
                self.with_tree.learn(done.matched, torch.ones_like(joined), joined, weights)

    def _expected(self, whole: Tree, weights: Tensor) -> Tensor:
        """Return a(k, n) of trees of which all nodes (B, M) that were scored are given."""
        depths, levels = node_depths(whole.parents, self.depth), torch.arange(self.depth + 1, device=weights.device)
        chances = self.calibration.chance(whole.scores)
        chances = chances * ((depths > 0) & (depths <= levels[:, None, None]))  # (K+1, B, M)
        best = torch.nn.functional.pad(chances.sort(descending=True).values.cumsum(-1), (1, 0))
        return weights @ best[..., self.last_nodes.clamp(max=depths.shape[1])] / weights.sum().clamp(min=1)
