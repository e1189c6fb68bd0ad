"""From samples to batches: which passes count where, padding, noise, buckets of like length, the split."""

import hashlib
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Sampler

from poss_lightning.features.store import Sample


class Batch(NamedTuple):
    """Right-padded samples."""

    tokens: Tensor  # (B, T) int64
    features: Tensor  # (B, T, D), the target's
    inputs: Tensor  # (B, T, D), the same with noise in training
    greedy: Tensor  # (B, T) the target's likeliest next token, -1 where unknown
    counts: Tensor  # (B, T) pass k counts at slot t where k <= counts[t]
    lengths: Tensor  # (B,)
    ids: list[str]


def passes_that_count(length: int, spans: list[tuple[int, int]]) -> Tensor:
    """(T,): pass k counts at slot t where x_{t-k+2} ... x_{t+2} lie in one assistant span, so where k <= counts[t].

    A round starts from a root that the target emitted, so its first token too must be the assistant's.
    """
    slots = torch.arange(length)
    counts = torch.zeros(length, dtype=torch.long)
    for start, stop in spans:
        inside = (slots + 1 >= start) & (slots + 2 < stop)  # x_{t+1} is in the span, and so is x_{t+2}
        counts = torch.where(inside, slots + 2 - start, counts)  # x_start ... x_{t+2} are k + 1 tokens
    return counts


def add_noise(features: Tensor, lengths: Tensor, strength: float, seeds: list[int]) -> Tensor:
    """Uniform noise (u - 0.5) * strength * 512 / T, as EAGLE trains, with T the sample's own length.

    Args:
        features: (B, T, D)
        lengths: (B,)
        seeds: one a sample, so that its noise depends on nothing beside it.
    """
    noisy = features.clone()
    generator = torch.Generator(features.device)
    for row, length, seed in zip(noisy, lengths.tolist(), seeds, strict=True):
        noise = torch.rand(length, row.shape[1], generator=generator.manual_seed(seed), device=row.device) - 0.5
        row[:length] += noise * (strength * 512 / length)
    return noisy


def collate(samples: list[Sample]) -> Batch:
    """Pad samples on the right."""
    lengths = torch.tensor([len(sample.tokens) for sample in samples])

    def padded(rows: list[Tensor], fill: int = 0) -> Tensor:
        out = rows[0].new_full((len(rows), int(lengths.max()), *rows[0].shape[1:]), fill)
        for place, row in zip(out, rows, strict=True):
            place[: len(row)] = row
        return out

    features = padded([sample.features for sample in samples])
    return Batch(
        tokens=padded([sample.tokens for sample in samples]),
        features=features,
        inputs=features,
        greedy=padded([sample.greedy for sample in samples], -1),
        counts=padded([passes_that_count(len(sample.tokens), sample.spans) for sample in samples]),
        lengths=lengths,
        ids=[sample.id for sample in samples],
    )


def split(ids: list[str], validation: float, seed: int) -> tuple[list[int], list[int]]:
    """Training and validation indices. A conversation's side depends on its id and the seed, not on its neighbours.

    Raises:
        ValueError: a side is empty.
    """
    if not 0 < validation < 1:
        raise ValueError(f"validation is {validation}; it must be a fraction between 0 and 1")
    ranks = np.array([stable_number(f"{seed}/{name}") / 2**63 for name in ids])
    held = np.flatnonzero(ranks < validation).tolist()
    kept = np.flatnonzero(ranks >= validation).tolist()
    if not held or not kept:
        raise ValueError(f"validation {validation} of {len(ids)} conversations leaves a side empty: use more of them")
    return kept, held


def stable_number(text: str) -> int:
    """A number of 63 bits from a text, the same on every machine."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


class Buckets(Sampler[list[int]]):
    """Batches of samples of like length, `batch_tokens` at most each, padding included; shuffled by (seed, epoch).

    Samples are shuffled, ordered by length (so samples of one length change places from epoch to epoch), cut into
    batches, and these are shuffled. Every epoch has the same number of batches: Lightning asks for it only once.

    Args:
        indices: samples to draw from.
        lengths: (samples,) tokens of every sample of the store.
        batch_tokens: slots of a batch.
        seed: of the order.
        training: a new order every epoch, and as many steps for all processes (batches left over are dropped); else
            one order for good, in which the first batches are a fair sample, and nothing is dropped.
        rank: which of the `world` processes this is; each takes every world-th batch.
        world: how many processes share the batches.
    """

    def __init__(
        self,
        indices: list[int],
        lengths: np.ndarray,
        batch_tokens: int,
        seed: int,
        training: bool = True,
        rank: int = 0,
        world: int = 1,
    ):
        self.indices, self.lengths, self.batch_tokens = indices, lengths, batch_tokens
        self.seed, self.training, self.epoch = seed, training, 0
        self.rank, self.world = rank, world

    @property
    def sampler(self) -> "Buckets":
        """Where Lightning looks for `set_epoch` on a batch sampler."""
        return self

    def set_epoch(self, epoch: int) -> None:
        """Lightning calls this at the start of every epoch."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.batches())

    def __len__(self) -> int:
        return len(self.batches())

    def batches(self) -> list[list[int]]:
        """The epoch's batches of this process."""
        generator = np.random.default_rng((self.seed, self.epoch if self.training else 0))
        order = generator.permutation(self.indices)
        batches = self._cut(order[np.argsort(-self.lengths[order], kind="stable")].tolist())
        shuffled = [batches[i] for i in generator.permutation(len(batches))]
        shared = len(shuffled) - (len(shuffled) % self.world if self.training else 0)
        return shuffled[self.rank : shared : self.world]

    def _cut(self, ordered: list[int]) -> list[list[int]]:
        batches: list[list[int]] = []
        for index in ordered:  # the first of a batch is its longest
            if batches and (len(batches[-1]) + 1) * self.lengths[batches[-1][0]] <= self.batch_tokens:
                batches[-1].append(index)
            else:
                batches.append([index])
        return batches
