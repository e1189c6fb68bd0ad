"""What a validation measures by depth: losses, pos-acc in the unroll, and drift."""

import torch
from torch import Tensor, nn

from poss_lightning.features.stream import Batch
from poss_lightning.losses.passes import PassLosses
from poss_lightning.metrics import FeatureDrift, PassSums, UnrollAcceptance


class ValidationMetrics(nn.Module):
    """Means over the slots of all batches and processes, for depth K.

    Args:
        depth: K.
        terms: names of the loss terms to report, besides their weighted sum.
        predicts_feature: whether to measure drift.
    """

    def __init__(self, depth: int, terms: tuple[str, ...], predicts_feature: bool):
        super().__init__()
        self.terms = terms
        self.losses = PassSums(1 + len(terms), depth)
        self.acceptance = UnrollAcceptance(depth)
        self.drift = FeatureDrift(depth) if predicts_feature else None

    def update(self, losses: PassLosses, predictions: list[Tensor], batch: Batch, unrolled: dict[str, Tensor]) -> None:
        """Add a batch; `unrolled` are the arguments of `UnrollAcceptance.update`."""
        sums = torch.stack([losses.weighted, *(losses.by_term[name] for name in self.terms)])
        self.losses.update(sums, losses.slots)
        self.acceptance.update(**unrolled)
        if self.drift is not None:
            self.drift.update(predictions, batch.features[:, 1:], batch.counts[:, :-1])

    def compute(self) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss of each pass (K,), 0 without slots; and means (K,) by name, nan there.

        Without any slot all are nan.
        """
        names = ["loss", *(f"{name}_loss" for name in self.terms)]
        sums, slots = self.losses.compute()
        slots = torch.atleast_1d(slots)  # which torchmetrics squeezes
        means = dict(zip(names, sums / slots, strict=True))
        means["pos_acc_unroll"] = self.acceptance.compute()
        if self.drift is not None:
            drift = self.drift.compute()
            means |= {f"drift_{name}": drift[name] for name in ("cosine", "l2", "norm_ratio")}
        return sums[0] / slots.clamp(min=1) / (slots[0] > 0), means

    def reset(self) -> None:
        """Forget all batches."""
        for metric in (self.losses, self.acceptance, self.drift):
            if metric is not None:
                metric.reset()
