"""The loss of a pass: smooth-L1 of features, and terms that compare distributions (docs/METHOD.md, 5).

L_k = Σ_terms weight · term, by default
      1.0 mean_D SmoothL1(F̂, f)  +  0.1 (-Σ_v p log q)  +  1.0 (-Σ_{v in top(p)} p log q)
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from poss_lightning.losses.chunks import ENTROPIES, ChunkLosses, Heads, Workspace, is_fused
from poss_lightning.losses.slot_weights import dpace, to_slots
from poss_lightning.losses.terms import DISTRIBUTION_TERMS

STEP, CHUNK_BYTES = 128, 2**31  # slots of a chunk are a multiple; what its matrices may take on CUDA
DEFAULT = MappingProxyType({"feature": 1.0, "token": 0.1, "topk": 1.0})


@dataclass(frozen=True, kw_only=True)
class LossSpec:
    """What is minimised.

    Args:
        terms: weights of `feature`, `token`, `topk`, and those of `terms.py`.
        top_k: tokens of the term `topk`.
        gamma: weight of a pass relative to the one before.
        slot_weights: "dpace", or None to weigh all slots alike. It computes the logits twice.
        chunk: slots whose (K+1, chunk, V) logits exist at once; None for the number that `slots_of_chunk` chooses.

    Raises:
        ValueError: an unknown term, a negative weight, or none above 0.
    """

    terms: Mapping[str, float] = field(default_factory=lambda: DEFAULT)
    top_k: int = 10
    gamma: float = 1.0
    slot_weights: Literal["dpace"] | None = None
    chunk: int | None = None

    def __post_init__(self):
        names = ("feature", *ENTROPIES, *DISTRIBUTION_TERMS)  # a script may add to these
        if unknown := [name for name in self.terms if name not in names]:
            raise ValueError(f"loss has the term {unknown[0]!r}; terms are {', '.join(names)}")
        if not any(self.terms.values()) or min(self.terms.values()) < 0:
            raise ValueError(f"loss is {dict(self.terms)}: give at least one term a weight above 0, and none below")

    @property
    def computed(self) -> dict[str, float]:
        """Return the weights of the terms that are computed: all above 0, and both entropies, which are one product."""
        order = ("feature", *ENTROPIES, *DISTRIBUTION_TERMS)
        return {name: self.terms.get(name, 0.0) for name in order if name in ENTROPIES or self.terms.get(name)}

    def check_kind(self, predicts_feature: bool) -> None:
        """Raise ValueError for a feature loss of a draft without features."""
        if self.terms.get("feature") and not predicts_feature:
            raise ValueError(f"loss has feature: {self.terms['feature']}, but a draft of this kind predicts no feature")

    def discounts(self, depth: int, device: torch.device | str = "cpu") -> Tensor:
        """Return γ^{k-1} of each pass: (K,)"""
        return self.gamma ** torch.arange(depth, device=device)

    def sum_passes(self, means: Tensor) -> Tensor:
        """Return L = Σ_k γ^{k-1} L_k of means (K,)."""
        return (means * self.discounts(len(means), means.device)).sum()


class PassLosses(NamedTuple):
    """Sums over the slots that count, one number per pass (K,), and the draft's top tokens there."""

    total: Tensor  # () Σ_k pass_weights_k weighted_k, the only one with a gradient
    by_term: dict[str, Tensor]  # (K,) sums by name: `token`, `topk`, and all that have a weight
    weighted: Tensor  # (K,) Σ weight · term
    slots: Tensor  # (K,) how many slots count, whether or not their chains were drawn
    top_rows: Tensor  # (K, B, T) the draft's most likely row of the head; -1 but at `slots`, and without find_top

    def plus(self, extra: Tensor, pass_weights: Tensor | None) -> "PassLosses":
        """Add other losses of the passes (K,), summed over slots; without weights they are not in the total."""
        total = self.total if pass_weights is None else self.total + (pass_weights * extra).sum()
        extra = extra.detach()
        return self._replace(total=total, weighted=self.weighted + extra, by_term=self.by_term | {"extra": extra})


