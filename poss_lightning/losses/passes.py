"""The loss of a pass: smooth-L1 of features, and terms that compare distributions (docs/METHOD.md, 5).

    L_k = Σ_terms weight · term, by default
          1.0 mean_D SmoothL1(F̂, f)  +  0.1 (-Σ_v p log q)  +  1.0 (-Σ_{v in top(p)} p log q)

Both cross-entropies are one with unnormalised weights c = w_token p + w_topk p [v in top(p)]: it is lse(l)·Σc - c·l for
logits l, with gradient softmax(l)·Σc - c. The other terms are in `terms.py`. Forward computes the gradient by the
features, (slots, D), too, so no tensor of (slots, V) outlives its chunk. Where the target caps its logits, l = cap
tanh(scale u / cap) of the head's product u, and the gradient by u is that by l times scale (1 - (l / cap)²).

The gradient of a draft's own head (EAGLE-3) is a sum over slots and passes, for which forward needs the weight of each
pass. So the weights are arguments, and there is one `total`, not K losses to be weighted afterwards.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import smooth_l1_loss

from poss_lightning.losses.slot_weights import to_slots
from poss_lightning.losses.terms import DISTRIBUTION_TERMS

ENTROPIES = ("token", "topk")  # always computed, as both are one product
STEP, CHUNK_BYTES = 128, 2**31  # slots of a chunk are a multiple; what its matrices may take on CUDA
DEFAULT = MappingProxyType({"feature": 1.0, "token": 0.1, "topk": 1.0})


class PassLosses(NamedTuple):
    """Sums over the slots that count, one number per pass (K,), and the draft's top tokens there."""

    total: Tensor  # () Σ_k pass_weights_k weighted_k, the only one with a gradient
    by_term: dict[str, Tensor]  # (K,) sums by name: `token`, `topk`, and all that have a weight
    weighted: Tensor  # (K,) Σ weight · term
    slots: Tensor  # (K,) how many slots count, whether or not their chains were drawn
    top_rows: Tensor  # (K, B, T) the draft's most likely row of the head; -1 but at `counting`, and without find_top

    def plus(self, extra: Tensor, pass_weights: Tensor | None) -> "PassLosses":
        """Add other losses of the passes (K,), summed over slots; without weights they are not in the total."""
        total = self.total if pass_weights is None else self.total + (pass_weights * extra).sum()
        extra = extra.detach()
        return self._replace(total=total, weighted=self.weighted + extra, by_term=self.by_term | {"extra": extra})


def known_terms() -> tuple[str, ...]:
    """Return the names that `loss` may have; a script may add to `DISTRIBUTION_TERMS`."""
    return ("feature", *ENTROPIES, *DISTRIBUTION_TERMS)


def check_weights(weights: Mapping[str, float], predicts_feature: bool) -> None:
    """Raise ValueError for an unknown term, a negative weight, none above 0, or a feature loss without features."""
    if unknown := [name for name in weights if name not in known_terms()]:
        raise ValueError(f"loss has the term {unknown[0]!r}; terms are {', '.join(known_terms())}")
    if not any(weights.values()) or min(weights.values()) < 0:
        raise ValueError(f"loss is {dict(weights)}: give at least one term a weight above 0, and none below")
    if weights.get("feature") and not predicts_feature:
        raise ValueError(f"loss has feature: {weights['feature']}, but a draft of this kind predicts no feature")


