"""Preallocated keys and values for trees: write N nodes after the verified slots, then keep the accepted path.

Every row of the batch has its own length. Slots below it are verified; the current tree starts at it:

    row 0   v v v v v v | r a b c . .        v verified, r root, a b c nodes: length 6
    row 1   v v v | r a b c . . . . .        length 3
"""

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

# Views grow by this many slots, so that few different shapes occur. What lies beyond a text costs bandwidth: little on
# a GPU, where each new shape costs a capture.
STEP, CUDA_STEP = 64, 512


def step_of(device: torch.device) -> int:
    """Return by how many slots views grow on a device."""
    return CUDA_STEP if device.type == "cuda" else STEP


class SlotStore:
    """Keys and values of L attention layers: B rows of C slots, slot-major, so that one copy moves a token.

    Attributes:
        slots: (L, B * C, 2, H, d), keys before values.
    """

    def __init__(
        self,
        *,
        layers: int,
        batch: int,
        capacity: int,
        heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ):
        self.batch, self.capacity, self.device = batch, capacity, device
        self._set(torch.zeros(layers, batch * capacity, 2, heads, head_dim, dtype=dtype, device=device))

    def _set(self, slots: Tensor) -> None:
        self.slots = slots
        self._views: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}  # by layer and extent, as making them takes time

    def write(self, layers: int | slice, index: Tensor, keys: Tensor, values: Tensor) -> None:
        """Put keys and values (layers if several, B, H, n, d) at flat slots `index` (B*n,)."""
        new = torch.stack((keys.transpose(-3, -2), values.transpose(-3, -2)), dim=-3)  # (…, B, n, 2, H, d)
        self.slots[layers].index_copy_(-4, index, new.flatten(-5, -4))

    def move(self, source: Tensor, destination: Tensor) -> None:
        """Copy flat slots `source` (n,) to flat slots `destination` (n,), in every layer."""
        self.slots.index_copy_(1, destination, self.slots[:, source])

    def view(self, layer: int, extent: int) -> tuple[Tensor, Tensor]:
        """View the first `extent` slots of every row of a layer: keys and values (B, H, extent, d)."""
        if (layer, extent) not in self._views:
            rows = self.slots[layer].unflatten(0, (self.batch, self.capacity))[:, :extent]  # (B, extent, 2, H, d)
            self._views[layer, extent] = rows[:, :, 0].transpose(1, 2), rows[:, :, 1].transpose(1, 2)
        return self._views[layer, extent]

    def put(self, rows: list[int], other: "SlotStore") -> None:
        """Copy the rows of a store that is no longer to these rows."""
        mine, others = (store.slots.unflatten(1, (store.batch, store.capacity)) for store in (self, other))
        mine[:, rows, : other.capacity] = others

    def clear(self) -> None:
        """Write zeros everywhere: a hidden slot has weight 0, but 0 times NaN is NaN."""
        self.slots.zero_()

    def free(self) -> None:
        """Give the memory back."""
        self._set(self.slots.new_empty(0, 0, 2, 1, 1))

    def select(self, rows: list[int]) -> None:
        """Keep only these rows of the batch."""
        slots = self.slots.unflatten(1, (self.batch, self.capacity))[:, rows].flatten(1, 2)
        self.batch = len(rows)
        self._set(slots)


