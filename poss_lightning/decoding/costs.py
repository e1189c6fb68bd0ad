"""What a round costs on this machine: the time of a draft step, and of verifying trees of several sizes."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    import torch

# Nodes of trees, root included.
TREE_SIZES = (1, 2, 3, 4, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 60, 80, 100, 128)
MEASURED = (1, 2, 4, 8, 16, 32, 60, 128)  # those of them that are timed
EACH = 10**6  # steps of a tree whose positions take one each
ENOUGH = 3.0  # seconds after which nothing more is timed


class Costs(NamedTuple):
    """Seconds of the parts of a round, on this machine, for one size of batch and length of text."""

    draft_step: float
    verify: dict[int, float]  # for n nodes per row, every n that a tree may have; 1 is a step of plain decoding
    steps: int = EACH  # of a whole tree, where they are fewer than its positions

    @classmethod
    def interpolate(cls, draft_step: float, timed: dict[int, float], steps: int = EACH) -> "Costs":
        """From the times of some sizes; a size between two of them lies on the line between.

        Noise only adds time, and more nodes never cost less, so a size costs no more than any larger one.
        """
        knots = sorted(timed)
        level = [min(timed[m] for m in knots if m >= n) for n in knots]
        sizes = sorted({*knots, *(n for n in TREE_SIZES if n < knots[-1])})
        return cls(draft_step, {n: float(np.interp(n, knots, level)) for n in sizes}, steps)

    @classmethod
    def read(cls, stored: dict[str, Any]) -> "Costs":
        """From run.json."""
        verify = {int(n): seconds for n, seconds in stored["verify"].items()}
        return cls(stored["draft_step"], verify, stored.get("steps", EACH))

    def least(self, other: "Costs") -> "Costs":
        """The least of two measurements of the same sizes, as noise only adds time."""
        verify = {n: min(seconds, other.verify[n]) for n, seconds in self.verify.items()}
        return Costs(min(self.draft_step, other.draft_step), verify, self.steps)

    def draft_seconds(self, depth: int) -> float:
        """Seconds of drafting to this depth."""
        return min(depth, self.steps) * self.draft_step

    def verify_seconds(self, nodes: int) -> float:
        """Seconds of verifying any number of nodes: those of the next larger size that was timed, or of the largest."""
        return self.verify[min((n for n in self.verify if n >= nodes), default=max(self.verify))]

    def break_even(self, steps: int, nodes: int) -> float:
        """Tokens per round at which drafting `steps` and verifying `nodes` is as fast as plain decoding."""
        return (self.draft_seconds(steps) + self.verify_seconds(nodes)) / self.verify[1]


def measure(
    draft: Callable[[], object],
    steps: int,
    verify: Callable[[int], Callable[[], object]],
    nodes: int,
    device: "torch.device",
    looked_up: int = 0,
) -> Costs:
    """Time draft steps and verification here and now.

    Args:
        draft: drafts a tree in `steps` steps, none where only lookups propose.
        verify: n -> what verifies n nodes per row.
        nodes: the most that a drafted tree may have.
        looked_up: the most nodes beside them.
    """
    from poss_lightning.machine import best_seconds  # `poss compare` reads costs, and need not wait for torch

    sizes = {n for n in MEASURED if n < nodes + looked_up} | {nodes, nodes + looked_up}
    works = {0: draft} | {n: verify(n) for n in sorted(sizes)}
    seconds = best_seconds(works, device=device, enough=ENOUGH)
    return Costs.interpolate(seconds.pop(0) / max(steps, 1), seconds, steps)