def pass_losses(
    predictions: list[Tensor],
    features: Tensor,
    counts: Tensor,
    head: Tensor,
    *,
    weights: Mapping[str, float] = DEFAULT,
    slot_weights: Callable[[Tensor, Tensor], Tensor] | None = None,
    topk: int = 10,
    chunk: int | None = None,
    find_top: bool = True,
    scale: float = 1.0,
    cap: float | None = None,
    draft_head: Tensor | None = None,
    pass_weights: Tensor | None = None,
    chains: Tensor | None = None,
    counting: Tensor | None = None,
) -> PassLosses:
    """Compute the losses of K passes against the target's features.

    Args:
        predictions: K tensors (B, T, D), F̂ of f_{t+1} at slot t; or the input of the draft's own head there.
        features: (B, T, D), the target's f_{t+1} at slot t.
        counts: (B, T), pass k counts at a slot where k <= counts.
        head: (V, D), the target's, frozen.
        weights: by term: `feature`, `token`, `topk`, and those of `terms.py`; see `check_weights`.
        slot_weights: `dpace`; None weighs all slots alike. It computes the logits twice.
        topk: tokens of the term `topk`.
        chunk: slots whose (K+1, chunk, V) logits exist at once; None for the number that `slots_of_chunk` chooses.
        find_top: whether to find the draft's top tokens, which takes a little time.
        scale, cap: of the target's logits, between head and softmax; the draft's too, where it uses the target's head.
        draft_head: (V, D), the draft's own head; None where it uses the target's.
        pass_weights: (K,) weight of each pass in the total, above 0; 1 by default.
        chains: (B, T) weight of the chain that begins at each slot, see `draw_chains`; 1 by default.
        counting: (S,) the slots that count, or more, of the rows end to end; to find them, the host waits for the
            device. See `slots_that_count`.
    """
    check_weights(weights, predicts_feature=draft_head is None)
    passes, places = len(predictions), counts.numel()
    of_chains = None if chains is None else to_slots(chains.expand(passes, -1, -1)).flatten(1)  # (K, B * T)
    counting = slots_that_count(counts, passes, chains) if counting is None else counting
    predicted = torch.stack([prediction.flatten(0, 1)[counting] for prediction in predictions])  # (K, S, D)
    features = features.flatten(0, 1)[counting]
    counted = counts.flatten()[counting] >= torch.arange(1, passes + 1, device=counts.device)[:, None]  # (K, S)
    if pass_weights is None:
        pass_weights = predicted.new_ones(passes, dtype=torch.float32)
    heads = _Heads(head, head if draft_head is None else draft_head.detach().to(head.dtype), scale, cap)
    chunk = chunk or slots_of_chunk(counts.device.type, passes, head)
    with torch.autocast(counts.device.type, enabled=False):  # dtypes are chosen here, one by one
        by_slot = counted.to(torch.promote_types(head.dtype, torch.float32))  # (K, S)
        if of_chains is not None:
            by_slot = by_slot * of_chains[:, counting]
        if slot_weights is not None:
            chances = _chances(predicted.detach(), features, heads, chunk)
            by_slot = by_slot * _weigh_slots(slot_weights, chances, counted, counts, counting)
        if draft_head is not None and not torch.is_grad_enabled():
            draft_head = draft_head.detach()  # else its gradient would be computed in validation, too
        weights = {name: weights.get(name, 0.0) for name in known_terms() if name in ENTROPIES or weights.get(name)}
        total, weighted, sums, rows = _Losses.apply(
            predicted, draft_head, pass_weights, features, by_slot, heads, weights, topk, chunk, find_top
        )
    top_rows = counts.new_full((passes, places), -1, dtype=torch.long)
    top_rows[:, counting] = rows
    by_term = dict(zip(weights, sums, strict=True))
    slots = (counts.flatten() >= torch.arange(1, passes + 1, device=counts.device)[:, None]).sum(-1)
    return PassLosses(total, by_term, weighted, slots, top_rows.view(passes, *counts.shape))


def slots_of_chunk(device: str, passes: int, head: Tensor) -> int:
    """How many slots to compute at once: on CUDA, where every chunk starts its kernels and reads the head again, as
    many as `CHUNK_BYTES` hold; elsewhere so few that the matrices stay near a CPU's cache.
    """
    matrices = _Space.make(passes, STEP, torch.empty_like(head, device="meta"))
    steps = CHUNK_BYTES // sum(matrix.nbytes for matrix in matrices) if device == "cuda" else 1
    return max(steps, 1) * STEP


def slots_that_count(counts: Tensor, passes: int, chains: Tensor | None = None) -> Tensor:
    """(S,) of the rows end to end: those that count, (B, T), and that some chain reads in one of its passes."""
    read = counts > 0 if chains is None else (counts > 0) & to_slots(chains.expand(passes, -1, -1)).any(0)
    return read.flatten().nonzero()[:, 0]


def _weigh_slots(
    slot_weights: Callable[[Tensor, Tensor], Tensor], chances: Tensor, counted: Tensor, counts: Tensor, counting: Tensor
) -> Tensor:
    """The weights (K, S) of the slots that count, from chances and counted (K, S), which it needs as whole rows."""
    rows = [counts.new_zeros(len(x), counts.numel(), dtype=x.dtype) for x in (chances, counted)]
    for row, known in zip(rows, (chances, counted), strict=True):
        row[:, counting] = known
    return slot_weights(*(row.view(-1, *counts.shape) for row in rows)).flatten(1)[:, counting]


