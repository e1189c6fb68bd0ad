"""The losses of a chunk of slots and their gradient; no (slots, V) matrix outlives its chunk.

Both cross-entropies are one with unnormalised weights c = w_token p + w_topk p [v in top(p)]: it is lse(l)·Σc - c·l for
logits l, with gradient softmax(l)·Σc - c. The other terms are in `terms.py`. Where the target caps its logits, l = cap
tanh(scale u / cap) of the head's product u, and the gradient by u is that by l times scale (1 - (l / cap)²).

Letters of this file: s slots of a chunk, V the draft's vocabulary.
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import smooth_l1_loss

from poss_lightning.losses.terms import DISTRIBUTION_TERMS
from poss_lightning.machine import compiled

ENTROPIES = ("token", "topk")  # always computed, as both are one product
Terms = Mapping[str, float]


class Heads(NamedTuple):
    """What turns features into logits: the target's head, and the draft's own, if it has one."""

    target: Tensor  # (V, D), frozen
    draft: Tensor | None = None  # (V, D), in the same dtype within a chunk
    scale: float = 1.0  # of the target's logits; the draft's too, where it uses the target's head
    cap: float | None = None

    def write_logits(self, logits: Tensor, features: Tensor, predicted: Tensor) -> None:
        """Fill (K+1, s, V): the target's logits of features (s, D), then the draft's of predictions (K, s, D)."""
        dtype = self.target.dtype
        if self.draft is None:  # one product for all, so that the large head is read once
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


def is_fused(device: str, heads: Heads, terms: Terms) -> bool:
    """Return whether a pass is one compiled function: on CUDA, for a draft that only compares plain entropies."""
    plain = heads.draft is None and heads.cap is None and not any(name in DISTRIBUTION_TERMS for name in terms)
    return device == "cuda" and plain


class Workspace(NamedTuple):
    """Memory for a chunk's matrices, shared by all chunks: to allocate it each time would take longer than the work."""

    logits: Tensor  # (K+1, s, V), the target's first, in the head's dtype; a pass's are overwritten by its slope
    wide: Tensor  # (4, s, V), float32; empty where passes are fused

    @classmethod
    def make(cls, passes: int, rows: int, head: Tensor, fused: bool) -> "Workspace":
        wide = head.new_empty(4, 0 if fused else rows, len(head), dtype=torch.promote_types(head.dtype, torch.float32))
        return cls(head.new_empty(passes + 1, rows, len(head)), wide)

    def first(self, rows: int) -> "Workspace":
        """Return the part for a chunk of `rows` slots."""
        matrices, _, size = self.logits.shape
        logits = self.logits.flatten()[: matrices * rows * size]
        return Workspace(logits.view(matrices, rows, size), self.wide[:, :rows])


class ChunkLosses(torch.autograd.Function):
    """Sums of terms over all slots, chunk by chunk; the target's probabilities are computed once per chunk.

    Forward computes the gradient, too. That of a draft's own head is a sum over slots and passes, for which forward
    needs the weight of each pass: so there is one total, not K losses to be weighted afterwards.
    """

    @staticmethod
    def forward(ctx, predicted, draft_head, pass_weights, features, by_slot, heads, terms, top_k, chunk, find_top):
        passes, slots, _ = predicted.shape
        sums = by_slot.new_zeros(len(terms), passes)
        top_rows = torch.full((passes, slots), -1, device=predicted.device)
        gradient = torch.empty_like(predicted) if any(ctx.needs_input_grad[:2]) else None
        head_gradient = torch.zeros_like(draft_head, dtype=by_slot.dtype) if ctx.needs_input_grad[1] else None
        fused = is_fused(predicted.device.type, heads, terms)
        space = Workspace.make(passes, min(chunk, slots), heads.target, fused)
        largest = pass_weights.max()  # weights relative to it, so that a slope in half precision does not vanish
        for start in range(0, slots, chunk):
            rows = slice(start, start + chunk)
            part, given = space.first(len(features[rows])), (predicted[:, rows], features[rows], by_slot[:, rows])
            top, slopes = top_rows[:, rows] if find_top else None, None if gradient is None else gradient[:, rows]
            sums += chunk_sums(*given, heads, terms, top_k, part, top, slopes)
            if head_gradient is not None:
                inputs = given[0] * (given[2] * (pass_weights / largest)[:, None])[..., None]  # (K, s, D)
                slopes = part.logits[1:]  # `chunk_sums` has overwritten the logits with them
                head_gradient += slopes.flatten(0, 1).T @ inputs.flatten(0, 1).to(heads.target.dtype)
        if gradient is not None:
            if head_gradient is not None:
                head_gradient = head_gradient.mul_(largest).to(draft_head.dtype)
            ctx.save_for_backward(gradient, head_gradient, pass_weights)
        # The weights of terms stay on the host: to move them would wait for the device.
        weighted = torch.stack([weight * of for weight, of in zip(terms.values(), sums, strict=True)]).sum(0)
        ctx.mark_non_differentiable(weighted, sums, top_rows)
        return (pass_weights * weighted).sum(), weighted, sums, top_rows

    @staticmethod
    def backward(ctx, grad_total, *_):
        gradient, head_gradient, pass_weights = ctx.saved_tensors
        # Scaled pass by pass, so that the scale stays in float32 and the product has the gradient's dtype.
        scales = grad_total * pass_weights
        predicted = torch.stack([scale * slope for scale, slope in zip(scales, gradient, strict=True)])
        return predicted, None if head_gradient is None else grad_total * head_gradient, *(None,) * 8


