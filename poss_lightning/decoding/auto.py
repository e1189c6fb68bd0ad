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

Key = tuple[
    int, int, tuple[bool, ...]
]  # rows of the batch, doublings of the texts' length, what choosing a token takes


class AutoPlans:
    """Chooses the plan of each round, and remembers costs from text to text.

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
        # Of the texts in hand:
        self.planner = Planner(plan, device)
        self.now: Costs | None = None
        self.trials = 0  # rounds to come that draft a whole tree
        self.settled: TreePlan | None = None  # where plans are not chosen for each round
        self.due = True  # it must be chosen again

    def begin(self, sampling: Sampling, key: Key, measure: Callable[[bool], Costs], clock: Clock) -> None:
        """Begin texts: `measure` costs that are not known, or again those by which drafting does not pay."""
        self.planner = self.planners.setdefault(sampling, Planner(self.plan, self.device))
        known = self.measured.get(key)
        doubted = known is not None and key not in self.confirmed and self.planner.why_plain(known) is not None
        if known is None or doubted:
            with clock.excluded("measure"):
                self.measured[key] = measure(doubted)
            self.confirmed |= {key} if doubted else set()
        self.now, self.due = self.measured[key], True
        self.trials = self.planner.begin(self.now)

    def choose(self, key: Key, matches: list[int]) -> TreePlan:
        """Choose the plan of the next round; `matches` are the tokens that matched in each row's lookup.

        Longer texts, and fewer rows, have costs of their own where these were measured.
        """
        rows, doublings, kind = key
        known = [own for own in self.measured if (own[0], own[2]) == (rows, kind) and own[1] <= doublings]
        before, self.now = self.now, self.measured[max(known)] if known else self.now
        assert self.now is not None, "no texts were begun"
        if self.each_round:
            return self.planner.choose(self.now, matches, whole=self.trials > 0)
        if self.trials:
            return self.plan
        if self.settled is None or self.due or self.now is not before:
            self.settled, self.due = self.planner.choose(self.now, None, kept=self.settled), False
        return self.settled

    def learn(self, done: Round, mask: Tensor) -> None:
        """Take a round into account; `mask` (B,) is 1 for rows that count."""
        if self.trials or self.each_round:
            self.planner.learn(done, mask, whole=self.trials > 0)
        self.trials = max(self.trials - 1, 0)

    @property
    def why_plain(self) -> str | None:
        """Why the last texts were not drafted any more, in a line; None where they were."""
        return None if self.now is None else self.planner.why_plain(self.now)
