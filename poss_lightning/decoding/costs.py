"""What a round costs on this machine: the time of a draft step, and of verifying trees of several sizes."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch

from poss_lightning.machine import best_seconds

MEASURED = (1, 2, 4, 8, 16, 32, 60, 128)  # sizes of trees, root included
EACH = 10**6  # steps of a tree whose positions take one each
ENOUGH = 3.0  # seconds after which nothing more is timed


class Costs(NamedTuple):
    """Seconds of the parts of a round, on this machine, for one size of batch and length of text."""

    draft_step: float
    verify: dict[int, float]  # for n nodes per row; 1 is a step of plain decoding
    steps: int = EACH  # of a whole tree, where they are fewer than its positions

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
    most: int,
    device: torch.device,
    known: dict[int, float],
) -> Costs:
    """Time draft steps and verification here and now.

    Args:
        draft: drafts a tree in `steps` steps, none where only lookups propose.
        verify: n -> what verifies n nodes per row.
        most: nodes that a round may verify.
        known: seconds of verifying n nodes, which are not timed again.
    """
    works = {n: verify(n) for n in sorted({*(n for n in MEASURED if n < most), most} - known.keys())}
    seconds = best_seconds({0: draft} | works, device=device, enough=ENOUGH)
    return Costs(seconds.pop(0) / max(steps, 1), known | seconds, steps)