class Slots:
    """The length of each row, and which flat slots the next tokens take. Shared by all layers of a cache.

    Lengths are kept twice: on the device, where all work is done, and on the host, which sizes views by them.
    `advance_device` changes the first in place, without synchronising; `advance_host` lets the second follow.

    Attributes:
        lengths: (B,) on the device; `host_lengths` are the same on the host.
        min_extent: views reach at least this many slots past the longest row, so that all work of a round shares a
            shape.
    """

    def __init__(self, batch: int, capacity: int, device: torch.device):
        self.capacity, self.step = capacity, step_of(device)
        self.host_lengths = [0] * batch
        self.lengths = torch.zeros(batch, dtype=torch.long, device=device)  # (B,)
        self.min_extent, self.extent = 0, 0
        self.index = self.lengths

    @property
    def longest(self) -> int:
        """The largest length, as the host knows it."""
        return max(self.host_lengths, default=0)

    def extent_for(self, count: int) -> int:
        """Return the slots per row that a view needs for `count` more tokens, rounded up to a multiple of `step`.

        Raises:
            ValueError: they do not fit the capacity.
        """
        needed = self.longest + max(count, self.min_extent)
        if needed > self.capacity:
            raise ValueError(f"the cache has {self.capacity} slots per row, and {needed} are needed: make it larger")
        return min(-(-needed // self.step) * self.step, self.capacity)

    def clear(self) -> None:
        """Set all lengths to 0."""
        self.host_lengths = [0] * len(self.host_lengths)
        self.lengths.zero_()

    def fits(self, batch: int, capacity: int) -> bool:
        """Return whether it has this many rows, of at least this capacity."""
        return len(self.host_lengths) == batch and self.capacity >= capacity

    def open(self, count: int, offset: int = 0, room: int = 0) -> None:
        """Let the next writes go to the `count` slots that begin `offset` slots after each row's length.

        Views reach at least `room` slots past the longest row.
        """
        self.extent = self.extent_for(max(offset + count, room))
        self.index = self.flat_index(torch.arange(offset, offset + count, device=self.lengths.device)[None])

    def flat_index(self, offsets: Tensor) -> Tensor:
        """Return the slots at `offsets` (B or 1, n) from each row's length, as flat indices (B*n,)."""
        return ((self.first + self.lengths)[:, None] + offsets).flatten()

    @property
    def first(self) -> Tensor:
        """The first slot of each row, as a flat index: (B,)."""
        return torch.arange(len(self.lengths), device=self.lengths.device) * self.capacity

    def advance_device(self, counts: Tensor | int) -> None:
        """Count the next slots as verified, `counts` (B,) or the same number in every row; the host is not told."""
        self.lengths.add_(counts)

    def advance_host(self, counts: list[int]) -> None:
        """Tell the host by how much each row has advanced."""
        self.host_lengths = [length + count for length, count in zip(self.host_lengths, counts, strict=True)]

    def select(self, rows: list[int]) -> None:
        """Keep only these rows of the batch."""
        self.host_lengths = [self.host_lengths[row] for row in rows]
        self.lengths = self.lengths[rows]

    def put(self, rows: list[int], lengths: list[int]) -> None:
        """Let these rows hold so many tokens."""
        for row, length in zip(rows, lengths, strict=True):
            self.host_lengths[row] = length
        self.lengths[rows] = torch.tensor(lengths, device=self.lengths.device)

    def verified(self, older_than: int = 0) -> Tensor:
        """Return which slots are verified, without the newest `older_than` of them: (B, extent)."""
        return torch.arange(self.extent, device=self.lengths.device) < (self.lengths - older_than)[:, None]

    def tree_mask(self, ancestors: Tensor, window: int | None = None) -> Tensor:
        """Return the attention mask of nodes after the verified slots: (B, 1, n, extent), True where visible.

        Args:
            ancestors: (B or 1, n, m), True where query i may see the j-th slot from the length on.
            window: how many of the newest verified slots are visible; None for all.
        """
        batch, (queries, nodes) = len(self.lengths), ancestors.shape[1:]
        verified = self.verified() if window is None else self.verified() & ~self.verified(older_than=window)
        slots = self.lengths[:, None] + torch.arange(nodes, device=self.lengths.device)  # (B, m)
        mask = verified[:, None].repeat(1, queries, 1)
        mask.scatter_(2, slots[:, None].expand(-1, queries, -1), ancestors.expand(batch, -1, -1))
        return mask[:, None]


class _Layer(CacheLayerMixin):
    """The cache that a transformers attention layer sees: writes into the store, returns a view."""

    def __init__(self, store: SlotStore, slots: Slots, layer: int):
        super().__init__()
        self.store, self.slots, self.layer = store, slots, layer
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        pass  # the store is allocated with the cache

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        index = self.slots.index
        index = index if index.device == self.store.device else index.to(self.store.device)
        self.store.write(self.layer, index, key_states, value_states)
        return self.store.view(self.layer, self.slots.extent)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.slots.extent, 0

    def get_seq_length(self) -> int:
        return self.slots.longest

    def get_max_length(self) -> int:
        return self.slots.capacity


class TreeCache(Cache):
    """The target's cache: B rows of `capacity` slots. `append` or `keep_path` says what of the last forward stays.

    Args:
        devices: one per layer, whose keys and values lie there.
        device: of lengths and indices.
        sizes: the other arguments of `SlotStore`.
    """

    def __init__(self, devices: list[torch.device], device: torch.device, batch: int, capacity: int, **sizes: Any):
        sizes |= {"batch": batch, "capacity": capacity}
        self.slots = Slots(batch, capacity, device)
        self.stores = {
            each: SlotStore(layers=devices.count(each), device=each, **sizes) for each in dict.fromkeys(devices)
        }
        in_store = [devices[:layer].count(each) for layer, each in enumerate(devices)]  # a layer's number in its store
        super().__init__(
            layers=[_Layer(self.stores[each], self.slots, n) for each, n in zip(devices, in_store, strict=True)]
        )

    def clear(self) -> None:
        """Empty it."""
        self.slots.clear()
        for store in self.stores.values():
            store.clear()

    def free(self) -> None:
        """Give the memory back: no text fits any more."""
        self.slots.host_lengths = []
        for store in self.stores.values():
            store.free()

    def append(self, counts: list[int]) -> None:
        """Keep the first counts[b] tokens of the last forward."""
        self.slots.advance_device(torch.tensor(counts, device=self.slots.lengths.device))
        self.slots.advance_host(counts)

    def keep_path(self, path: Tensor, counts: Tensor) -> None:
        """Keep a path of the last forward's nodes and drop the rest; the host follows by `slots.advance_host`.

        Args:
            path: (B, M) node numbers, ascending; entries from counts[b] on are ignored.
            counts: (B,) how many nodes of each row's path stay.
        """
        destination = torch.arange(path.shape[1], device=path.device)[None]
        moved = self.slots.flat_index(path), self.slots.flat_index(destination)
        for device, store in self.stores.items():
            store.move(*(index.to(device) for index in moved))
        self.slots.advance_device(counts)

    def select(self, rows: list[int]) -> None:
        """Keep only these rows of the batch."""
        self.slots.select(rows)
        for store in self.stores.values():
            store.select(rows)

    def put(self, rows: list[int], other: "TreeCache") -> None:
        """Copy the keys and values of a cache that is no longer to these rows."""
        for device, store in self.stores.items():
            store.put(rows, other.stores[device])