class _Heads(NamedTuple):
    target: Tensor  # (V, D)
    draft: Tensor  # (V, D), the same tensor where the draft has no head of its own
    scale: float  # of the target's logits
    cap: float | None

    def write_logits(self, logits: Tensor, features: Tensor, predicted: Tensor) -> None:
        """Fill (K+1, s, V): the target's logits of features (s, D), then the draft's of predictions (K, s, D)."""
        dtype = self.target.dtype
        if self.draft is self.target:  # one product for all, so that the large head is read once
            rows = torch.cat([features[None], predicted]).flatten(0, 1).to(dtype)
            torch.mm(rows, self.target.T, out=logits.flatten(0, 1))
        else:
            torch.mm(features.to(dtype), self.target.T, out=logits[0])
            torch.mm(predicted.flatten(0, 1).to(dtype), self.draft.T, out=logits[1:].flatten(0, 1))
            logits = logits[:1]  # only the target's are scaled and capped
        if self.scale != 1.0:
            logits.mul_(self.scale)
        if self.cap is not None:
            logits.div_(self.cap).tanh_().mul_(self.cap)


def _chances(predicted: Tensor, features: Tensor, heads: _Heads, chunk: int) -> Tensor:
    """Return the draft's probability of the target's most likely token: (K, S)."""
    passes, slots, _ = predicted.shape
    chances = torch.zeros(passes, slots, dtype=torch.float32, device=features.device)
    for start in range(0, slots, chunk):
        rows = slice(start, start + chunk)
        logits = heads.target.new_empty(passes + 1, len(features[rows]), len(heads.target))
        heads.write_logits(logits, features[rows], predicted[:, rows])
        best = logits[0].max(-1, keepdim=True).indices  # (s, 1)
        for k, drafted in enumerate(logits[1:]):  # (s, V), one by one: all in float32 would be large
            chances[k, rows] = (drafted.gather(-1, best)[:, 0].float() - drafted.float().logsumexp(-1)).exp()
    return chances


class _Losses(torch.autograd.Function):
    """Chunk by chunk; the target's probabilities are computed once per chunk, for all passes."""

    @staticmethod
    def forward(ctx, predicted, draft_head, pass_weights, features, by_slot, heads, weights, topk, chunk, find_top):
        passes, slots, _ = predicted.shape
        sums = by_slot.new_zeros(len(weights), passes)
        top_rows = torch.full((passes, slots), -1, device=predicted.device)
        gradient = torch.empty_like(predicted) if any(ctx.needs_input_grad[:2]) else None
        head_gradient = torch.zeros_like(draft_head, dtype=by_slot.dtype) if ctx.needs_input_grad[1] else None
        space = _Space.make(passes, min(chunk, slots), heads.target)
        largest = pass_weights.max()  # weights relative to it, so that a slope in half precision does not vanish
        for start in range(0, slots, chunk):
            rows = slice(start, start + chunk)
            part, given = space.first(len(features[rows])), (predicted[:, rows], features[rows], by_slot[:, rows])
            top, slopes = top_rows[:, rows] if find_top else None, None if gradient is None else gradient[:, rows]
            sums += _chunk_sums(*given, heads, weights, topk, part, top, slopes)
            if head_gradient is not None:
                inputs = given[0] * (given[2] * (pass_weights / largest)[:, None])[..., None]  # (K, s, D)
                slopes = part.logits[1:]  # `_chunk_sums` has overwritten the logits with them
                head_gradient += slopes.flatten(0, 1).T @ inputs.flatten(0, 1).to(heads.target.dtype)
        if gradient is not None:
            kept = None if head_gradient is None else head_gradient.mul_(largest).to(draft_head.dtype)
            ctx.save_for_backward(gradient, kept, pass_weights)
        # The weights stay on the host: to move them would wait for the device.
        weighted = torch.stack([weight * of for weight, of in zip(weights.values(), sums, strict=True)]).sum(0)
        ctx.mark_non_differentiable(weighted, sums, top_rows)
        return (pass_weights * weighted).sum(), weighted, sums, top_rows

    @staticmethod
    def backward(ctx, grad_total, *_):
        gradient, head_gradient, pass_weights = ctx.saved_tensors
        # Scaled pass by pass, so that the scale stays in float32 and the product has the gradient's dtype.
        scales = grad_total * pass_weights
        predicted = torch.stack([scale * slope for scale, slope in zip(scales, gradient, strict=True)])
        return predicted, None if head_gradient is None else grad_total * head_gradient, *(None,) * 8


