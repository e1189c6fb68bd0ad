"""From samples to batches: which passes count where, packing, noise, the split, and the schedule of an epoch.

A schedule is planned ahead from lengths and spans alone. So every batch knows over how many slots its optimizer step
takes the mean, on however many processes and accumulated batches, and a run can go on at the exact sample.
"""

import hashlib
from bisect import bisect_left, insort
from collections.abc import Iterator
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Sampler

from poss_lightning.features.store import Sample


class Step(NamedTuple):
    """The optimizer step that a batch is part of: all its batches, of all processes."""

    answers: Tensor  # (answers,) slots of every assistant span in the step; pass k counts in all but k-1 of them
    tokens: Tensor  # () counting or not
    batches: int  # processes x accumulated batches; strategies take the mean of their gradients

    def slots(self, depth: int) -> Tensor:
        """How many slots count in each pass: (K,)"""
        return (self.answers[:, None] - torch.arange(depth, device=self.answers.device)).clamp(min=0).sum(0)


class Batch(NamedTuple):
    """Rows of one or several conversations, padded on the right."""

    tokens: Tensor  # (B, T) int64
    features: Tensor  # (B, T, D), the target's
    inputs: Tensor  # (B, T, D), the same with noise in training
    greedy: Tensor  # (B, T) the target's likeliest next token, -1 where unknown
    counts: Tensor  # (B, T) pass k counts at slot t where k <= counts[t]
    positions: Tensor  # (B, T) a token's place in its conversation
    lengths: list[list[int]]  # tokens of the conversations of each row
    ids: list[str]  # of the conversations, row by row
    step: Step

    def parts(self) -> list[tuple[int, slice]]:
        """Where each conversation stands: row and slots."""
        return [
            (row, slice(stop - length, stop))
            for row, lengths in enumerate(self.lengths)
            for length, stop in zip(lengths, accumulate(lengths), strict=True)
        ]


def answers(length: int, spans: np.ndarray) -> np.ndarray:
    """Slots of each assistant span where pass 1 counts; pass k counts in k-1 fewer. spans (n, 2) -> (n,)"""
    starts, stops = np.maximum(spans[:, 0], 1), np.minimum(spans[:, 1], length)
    return np.maximum(stops - starts - 1, 0)


def passes_that_count(length: int, spans: np.ndarray) -> Tensor:
    """(T,): pass k counts at slot t where x_{t-k+2} ... x_{t+2} lie in one assistant span, so where k <= counts[t].

    A round starts from a root that the target emitted, so its first token too must be the assistant's; the first token
    of a text is nobody's.
    """
    counts = torch.zeros(length, dtype=torch.long)
    for (start, _), slots in zip(spans, answers(length, spans), strict=True):
        first = max(start, 1) - 1  # its x_{t+1} is the span's first token
        counts[first : first + slots] = torch.arange(1, slots + 1)
    return counts


def add_noise(batch: Batch, strength: float, seeds: list[int]) -> Tensor:
    """Inputs with uniform noise (u - 0.5) * strength * 512 / T, as EAGLE trains, T being the conversation's own length.

    Args:
        seeds: one a conversation, so that its noise depends on nothing beside it.
    """
    noisy = batch.features.clone()
    generator = torch.Generator(noisy.device)
    for part, seed in zip(batch.parts(), seeds, strict=True):
        here = noisy[part]  # (length, D)
        noise = torch.rand(here.shape, generator=generator.manual_seed(seed), device=here.device) - 0.5
        here += noise * (strength * 512 / len(here))
    return noisy


