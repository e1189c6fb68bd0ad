"""A gradient that is not finite ends the training, before its weights are kept anywhere."""

from torch import Tensor

SHOWN = 64  # conversations that a message names


class NormGuard:
    """The norm of a step's gradient, looked at when the next step begins: by then it is there, and nobody waits.

    Attributes:
        ids: conversations of the step that is on its way.
    """

    def __init__(self):
        self.ids: list[str] = []
        self.last: tuple[Tensor, int, list[str]] | None = None  # norm, number and conversations of a step

    def keep(self, norm: Tensor, step: int) -> None:
        """Of the step that is on its way, which ends with this."""
        self.last, self.ids = (norm, step, self.ids), []

    def check(self) -> None:
        """Raise ValueError where the gradient of the last step was not finite."""
        if self.last is None:
            return
        norm, step, ids = self.last
        if not norm.isfinite():
            more = f" and {len(ids) - SHOWN} more" if len(ids) > SHOWN else ""
            raise ValueError(
                f"step {step}: the norm of the gradient is {norm.item()}, in {', '.join(ids[:SHOWN])}{more}. "
                "Checkpoints and drafts are from before it"
            )
        self.last = None
