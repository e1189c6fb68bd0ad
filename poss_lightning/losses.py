"""The loss of a pass: smooth-L1 of features, cross-entropy against the target, its top-K part (docs/METHOD.md, 5).

    L_k = w_feature * mean_D SmoothL1(F̂, f) + w_token * (-Σ_v p log q) + w_topk * (-Σ_{v in top(p)} p log q)

Both cross-entropies are one with unnormalised weights c = w_token p + w_topk p [v in top(p)]: it is lse(l)·Σc - c·l for
logits l, with gradient softmax(l)·Σc - c. So forward can leave behind the gradient of a feature, (slots, D), and no
tensor of (slots, V) outlives its chunk. Where the target caps its logits, l = cap tanh(scale u / cap) of the head's
product u, and the gradient by u is that by l times scale (1 - (l / cap)²).

An own head of the draft (EAGLE-3) learns too. Its gradient sums over slots and passes, so forward must know the weight
of each pass in the loss. So forward takes these weights and returns one `total`, not K losses to be weighed later.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class PassLosses(NamedTuple):
    """Sums over the slots that count, one number a pass (K,), and the draft's top tokens there."""

    total: Tensor  # () Σ_k pass_weights_k weighted_k, the only one with a gradient
    feature: Tensor  # (K,) unweighted sums; 0 with an own head, where no feature is predicted
    token: Tensor  # (K,) of -Σ p log q
    topk: Tensor  # (K,)
    weighted: Tensor  # (K,)
    slots: Tensor  # (K,) how many slots count
    top_rows: Tensor  # (K, B, T) the draft's likeliest row of the head; -1 where no pass counts, or without find_top


def pass_losses(
    predictions: list[Tensor],
    features: Tensor,
    counts: Tensor,
    head: Tensor,
    *,
    w_feature: float = 1.0,
    w_token: float = 0.1,
    w_topk: float = 1.0,
    topk: int = 10,
    chunk: int | None = None,
    find_top: bool = True,
    scale: float = 1.0,
    cap: float | None = None,
    draft_head: Tensor | None = None,
    pass_weights: Tensor | None = None,
) -> PassLosses:
    """Losses of K passes against the target's features.

    Args:
        predictions: K tensors (B, T, D), F̂ of f_{t+1} at slot t; or the input of an own head there.
        features: (B, T, D), the target's f_{t+1} at slot t.
        counts: (B, T), pass k counts at a slot where k <= counts.
        head: (V, D), the target's, frozen.
        topk: tokens in the top-K part.
        chunk: slots whose (K+1, chunk, V) logits exist at once; None for `chunk_on` the device.
        find_top: whether to find the draft's top tokens, which takes a little time.
        scale, cap: of the target's logits, between head and softmax; the draft's too, where it takes the target's head.
        draft_head: (V, D), the draft's own head; None where it takes the target's.
        pass_weights: (K,) each pass's weight in the total, above 0; 1 by default.

    Raises:
        ValueError: chunk below 1, or a feature loss where no feature is predicted.
    """
    chunk = chunk_on(counts.device.type) if chunk is None else chunk
    if chunk < 1:
        raise ValueError(f"chunk is {chunk}; it must be at least 1 slot")
    if draft_head is not None and w_feature:
        raise ValueError(f"w_feature is {w_feature}, but a draft with a head of its own predicts no feature: make it 0")
    counting = counts.flatten().nonzero()[:, 0]  # (S,) the one time that the host waits for the device
    predicted = torch.stack([prediction.flatten(0, 1)[counting] for prediction in predictions])  # (K, S, D)
    passes = torch.arange(1, len(predictions) + 1, device=counts.device)
    counted = counts.flatten()[counting] >= passes[:, None]  # (K, S)
    if pass_weights is None:
        pass_weights = predicted.new_ones(len(predictions), dtype=torch.float32)
    terms = _Terms(w_feature, w_token, w_topk, topk, scale, cap)
    with torch.autocast(counts.device.type, enabled=False):  # dtypes are chosen here, one by one
        total, weighted, (feature, token, top), rows = _Losses.apply(
            predicted, draft_head, pass_weights, features.flatten(0, 1)[counting], counted, head, terms, chunk, find_top
        )
    top_rows = counts.new_full((len(predictions), counts.numel()), -1, dtype=torch.long)
    top_rows[:, counting] = rows
    return PassLosses(
        total, feature, token, top, weighted, counted.sum(-1), top_rows.view(len(predictions), *counts.shape)
    )


