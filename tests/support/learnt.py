"""Tiny drafts that have learnt their target's answers: they accept clearly more than by chance."""

from collections.abc import Sequence

import torch
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence

from poss_lightning.draft.specialists import Specialists
from poss_lightning.features.store import Sample
from poss_lightning.target.model import Target
from tests.support.tiny import tiny_draft

POSITIONS, STEPS = 3, 120


def learnt_draft(target: Target, samples: Sequence[Sample], kind: str, **config) -> Specialists:
    """Train a draft on samples with the outputs of all layers, for what the target would say."""
    depth = {"depth": 2} if kind != "block" else {}
    draft = tiny_draft(target, [POSITIONS], kind=kind, **depth | config)
    places = [layer - 1 for layer in draft.config.aux_layers] or [-1]
    tokens, greedy = (
        pad_sequence([getattr(each, name) for each in samples], batch_first=True, padding_value=fill)
        for name, fill in (("tokens", 0), ("greedy", -1))
    )
    inputs = pad_sequence([each.layers[:, places].flatten(1) for each in samples], batch_first=True)
    embedded = target.embed_head.embed(tokens)
    draft.init_head(target.embed_head)
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
