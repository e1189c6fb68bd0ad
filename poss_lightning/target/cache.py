"""Preallocated keys and values for trees: write N nodes behind the verified slots, keep the accepted path.

Every row of the batch has a length of its own: slots below it are verified, slots from it on hold the tree in hand.

    row 0   v v v v v v | r a b c . .        v verified, r root, a b c nodes: length 6
    row 1   v v v | r a b c . . . . .        length 3
"""

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin


class SlotStore:
    """Keys and values of one attention layer: B rows of C slots, stored slot-major so that one copy moves a token."""

    def __init__(self, batch: int, capacity: int, heads: int, head_dim: int, dtype: torch.dtype, device: torch.device):
        self.batch, self.capacity = batch, capacity
        self.keys = torch.zeros(batch * capacity, heads, head_dim, dtype=dtype, device=device)  # (B*C, H, d)
        self.values = torch.zeros_like(self.keys)

    def write(self, index: Tensor, keys: Tensor, values: Tensor) -> None:
        """Put keys and values (B, H, n, d) at flat slots `index` (B*n,)."""
        self.keys.index_copy_(0, index, keys.transpose(1, 2).flatten(0, 1))
        self.values.index_copy_(0, index, values.transpose(1, 2).flatten(0, 1))

    def move(self, source: Tensor, destination: Tensor) -> None:
        """Copy flat slots `source` (n,) to flat slots `destination` (n,)."""
        self.keys.index_copy_(0, destination, self.keys[source])
        self.values.index_copy_(0, destination, self.values[source])

    def view(self, extent: int) -> tuple[Tensor, Tensor]:
        """The first `extent` slots of every row: two views (B, H, extent, d)."""
        shape = (self.batch, self.capacity, *self.keys.shape[1:])
        return (
            self.keys.view(shape)[:, :extent].transpose(1, 2),
            self.values.view(shape)[:, :extent].transpose(1, 2),
        )

    def select(self, rows: list[int]) -> None:
        """Forget every row of the batch but `rows`."""
        shape = (self.batch, self.capacity, *self.keys.shape[1:])
        self.keys = self.keys.view(shape)[rows].flatten(0, 1)
        self.values = self.values.view(shape)[rows].flatten(0, 1)
        self.batch = len(rows)


class Slots:
    """How long each row is, and which flat slots the next tokens take. Shared by all layers of a cache."""

    def __init__(self, batch: int, capacity: int, device: torch.device):
        self.capacity = capacity
        self.lengths = [0] * batch  # the host's copy: no synchronisation is needed to size a view
        self.length = torch.zeros(batch, dtype=torch.long, device=device)  # (B,)
        self.extent = 0
        self.index = self.length

    def open(self, count: int, offset: int = 0) -> None:
        """Let the next writes go to the `count` slots that begin `offset` behind each row's length.

        Raises:
            ValueError: they lie beyond the capacity.
        """
        self.extent = max(self.lengths) + offset + count
        if self.extent > self.capacity:
            raise ValueError(
                f"the cache has {self.capacity} slots a row, {self.extent} are needed: make it larger when it is built"
            )
        self.index = self.flat(torch.arange(offset, offset + count, device=self.length.device)[None])

    def flat(self, behind: Tensor) -> Tensor:
        """Slots `behind` (B or 1, n) each row's length, as flat indices (B*n,)."""
        rows = torch.arange(len(self.length), device=self.length.device)[:, None] * self.capacity
        return (rows + self.length[:, None] + behind).flatten()

    def advance(self, counts: list[int]) -> None:
        """Call the next counts[b] slots of row b verified."""
        self.lengths = [length + count for length, count in zip(self.lengths, counts, strict=True)]
        self.length = torch.tensor(self.lengths, device=self.length.device)

    def select(self, rows: list[int]) -> None:
        """Forget every row of the batch but `rows`."""
        self.lengths = [self.lengths[row] for row in rows]
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

    def __init__(self, store: SlotStore, slots: Slots):
        super().__init__()
        self.store, self.slots = store, slots
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to do: the store is allocated when the cache is built."""

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        self.store.write(self.slots.index, key_states, value_states)
        return self.store.view(self.slots.extent)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.slots.extent, 0

    def get_seq_length(self) -> int:
        return max(self.slots.lengths)

    def get_max_length(self) -> int:
        return self.slots.capacity


class TreeCache(Cache):
    """The target's cache: B rows of `capacity` slots; `append` or `keep` says what of the last forward stays."""

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
        self.slots = Slots(batch, capacity, device)
        self.stores = [SlotStore(batch, capacity, heads, head_dim, dtype, device) for _ in range(layers)]
        super().__init__(layers=[_Layer(store, self.slots) for store in self.stores])

    def append(self, counts: list[int]) -> None:
        """Keep the first counts[b] tokens of the last forward."""
        self.slots.advance(counts)

    def keep(self, path: Tensor, counts: list[int]) -> None:
        """Keep a path of the last forward's nodes and forget the rest.

        Args:
            path: (B, M) node numbers, ascending; entries from counts[b] on are ignored.
            counts: how many nodes of each row's path stay.
        """
        source = self.slots.flat(path)
        destination = self.slots.flat(torch.arange(path.shape[1], device=path.device)[None])
        for store in self.stores:
            store.move(source, destination)
        self.slots.advance(counts)

    def select(self, rows: list[int]) -> None:
        """Forget every row of the batch but `rows`."""
        for store in self.stores:
            store.select(rows)
        self.slots.select(rows)
