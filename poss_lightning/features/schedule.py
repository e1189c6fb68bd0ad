"""The schedule of an epoch: the split, rows of conversations, the batches of every optimizer step, and their loader.

It is planned ahead from lengths and spans alone. So every batch knows over how many slots its optimizer step takes the
mean, on any number of processes and accumulated batches, and a run resumes at the exact sample.
"""

import hashlib
import signal
from bisect import bisect_left, insort
from collections.abc import Iterator
from types import SimpleNamespace

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from poss_lightning.features.stream import Batch, PlannedBatch, collate, step_totals
from poss_lightning.terminal import announced

GRACE = 60  # seconds for which a loader still works after SIGTERM


def split(origins: list[str], validation: float, seed: int) -> tuple[list[int], list[int]]:
    """Split indices into training and validation. A conversation's side depends on its id and the seed alone.

    Where a side would be empty, it gets the conversation nearest to the border.

    Args:
        origins: for every sample the id that stands for its conversation. Duplicates share one, and are on one side.

    Raises:
        ValueError: there is only one conversation.
    """
    ranks = np.array([stable_number(f"{seed}/{name}") / 2**63 for name in origins])
    border = min(max(validation, np.nextafter(ranks.min(), 1)), ranks.max())
    held_out, train = np.flatnonzero(ranks < border).tolist(), np.flatnonzero(ranks >= border).tolist()
    if not held_out:
        one = "there is one conversation, or all are the same"
        raise ValueError(f"{one}: none can be held out; give a validation_store, or more text")
    return train, held_out


