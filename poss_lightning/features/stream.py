"""From samples to batches: which passes count where, and noise."""

from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from poss_lightning.features.store import Sample
from poss_lightning.losses.mask import LossMask, Transferable, count_step_slots


class PlannedBatch(NamedTuple):
    """A batch before it is loaded, and what its `LossMask` says of the optimizer step that it is part of."""

    samples: list[int]  # indices; they share a row
    counts: bool  # False: it only completes the last step, and none of its slots counts
    step_slots: Tensor
    step_tokens: Tensor
    step_batches: int


class PackedText(NamedTuple):
    """A conversation in a row of a batch."""

    id: str
    length: int  # tokens
    spans: list[tuple[int, int]]  # the assistant's; none in a batch that only completes a step


@dataclass
class Batch(Transferable):
    """Rows of one or more conversations, padded on the right."""

    tokens: Tensor  # (B, T) int64
    features: Tensor  # (B, T, D), the target's
    draft_input: Tensor  # (B, T, R), what the draft reads: the features, or inner layers; with noise in training
    target_argmax: Tensor  # (B, T) the target's most likely next token, -1 where unknown
    positions: Tensor  # (B, T) a token's place in its conversation
    mask: LossMask
    rows: list[list[PackedText]]

    @property
    def ids(self) -> list[str]:
        """Of the conversations, row by row."""
        return [text.id for row in self.rows for text in row]

    @property
    def lengths(self) -> list[list[int]]:
        """Tokens of each row's conversations."""
        return [[text.length for text in row] for row in self.rows]

    @property
    def spans(self) -> list[list[tuple[int, int]]]:
        """The assistant's in each conversation, row by row; none where nothing counts."""
        return [text.spans for row in self.rows for text in row]

    def parts(self) -> list[tuple[int, slice]]:
        """Return row and tokens of each conversation."""
        return [
            (row, slice(stop - length, stop))
            for row, lengths in enumerate(self.lengths)
            for length, stop in zip(lengths, accumulate(lengths), strict=True)
        ]


def answer_slots(length: int, spans: np.ndarray) -> np.ndarray:
    """Count the slots of each assistant span where pass 1 counts; pass k counts in k-1 fewer: (n, 2) -> (n,)"""
    starts, stops = np.maximum(spans[:, 0], 1), np.minimum(spans[:, 1], length)
    return np.maximum(stops - starts - 1, 0)


def step_totals(lengths: list[int], spans: list[np.ndarray], batches: int) -> tuple[Tensor, Tensor, int]:
    """Return the slots by pass, the tokens and the batches of an optimizer step, as its `PlannedBatch`es hold them."""
    answers = np.concatenate([answer_slots(*text) for text in zip(lengths, spans, strict=True)])
    return count_step_slots(answers), torch.tensor(int(sum(lengths))), batches


def count_passes(length: int, spans: np.ndarray) -> Tensor:
    """Count passes (T,): k counts at slot t where x_{t-k+2} ... x_{t+2} lie in one assistant span, so k <= passes[t].

    A round starts from a root that the target emitted, so its first token must be the assistant's, too. The first token
    of a text is nobody's. Nothing counts at the last token, which is no slot.
    """
    passes = torch.zeros(length, dtype=torch.long)
    for (start, _), slots in zip(spans, answer_slots(length, spans), strict=True):
        first = max(start, 1) - 1  # its x_{t+1} is the span's first token
        passes[first : first + slots] = torch.arange(1, slots + 1)
    return passes


def add_noise(batch: Batch, strength: float, seeds: list[int]) -> Tensor:
    """Add uniform noise (u - 0.5) * strength * 512 / T to the draft's input, as in EAGLE; a conversation has T tokens.

    Each conversation has its own seed, so its noise does not depend on its neighbours.
    """
    noisy = batch.draft_input.clone()
    generator = torch.Generator(noisy.device)
    for part, seed in zip(batch.parts(), seeds, strict=True):
        vectors = noisy[part]  # (length, R)
        noise = torch.rand(vectors.shape, generator=generator.manual_seed(seed), device=vectors.device) - 0.5
        vectors += noise * (strength * 512 / len(vectors))
    return noisy


def collate(rows: list[list[Sample]], planned: PlannedBatch | None = None) -> Batch:
    """Collate rows of samples; without a plan, the batch is an optimizer step of its own."""
    samples = [sample for row in rows for sample in row]
    longest = max(sum(len(sample.tokens) for sample in row) for row in rows)

    def padded(parts: list[Tensor], fill: int = 0) -> Tensor:
        out = parts[0].new_full((len(rows), longest, *parts[0].shape[1:]), fill)
        remaining = iter(parts)
        for padded_row, row in zip(out, rows, strict=True):
            row_parts = [next(remaining) for _ in row]
            torch.cat(row_parts, out=padded_row[: sum(map(len, row_parts))])
        return out

    features = padded([sample.features for sample in samples])
    has_layers = samples[0].layers.shape[1] > 0
    lengths = [len(sample.tokens) for sample in samples]
    spans = [np.array(sample.spans, dtype=np.int64).reshape(-1, 2) for sample in samples]
    planned = planned or PlannedBatch([], True, *step_totals(lengths, spans, 1))
    passes = padded([count_passes(*text) * planned.counts for text in zip(lengths, spans, strict=True)])
    passes = passes[:, :-1].contiguous()
    slots = passes.flatten().nonzero()[:, 0]
    return Batch(
        tokens=padded([sample.tokens for sample in samples]),
        features=features,
        draft_input=padded([sample.draft_input for sample in samples]) if has_layers else features,
        target_argmax=padded([sample.greedy for sample in samples], -1),
        positions=padded([torch.arange(length) for length in lengths]),
        mask=LossMask(passes, passes.numpy().copy(), slots, *planned[2:]),  # a loader moves the tensor's memory
        rows=[[PackedText(s.id, len(s.tokens), s.spans if planned.counts else []) for s in row] for row in rows],
    )