def chunk_sums(
    predicted: Tensor,
    features: Tensor,
    by_slot: Tensor,
    heads: Heads,
    terms: Terms,
    top_k: int,
    space: Workspace,
    top_rows: Tensor | None,
    gradient: Tensor | None,
) -> Tensor:
    """Sum the terms over the slots of a chunk: (terms, K).

    Args:
        predicted, features, by_slot: (K, s, D), (s, D), and weights (K, s), 0 where a pass does not count.
        top_rows, gradient: (K, s) and (K, s, D) to fill, or None.
    """
    heads.write_logits(space.logits, features, predicted)
    target_logits, *draft_logits = space.logits
    kind = FusedEntropies if is_fused(predicted.device.type, heads, terms) else Entropies
    entropies = kind(target_logits, heads, terms, top_k, space.wide)
    f, w_feature, sums = features.to(by_slot.dtype), terms.get("feature", 0.0), []
    head, scale = (heads.target, heads.scale) if heads.draft is None else (heads.draft, 1.0)
    for k, (prediction, drafted, mask) in enumerate(zip(predicted, draft_logits, by_slot, strict=True)):
        if top_rows is not None:
            top_rows[k] = drafted.max(-1).indices
        values, slope = entropies.of_pass(drafted, gradient is not None)
        if w_feature:
            distance = prediction.to(f.dtype) - f  # (s, D)
            values["feature"] = smooth_l1_loss(distance, torch.zeros_like(distance), reduction="none").mean(-1)
        sums.append(torch.stack([(values[name] * mask).sum() for name in terms]))
        if gradient is not None:
            back = (slope @ head).to(f.dtype) * scale  # (s, D)
            if w_feature:
                back += w_feature / f.shape[-1] * distance.clamp_(-1, 1)
            gradient[k] = back * mask[:, None]
    return torch.stack(sums, dim=1)


class Entropies:
    """The terms that compare the target's distribution p with the draft's q, pass by pass, in a chunk's workspace.

    Args:
        target_logits: (s, V)
        wide: (4, s, V), float32 matrices to overwrite.
    """

    def __init__(self, target_logits: Tensor, heads: Heads, terms: Terms, top_k: int, wide: Tensor):
        self.target_logits, self.terms = target_logits, terms
        self.p, self.c, self.q, self.product = p, c, *_ = wide
        self.cap = heads.cap if heads.draft is None else None
        w_token, w_topk = (terms.get(name, 0.0) for name in ENTROPIES)
        p.copy_(target_logits).sub_(target_logits.amax(-1, keepdim=True)).exp_().div_(p.sum(-1, keepdim=True))
        self.p_top, self.rows = p.topk(min(top_k, p.shape[-1]), dim=-1)  # (s, top_k)
        torch.mul(p, w_token, out=c).scatter_add_(-1, self.rows, w_topk * self.p_top)
        self.total = w_token + w_topk * self.p_top.sum(-1, keepdim=True)  # (s, 1)

    def of_pass(self, drafted: Tensor, has_slope: bool) -> tuple[dict[str, Tensor], Tensor]:
        """Return terms by name, (s,) each; with `has_slope` also their gradient by the draft's logits, in these."""
        p, c, q, product = self.p, self.c, self.q, self.product
        q.copy_(drafted).sub_(drafted.amax(-1)[:, None])
        mean, q_top = torch.mul(p, q, out=product).sum(-1), q.gather(-1, self.rows)
        norm = q.exp_().sum(-1, keepdim=True)  # (s, 1)
        lse = norm.log()
        values = {"token": lse[:, 0] - mean, "topk": (self.p_top * (lse - q_top)).sum(-1)}
        if has_slope:
            q.mul_(self.total / norm).sub_(c)  # now the slope by the logits
        if others := {name: weight for name, weight in self.terms.items() if name in DISTRIBUTION_TERMS}:
            log_p, log_q = (of.to(q.dtype).log_softmax(-1) for of in (self.target_logits, drafted))
            values |= _add_others(others, log_p, log_q, q if has_slope else None)
        if has_slope and self.cap is not None:
            q.mul_(product.copy_(drafted).div_(self.cap).square_().neg_().add_(1))
        return values, drafted.copy_(q) if has_slope else drafted


