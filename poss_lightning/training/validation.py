"""What a validation measures by depth: losses, pos-acc in the unroll, and drift."""

from collections.abc import Mapping

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


def tabulate(logged: Mapping[str, float]) -> str:
    """Lay out logged values, three digits each: a line per metric, depths and mean as columns; then others, τ last.

    Args:
        logged: by tag: `val_loss/depth_1` and `val_loss/mean`, as `log_by_depth` names them, or `val/loss`.
    """
    names = sorted(tag.removesuffix("/mean") for tag in logged if tag.endswith("/mean"))
    by_depth = {tag for tag in logged for name in names if tag.startswith(f"{name}/")}
    depths = range(1, max((int(tag.rpartition("_")[2]) for tag in by_depth if "/depth_" in tag), default=0) + 1)
    rows = {
        name: [logged.get(f"{name}/{place}") for place in (*map("depth_{}".format, depths), "mean")] for name in names
    }
    rows |= {tag: [logged[tag]] for tag in sorted(logged.keys() - by_depth, key=lambda tag: ("tau" in tag, tag))}
    width = max(map(len, rows))
    lines = [f"{'depth':{width}}" + "".join(f"{place:>9}" for place in (*depths, "mean"))]
    for name, values in rows.items():
        lines.append(f"{name:{width}}" + "".join(f"{'' if value is None else f'{value:#.3g}':>9}" for value in values))
    return "\n".join(lines)
