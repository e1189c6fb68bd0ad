"""CUDA graphs on the pretended device: what is captured runs again on the same memory, and asks Python nothing.

    capture   computes nothing that stays: every operation is noted, and what it wrote is put back
    replay    spoils all memory of the pool, then does the same operations on the same memory

So a graph shows itself that speaks of a value of its capture, of memory that is gone, or of a replay before.
"""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from tests.support.pretended import (
    DEVICE,
    Call,
    DeviceError,
    Memory,
    Pretended,
    PretendedDevice,
    place,
    replace_tensors,
    tensors_of,
)

Storage = torch.UntypedStorage
SPOILT = 0xFF  # in every byte: nan, or -1


class Step(NamedTuple):
    """An operation of a graph, with tensors of the host that hold the device's values."""

    func: Any
    args: tuple
    kwargs: dict[str, Any]
    made: list[Tensor]  # by it, in the graph's pool


class Pool:
    """The memory that captures allocate. Graphs share it, for they never run at once."""

    def __init__(self):
        self.storages: list[Storage] = []

    def spoil(self) -> None:
        for storage in self.storages:
            storage.fill_(SPOILT)


class Graph:
    """A `torch.cuda.CUDAGraph`."""

    def __init__(self):
        self.steps: list[Step] = []
        self.own: set[int] = set()  # storages in the pool
        self.outside: dict[int, tuple[weakref.ref[Memory], str]] = {}  # storages that it reads or writes, and where
        self.before: dict[int, tuple[Storage, Storage]] = {}  # storages it writes, and what they held

    def pool(self) -> Pool:
        return self._pool

    def replay(self) -> None:
        """Do all of it again.

        Raises:
            DeviceError: memory that it reads or writes belongs to nobody any more.
        """
        for memory, where in self.outside.values():
            if memory() is None:
                raise DeviceError(f"{where}: a graph that was captured here uses memory that is gone")
        self._pool.spoil()
        with torch.inference_mode():
            for func, args, kwargs, made in self.steps:
                results = tensors_of(func(*args, **kwargs))
                for tensor, result in zip(made, results if made else [], strict=True):
                    tensor.copy_(result)

    def add(self, call: Call, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Note an operation, and compute it for now, so that shapes are known."""
        known = {_id(tensor): tensor for tensor in call.device_tensors}
        for storage, tensor in known.items():
            if storage not in self.own:
                self.outside.setdefault(storage, (weakref.ref(tensor.memory), place()))
        written = call.written()
        for tensor in written:
            if _id(tensor) not in self.own | self.before.keys():
                storage = tensor.host.untyped_storage()
                self.before[_id(tensor)] = storage, storage.clone()
        result = call.func(*args, **kwargs)
        made = [tensor for tensor in tensors_of(result) if _id(tensor) not in known]
        if made or written:
            numbers = {id(tensor) for tensor in tensors_of(call.by_name) if not isinstance(tensor, Pretended)}
            baked = replace_tensors(lambda tensor: tensor.clone() if id(tensor) in numbers else tensor, (args, kwargs))
            self.steps.append(Step(call.func, *baked, made))
        self.own.update(map(_id, made))
        self._pool.storages += [tensor.untyped_storage() for tensor in made]
        return result

    def begin(self, pool: Pool | None) -> None:
        self._pool = pool or Pool()

    def end(self) -> None:
        for storage, value in self.before.values():
            storage.copy_(value)
        self.before.clear()
        self._pool.spoil()


def _id(tensor: Tensor) -> int:
    return getattr(tensor, "host", tensor).untyped_storage()._cdata


def replace_cuda(monkeypatch: pytest.MonkeyPatch, device: PretendedDevice) -> None:
    """Let what the package asks of `torch.cuda` for its graphs be the pretended device's."""

    @contextmanager
    def capture(graph: Graph, pool: Pool | None = None) -> Iterator[None]:
        graph.begin(pool)
        device.graph = graph
        try:
            yield
        finally:
            device.graph = None
            graph.end()
        device.captures += 1

    def current(chosen: torch.device) -> nullcontext:
        assert chosen == DEVICE
        return nullcontext()

    stream = SimpleNamespace(wait_stream=lambda other: None)
    fakes = {"CUDAGraph": Graph, "Stream": lambda: stream, "current_stream": lambda: stream, "graph": capture}
    fakes |= {"device": current, "stream": lambda stream: nullcontext()}
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
