"""Decoding steps as CUDA graphs: hundreds of kernels started at once, where Python would start them one by one."""

import logging
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor

from poss_lightning.clock import Clock, Timer

MOST = 32  # captures that are kept: each holds memory; a text needs one for every 512 tokens and size of tree
Result = TypeVar("Result")
Replays = list[tuple[str, Callable[[], None]]]  # the parts of some work by name, and how to do each again
logger = logging.getLogger(__name__)


class Graphs:
    """Captures work of fixed shapes once per key, and replays it. Its results stay in place and are overwritten.

    Each part of the work becomes a graph of its own, so that a clock sees the parts as they really run.

    Args:
        device: of all tensors of the work; need not be the current one.
        enabled: whether to capture; otherwise work is simply done. None captures on CUDA, but only warns where that
            fails, and does the work without graphs from then on.
        possible: whether the work can be captured at all.

    Raises:
        ValueError: enabled on a device that is not CUDA's.
    """

    def __init__(self, device: torch.device, enabled: bool | None = None, possible: bool = True):
        if enabled and device.type != "cuda":
            raise ValueError(f"graphs is true, but the target is on {device}: CUDA graphs need a GPU of NVIDIA or AMD")
        self.enabled, self.device = (device.type == "cuda" and possible) if enabled is None else enabled, device
        self.asked = enabled is not None  # then a failed capture is an error: times without graphs mean something else
        self.captured: dict[Hashable, tuple[Replays, Any]] = {}  # the most recently used is last
        # Shared by all captures, which never run at once: torch reuses a pool's blocks per stream.
        self.pool = self.stream = None

    def clear(self) -> None:
        """Drop all graphs: the tensors they refer to are gone."""
        self.captured.clear()
        self.pool = None  # it holds nothing any more

    def run(self, key: Hashable, work: Callable[[Timer], Result], state: list[Tensor], clock: Clock) -> Result:
        """Do `work`, as a replay where it was captured before.

        Args:
            key: everything that shapes depend on.
            work: is given a function that opens a part by name, and computes only within parts. It reads and writes
                tensors that stay where they are, and never synchronises with the host.
            state: the tensors that it must find as it left them; all others it writes before it reads them.
            clock: times the parts. A capture is the part `capture`, outside the total, as it is paid once for many.

        Raises:
            RuntimeError: a capture failed, and graphs were asked for.
        """
        if self.enabled and key not in self.captured:
            with clock.excluded("capture"):
                self._try_to_capture(key, work, state)
        if not self.enabled:
            return work(clock.part)
        parts, result = self.captured[key] = self.captured.pop(key)
        for name, replay in parts:
            with clock.part(name):
                replay()
        return result

    def run_alone(self, key: Hashable, work: Callable[[], Result]) -> Result:
        """`run` for work of one part that needs no state and is timed from outside."""

        def one_part(part: Timer) -> Result:
            with part("work"):
                return work()

        return self.run(key, one_part, [], Clock(self.device))

    def _try_to_capture(self, key: Hashable, work: Callable[[Timer], Any], state: list[Tensor]) -> None:
        if len(self.captured) >= MOST:
            del self.captured[next(iter(self.captured))]
        try:
            self.captured[key] = self._capture(work, state)
        except RuntimeError as error:
            if self.asked:
                raise RuntimeError(f"a capture failed; without CUDA graphs: graphs false. {error}") from error
            logger.warning("rounds run without CUDA graphs, so more slowly: %s", str(error).splitlines()[0])
            self.enabled = False

    def _capture(self, work: Callable[[Timer], Any], state: list[Tensor]) -> tuple[Replays, Any]:
        parts: Replays = []
        saved = [tensor.clone() for tensor in state]
        with torch.cuda.device(self.device):  # streams and graphs belong to the current device
            usual = torch.cuda.current_stream()
            stream = self.stream = self.stream or torch.cuda.Stream()
            stream.wait_stream(usual)
            try:
                with torch.cuda.stream(stream):  # torch asks for a first run outside: libraries allocate in it
                    work(lambda name: nullcontext())
            finally:  # also where memory ran out: the work is then done without a graph
                usual.wait_stream(stream)
                for tensor, value in zip(state, saved, strict=True):
                    tensor.copy_(value)

            @contextmanager
            def record(name: str) -> Iterator[None]:
                graph = torch.cuda.CUDAGraph()
                # Other threads may allocate meanwhile: a second engine, or a loader that pins memory.
                with torch.cuda.graph(graph, pool=self.pool, stream=stream, capture_error_mode="thread_local"):
                    yield
                self.pool = graph.pool()
                parts.append((name, graph.replay))

            try:
                return parts, work(record)
            finally:  # torch stays on the side stream where a capture cannot end
                torch.cuda.set_stream(usual)
