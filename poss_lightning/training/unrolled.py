"""The losses of an unrolled batch, and what a validation measures by depth: losses, pos-acc in the unroll, drift."""

from typing import Any

import torch
from torch import Tensor, nn

from poss_lightning.draft.attention import Packing
from poss_lightning.draft.specialists import Specialists
from poss_lightning.features.stream import Batch
from poss_lightning.losses.passes import PassLosses, pass_losses, slots_that_count
from poss_lightning.machine import send
from poss_lightning.metrics import FeatureDrift, PassSums, UnrollAcceptance
from poss_lightning.target.spec import EmbedHead


def unrolled_losses(
    draft: Specialists,
    embed_head: EmbedHead,
    batch: Batch,
    depth: int,
    *,
    chains: Tensor | None = None,
    **options: Any,
) -> tuple[PassLosses, list[Tensor]]:
    """Compute the losses of `depth` unrolled passes, and K predictions (B, T-1, D).

    There is one slot less than tokens: slot t has x_{t+1} on its right and predicts f_{t+1}.

    Args:
        chains: (B, T-1) weights of chains, on the host.
        options: other arguments of `pass_losses`.
    """
    torch.set_autocast_cache_enabled(True)  # else Lightning casts a weight at each use, and keeps all copies
    device, counts = batch.counts.device, batch.counts[:, :-1]
    embedded = embed_head.embed(batch.tokens[:, 1:])
    inputs = batch.draft_input[:, :-1].to(draft.fc.weight.dtype)
    packing = Packing(batch.lengths, batch.positions[:, :-1])
    begins, counting = (send(slots_that_count(slot_counts(batch), passes, chains), device) for passes in (1, depth))
    predictions = draft(embedded, inputs, depth, packing, begins)
    if draft.config.own_head:  # as published, no loss where the head has no row for the target's token
        counts = counts * embed_head.has_row(batch.greedy[:, 1:])
    losses = pass_losses(
        [draft.head_input(prediction) for prediction in predictions],
        batch.features[:, 1:],
        counts,
        embed_head.head,
        scale=embed_head.scale,
        cap=embed_head.cap,
        draft_head=draft.lm_head.weight if draft.config.own_head else None,
        chains=None if chains is None else send(chains, device),
        counting=counting,
        **options,
    )
    return losses, predictions


def acceptance_inputs(
    draft: Specialists, batch: Batch, losses: PassLosses, chains: Tensor | None = None
) -> dict[str, Any]:
    """Return arguments of `UnrollAcceptance.update`: at slot t the draft's top token is a proposal for x_{t+2}."""
    return {
        "proposals": draft.token_ids(losses.top_rows.clamp(min=0))[:, :, :-1],
        "greedy": batch.greedy[:, 1:-1],
        "text": batch.tokens[:, 2:],
        "counts": batch.counts[:, :-2],
        "begins": None if chains is None else chains[:, :-1].to(batch.counts.device) > 0,
    }


def slot_counts(batch: Batch) -> Tensor:
    """Count the passes at each slot, on the host: (B, T-1)"""
    return torch.from_numpy(batch.host_counts[:, :-1])


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
        """Forget all batches; a fit that follows `Trainer.validate` could not add to tensors of inference mode."""
        with torch.inference_mode(False):
            for metric in (self.losses, self.acceptance, self.drift):
                if metric is not None:
                    metric.reset()