def _add_others(weights: Terms, log_p: Tensor, log_q: Tensor, slope: Tensor | None) -> dict[str, Tensor]:
    """Compute these terms (s,), and add their gradient by the draft's logits to `slope` (s, V)."""
    if slope is None:
        return {name: DISTRIBUTION_TERMS[name](log_p, log_q) for name in weights}
    with torch.enable_grad():
        free = log_q.detach().requires_grad_()  # as if its entries were independent
        values = {name: DISTRIBUTION_TERMS[name](log_p, free) for name in weights}
        (found,) = torch.autograd.grad([weight * values[name].sum() for name, weight in weights.items()], free)
    slope.add_(found - log_q.exp() * found.sum(-1, keepdim=True))
    return {name: value.detach() for name, value in values.items()}


class FusedEntropies:
    """What `Entropies` computes, for the terms `token` and `topk` alone, in one compiled function a pass.

    It reads the logits two or three times and writes the slope, where the matrices of `Entropies` take a dozen passes.
    The target's probabilities are computed again from its logits and their norm.
    """

    def __init__(self, target_logits: Tensor, heads: Heads, terms: Terms, top_k: int, wide: Tensor):
        self.target_logits = target_logits
        self.log_norm = compiled(log_norm)(target_logits)
        top, self.rows = target_logits.topk(min(top_k, target_logits.shape[-1]), dim=-1)  # (s, top_k)
        self.p_top = (top - self.log_norm).exp()
        self.weights = [self.p_top.new_full((), terms.get(name, 0.0)) for name in ENTROPIES]

    def of_pass(self, drafted: Tensor, has_slope: bool) -> tuple[dict[str, Tensor], Tensor]:
        function = compiled(fused_pass if has_slope else fused_terms)
        token, topk, *slopes = function(
            drafted, self.target_logits, self.log_norm, self.rows, self.p_top, *self.weights
        )
        if has_slope:
            drafted = slopes[0].scatter_(-1, self.rows, slopes[1])
        return {"token": token, "topk": topk}, drafted


def log_norm(logits: Tensor) -> Tensor:
    """Return the logarithm of the softmax's norm: (s, V) -> (s, 1), at least float32."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32)).logsumexp(-1, keepdim=True)


def fused_terms(
    drafted: Tensor, target: Tensor, target_norm: Tensor, rows: Tensor, p_top: Tensor, w_token: Tensor, w_topk: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the terms `token` and `topk`: (s,) each."""
    logits = drafted.to(target_norm.dtype)
    lse = logits.logsumexp(-1, keepdim=True)  # (s, 1)
    p = (target.to(target_norm.dtype) - target_norm).exp()  # (s, V)
    return (p * (lse - logits)).sum(-1), (p_top * (lse - logits.gather(-1, rows))).sum(-1)


def fused_pass(
    drafted: Tensor, target: Tensor, target_norm: Tensor, rows: Tensor, p_top: Tensor, w_token: Tensor, w_topk: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the terms, their slope by the draft's logits but for the rows of `topk`, and the slope there.

    Args:
        drafted, target: logits (s, V) of draft and target.
        target_norm: (s, 1), `log_norm` of the target's.
        rows, p_top: (s, top_k), the target's most likely tokens and their probabilities.
        w_token, w_topk: () weights of the terms.

    Returns:
        (s,) each; (s, V), wrong at `rows`; (s, top_k), right there. Both slopes are in the dtype of `drafted`.
    """
    token, topk = fused_terms(drafted, target, target_norm, rows, p_top, w_token, w_topk)
    logits = drafted.to(target_norm.dtype)
    lse, logits_top = logits.logsumexp(-1, keepdim=True), logits.gather(-1, rows)
    p = (target.to(target_norm.dtype) - target_norm).exp()  # (s, V)
    total = w_token + w_topk * p_top.sum(-1, keepdim=True)  # (s, 1)
    slope = (logits - lse).exp() * total - w_token * p
    slope_top = (logits_top - lse).exp() * total - (w_token + w_topk) * p_top
    return token, topk, slope.to(drafted.dtype), slope_top.to(drafted.dtype)