def stable_number(text: str) -> int:
    """Return 63 bits of a text's digest, the same on every machine."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def pack_rows(ordered: list[int], lengths: np.ndarray, batch_tokens: int) -> list[list[int]]:
    """Pack samples, longest first, into rows, one per batch; each goes where it leaves the least room (best fit)."""
    batches: list[list[int]] = []
    room: list[tuple[int, int]] = []  # free tokens of each batch, ascending
    for index in ordered:
        length = int(lengths[index])
        best = bisect_left(room, (length, -1))
        if best == len(room):
            batches.append([])
            free, batch = max(batch_tokens, length), len(batches) - 1
        else:
            free, batch = room.pop(best)
        batches[batch].append(index)
        insort(room, (free - length, batch))
    return batches


class Schedule(Sampler[PlannedBatch]):
    """The batches of every epoch, in steps of `world * accumulate`; a process takes every world-th batch.

    Samples are shuffled by (seed, epoch), stably sorted by length, packed into batches, and these are shuffled. So the
    batches do not depend on the number of processes, and every epoch has the same number, as Lightning asks only once.
    Batches in which nothing counts complete the last step, so no sample is dropped or shown twice.

    Args:
        indices: samples to draw from.
        lengths: (samples,) tokens of every sample of the source.
        spans: (n, 2) of every sample of the source.
        batch_tokens: most tokens of a batch; a longer sample is a batch alone.
        seed: of the order.
        training: a new order every epoch; else always the same, in which the first batches are a fair sample.
        rank: which of the `world` processes this is.
        world: how many processes share the batches.
        accumulate: batches of a process in a step.
    """

    def __init__(
        self,
        indices: list[int],
        lengths: np.ndarray,
        spans: list[np.ndarray],
        *,
        batch_tokens: int,
        seed: int,
        training: bool = True,
        rank: int = 0,
        world: int = 1,
        accumulate: int = 1,
    ):
        self.indices, self.lengths, self.spans = indices, lengths, spans
        self.batch_tokens, self.seed, self.training = batch_tokens, seed, training
        self.rank, self.world, self.accumulate = rank, world, accumulate
        self.epoch, self.resumed, self.taken = 0, (0, 0), 0
        self.total = len(self.batches())
        order = [(i, int(lengths[i])) for i in indices]
        self.data = stable_number(f"{order} {batch_tokens} {seed}")  # all that determines the order of batches

    @property
    def step_batches(self) -> int:
        """Batches of a step, over all processes."""
        return self.world * self.accumulate

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch; Lightning calls this at its start."""
        self.epoch = epoch

    def state_dict(self) -> dict[str, int]:
        """Return the state of this epoch: the batches that all processes have taken, in complete steps."""
        done = min(self._first() + self.taken // self.accumulate * self.step_batches, self.total)
        return {"epoch": self.epoch, "done": done, "total": self.total, "share": self.step_batches, "data": self.data}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Resume in that epoch after the batches done, on any number of processes; ValueError for other data."""
        if state["data"] != self.data:
            raise ValueError(
                f"the checkpoint's epochs have {state['total']} batches of other data than these {self.total}: resume "
                "with the same store, limit, validation, seed and batch_tokens"
            )
        self.epoch, self.resumed = state["epoch"], (state["epoch"], state["done"])

    def __len__(self) -> int:
        """Count the batches of this process in a full epoch."""
        return -(-self.total // self.step_batches) * self.accumulate

    def remaining(self) -> int:
        """Count this process's batches from where the epoch begins or resumes."""
        return -(-(self.total - self._first()) // self.step_batches) * self.accumulate

    def __iter__(self) -> Iterator[PlannedBatch]:
        batches = self.batches()
        for start in range(self._first(), len(batches), self.step_batches):
            yield from self._step(batches[start : start + self.step_batches])[self.rank :: self.world]

    @announced("planning an epoch")
    def batches(self) -> list[list[int]]:
        """Plan the epoch's batches, as lists of samples."""
        generator = np.random.default_rng((self.seed, self.epoch if self.training else 0))
        order = generator.permutation(self.indices)
        by_length = order[np.argsort(-self.lengths[order], kind="stable")].tolist()
        batches = pack_rows(by_length, self.lengths, self.batch_tokens)
        return [batches[i] for i in generator.permutation(len(batches))]

    def _first(self) -> int:
        epoch, done = self.resumed
        return done if epoch == self.epoch else 0

    def _step(self, batches: list[list[int]]) -> list[PlannedBatch]:
        samples = [i for batch in batches for i in batch]
        step = step_totals(self.lengths[samples].tolist(), [self.spans[i] for i in samples], self.step_batches)
        idle = PlannedBatch([min(samples, key=lambda i: self.lengths[i])], False, *step)
        return [PlannedBatch(batch, True, *step) for batch in batches] + [idle] * (self.step_batches - len(batches))


class Loader:
    """Loads a schedule's batches.

    It wraps a `DataLoader` rather than being one, because Lightning would replace the schedule by samplers of its own
    for several processes and for `overfit_batches`. Lightning sets the epoch through `batch_sampler.sampler`.
    """

    def __init__(self, source, schedule: Schedule, workers: int):
        self.schedule = schedule
        self.batch_sampler = SimpleNamespace(sampler=schedule)
        self.loader = DataLoader(
            _Reader(source),
            sampler=schedule,
            batch_size=None,
            num_workers=workers,
            pin_memory=torch.cuda.is_available(),  # so that copies to the device are asynchronous
            worker_init_fn=_outlive_signals,
        )

    def __len__(self) -> int:
        return len(self.schedule)

    def __iter__(self) -> Iterator[Batch]:
        self.schedule.taken = 0
        for batch in self.loader:
            self.schedule.taken += 1
            yield batch

    def state_dict(self) -> dict[str, int]:
        return self.schedule.state_dict()

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        self.schedule.load_state_dict(state_dict)


def _outlive_signals(worker: int) -> None:
    """Keep a loading process alive after a signal to the whole job, as the training needs its batches.

    The training handles Ctrl-C and ends its loaders itself. SIGTERM ends them late: the step may still take a while.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda number, frame: signal.alarm(GRACE))


class _Reader(Dataset[Batch]):
    """A data set whose indices are planned batches."""

    def __init__(self, source):
        self.source = source

    def __getitem__(self, planned: PlannedBatch) -> Batch:
        return collate([[self.source[i] for i in planned.samples]], planned)
