"""Block drafts: all K positions in one pass, from masks, so that nothing drifts (DFlash, arXiv 2602.06036).

A block begins at a slot t. Its places 0 ... K stand at the positions t+1 ... t+1+K and hold the embedding of x_{t+1},
the newest token, and K masks; place k predicts x_{t+1+k}. In every layer a place sees the context of the slots 0 ... t,
which is made of the target's inner layers, and all places of its own block, in both directions. For K = 2:

                       context      block at 1   block at 2
                       0 1 2 3      0 1 2        0 1 2
    block at 1, each   x x . .      x x x        . . .
    block at 2, each   x x x .      . . .        x x x

In training a block begins at every slot. So place k of the block at slot t stands where pass k of an unroll that began
there would stand, at slot t+k-1, and has the same loss and the same metrics.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from poss_lightning.draft.attention import KeysValues, Packing, block_on

if TYPE_CHECKING:
    from poss_lightning.draft.specialists import Specialists


def draft_blocks(
    draft: Specialists, embedded: Tensor, draft_input: Tensor, depth: int, packing: Packing | None = None
) -> list[Tensor]:
    """Draft a block at every slot of rows of conversations; arguments as of `unroll`.

    Returns:
        K tensors (B, T, D): the k-th at slot t is place k of the block at slot t-k+1 and predicts x_{t+2}. It is valid
        from the k-th slot of a conversation on, and finite before that.
    """
    draft.config.check_depth(depth)
    batch, count, _ = draft_input.shape
    packing = packing or Packing.one_per_row(batch, count, draft_input.device)
    context = draft.fuse(draft_input)  # (B, T, D)
    hidden = begin_blocks(draft, embedded.to(context.dtype))  # (B, T, P, D), P = K + 1
    places = hidden.shape[2]
    rope = draft.rope_at(packing.positions)
    behind = packing.positions[..., None] + torch.arange(1, places + 1, device=embedded.device)
    own_rope = draft.rope_at(behind.flatten(1))
    hidden = hidden.flatten(1, 2)
    for layer in draft.stack:
        keys_values = layer.context_keys_values(context, rope)
        queries, own = layer.queries(hidden, own_rope), layer.keys_values(hidden, own_rope)
        attended = attend_blocks(queries, keys_values, own, packing, draft.config.window)
        hidden = layer.after_attention(hidden, attended)
    by_place = hidden.unflatten(1, (count, places))
    return [_shift_right(by_place[:, :, k], min(k - 1, count)) for k in range(1, depth + 1)]


def begin_blocks(draft: Specialists, embedded: Tensor) -> Tensor:
    """What blocks hold before the first layer: newest tokens (B, T, D) -> (B, T, P, D)."""
    masks = draft.mask.to(embedded.dtype).expand(*embedded.shape[:2], draft.config.depth, -1)
    return torch.cat([embedded[:, :, None], masks], dim=2)


def attend_blocks(
    queries: Tensor, context: KeysValues, own: KeysValues, packing: Packing, window: int | None = None
) -> Tensor:
    """Attention of the blocks of all slots, (B, H, T * P, d), in one softmax over context and block.

    Args:
        queries: (B, H, T * P, d), block by block.
        context: (B, kv heads, T, d) each.
        own: of the blocks, (B, kv heads, T * P, d) each.
        window: slots of the context that a block sees; None for all.
    """
    count, kv_heads, scale = context[0].shape[2], context[0].shape[1], queries.shape[-1] ** -0.5
    split = queries.unflatten(2, (count, -1)).unflatten(1, (kv_heads, -1))  # (B, kv, H/kv, T, P, d)
    split = split.transpose(3, 4)  # all places of a block see the same context, as heads of one slot
    attended, norm = block_on(queries.device)(split.flatten(1, 3), *context, 0, packing, window)
    keys, values = (each.unflatten(2, (count, -1)) for each in own)  # (B, kv, T, P, d)
    scores = torch.einsum("bhgqtd,bhtkd->bhgqtk", split * scale, keys).float()
    weights = torch.cat([norm.view(*scores.shape[:-1], 1), scores], -1).softmax(-1).to(values.dtype)
    out = attended.view(split.shape) * weights[..., :1]
    out = out + torch.einsum("bhgqtk,bhtkd->bhgqtd", weights[..., 1:], values)
    return out.transpose(3, 4).flatten(1, 2).flatten(2, 3)


def _shift_right(x: Tensor, steps: int) -> Tensor:
    """(B, T, D) moved to the right; what enters is the first slot's."""
    return torch.cat([x[:, :1].expand(-1, steps, -1), x[:, : x.shape[1] - steps]], dim=1)
