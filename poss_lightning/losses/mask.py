"""Which passes of an unroll count at which slot, and over how many slots of its optimizer step a batch is averaged."""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from poss_lightning.ranges import MAX_POSITIONS


class Transferable:
    """A record whose tensors are pinned, and moved to a device, together: one that two fields share once."""

    def to(self, device: torch.device) -> Self:
        """Copy all tensors to a device, without waiting for what is queued there; arrays stay on the host."""
        waits = device.type in ("cpu", "mps")
        return self._with_tensors(lambda tensor: tensor.to(device, non_blocking=not waits))

    def pin_memory(self) -> Self:
        return self._with_tensors(Tensor.pin_memory)

    def _with_tensors(self, change: Callable[[Tensor], Tensor]) -> Self:
        changed: dict[int, Tensor] = {}

        def once(value: Any) -> Any:
            if isinstance(value, Transferable):
                return value._with_tensors(change)
            if not isinstance(value, Tensor):
                return value
            if id(value) not in changed:
                changed[id(value)] = change(value)
            return changed[id(value)]

        return replace(self, **{field.name: once(getattr(self, field.name)) for field in fields(self)})  # pyright: ignore


@dataclass
class LossMask(Transferable):
    """The slots of a batch's rows (there is one slot less than tokens) where passes count.

    For one conversation of eight tokens, of which tokens 3 to 7 are the assistant's answer:

        token           0  1  2  3  4  5  6  7
        slot            0  1  2  3  4  5  6
        passes          0  0  1  2  3  4  0        slot 2 joins token 3 with feature 2, and predicts token 4
        slots           2  3  4  5
        step_slots      4  3  2  1  0 ...          if this conversation is the whole optimizer step
    """

    passes: Tensor  # (B, T-1) pass k counts at slot t where k <= passes[t]
    host_passes: np.ndarray  # (B, T-1) the same, which stays on the host
    slots: Tensor  # (S,) where pass 1 counts, of the rows end to end
    step_slots: Tensor  # (MAX_POSITIONS,) of pass k in the optimizer step: all its batches, of all processes
    step_tokens: Tensor  # () of the optimizer step, whether a pass counts there or not
    step_batches: int  # processes x accumulated batches; strategies take the mean of their gradients

    @property
    def is_empty(self) -> bool:
        """Return whether no slot counts, as in a batch that only completes a step."""
        return not self.host_passes.any()

    def pass_weights(self, discounts: Tensor, over: str) -> Tensor:
        """Return weights (K,) that make sums over slots a mean over the "slots" or "tokens" of the step, discounted.

        Strategies take the mean over the step's batches, which the last factor undoes.
        """
        total = self.step_slots[: len(discounts)] if over == "slots" else self.step_tokens
        return discounts / total.clamp(min=1) * self.step_batches


def count_step_slots(answers: np.ndarray) -> Tensor:
    """Count the slots of each pass, (MAX_POSITIONS,), in answers with (A,) slots of pass 1; pass k has k-1 fewer."""
    return torch.from_numpy((answers[:, None] - np.arange(MAX_POSITIONS)).clip(0).sum(0))
