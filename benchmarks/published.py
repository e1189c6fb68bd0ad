"""A training step as the published code takes it, written from docs/METHOD.md, for `make bench-train` to compare with.

Every pass keeps a full (T, T) score matrix for backward, and full (T, V) tensors of logits, log-probabilities and their
products with the target's. The mask is exact, not the published one, or the losses would differ. The target's
probabilities are computed once for all passes, which is better than some published code does.
"""

import torch
from torch import Tensor, nn

from poss_lightning.draft.layer import Rope
from poss_lightning.draft.specialists import DraftModel


def step(
    draft: DraftModel,
    head: Tensor,
    embedded: Tensor,
    inputs: Tensor,
    features: Tensor,
    counts: Tensor,
    weights: tuple[float, float, float] = (1.0, 0.1, 1.0),
    topk: int = 10,
) -> list[Tensor]:
    """The weighted loss of every pass, summed over the slots that count.

    Args:
        embedded, inputs: (B, T, D) of every slot, token on the right and feature on the left; no padding.
        features: (B, T, D), f_{t+1} at slot t.
        counts: (B, T), pass k counts where k <= counts.
    """
    w_feature, w_token, w_topk = weights
    rope = draft.rope_at(torch.arange(inputs.shape[1], device=inputs.device)[None])
    p = nn.functional.linear(features.to(head.dtype), head).float().softmax(-1)  # (B, T, V)
    top = p.topk(topk, dim=-1).indices  # (B, T, topk)
    joined, losses = [], []
    own = inputs
    for k in range(1, draft.config.depth + 1):
        joined.append(draft.join(embedded, own))
        predicted = layer(draft.layers[draft.config.specialist_at(k)], joined, rope)  # (B, T, D)
        live = counts >= k  # (B, T)
        log_q = nn.functional.linear(predicted.to(head.dtype), head).float().log_softmax(-1)  # (B, T, V)
        products = p * log_q  # (B, T, V)
        distance = nn.functional.smooth_l1_loss(predicted.float(), features.float(), reduction="none").mean(-1)
        loss = w_feature * distance - w_token * products.sum(-1) - w_topk * products.gather(-1, top).sum(-1)  # (B, T)
        losses.append((loss * live).sum())
        own = predicted.detach()
        own = torch.cat([own[:, :1], own[:, :-1]], dim=1)
    return losses


def layer(specialist: nn.Module, joined: list[Tensor], rope: Rope) -> Tensor:
    """One pass with one full score matrix, from z^0; the later sets overwrite its diagonals."""
    queries = specialist.queries(joined[-1], rope)  # (B, H, T, d)
    # keys and values of every set, (B, H, T, d)
    pairs = [
        [x.repeat_interleave(len(queries[0]) // len(x[0]), 1) for x in specialist.keys_values(z, rope)] for z in joined
    ]
    scale, near = queries.shape[-1] ** -0.5, len(joined) - 1
    scores = queries @ pairs[0][0].mT * scale  # (B, H, T, T)
    for i in range(near):  # the key i slots to the left belongs to set k-1-i
        score = (queries * pairs[-1 - i][0].roll(i, 2)).sum(-1) * scale  # (B, H, T)
        scores = scores.diagonal_scatter(score[..., i:], -i, 2, 3)
    future = torch.ones_like(scores[0, 0], dtype=torch.bool).triu(1)  # (T, T)
    weights = scores.masked_fill(future, -torch.inf).softmax(-1, dtype=torch.float32).to(queries.dtype)
    attended = weights.tril(-near) @ pairs[0][1]  # (B, H, T, d)
    for i in range(near):
        weight = nn.functional.pad(weights.diagonal(-i, 2, 3), (i, 0))  # (B, H, T)
        attended = attended + weight[..., None] * pairs[-1 - i][1].roll(i, 2)
    return specialist.after_attention(joined[-1], attended)
