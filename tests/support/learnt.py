"""Tiny drafts that have learnt their target's answers: they accept clearly more than by chance."""

import torch
from torch.nn.functional import cross_entropy

from poss_lightning.draft.specialists import Specialists
from poss_lightning.target.generation import PlainLoop
from poss_lightning.target.model import Target
from tests.support.tiny import tiny_draft


def answered(target: Target, prompts: list[list[int]], length: int = 40) -> torch.Tensor:
    """Prompts of one length, each with the target's greedy answer: (B, T)."""
    answers = PlainLoop(target).generate(prompts, length, frozenset())
    return torch.tensor([prompt + answer for prompt, answer in zip(prompts, answers, strict=True)])


def learnt_draft(target: Target, texts: torch.Tensor, allocation: list[int], steps: int = 120, **config) -> Specialists:
    """A draft that was trained on texts (B, T), for what the target would say."""
    draft = tiny_draft(target, allocation, **config)
    with torch.no_grad():
        features, inner = target.text_layers(texts, draft.config.aux_layers)
        inputs = inner.flatten(2) if draft.config.aux_layers else features
        greedy = target.embed_head.logits(features).argmax(-1)
        embedded = target.embed_head.embed(texts)
        draft.init_head(target.embed_head)
    optimizer = torch.optim.AdamW(draft.parameters(), 1e-2)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, steps)
    for _ in range(steps):
        some = torch.randperm(len(texts))[:16]
        predictions = draft(embedded[some, 1:], inputs[some, :-1], draft.config.depth)
        loss = sum(
            cross_entropy(draft.logits(p[:, k:], target.embed_head).flatten(0, 1), greedy[some, k + 1 :].flatten())
            for k, p in enumerate(predictions)
        )
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(draft.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    return draft.eval()
