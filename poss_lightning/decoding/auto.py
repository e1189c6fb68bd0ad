"""`tree: auto`: what rounds cost here, as far as it was measured, and the plan of the next round that follows."""

from collections.abc import Callable

import torch
from torch import Tensor

from poss_lightning.clock import Clock
from poss_lightning.decoding.acceptance import Round
from poss_lightning.decoding.budget import Planner
from poss_lightning.decoding.costs import Costs
from poss_lightning.decoding.plans import TreePlan
from poss_lightning.sampling import Sampling

Key = tuple[int, int, tuple[bool, ...]]  # rows of the batch, doublings of the texts' length, `Sampling.steps`


class AutoPlans:
    """Chooses the plan of each round, and stores costs from text to text.

    Args:
        plan: the largest.
        device: where rounds are computed. On a CPU a plan is chosen for every round; elsewhere, where choosing waits
            for the device and a new plan takes a new graph, for every text, and again once its length has doubled.
    """

    def __init__(self, plan: TreePlan, device: torch.device):
        self.plan, self.device, self.each_round = plan, device, device.type == "cpu"
        self.measured: dict[Key, Costs] = {}
        self.confirmed: set[Key] = set()  # measured again, as drafting did not pay
        self.planners: dict[Sampling, Planner] = {}  # as a draft is better at some temperatures
        self.planner = Planner(plan, device)  # of the texts in hand, as all that follows
        self.costs: Costs | None = None
        self.warmup_rounds_left = 0  # that draft a whole tree
        self.fixed_plan: TreePlan | None = None  # where plans are not chosen for each round
        self.needs_replan = True

    def begin(self, sampling: Sampling, key: Key, measure: Callable[[bool], Costs], clock: Clock) -> None:
        """Begin texts: `measure` costs that are not known, or again those by which drafting does not pay."""
        self.planner = self.planners.setdefault(sampling, Planner(self.plan, self.device))
        costs = self.measured.get(key)
        doubted = costs is not None and key not in self.confirmed and self.planner.why_plain(costs) is not None
        if costs is None or doubted:
            with clock.excluded("measure"):
                self.measured[key] = measure(doubted)
            self.confirmed |= {key} if doubted else set()
        self.costs, self.needs_replan = self.measured[key], True
        self.warmup_rounds_left = self.planner.begin(self.costs)

    def choose(self, key: Key, matches: list[int]) -> TreePlan:
        """Choose the plan of the next round, by what was measured for such texts; `matches` is of each row's lookup."""
        rows, doublings, kind = key
        measured = [k for k in self.measured if (k[0], k[2]) == (rows, kind) and k[1] <= doublings]
        before, self.costs = self.costs, self.measured[max(measured)] if measured else self.costs
        assert self.costs is not None, "no texts were begun"
        if self.each_round:
            return self.planner.choose(self.costs, matches, whole=self.warmup_rounds_left > 0)
        if self.warmup_rounds_left:
            return self.plan
        if self.fixed_plan is None or self.needs_replan or self.costs is not before:
            self.fixed_plan, self.needs_replan = self.planner.choose(self.costs, None, current=self.fixed_plan), False
        return self.fixed_plan

    def learn(self, done: Round, mask: Tensor) -> None:
        """Take a round into account; `mask` (B,) is 1 for rows that count."""
        if self.warmup_rounds_left or self.each_round:
            self.planner.learn(done, mask, whole=self.warmup_rounds_left > 0)
        self.warmup_rounds_left = max(self.warmup_rounds_left - 1, 0)

    @property
    def why_plain(self) -> str | None:
        """Why the last texts were not drafted any more, in a line; None where they were."""
        return None if self.costs is None else self.planner.why_plain(self.costs)
