"""Decoding steps as CUDA graphs: hundreds of kernels started at once, where Python would start them one by one."""

import logging
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import torch
from torch import Tensor

Result = TypeVar("Result")
logger = logging.getLogger(__name__)


class Graphs:
    """Captures work of fixed shapes once a key, and replays it. Its results stay in place and are overwritten.

    Where a capture fails, it says so once, and work is simply done from then on.

    Args:
        enabled: whether to capture; else work is simply done.
        device: of all tensors of the work, which need not be the current one.
    """

    def __init__(self, enabled: bool, device: torch.device | None = None):
        self.enabled, self.device = enabled, device
        self.captured: dict[Hashable, tuple[torch.cuda.CUDAGraph, Any]] = {}
        self.pool = None  # of memory, shared by all that is captured: they never run at once

    def clear(self) -> None:
        """Drop all graphs: the tensors they refer to are gone."""
        self.captured.clear()
        self.pool = None  # it holds nothing any more

    def run(self, key: Hashable, work: Callable[[], Result], state: list[Tensor]) -> Result:
        """Do `work`.

        Args:
            key: all that shapes depend on.
            work: reads and writes tensors that stay where they are, and never synchronises with the host.
            state: those tensors that it must find as it left them; all others it writes before it reads them.
        """
        with torch.cuda.device(self.device):  # streams and graphs are those of the current device
            if key not in self.captured:
                try:
                    self._capture(key, work, state)
                except RuntimeError as error:
                    logger.warning("rounds run without CUDA graphs, so more slowly: %s", str(error).splitlines()[0])
                    self.enabled = False
                    return work()
            graph, result = self.captured[key]
            graph.replay()
            return result

    def _capture(self, key: Hashable, work: Callable[[], Any], state: list[Tensor]) -> None:
        saved = [tensor.clone() for tensor in state]
        warm_up = torch.cuda.Stream()
        warm_up.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(warm_up):  # as torch asks: libraries allocate in a first run, outside the graph
            work()
        torch.cuda.current_stream().wait_stream(warm_up)
        for tensor, value in zip(state, saved, strict=True):
            tensor.copy_(value)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool):
            result = work()
        self.pool = graph.pool()
        self.captured[key] = (graph, result)
