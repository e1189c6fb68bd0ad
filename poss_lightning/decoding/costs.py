"""What a round costs on this machine: the time of a draft step, and of verifying trees of several sizes."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch

from poss_lightning.machine import best_seconds

MEASURED = (1, 2, 6, 12, 24, 60, 128)  # sizes of trees, root included
NO_STEP_LIMIT = 10**6  # a tree takes a step per position
TIME_BUDGET_S = 3.0  # after which nothing more is timed


class Costs(NamedTuple):
    """Seconds of the parts of a round, on this machine, for one size of batch and length of text."""

    draft_step: float
    verify: dict[int, float]  # for n nodes per row; 1 is a step of plain decoding
    steps: int = NO_STEP_LIMIT  # of a whole tree, where they are fewer than its positions

    def round_seconds(self, depth: Any, nodes: Any) -> Any:
        """Return the seconds of drafting to a depth and verifying so many nodes; numbers or arrays of them.

        A size between two that were timed lies on the line between. Noise only adds time, and more nodes never cost
        less, so no size costs more than a larger one.
        """
        sizes = sorted(self.verify)
        level = np.minimum.accumulate([self.verify[n] for n in reversed(sizes)])[::-1]
        return np.minimum(depth, self.steps) * self.draft_step + np.interp(nodes, sizes, level)


def measure(
    draft: Callable[[], object],
    steps: int,
    verify: Callable[[int], Callable[[], object]],
    max_nodes: int,
    device: torch.device,
    timed: dict[int, float],
) -> Costs:
    """Time draft steps and verification here and now.

    Args:
        draft: drafts a tree in `steps` steps, none where only lookups propose.
        verify: n -> what verifies n nodes per row.
        max_nodes: of a round.
        timed: seconds of verifying n nodes, which are not timed again.
    """
    sizes = {*(n for n in MEASURED if n < max_nodes), max_nodes} - timed.keys()
    works = {n: verify(n) for n in sorted(sizes)}
    seconds = best_seconds({0: draft} | works, device=device, enough=TIME_BUDGET_S)
    return Costs(seconds.pop(0) / max(steps, 1), timed | seconds, steps)
