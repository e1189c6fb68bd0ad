"""The published attention mask (docs/METHOD.md, 8.1), for the experiment that asks what it costs; nothing else uses it.

From pass 2 on, keys that a query may not see, those of later slots and of padding, enter its softmax as logit 0 instead
of -inf. They bring no value, but take weight: a query at slot t of a row of T loses to T - 1 - t of them, so what it
reads depends on how far the row goes on behind it, which no drafter knows.
"""

import lightning
import torch
from torch import Tensor

from poss_lightning.draft import attention, unroll
from poss_lightning.draft.attention import KeysValues, Packing


def attend(
    queries: Tensor, context: KeysValues, diagonals: list[KeysValues], packing: Packing, window: None = None
) -> Tensor:
    """As `attention.attend`, with the weight that hidden keys take; rows must hold one conversation each."""
    exact = attention.attend(queries, context, diagonals, packing, window)
    if not diagonals:
        return exact
    keys, values = context
    _, norm = attention.causal_block(queries, keys, values, len(diagonals), packing)  # (B, H, T)
    scores = [norm]
    for i, (key, _) in enumerate(diagonals):
        grouped = queries.unflatten(1, (keys.shape[1], -1))
        score = (grouped * attention._shift_right(key, i)).sum(-1, dtype=torch.float32) * queries.shape[-1] ** -0.5
        scores.append(score.flatten(1, 2).masked_fill((packing.positions < i)[:, None], -torch.inf))
    seen = torch.stack(scores).logsumexp(0)  # (B, H, T)
    later = torch.arange(queries.shape[2] - 1, -1, -1, device=queries.device)  # (T,) slots behind each
    return exact * torch.sigmoid(seen - later.log())[..., None].to(exact.dtype)


class PublishedMask(lightning.Callback):
    """Trains with the published mask, and validates with the exact one, as drafting has it."""

    def on_train_batch_start(self, *_) -> None:
        unroll.attend = attend

    def on_train_batch_end(self, *_) -> None:
        unroll.attend = attention.attend