def collate(rows: list[list[Sample]], step: Step | None = None) -> Batch:
    """Rows of samples as a batch; on its own (`step` None) it is its whole step."""
    samples = [sample for row in rows for sample in row]
    lengths = [[len(sample.tokens) for sample in row] for row in rows]
    longest = max(map(sum, lengths))

    def padded(parts: list[Tensor], fill: int = 0) -> Tensor:
        out = parts[0].new_full((len(rows), longest, *parts[0].shape[1:]), fill)
        left = iter(parts)
        for place, row in zip(out, lengths, strict=True):
            torch.cat([next(left) for _ in row], out=place[: sum(row)])
        return out

    features = padded([sample.features for sample in samples])
    spans = [np.array(sample.spans, dtype=np.int64).reshape(-1, 2) for sample in samples]
    if step is None:
        found = [answers(len(sample.tokens), edges) for sample, edges in zip(samples, spans, strict=True)]
        step = Step(torch.from_numpy(np.concatenate(found)), torch.tensor(sum(map(sum, lengths))), 1)
    return Batch(
        tokens=padded([sample.tokens for sample in samples]),
        features=features,
        inputs=features,
        greedy=padded([sample.greedy for sample in samples], -1),
        counts=padded([passes_that_count(len(s.tokens), edges) for s, edges in zip(samples, spans, strict=True)]),
        positions=padded([torch.arange(len(sample.tokens)) for sample in samples]),
        lengths=lengths,
        ids=[sample.id for sample in samples],
        step=step,
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


class Planned(NamedTuple):
    """A batch before it is read."""

    rows: list[list[int]]  # indices of samples
    counts: bool  # False: it only fills up the last step, and no slot of it counts
    step: Step


def packs(ordered: list[int], lengths: np.ndarray, batch_tokens: int) -> list[list[list[int]]]:
    """One row a batch, filled by the best fit: each sample, longest first, goes where it leaves the least room."""
    batches: list[list[int]] = []
    room: list[tuple[int, int]] = []  # what is left of each batch, ascending
    for index in ordered:
        length = int(lengths[index])
        place = bisect_left(room, (length, -1))
        if place == len(room):
            batches.append([])
            left, batch = max(batch_tokens, length), len(batches) - 1
        else:
            left, batch = room.pop(place)
        batches[batch].append(index)
        insort(room, (left - length, batch))
    return [[batch] for batch in batches]


def buckets(ordered: list[int], lengths: np.ndarray, batch_tokens: int) -> list[list[list[int]]]:
    """A row a sample, neighbours in length, `batch_tokens` with the padding at most."""
    batches: list[list[list[int]]] = []
    for index in ordered:  # the first of a batch is its longest
        if batches and (len(batches[-1]) + 1) * lengths[batches[-1][0][0]] <= batch_tokens:
            batches[-1].append([index])
        else:
            batches.append([[index]])
    return batches


class Schedule(Sampler[Planned]):
    """The batches of every epoch, in steps of `world * accumulate`; a process takes every world-th batch.

    Samples are shuffled by (seed, epoch), ordered by length (so those of one length change places from epoch to epoch),
    cut into batches, and these are shuffled. All epochs have the same number of batches, because Lightning asks only
    once. The batches themselves do not depend on the number of processes. Where the last step has too few, batches in
    which nothing counts fill it up: all processes take as many, and no sample is dropped or shown twice.

    Args:
        indices: samples to draw from.
        lengths: (samples,) tokens of every sample of the source.
        spans: of every sample, (n, 2) each.
        batch_tokens: tokens of a batch at most, padding included; a longer sample stands alone.
        seed: of the order.
        packed: several conversations a row (`packs`), or one (`buckets`).
        training: a new order every epoch; else one for good, in which the first batches are a fair sample.
        rank: which of the `world` processes this is.
        world: how many processes share the batches.
        accumulate: batches of a process in a step.
    """

    def __init__(
        self,
        indices: list[int],
        lengths: np.ndarray,
        spans: list[np.ndarray],
        batch_tokens: int,
        seed: int,
        packed: bool = True,
        training: bool = True,
        rank: int = 0,
        world: int = 1,
        accumulate: int = 1,
    ):
        self.indices, self.lengths, self.spans = indices, lengths, spans
        self.batch_tokens, self.seed, self.cut, self.training = (
            batch_tokens,
            seed,
            packs if packed else buckets,
            training,
        )
        self.rank, self.world, self.accumulate = rank, world, accumulate
        self.epoch, self.resumed, self.taken = 0, (0, 0), 0
        self.total = len(self.batches())
        order = [(i, int(lengths[i])) for i in indices]
        self.data = stable_number(f"{order} {batch_tokens} {packed} {seed}")  # what the order of batches follows from

    @property
    def share(self) -> int:
        """Batches of a step."""
        return self.world * self.accumulate

    def set_epoch(self, epoch: int) -> None:
        """Lightning calls this at the start of every epoch."""
        self.epoch = epoch

    def state_dict(self) -> dict[str, int]:
        """Where this epoch stands: how many of its batches all processes together have taken, in whole steps."""
        done = self._first() + self.taken // self.accumulate * self.share
        done = min(done, self.total)
        return {"epoch": self.epoch, "done": done, "total": self.total, "share": self.share, "data": self.data}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on in that epoch behind the batches done, on whatever number of processes.

        Raises:
            ValueError: the state is of other data, so its batches are not these.
        """
        if state["data"] != self.data:
            raise ValueError(
                f"the checkpoint's epochs have {state['total']} batches of other data than these {self.total}: resume "
                "with the same store, limit, validation, seed, batch_tokens and packed"
            )
        self.epoch, self.resumed = state["epoch"], (state["epoch"], state["done"])

    def __len__(self) -> int:
        """Batches of this process in a whole epoch."""
        return -(-self.total // self.share) * self.accumulate

    def left(self) -> int:
        """Batches of this process from where the epoch begins or goes on."""
        return -(-(self.total - self._first()) // self.share) * self.accumulate

    def __iter__(self) -> Iterator[Planned]:
        batches = self.batches()
        for start in range(self._first(), len(batches), self.share):
            yield from self._step(batches[start : start + self.share])[self.rank :: self.world]

    def batches(self) -> list[list[list[int]]]:
        """The epoch's batches: rows of samples."""
        generator = np.random.default_rng((self.seed, self.epoch if self.training else 0))
        order = generator.permutation(self.indices)
        batches = self.cut(
            order[np.argsort(-self.lengths[order], kind="stable")].tolist(), self.lengths, self.batch_tokens
        )
        return [batches[i] for i in generator.permutation(len(batches))]

    def _first(self) -> int:
        epoch, done = self.resumed
        return done if epoch == self.epoch else 0

    def _step(self, batches: list[list[list[int]]]) -> list[Planned]:
        samples = [i for rows in batches for row in rows for i in row]
        found = [answers(self.lengths[i], self.spans[i]) for i in samples]
        step = Step(torch.from_numpy(np.concatenate(found)), torch.tensor(int(self.lengths[samples].sum())), self.share)
        idle = Planned([[min(samples, key=lambda i: self.lengths[i])]], False, step)
        return [Planned(rows, True, step) for rows in batches] + [idle] * (self.share - len(batches))


class Loader(DataLoader):
    """Reads a schedule's batches. It begins when the first is asked for, so that the epoch is known by then."""

    def __init__(self, source, schedule: Schedule, workers: int):
        super().__init__(_Reader(source), sampler=schedule, batch_size=None, num_workers=workers)

    def __iter__(self) -> Iterator[Batch]:
        self.sampler.taken = 0
        for batch in super().__iter__():
            self.sampler.taken += 1
            yield batch

    def state_dict(self) -> dict[str, int]:
        return self.sampler.state_dict()

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        self.sampler.load_state_dict(state_dict)


class _Reader:
    """What a DataLoader takes for a data set: planned batches are its indices."""

    def __init__(self, source):
        self.source = source

    def __getitem__(self, planned: Planned) -> Batch:
        batch = collate([[self.source[i] for i in row] for row in planned.rows], planned.step)
        return batch if planned.counts else batch._replace(counts=torch.zeros_like(batch.counts))
