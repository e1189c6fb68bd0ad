"""Recursive training: pass k predicts position k at every slot at once, on the draft's own features.

Pass 1 reads the target's features, pass k the output of pass k-1, one slot to the right. Its query at slot t sees one
key for every slot s <= t, made from the feature that a drafter would hold there (docs/METHOD.md, section 4). For k = 3,
with digits for the set a key comes from and `.` for hidden:

                key slot s
                0 1 2 3 4 5
    query  2    0 1 2 . . .
    slot   3    0 0 1 2 . .
     t     4    0 0 0 1 2 .
           5    0 0 0 0 1 2

That is one causal block (the zeros) and k-1 diagonals: scores are (T, T) for the block and (T,) for each diagonal.
"""

import torch
from torch import Tensor

from poss_lightning.draft.specialists import Specialists

KeysValues = tuple[Tensor, Tensor]  # (B, kv heads, T, d) each


def unroll(draft: Specialists, embedded: Tensor, features: Tensor, depth: int) -> list[Tensor]:
    """Run `depth` passes over right-padded slots.

    Args:
        embedded: (B, T, D), embeddings of the token to the right of each slot, x_{t+1}.
        features: (B, T, D), the target's features f_t (with noise, in training).
        depth: number of passes K.

    Returns:
        K tensors (B, T, D): pass k at slot t predicts f_{t+1}. It is real for t >= k-1 only; what stands before is
        finite, and no real slot has read it.
    """
    slots = torch.arange(features.shape[1], device=features.device)[None]
    turn = draft.rotation(slots)
    joined = [draft.join(embedded, features)]  # z^0, z^1, ...: (B, T, D)
    projected: dict[tuple[int, int], KeysValues] = {}  # (specialist, set) -> keys and values: each is made once
    outputs = []
    for k in range(1, depth + 1):
        index = draft.config.serving(k)
        layer = draft.layers[index]
        for m in range(k):
            if (index, m) not in projected:
                projected[index, m] = layer.keys_values(joined[m], turn)
        diagonals = [projected[index, k - 1 - i] for i in range(k - 1)]  # i slots to the left: set k-1-i
        attended = attend(layer.queries(joined[k - 1], turn), projected[index, 0], diagonals)
        outputs.append(layer.finish(joined[k - 1], attended))
        if k < depth:
            own = outputs[-1].detach() if draft.config.detach else outputs[-1]
            shifted = torch.cat([own[:, :1], own[:, :-1]], dim=1)  # F^k_t = output of pass k at slot t-1
            joined.append(draft.join(embedded, shifted))
    return outputs


def attend(queries: Tensor, context: KeysValues, diagonals: list[KeysValues]) -> Tensor:
    """Attention over one causal block and some diagonals, in one softmax.

    Args:
        queries: (B, H, T, d)
        context: of z^0; slot t sees its slots s <= t - len(diagonals).
        diagonals: the i-th holds, for every slot t, the key and value at slot t - i, stored at t - i.

    Returns:
        (B, H, T, d)
    """
    keys, values = context
    batch, heads, count, width = queries.shape
    grouped = queries.view(batch, keys.shape[1], -1, count, width) * width**-0.5  # (B, kv, H/kv, T, d)
    hidden = torch.ones(count, count, dtype=torch.bool, device=keys.device).triu(1 - len(diagonals))
    scores = [(grouped @ keys[:, :, None].transpose(-1, -2)).masked_fill(hidden, -torch.inf)]  # (B, kv, H/kv, T, T)
    slots = torch.arange(count, device=keys.device)
    for i, (key, _) in enumerate(diagonals):
        score = (grouped * _right(key, i)[:, :, None]).sum(-1)  # (B, kv, H/kv, T)
        scores.append(score.masked_fill(slots < i, -torch.inf)[..., None])
    weights = torch.cat(scores, dim=-1).softmax(-1, dtype=torch.float32).to(values.dtype)
    attended = weights[..., :count] @ values[:, :, None]
    for i, (_, value) in enumerate(diagonals):
        attended = attended + weights[..., count + i, None] * _right(value, i)[:, :, None]
    return attended.view(batch, heads, count, width)


def _right(x: Tensor, steps: int) -> Tensor:
    """(B, H, T, d) moved `steps` slots to the right; what enters on the left is hidden by the caller."""
    return x.roll(steps, dims=2)
