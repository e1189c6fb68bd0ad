"""Preallocated keys and values for trees: write N nodes behind the verified slots, keep the accepted path.

Every row of the batch has a length of its own: slots below it are verified, slots from it on hold the tree in hand.

    row 0   v v v v v v | r a b c . .        v verified, r root, a b c nodes: length 6
    row 1   v v v | r a b c . . . . .        length 3
"""

from typing import NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

STEP = 64  # views grow by so many slots


class Packed(NamedTuple):
    """M nodes of a batch of trees that are read side by side, in one row: each sees its own row's slots alone."""

    rows: Tensor  # (M,)
    nodes: Tensor  # (M,)

    def lay(self, of_nodes: Tensor) -> Tensor:
        """(B, n) -> (1, M)"""
        return of_nodes[self.rows, self.nodes][None]

    def mask(self, visible: Tensor) -> Tensor:
        """(B, 1, n, extent) -> (1, 1, M, B * extent)"""
        own = visible[self.rows, 0, self.nodes]  # (M, extent)
        rows = torch.arange(len(visible), device=own.device) == self.rows[:, None]  # (M, B)
        return (rows[..., None] & own[:, None]).flatten(1)[None, None]


class SlotStore:
    """Keys and values of L attention layers: B rows of C slots, slot-major, so that one copy moves a token."""

    def __init__(
        self,
        layers: int,
        batch: int,
        capacity: int,
        heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ):
        self.batch, self.capacity = batch, capacity
        self.keys = torch.zeros(layers, batch * capacity, heads, head_dim, dtype=dtype, device=device)  # (L, B*C, H, d)
        self.values = torch.zeros_like(self.keys)

    def write(self, layers: int | slice, index: Tensor, keys: Tensor, values: Tensor) -> None:
        """Put keys and values (layers if several, B, H, n, d) at flat slots `index` (B*n,)."""
        self.keys[layers].index_copy_(-3, index, keys.transpose(-3, -2).flatten(-4, -3))
        self.values[layers].index_copy_(-3, index, values.transpose(-3, -2).flatten(-4, -3))

    def move(self, source: Tensor, destination: Tensor) -> None:
        """Copy flat slots `source` (n,) to flat slots `destination` (n,), in every layer."""
        self.keys.index_copy_(1, destination, self.keys[:, source])
        self.values.index_copy_(1, destination, self.values[:, source])

    def view(self, layer: int, extent: int) -> tuple[Tensor, Tensor]:
        """The first `extent` slots of every row of a layer: two views (B, H, extent, d)."""
        keys, values = self._by_row(self.keys[layer], 0), self._by_row(self.values[layer], 0)
        return keys[:, :extent].transpose(1, 2), values[:, :extent].transpose(1, 2)

    def clear(self) -> None:
        """Zeros everywhere: what is hidden weighs nothing, but nothing times a NaN is one."""
        self.keys.zero_()
        self.values.zero_()

    def select(self, rows: list[int]) -> None:
        """Forget every row of the batch but `rows`."""
        self.keys = self._by_row(self.keys, 1)[:, rows].flatten(1, 2)
        self.values = self._by_row(self.values, 1)[:, rows].flatten(1, 2)
        self.batch = len(rows)

    def _by_row(self, slots: Tensor, dim: int) -> Tensor:
        return slots.unflatten(dim, (self.batch, self.capacity))