def pass_losses(
    predictions: list[Tensor],
    features: Tensor,
    passes: Tensor,
    heads: Heads,
    spec: LossSpec = LossSpec(),
    *,
    slots: Tensor | None = None,
    chains: Tensor | None = None,
    pass_weights: Tensor | None = None,
    find_top: bool = True,
) -> PassLosses:
    """Compute the losses of K passes against the target's features.

    Args:
        predictions: K tensors (B, T, D), F̂ of f_{t+1} at slot t; or the input of the draft's own head there.
        features: (B, T, D), the target's f_{t+1} at slot t.
        passes: (B, T), pass k counts at a slot where k <= passes.
        slots: (S,) the slots that count, or more, of the rows end to end; to find them, the host waits for the device.
        chains: (B, T) weight of the chain that begins at each slot, see `draw_chains`; 1 by default.
        pass_weights: (K,) weight of each pass in the total, above 0; 1 by default.
        find_top: whether to find the draft's top tokens, which takes a little time.
    """
    spec.check_kind(predicts_feature=heads.draft is None)
    depth, flat = torch.arange(1, len(predictions) + 1, device=passes.device)[:, None], passes.flatten()
    slots = flat.nonzero()[:, 0] if slots is None else slots
    predicted = torch.stack([prediction.flatten(0, 1)[slots] for prediction in predictions])  # (K, S, D)
    features = features.flatten(0, 1)[slots]
    counted = flat[slots] >= depth  # (K, S)
    if pass_weights is None:
        pass_weights = predicted.new_ones(len(predictions), dtype=torch.float32)
    chunk = spec.chunk or slots_of_chunk(passes.device.type, len(predictions), heads, spec)
    draft_head = heads.draft
    if draft_head is not None:
        heads = heads._replace(draft=draft_head.detach().to(heads.target.dtype))
        if not torch.is_grad_enabled():
            draft_head = draft_head.detach()  # else its gradient would be computed in validation, too
    with torch.autocast(passes.device.type, enabled=False):  # dtypes are chosen here, one by one
        by_slot = counted.to(torch.promote_types(heads.target.dtype, torch.float32))  # (K, S)
        if chains is not None:
            by_slot = by_slot * to_slots(chains.expand(len(predictions), -1, -1)).flatten(1)[:, slots]
        if spec.slot_weights is not None:
            probs = target_token_probs(predicted.detach(), features, heads, chunk)
            by_slot = by_slot * _weigh_slots(probs, counted, passes.shape, slots)
        total, weighted, sums, rows = ChunkLosses.apply(
            predicted, draft_head, pass_weights, features, by_slot, heads, spec.computed, spec.top_k, chunk, find_top
        )
    top_rows = passes.new_full((len(predictions), passes.numel()), -1)
    top_rows[:, slots] = rows
    by_term = dict(zip(spec.computed, sums, strict=True))
    return PassLosses(total, by_term, weighted, (flat >= depth).sum(-1), top_rows.view(-1, *passes.shape))


def slots_of_chunk(device: str, passes: int, heads: Heads, spec: LossSpec) -> int:
    """How many slots to compute at once: on CUDA, where every chunk starts its kernels and reads the head again, as
    many as `CHUNK_BYTES` hold; elsewhere so few that the matrices stay near a CPU's cache.
    """
    empty = torch.empty_like(heads.target, device="meta")
    space = Workspace.make(passes, STEP, empty, fused := is_fused(device, heads, spec.computed))
    taken = sum(matrix.nbytes for matrix in space) + fused * space.logits[0].nbytes  # whose slope is a new matrix
    return max(CHUNK_BYTES // taken if device == "cuda" else 1, 1) * STEP


def _weigh_slots(probs: Tensor, counted: Tensor, shape: torch.Size, slots: Tensor) -> Tensor:
    """Return D-PACE's weights (K, S) of slots from probs and counted (K, S), which it needs as whole rows."""
    rows = []
    for values in (probs, counted):
        row = values.new_zeros(len(values), shape.numel())
        row[:, slots] = values
        rows.append(row.view(-1, *shape))
    return dpace(*rows).flatten(1)[:, slots]


def target_token_probs(predicted: Tensor, features: Tensor, heads: Heads, chunk: int) -> Tensor:
    """Return the draft's probability of the target's most likely token: (K, S)."""
    passes, slots, _ = predicted.shape
    probs = torch.zeros(passes, slots, dtype=torch.float32, device=features.device)
    for start in range(0, slots, chunk):
        rows = slice(start, start + chunk)
        logits = heads.target.new_empty(passes + 1, len(features[rows]), len(heads.target))
        heads.write_logits(logits, features[rows], predicted[:, rows])
        best = logits[0].max(-1, keepdim=True).indices  # (s, 1)
        for k, drafted in enumerate(logits[1:]):  # (s, V), one by one: all in float32 would be large
            probs[k, rows] = (drafted.gather(-1, best)[:, 0].float() - drafted.float().logsumexp(-1)).exp()
    return probs
