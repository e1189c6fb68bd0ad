"""The loss of a pass: smooth-L1 of features, cross-entropy against the target, its top-K part (docs/METHOD.md, 5).

    L_k = w_feature * mean_D SmoothL1(F̂, f) + w_token * (-Σ_v p log q) + w_topk * (-Σ_{v in top(p)} p log q)

Both cross-entropies are one with unnormalised weights c = w_token p + w_topk p [v in top(p)]: it is lse(l)·Σc - c·l for
logits l, with gradient softmax(l)·Σc - c. So forward can leave behind the gradient of a feature, (slots, D), and no
tensor of (slots, V) outlives its chunk. Where the target caps its logits, l = cap tanh(scale u / cap) of the head's
product u, and the gradient by u is that by l times scale (1 - (l / cap)²).

A head of the draft's own (EAGLE-3) learns too. Its gradient sums over slots and passes, so forward must know what each
pass weighs in the loss: hence one `total`, of weights that are given, and not K losses to be weighed later.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class PassLosses(NamedTuple):
    """Sums over the slots that count, one number a pass (K,), and what was guessed there."""

    total: Tensor  # () Σ_k by_k weighted_k, the only one with a gradient
    feature: Tensor  # (K,) unweighted sums; 0 with an own head, which reads no prediction of a feature
    token: Tensor  # (K,) of -Σ p log q
    topk: Tensor  # (K,)
    weighted: Tensor  # (K,)
    slots: Tensor  # (K,) how many slots count
    guesses: Tensor  # (K, B, T) the draft's likeliest row of the head; -1 where no pass counts, or nobody asked


def pass_losses(
    predictions: list[Tensor],
    features: Tensor,
    counts: Tensor,
    head: Tensor,
    w_feature: float = 1.0,
    w_token: float = 0.1,
    w_topk: float = 1.0,
    topk: int = 10,
    chunk: int = 128,
    guessing: bool = True,
    scale: float = 1.0,
    cap: float | None = None,
    own: Tensor | None = None,
    by: Tensor | None = None,
) -> PassLosses:
    """Losses of K passes against the target's features.

    Args:
        predictions: K tensors (B, T, D), F̂ of f_{t+1} at slot t; or what an own head reads there.
        features: (B, T, D), the target's f_{t+1} at slot t.
        counts: (B, T), pass k counts at a slot where k <= counts.
        head: (V, D), frozen.
        topk: tokens in the top-K part.
        chunk: slots whose (K+1, chunk, V) logits exist at once.
        guessing: whether to find the guesses, which takes a little time.
        scale, cap: of the target's logits, between head and softmax; the draft's are made likewise by the same head.
        own: (V, D), the draft's own head; None where it takes the target's.
        by: (K,) each pass's weight in the total, above 0; 1 by default.

    Raises:
        ValueError: chunk below 1, or a feature loss where no feature is predicted.
    """
    if chunk < 1:
        raise ValueError(f"chunk is {chunk}; it must be at least 1 slot")
    if own is not None and w_feature:
        raise ValueError(f"w_feature is {w_feature}, but a draft with a head of its own predicts no feature: make it 0")
    somewhere = counts > 0
    predicted = torch.stack([prediction[somewhere] for prediction in predictions])  # (K, S, D)
    passes = torch.arange(1, len(predictions) + 1, device=counts.device)
    live = counts[somewhere] >= passes[:, None]  # (K, S)
    by = predicted.new_ones(len(predictions), dtype=torch.float32) if by is None else by
    weights, given = (w_feature, w_token, w_topk), (features[somewhere], live, head)
    total, weighted, (feature, token, top), guess = _Losses.apply(
        predicted, own, by, *given, weights, topk, chunk, guessing, (scale, cap)
    )
    guesses = torch.full((len(predictions), *counts.shape), -1, device=counts.device)
    guesses[:, somewhere] = guess
    return PassLosses(total, feature, token, top, weighted, live.sum(-1), guesses)


class _Losses(torch.autograd.Function):
    """Chunk by chunk; the target's probabilities are made once a chunk, for all passes."""

    @staticmethod
    def forward(ctx, predicted, own, by, wanted, live, head, weights, topk, chunk, guessing, shape):
        passes, slots, _ = predicted.shape
        sums = predicted.new_zeros(3, passes, dtype=torch.float32)  # feature, token, top-K
        guess = torch.full((passes, slots), -1, device=predicted.device)
        gradient = torch.empty_like(predicted) if ctx.needs_input_grad[0] else None
        head_gradient = torch.zeros_like(own, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        heads = head, head if own is None else own.to(head.dtype)
        largest = by.max()  # shares are taken of it: a slope in half precision must not vanish
        room = _Room.make(passes, min(chunk, slots), head)
        for start in range(0, slots, chunk):
            here = slice(start, start + chunk)
            some, made = (predicted[:, here], wanted[here], live[:, here]), room.of(len(wanted[here]))
            guessed = guess[:, here] if guessing else None
            sloped = None if gradient is None else gradient[:, here]
            _chunk(*some, *heads, weights, topk, shape, made, sums, guessed, sloped)
            if head_gradient is not None:
                read = some[0] * (some[2] * (by / largest)[:, None])[..., None]  # (K, s, D)
                head_gradient += made.logits[1:].flatten(0, 1).T @ read.flatten(0, 1).to(head.dtype)
        if gradient is not None:
            kept = None if head_gradient is None else head_gradient.mul_(largest).to(own.dtype)
            ctx.save_for_backward(gradient, kept, by)
        weighted = (sums * sums.new_tensor(weights)[:, None]).sum(0)
        ctx.mark_non_differentiable(weighted, sums, guess)
        return (by * weighted).sum(), weighted, sums, guess

    @staticmethod
    def backward(ctx, grad_total, *_):
        gradient, head_gradient, by = ctx.saved_tensors
        # by one number at a time: it stays in float32, and the product in the gradient's dtype
        predicted = torch.stack([scale * one for scale, one in zip(grad_total * by, gradient, strict=True)])
        return predicted, None if head_gradient is None else grad_total * head_gradient, *(None,) * 9


class _Room(NamedTuple):
    """Where a chunk's matrices are made, again and again: new memory would cost more time than what is done in it."""

    logits: Tensor  # (K+1, s, V), the target's first; of the head's dtype; a pass's become its slope
    p: Tensor  # (s, V), float32
    c: Tensor
    q: Tensor
    product: Tensor

    @classmethod
    def make(cls, passes: int, rows: int, head: Tensor) -> "_Room":
        wide = head.new_empty(4, rows, len(head), dtype=torch.promote_types(head.dtype, torch.float32))
        return cls(head.new_empty(passes + 1, rows, len(head)), *wide)

    def of(self, rows: int) -> "_Room":
        """For a shorter chunk."""
        logits = self.logits.flatten()[: len(self.logits) * rows * self.p.shape[-1]]
        return _Room(logits.view(len(self.logits), rows, -1), *(matrix[:rows] for matrix in self[1:]))


def _chunk(predicted, wanted, live, head, draft_head, weights, topk, shape, room, sums, guess, gradient) -> None:
    """Add a chunk's sums (3, K); fill in what is guessed (K, s) and the gradient (K, s, D), each unless it is None."""
    w_feature, w_token, w_topk = weights
    logits, p, c, q, product = room
    f, shared = wanted.float(), draft_head is head  # (s, D)
    if shared:  # one product for the target and all passes: the head is large, and would be read anew for each
        read = torch.cat([wanted[None], predicted]).flatten(0, 1)
        torch.mm(read.to(head.dtype), head.T, out=logits.flatten(0, 1))
        _shape(logits, *shape)
    else:
        torch.mm(wanted.to(head.dtype), head.T, out=logits[0])
        torch.mm(predicted.flatten(0, 1).to(head.dtype), draft_head.T, out=logits[1:].flatten(0, 1))
        _shape(logits[0], *shape)
    scale, cap = shape if shared else (1.0, None)
    p.copy_(logits[0]).sub_(logits[0].amax(-1, keepdim=True)).exp_().div_(p.sum(-1, keepdim=True))
    p_top, rows = p.topk(min(topk, p.shape[-1]), dim=-1)  # (s, topk)
    torch.mul(p, w_token, out=c).scatter_add_(-1, rows, w_topk * p_top)
    total = w_token + w_topk * p_top.sum(-1, keepdim=True)  # (s, 1)
    for k, (prediction, own, mask) in enumerate(zip(predicted, logits[1:], live, strict=True)):
        if guess is None:
            highest = own.amax(-1)  # (s,)
        else:
            highest, guess[k] = own.max(-1)
        q.copy_(own).sub_(highest[:, None])
        along, along_top = torch.mul(p, q, out=product).sum(-1), q.gather(-1, rows)
        norm = q.exp_().sum(-1, keepdim=True)  # (s, 1)
        lse = norm.log()
        parts = lse[:, 0] - along, (p_top * (lse - along_top)).sum(-1)
        sums[1:, k] += (torch.stack(parts) * mask).sum(-1)
        if shared:
            distance = prediction.float() - f  # (s, D)
            sums[0, k] += (_smooth_l1(distance).mean(-1) * mask).sum()
        if gradient is not None:
            q.mul_(total / norm).sub_(c)
            if cap is not None:
                q.mul_(product.copy_(own).div_(cap).square_().neg_().add_(1))
            slope = (own.copy_(q) @ draft_head).float()  # (s, D)
            if shared:
                slope = torch.add(w_feature / f.shape[-1] * distance.clamp_(-1, 1), slope, alpha=scale)
            gradient[k] = slope * mask[:, None]


def _shape(logits: Tensor, scale: float, cap: float | None) -> None:
    """What stands between the target's head and softmax, in place."""
    if scale != 1.0:
        logits.mul_(scale)
    if cap is not None:
        logits.div_(cap).tanh_().mul_(cap)


def _smooth_l1(distance: Tensor) -> Tensor:
    size = distance.abs()
    return torch.where(size < 1, 0.5 * size * size, size - 0.5)