class _Space(NamedTuple):
    """Memory for a chunk's matrices, shared by all chunks: to allocate it each time would take longer than the work."""

    logits: Tensor  # (K+1, s, V), the target's first, in the head's dtype; a pass's are overwritten by its slope
    p: Tensor  # (s, V), float32
    c: Tensor
    q: Tensor
    product: Tensor

    @classmethod
    def make(cls, passes: int, rows: int, head: Tensor) -> "_Space":
        wide = head.new_empty(4, rows, len(head), dtype=torch.promote_types(head.dtype, torch.float32))
        return cls(head.new_empty(passes + 1, rows, len(head)), *wide)

    def first(self, rows: int) -> "_Space":
        """Return the part for a chunk of `rows` slots."""
        logits = self.logits.flatten()[: len(self.logits) * rows * self.p.shape[-1]]
        return _Space(logits.view(len(self.logits), rows, -1), *(matrix[:rows] for matrix in self[1:]))


def _chunk_sums(
    predicted: Tensor,
    features: Tensor,
    by_slot: Tensor,
    heads: _Heads,
    weights: Mapping[str, float],
    topk: int,
    space: _Space,
    top_rows: Tensor | None,
    gradient: Tensor | None,
) -> Tensor:
    """Sum the terms over the slots of a chunk: (terms, K).

    Args:
        predicted, features, by_slot: (K, s, D), (s, D), and weights (K, s), 0 where a pass does not count.
        top_rows, gradient: (K, s) and (K, s, D) to fill, or None.
    """
    w_feature, w_token, w_topk = (weights.get(name, 0.0) for name in ("feature", *ENTROPIES))
    others = {name: weight for name, weight in weights.items() if name in DISTRIBUTION_TERMS}
    logits, p, c, q, product = space
    f, sums = features.to(p.dtype), []  # (s, D)
    scale, cap = (heads.scale, heads.cap) if heads.draft is heads.target else (1.0, None)
    heads.write_logits(logits, features, predicted)
    p.copy_(logits[0]).sub_(logits[0].amax(-1, keepdim=True)).exp_().div_(p.sum(-1, keepdim=True))
    p_top, rows = p.topk(min(topk, p.shape[-1]), dim=-1)  # (s, topk)
    torch.mul(p, w_token, out=c).scatter_add_(-1, rows, w_topk * p_top)
    total = w_token + w_topk * p_top.sum(-1, keepdim=True)  # (s, 1)
    for k, (prediction, drafted, mask) in enumerate(zip(predicted, logits[1:], by_slot, strict=True)):
        if top_rows is None:
            highest = drafted.amax(-1)  # (s,)
        else:
            highest, top_rows[k] = drafted.max(-1)
        q.copy_(drafted).sub_(highest[:, None])
        mean, q_top = torch.mul(p, q, out=product).sum(-1), q.gather(-1, rows)
        norm = q.exp_().sum(-1, keepdim=True)  # (s, 1)
        lse = norm.log()
        values = {"token": lse[:, 0] - mean, "topk": (p_top * (lse - q_top)).sum(-1)}
        if w_feature:
            distance = prediction.to(f.dtype) - f  # (s, D)
            values["feature"] = smooth_l1_loss(distance, torch.zeros_like(distance), reduction="none").mean(-1)
        if gradient is not None:
            q.mul_(total / norm).sub_(c)  # now the slope by the logits
        if others:
            log_p, log_q = (of.to(q.dtype).log_softmax(-1) for of in (logits[0], drafted))
            values |= _add_others(others, log_p, log_q, None if gradient is None else q)
        sums.append(torch.stack([(values[name] * mask).sum() for name in weights]))
        if gradient is not None:
            if cap is not None:
                q.mul_(product.copy_(drafted).div_(cap).square_().neg_().add_(1))
            back = (drafted.copy_(q) @ heads.draft).to(f.dtype) * scale  # (s, D)
            if w_feature:
                back += w_feature / f.shape[-1] * distance.clamp_(-1, 1)
            gradient[k] = back * mask[:, None]
    return torch.stack(sums, dim=1)


def _add_others(weights: Mapping[str, float], log_p: Tensor, log_q: Tensor, slope: Tensor | None) -> dict[str, Tensor]:
    """Compute these terms (s,), and add their gradient by the draft's logits to `slope` (s, V)."""
    if slope is None:
        return {name: DISTRIBUTION_TERMS[name](log_p, log_q) for name in weights}
    with torch.enable_grad():
        free = log_q.detach().requires_grad_()  # as if its entries were independent
        values = {name: DISTRIBUTION_TERMS[name](log_p, free) for name in weights}
        (found,) = torch.autograd.grad([weight * values[name].sum() for name, weight in weights.items()], free)
    slope.add_(found - log_q.exp() * found.sum(-1, keepdim=True))
    return {name: value.detach() for name, value in values.items()}