def chunk_on(device: str) -> int:
    """Slots of a chunk: on a CPU the matrices should stay near its cache, on a GPU each chunk reads the head anew."""
    return 512 if device == "cuda" else 128


class _Terms(NamedTuple):
    """The weights of the loss's terms, and how the target's logits are made; see `pass_losses`."""

    w_feature: float
    w_token: float
    w_topk: float
    topk: int
    scale: float
    cap: float | None


class _Losses(torch.autograd.Function):
    """Chunk by chunk; the target's probabilities are made once a chunk, for all passes."""

    @staticmethod
    def forward(ctx, predicted, draft_head, pass_weights, features, counted, head, terms, chunk, find_top):
        passes, slots, _ = predicted.shape
        sums = predicted.new_zeros(3, passes, dtype=torch.float32)  # feature, token, top-K
        top_rows = torch.full((passes, slots), -1, device=predicted.device)
        gradient = torch.empty_like(predicted) if ctx.needs_input_grad[0] else None
        head_gradient = torch.zeros_like(draft_head, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        workspace = _Workspace.make(passes, min(chunk, slots), head)
        pass_head = head if draft_head is None else draft_head.to(head.dtype)
        largest = pass_weights.max()  # weights are taken relative to it: a slope in half precision must not vanish
        for start in range(0, slots, chunk):
            rows = slice(start, start + chunk)
            part = _Chunk(
                predicted=predicted[:, rows],
                features=features[rows],
                counted=counted[:, rows],
                head=head,
                pass_head=pass_head,
                workspace=workspace.first(len(features[rows])),
                sums=sums,
                top_rows=top_rows[:, rows] if find_top else None,
                gradient=None if gradient is None else gradient[:, rows],
            )
            part.compute(terms)
            if head_gradient is not None:
                inputs = part.predicted * (part.counted * (pass_weights / largest)[:, None])[..., None]  # (K, s, D)
                slopes = part.workspace.logits[1:]  # `compute` has put them in place of the logits
                head_gradient += slopes.flatten(0, 1).T @ inputs.flatten(0, 1).to(head.dtype)
        if gradient is not None:
            kept = (
                None
                if draft_head is None or head_gradient is None
                else head_gradient.mul_(largest).to(draft_head.dtype)
            )
            ctx.save_for_backward(gradient, kept, pass_weights)
        weighted = (sums * sums.new_tensor(terms[:3])[:, None]).sum(0)
        ctx.mark_non_differentiable(weighted, sums, top_rows)
        return (pass_weights * weighted).sum(), weighted, sums, top_rows

    @staticmethod
    def backward(ctx, grad_total, *_):
        gradient, head_gradient, pass_weights = ctx.saved_tensors
        # Scaled pass by pass, so that the scale stays in float32 and the product has the gradient's dtype.
        scales = grad_total * pass_weights
        predicted = torch.stack([scale * slope for scale, slope in zip(scales, gradient, strict=True)])
        return predicted, None if head_gradient is None else grad_total * head_gradient, *(None,) * 7


class _Workspace(NamedTuple):
    """Memory for a chunk's matrices, used by all chunks: to allocate it anew would take longer than the work."""

    logits: Tensor  # (K+1, s, V), the target's first; of the head's dtype; a pass's become its slope
    p: Tensor  # (s, V), float32
    c: Tensor
    q: Tensor
    product: Tensor

    @classmethod
    def make(cls, passes: int, rows: int, head: Tensor) -> "_Workspace":
        wide = head.new_empty(4, rows, len(head), dtype=torch.promote_types(head.dtype, torch.float32))
        return cls(head.new_empty(passes + 1, rows, len(head)), *wide)

    def first(self, rows: int) -> "_Workspace":
        """The part for a chunk with so many rows."""
        logits = self.logits.flatten()[: len(self.logits) * rows * self.p.shape[-1]]
        return _Workspace(logits.view(len(self.logits), rows, -1), *(matrix[:rows] for matrix in self[1:]))


class _Chunk(NamedTuple):
    """Some slots: the inputs, and the results to fill in."""

    predicted: Tensor  # (K, s, D)
    features: Tensor  # (s, D)
    counted: Tensor  # (K, s)
    head: Tensor  # (V, D) the target's
    pass_head: Tensor  # (V, D) the draft's; the same where it has none of its own
    workspace: _Workspace
    sums: Tensor  # (3, K), added to
    top_rows: Tensor | None  # (K, s), filled in
    gradient: Tensor | None  # (K, s, D), filled in

    def compute(self, terms: _Terms) -> None:
        """Add the sums, and fill in top rows and gradients."""
        w_feature, w_token, w_topk, topk, scale, cap = terms
        logits, p, c, q, product = self.workspace
        f, shared = self.features.float(), self.pass_head is self.head  # (s, D)
        self._write_logits(scale, cap)
        p.copy_(logits[0]).sub_(logits[0].amax(-1, keepdim=True)).exp_().div_(p.sum(-1, keepdim=True))
        p_top, rows = p.topk(min(topk, p.shape[-1]), dim=-1)  # (s, topk)
        torch.mul(p, w_token, out=c).scatter_add_(-1, rows, w_topk * p_top)
        total = w_token + w_topk * p_top.sum(-1, keepdim=True)  # (s, 1)
        if not shared:
            scale, cap = 1.0, None  # only of the target's logits
        for k, (prediction, drafted, mask) in enumerate(zip(self.predicted, logits[1:], self.counted, strict=True)):
            if self.top_rows is None:
                highest = drafted.amax(-1)  # (s,)
            else:
                highest, self.top_rows[k] = drafted.max(-1)
            q.copy_(drafted).sub_(highest[:, None])
            mean, q_top = torch.mul(p, q, out=product).sum(-1), q.gather(-1, rows)
            norm = q.exp_().sum(-1, keepdim=True)  # (s, 1)
            lse = norm.log()
            entropies = lse[:, 0] - mean, (p_top * (lse - q_top)).sum(-1)
            self.sums[1:, k] += (torch.stack(entropies) * mask).sum(-1)
            if shared:
                distance = prediction.float() - f  # (s, D)
                self.sums[0, k] += (_smooth_l1(distance).mean(-1) * mask).sum()
            if self.gradient is not None:
                q.mul_(total / norm).sub_(c)
                if cap is not None:
                    q.mul_(product.copy_(drafted).div_(cap).square_().neg_().add_(1))
                slope = (drafted.copy_(q) @ self.pass_head).float()  # (s, D)
                if shared:
                    slope = torch.add(w_feature / f.shape[-1] * distance.clamp_(-1, 1), slope, alpha=scale)
                self.gradient[k] = slope * mask[:, None]

    def _write_logits(self, scale: float, cap: float | None) -> None:
        """The target's, and those of all passes."""
        logits, dtype = self.workspace.logits, self.head.dtype
        if self.pass_head is self.head:  # one product for all, so that the large head is read once
            inputs = torch.cat([self.features[None], self.predicted]).flatten(0, 1)
            torch.mm(inputs.to(dtype), self.head.T, out=logits.flatten(0, 1))
            _scale_and_cap(logits, scale, cap)
        else:
            torch.mm(self.features.to(dtype), self.head.T, out=logits[0])
            torch.mm(self.predicted.flatten(0, 1).to(dtype), self.pass_head.T, out=logits[1:].flatten(0, 1))
            _scale_and_cap(logits[0], scale, cap)


def _scale_and_cap(logits: Tensor, scale: float, cap: float | None) -> None:
    """The steps between the target's head and softmax, in place."""
    if scale != 1.0:
        logits.mul_(scale)
    if cap is not None:
        logits.div_(cap).tanh_().mul_(cap)


def _smooth_l1(distance: Tensor) -> Tensor:
    size = distance.abs()
    return torch.where(size < 1, 0.5 * size * size, size - 0.5)
