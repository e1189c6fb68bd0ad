"""What a validation measures, by depth: the losses, pos-acc in the unroll, and drift."""

import torch
from torch import Tensor, nn
from torchmetrics import MetricCollection

from poss_lightning.features.stream import Batch
from poss_lightning.losses.passes import PassLosses
from poss_lightning.metrics import FeatureDrift, PassMeans, UnrollAcceptance

DRIFTS = ("cosine", "l2", "norm_ratio")


class ValidationMetrics(nn.Module):
    """Means over the slots of all batches and processes.

    Args:
        depth: K.
        terms: losses to tell apart, by name.
        predicts_feature: whether there is a drift.
    """

    def __init__(self, depth: int, terms: tuple[str, ...], predicts_feature: bool):
        super().__init__()
        self.terms = terms
        means = {name: PassMeans(depth) for name in ("weighted", *terms)}
        self.losses = MetricCollection(dict(means), compute_groups=False)
        self.acceptance = UnrollAcceptance(depth)
        self.drift = FeatureDrift(depth) if predicts_feature else None

    def update(self, losses: PassLosses, predictions: list[Tensor], batch: Batch, unrolled: dict[str, Tensor]) -> None:
        """Add a batch; `unrolled` are the arguments of `UnrollAcceptance.update`."""
        for name, mean in self.losses.items():
            mean.update(losses.weighted if name == "weighted" else losses.terms[name], losses.slots)
        self.acceptance.update(**unrolled)
        if self.drift is not None:
            self.drift.update(predictions, batch.features[:, 1:], batch.counts[:, :-1])

    def compute(self) -> dict[str, Tensor]:
        """By the names under which they are logged, (K,) each."""
        weighted = torch.atleast_1d(self.losses["weighted"].compute())  # torchmetrics squeezes a single pass
        values = {"val_loss": weighted} | {f"val_{name}_loss": self.losses[name].compute() for name in self.terms}
        values["val_pos_acc_unroll"] = self.acceptance.compute()
        drift = {} if self.drift is None else self.drift.compute()
        return values | {f"val_drift_{name}": drift[name] for name in DRIFTS if drift}

    def reset(self) -> None:
        """Forget all batches."""
        for metric in (self.losses, self.acceptance, self.drift):
            if metric is not None:
                metric.reset()