class Slots:
    """How long each row is, and which flat slots the next tokens take. Shared by all layers of a cache.

    The lengths are kept twice: on the device, where all work is done, and by the host, which sizes views by them. The
    device's change in place and without asking (`advance`); the host's follow when it is told (`note`).

    Attributes:
        cover: views reach at least as many slots behind the longest row, so that steps of several sizes share a shape.
    """

    def __init__(self, batch: int, capacity: int, device: torch.device):
        self.capacity = capacity
        self.lengths, self.longest = [0] * batch, 0  # the host's
        self.length = torch.zeros(batch, dtype=torch.long, device=device)  # (B,)
        self.cover, self.extent, self.packed = 0, 0, False
        self.index = self.length

    def reach(self, count: int) -> int:
        """Slots of a row that a view needs for `count` more behind the longest row, in steps: few different shapes.

        Raises:
            ValueError: they lie beyond the capacity.
        """
        needed = self.longest + count
        if needed > self.capacity:
            raise ValueError(
                f"the cache has {self.capacity} slots a row, {needed} are needed: make it larger when it is built"
            )
        return min(-(-needed // STEP) * STEP, self.capacity)

    def clear(self) -> None:
        """Begin anew."""
        self.lengths, self.longest = [0] * len(self.lengths), 0
        self.length.zero_()

    def fits(self, batch: int, capacity: int) -> bool:
        """Whether it has so many rows, of at least such a capacity."""
        return len(self.lengths) == batch and self.capacity >= capacity

    def open(self, count: int, offset: int = 0) -> None:
        """Let the next writes go to the `count` slots that begin `offset` behind each row's length."""
        self.extent, self.packed = self.reach(max(offset + count, self.cover)), False
        self.index = self.flat(torch.arange(offset, offset + count, device=self.length.device)[None])

    def pack(self, packed: Packed) -> None:
        """Of the slots just opened, let only those of `packed` be written, and all rows be viewed as one."""
        self.index = packed.lay(self.index.view(len(self.length), -1))[0]
        self.packed = True

    def flat(self, behind: Tensor) -> Tensor:
        """Slots `behind` (B or 1, n) each row's length, as flat indices (B*n,)."""
        rows = torch.arange(len(self.length), device=self.length.device) * self.capacity
        return ((rows + self.length)[:, None] + behind).flatten()

    def advance(self, counts: Tensor) -> None:
        """Call the next counts[b] slots of row b verified; the host does not know it yet."""
        self.length.add_(counts)

    def note(self, counts: list[int]) -> None:
        """Tell the host by how much each row has advanced."""
        self.lengths = [length + count for length, count in zip(self.lengths, counts, strict=True)]
        self.longest = max(self.lengths)

    def select(self, rows: list[int]) -> None:
        """Forget every row of the batch but `rows`."""
        self.lengths = [self.lengths[row] for row in rows]
        self.longest = max(self.lengths)
        self.length = self.length[rows]

    def visible(self, ancestors: Tensor) -> Tensor:
        """Attention mask of nodes behind the verified slots.

        Args:
            ancestors: (B or 1, n, m), True where query i may see the j-th slot behind the length.

        Returns:
            (B, 1, n, extent), True where visible: every verified slot, and the ancestors.
        """
        behind = torch.arange(self.extent, device=self.length.device) - self.length[:, None]  # (B, extent)
        batch, (queries, nodes) = len(self.length), ancestors.shape[1:]
        lookup = behind.clamp(0, nodes - 1)[:, None].expand(batch, queries, self.extent)
        tree = ancestors.expand(batch, queries, nodes).gather(2, lookup) & (behind < nodes)[:, None]
        return (tree | (behind < 0)[:, None])[:, None]


class _Layer(CacheLayerMixin):
    """What a transformers attention layer talks to: writes into the store, reads a view."""

    def __init__(self, store: SlotStore, slots: Slots, layer: int):
        super().__init__()
        self.store, self.slots, self.layer = store, slots, layer
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to do: the store is allocated when the cache is built."""

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        self.store.write(self.layer, self.slots.index, key_states, value_states)
        keys, values = self.store.view(self.layer, self.slots.extent)
        if self.slots.packed:  # (B, H, extent, d) -> (1, H, B * extent, d)
            keys, values = (rows.transpose(0, 1).flatten(1, 2)[None] for rows in (keys, values))
        return keys, values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.slots.extent, 0

    def get_seq_length(self) -> int:
        return self.slots.longest

    def get_max_length(self) -> int:
        return self.slots.capacity


class TreeCache(Cache):
    """The target's cache: B rows of `capacity` slots; `append` or `keep` says what of the last forward stays."""

    def __init__(self, store: SlotStore):
        self.store, self.slots = store, Slots(store.batch, store.capacity, store.keys.device)
        super().__init__(layers=[_Layer(store, self.slots, layer) for layer in range(len(store.keys))])

    def clear(self) -> None:
        """Begin anew."""
        self.slots.clear()
        self.store.clear()

    def append(self, counts: list[int]) -> None:
        """Keep the first counts[b] tokens of the last forward."""
        self.slots.advance(torch.tensor(counts, device=self.slots.length.device))
        self.slots.note(counts)

    def keep(self, path: Tensor, counts: Tensor) -> None:
        """Keep a path of the last forward's nodes and forget the rest; the host is not told (`slots.note`).

        Args:
            path: (B, M) node numbers, ascending; entries from counts[b] on are ignored.
            counts: (B,) how many nodes of each row's path stay.
        """
        destination = torch.arange(path.shape[1], device=path.device)[None]
        self.store.move(self.slots.flat(path), self.slots.flat(destination))
        self.slots.advance(counts)

    def select(self, rows: list[int]) -> None:
        """Forget every row of the batch but `rows`."""
        self.store.select(rows)
        self.slots.select(rows)
