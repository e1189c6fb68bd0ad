"""A target divided among processes: rank 0 runs the command, and the others do with their parts what it does with its.

    rank 0   command ─ Target ─ Leader.call ─ Part.forward ┐
                                    │ what, with what      ├ sums over all ranks, in every layer
    rank 1                      follow ────── Part.forward ┘

So only rank 0 reads, decides, draws, times and writes, and no command need know that there are others.
"""

import atexit
import weakref
from collections.abc import Callable
from itertools import count
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_map_only

from poss_lightning.target.cache import Store, TreeCache, forward_of


class Place(NamedTuple):
    """Where a forward writes its keys and values, and how far it reads them."""

    store: int
    index: Tensor
    extent: int


class Part:
    """A process's part of a model and of its caches.

    Args:
        model: of transformers, divided.
        new_store: makes the part of a cache: rows, and slots of each.
    """

    def __init__(self, model: Any, new_store: Callable[[int, int], Store]):
        self.model, self.base_forward, self.new_store = model, forward_of(model.base_model), new_store
        self.stores: dict[int, Store] = {}

    def open(self, number: int, batch: int, capacity: int) -> None:
        """Make a store of that number."""
        self.stores[number] = self.new_store(batch, capacity)

    def close(self, number: int) -> None:
        """Free a store."""
        del self.stores[number]

    def change(self, number: int, change: str, *arguments: Any) -> None:
        """`move`, `clear` or `select` in a store."""
        getattr(self.stores[number], change)(*arguments)

    def forward(self, inputs: dict[str, Any], place: Place | None) -> Any:
        """The output of the base model."""
        cache = None if place is None else self._cache(place)
        return self.base_forward(cache, **inputs)

    def generate(self, seed: int, inputs: dict[str, Any]) -> Any:
        """The output of transformers' own `generate`; all ranks draw alike."""
        torch.manual_seed(seed)
        return self.model.generate(**inputs)

    def _cache(self, place: Place) -> TreeCache:
        cache = TreeCache(self.stores[place.store])
        _, cache.slots.index, cache.slots.extent = place
        return cache


class Leader:
    """Rank 0, whose calls the others repeat until it ends.

    Args:
        part: its own.
        device: on which tensors are sent.
    """

    def __init__(self, part: Part, device: torch.device):
        self.part, self.device = part, device
        self.numbers, self.closed = count(), []  # of stores; those that nobody needs any more
        self.leads = True
        atexit.register(self.end)

    def call(self, name: str, *arguments: Any) -> Any:
        """Do it with every part; the result is that of this one."""
        while self.closed:
            self._do("close", self.closed.pop())
        return self._do(name, *arguments)

    def forward(self, cache: TreeCache | None, **inputs: Any) -> Any:
        """The output of the base model, as of `Part.forward`."""
        place = None
        if cache is not None:
            assert isinstance(cache.store, SharedStore)
            place = Place(cache.store.number, cache.slots.index, cache.slots.extent)
        return self.call("forward", inputs, place)

    def generate(self, input_ids: Tensor, **inputs: Any) -> Any:
        """transformers' `generate`, which draws anew from torch's own generator."""
        return self.call("generate", int(torch.randint(2**63 - 1, ())), {"input_ids": input_ids, **inputs})

    def end(self) -> None:
        """Let the others go."""
        if self.leads:
            self.leads = False
            self._send(None)

    def _do(self, name: str, *arguments: Any) -> Any:
        self._send((name, arguments))
        try:
            return getattr(self.part, name)(*arguments)
        except BaseException:
            self.leads = False  # the others may wait in the middle of a layer: nothing that is sent would reach them
            raise

    def _send(self, message: Any) -> None:
        """The message as an object, and then its tensors one by one."""
        tensors: list[Tensor] = []

        def leave_out(tensor: Tensor) -> _Shape:
            tensors.append(tensor)
            return _Shape(tensor.shape, tensor.dtype)

        dist.broadcast_object_list([tree_map_only(Tensor, leave_out, message)])
        for tensor in tensors:
            dist.broadcast(_bytes_of(tensor.to(self.device).contiguous()), 0)


class SharedStore(Store):
    """Rank 0's view of a store of which every rank has its heads; it is read in `Part.forward` alone."""

    def __init__(self, leader: Leader, layers: int, batch: int, capacity: int):
        self.leader, self.layers, self.batch, self.capacity = leader, layers, batch, capacity
        self.device, self.number = leader.device, next(leader.numbers)
        leader.call("open", self.number, batch, capacity)
        weakref.finalize(self, leader.closed.append, self.number)

    def write(self, layers: int, index: Tensor, keys: Tensor, values: Tensor) -> None:
        """A forward writes into the parts, see `Part.forward`."""
        raise NotImplementedError

    def view(self, layer: int, extent: int) -> tuple[Tensor, Tensor]:
        """As `write`."""
        raise NotImplementedError

    def move(self, source: Tensor, destination: Tensor) -> None:
        """As of a `SlotStore`."""
        self.leader.call("change", self.number, "move", source, destination)

    def clear(self) -> None:
        """As of a `SlotStore`."""
        self.leader.call("change", self.number, "clear")

    def select(self, rows: list[int]) -> None:
        """As of a `SlotStore`."""
        self.leader.call("change", self.number, "select", rows)
        self.batch = len(rows)


class _Shape:
    """Stands in a message for a tensor that follows; no tuple, into which `tree_map_only` would look."""

    def __init__(self, shape: torch.Size, dtype: torch.dtype):
        self.shape, self.dtype = shape, dtype


@torch.inference_mode()
def follow(part: Part, device: torch.device) -> None:
    """Repeat rank 0's calls with this part until rank 0 ends."""

    def receive(shape: _Shape) -> Tensor:
        tensor = torch.empty(shape.shape, dtype=shape.dtype, device=device)
        dist.broadcast(_bytes_of(tensor), 0)
        return tensor

    while True:
        box: list[Any] = [None]
        dist.broadcast_object_list(box)
        if box[0] is None:
            return
        name, arguments = tree_map_only(_Shape, receive, box[0])
        getattr(part, name)(*arguments)


def _bytes_of(tensor: Tensor) -> Tensor:
    """The same memory as bytes: gloo sends no bool."""
    return tensor.view(torch.uint8) if tensor.dtype == torch.bool else tensor
