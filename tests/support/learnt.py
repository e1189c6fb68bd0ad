"""Tiny drafts that have learnt their target's answers: they accept clearly more than by chance."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, pad
from torch.nn.utils.rnn import pad_sequence

from poss_lightning.draft.layer import Rope
from poss_lightning.draft.specialists import DraftModel
from poss_lightning.features.store import Sample
from poss_lightning.target_model.model import Target
from tests.support.tiny import tiny_draft

POSITIONS, STEPS = 3, 120


def learnt_draft(
    target: Target,
    samples: Sequence[Sample],
    kind: str,
    allocation: tuple[int, ...] = (POSITIONS,),
    labels: int = 0,
    scale: float = 1.0,
    before_norm: bool = False,
    raw_head: bool = False,
    rope_at: Callable[[Tensor], Rope] | None = None,
    **config,
) -> DraftModel:
    """Train a draft on samples with the outputs of all layers, for what the target would say.

    Args:
        labels: slots by which it predicts too late a token.
        scale: of embeddings.
        before_norm: read, and predict, the feature before the target's last norm.
        raw_head: let the head read what no norm has changed.
        rope_at: other rotary angles.
    """
    depth = {"depth": 2} if kind != "block" else {}
    draft = tiny_draft(target, [*allocation], kind=kind, **depth | config)
    places = [layer - 1 for layer in draft.config.aux_layers] or [-2 if before_norm else -1]
    tokens, greedy = (
        pad_sequence([getattr(each, name) for each in samples], batch_first=True, padding_value=fill)
        for name, fill in (("tokens", 0), ("greedy", -1))
    )
    inputs = pad_sequence([each.layers[:, places].flatten(1) for each in samples], batch_first=True)
    embedded, greedy = scale * target.embed_head.embed(tokens), pad(greedy, (0, labels), value=-1)[:, labels:]
    draft.init_head(target.embed_head)
    if kind == "block":
        draft.mask *= scale
    if before_norm:
        draft.head_input = lambda predicted: target.model.base_model.norm(predicted)
    if raw_head:
        draft.head_input = lambda predicted: predicted
    draft.rope_at = rope_at or draft.rope_at
    optimizer = torch.optim.AdamW(draft.parameters(), 1e-2)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, STEPS)
    for _ in range(STEPS):
        predictions = draft(embedded[:, 1:], inputs[:, :-1], draft.config.depth)
        loss = sum(
            cross_entropy(
                draft.logits(p[:, k:], target.embed_head).flatten(0, 1), greedy[:, k + 1 :].flatten(), ignore_index=-1
            )
            for k, p in enumerate(predictions)
        )
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(draft.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    return draft.eval()
