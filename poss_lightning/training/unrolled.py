"""The losses of an unrolled batch, and what a validation measures by depth: losses, pos-acc in the unroll, drift."""

from typing import Any

import torch
from torch import Tensor, nn

from poss_lightning.draft.attention import Packing
from poss_lightning.draft.specialists import DraftModel
from poss_lightning.features.stream import Batch
from poss_lightning.losses.chunks import Heads
from poss_lightning.losses.passes import LossSpec, PassLosses, pass_losses
from poss_lightning.losses.slot_weights import chain_slots
from poss_lightning.machine import to_device_async
from poss_lightning.metrics import FeatureDrift, PassSums, UnrollAcceptance
from poss_lightning.target_model.spec import EmbedHead


def unrolled_losses(
    draft: DraftModel,
    embed_head: EmbedHead,
    batch: Batch,
    depth: int,
    spec: LossSpec,
    pass_weights: Tensor | None = None,
    chains: Tensor | None = None,
    find_top: bool = True,
) -> tuple[PassLosses, list[Tensor]]:
    """Compute the losses of `depth` unrolled passes, and K predictions (B, T-1, D).

    There is one slot less than tokens: slot t has x_{t+1} on its right and predicts f_{t+1}.

    Args:
        pass_weights: (K,) weight of each pass in the total.
        chains: (B, T-1) weights of chains, on the host.
        find_top: whether to find the draft's top tokens.
    """
    torch.set_autocast_cache_enabled(True)  # else Lightning casts a weight at each use, and keeps all copies
    passes, device = batch.mask.passes, batch.tokens.device
    begins = slots = batch.mask.slots
    if chains is not None:
        drawn = chain_slots(torch.from_numpy(batch.mask.host_passes), depth, chains)
        begins, slots, chains = (to_device_async(each, device) for each in (*drawn, chains))
    embedded = embed_head.embed(batch.tokens[:, 1:])
    inputs = batch.draft_input[:, :-1].to(draft.fc.weight.dtype)
    predictions = draft(embedded, inputs, depth, Packing(batch.lengths, batch.positions[:, :-1]), begins)
    if draft.config.own_head:  # as published, no loss where the head has no row for the target's token
        passes = passes * embed_head.has_row(batch.target_argmax[:, 1:])
    own_head = draft.lm_head.weight if draft.config.own_head else None
    losses = pass_losses(
        [draft.head_input(prediction) for prediction in predictions],
        batch.features[:, 1:],
        passes,
        Heads(embed_head.head, own_head, embed_head.scale, embed_head.cap),
        spec,
        slots=slots,
        chains=chains,
        pass_weights=pass_weights,
        find_top=find_top,
    )
    return losses, predictions


def acceptance_inputs(
    draft: DraftModel, batch: Batch, losses: PassLosses, chains: Tensor | None = None
) -> dict[str, Any]:
    """Return arguments of `UnrollAcceptance.update`: at slot t the draft's top token is a proposal for x_{t+2}."""
    return {
        "proposals": draft.token_ids(losses.top_rows.clamp(min=0))[:, :, :-1],
        "greedy": batch.target_argmax[:, 1:-1],
        "text": batch.tokens[:, 2:],
        "counts": batch.mask.passes[:, :-1],
        "begins": None if chains is None else chains[:, :-1].to(batch.tokens.device) > 0,
    }


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
            self.drift.update(predictions, batch.features[:, 1:], batch.mask.passes)

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
