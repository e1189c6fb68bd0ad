"""CUDA graphs on the pretended device: what is captured runs again on the same memory, and asks Python nothing.

    capture   computes nothing that stays: every operation is noted, and what it wrote is put back
    replay    spoils what it is going to make, then does the same operations on the same memory

So a graph shows itself that speaks of a value of its capture, of memory that is gone, or of a replay before.
"""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.pretended import PretendedDevice
from tests.support.pretended_calls import (
    ALLOCATING,
    DEVICE,
    Call,
    DeviceError,
    Memory,
    Pretended,
    place,
    replace_tensors,
    storage_id,
    tensors_of,
)

Storage = torch.UntypedStorage
SPOILT = 0xFF  # in every byte: nan, or -1


class Graph:
    """A `torch.cuda.CUDAGraph`. Its pool is memory that is never given back; graphs share it, as they run in turn."""

    def __init__(self):
        # Operations with arguments on the host that hold the device's values, and what each makes, in the graph's pool.
        self.steps: list[tuple[Any, tuple, dict[str, Any], list[Tensor]]] = []
        self.own: dict[int, Storage] = {}  # that it makes, in its pool
        self.outside: dict[int, tuple[weakref.ref[Memory], str]] = {}  # memory that is not the pool's, and who uses it
        self.before: dict[int, tuple[Storage, Storage]] = {}  # storages that it writes, and what they held
        self.storages: dict[int, Storage] = {}  # of the pool

    def pool(self) -> dict[int, Storage]:
        return self.storages

    def replay(self) -> None:
        """Do all of it again.

        Raises:
            DeviceError: memory that it reads or writes belongs to nobody any more.
        """
        for memory, where in self.outside.values():
            if memory() is None:
                raise DeviceError(f"{where}: a graph that was captured here uses memory that is gone")
        for storage in self.own.values():
            storage.fill_(SPOILT)
        with torch.inference_mode():
            for func, args, kwargs, made in self.steps:
                results = tensors_of(func(*args, **kwargs))
                for tensor, result in zip(made, results if made else [], strict=True):
                    tensor.copy_(result)

    def end(self) -> None:
        """Put back what was written. What was made keeps its values: the next capture may compute with them."""
        for storage, value in self.before.values():
            storage.copy_(value)
        self.before.clear()
        self.storages.update(self.own)

    def add(self, call: Call, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Note an operation, and compute it for now, so that shapes are known."""
        known = {storage_id(tensor): tensor for tensor in call.device_tensors}
        for storage, tensor in known.items():
            if storage not in self.own and storage not in self.storages:
                self.outside.setdefault(storage, (weakref.ref(tensor.memory), place()))
        written = call.written()
        for storage in map(storage_id, written):
            if storage not in self.own and storage not in self.before:
                held = known[storage].host.untyped_storage()
                self.before[storage] = held, held.clone()
        result = call.func(*args, **kwargs)
        made = [tensor for tensor in tensors_of(result) if storage_id(tensor) not in known]
        if (made or written) and call.packet not in ALLOCATING:  # else it is a view, or has no values yet
            numbers = {id(tensor) for tensor in tensors_of(call.by_name) if not isinstance(tensor, Pretended)}
            baked = replace_tensors(lambda tensor: tensor.clone() if id(tensor) in numbers else tensor, (args, kwargs))
            self.steps.append((call.func, *baked, made))
        self.own.update((storage_id(tensor), tensor.untyped_storage()) for tensor in made)
        return result


def replace_cuda(monkeypatch: pytest.MonkeyPatch, device: PretendedDevice) -> None:
    """Let what the package asks of `torch.cuda` for its graphs be the pretended device's."""

    @contextmanager
    def capture(graph: Graph, pool: dict | None, stream: Any, capture_error_mode: str) -> Iterator[None]:
        graph.storages = graph.storages if pool is None else pool
        device.graph = graph
        try:
            yield
        except RuntimeError as error:  # else the package would go on without graphs
            raise DeviceError(f"a capture failed: {error}") from error
        finally:
            device.graph = None
            graph.end()
        device.captures += 1

    def current(chosen: torch.device) -> nullcontext:
        assert chosen == DEVICE
        return nullcontext()

    stream = SimpleNamespace(wait_stream=lambda other: None)
    fakes = {"CUDAGraph": Graph, "Stream": lambda: stream, "current_stream": lambda: stream, "graph": capture}
    fakes |= {"device": current, "stream": lambda stream: nullcontext(), "set_stream": lambda stream: None}
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
