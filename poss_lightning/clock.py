"""Seconds by part of some work, on any device."""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import torch

from poss_lightning.machine import synchronize

Timer = Callable[[str], AbstractContextManager[None]]  # times what is done within, under that name


class Clock:
    """Seconds by part. On CUDA, events measure the parts, so nothing waits for the device before the end."""

    def __init__(self, device: torch.device):
        self.device, self.began = device, time.perf_counter()
        self.seconds: dict[str, float] = defaultdict(float)
        self.events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Time the block."""
        if self.device.type == "cuda":
            stream = torch.cuda.current_stream(self.device)
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record(stream)
            yield
            end.record(stream)
            self.events.append((name, start, end))
        else:
            start = time.perf_counter()
            yield
            self.seconds[name] += time.perf_counter() - start

    @contextmanager
    def excluded(self, name: str | None = None) -> Iterator[None]:
        """Leave the block out of the total; with a name, it is still a part. Waits for the device."""
        synchronize(self.device)  # what was queued before belongs to the total
        start = time.perf_counter()
        yield
        synchronize(self.device)
        took = time.perf_counter() - start
        self.began += took
        if name is not None:
            self.seconds[name] += took

    def total(self) -> dict[str, float]:
        """Seconds of every part, and "total", those since the clock was made. Waits for the device."""
        synchronize(self.device)
        for name, start, end in self.events:
            self.seconds[name] += start.elapsed_time(end) / 1000
        self.events.clear()
        return {**self.seconds, "total": time.perf_counter() - self.began}
