"""Attention of a tree's nodes by position: the bits of a node are those of a plain step at its place in the text.

A sum of floats depends on its order. The ancestors of a node stand in slots by their numbers in the tree, those of a
plain step by their positions. So the last `TAIL` tokens up to each node, its path among them, are gathered in order;
all tokens before are in order in the cache, where all nodes read them together. Both parts join by their norms. With a
tail of 4, after 6 verified tokens, for the tree r(a(c) b):

    slot       0 1 2 3 4 5 | r a b c
    r          x x x           gathers 3 4 5 r
    a          x x x x         gathers 4 5 r a
    b          x x x x         gathers 4 5 r b
    c          x x x x x       gathers 5 r a c
"""

from functools import cache, partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from poss_lightning.target.cache import STEP, Slots
from poss_lightning.target.grouped_attention import Attention
from poss_lightning.target.masks import Masks, Windows

TAIL = 16  # tokens: the longest path, root included
BLOCK = 512  # keys that torch's attention on a CPU folds at once
ROWS = (4, 512), (8, 512), (16, 512), (12, 24)  # of `Shapes`, the fastest first
_attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu  # scaled_dot_product_attention, with the norm


class ByPosition:
    """How a target on a CPU attends: with masks and with a function for each tree.

    Args:
        dtype, head_dim: of keys.

    Raises:
        NotImplementedError: this CPU sums in an order that depends on the tree.
    """

    def __init__(self, dtype: torch.dtype, head_dim: int):
        self.dtype = dtype
        self.shapes = find_shapes(dtype, head_dim, torch.get_num_threads())

    room = 0  # slots after a text that every forward writes, whatever the tree

    def limit(self, nodes: int, path: int) -> str | None:
        """Say which trees are exact, if one of `nodes` nodes in all with paths of `path` is not."""
        return f"paths of up to {TAIL - 1} drafted or looked-up tokens" if path > TAIL else None

    def fit(self, capacity: int) -> int:
        """Return the slots of a cache that holds texts of this length and a tree."""
        return self.shapes.round_extent(capacity)

    def fill(self, tokens: Tensor, ancestors: Tensor) -> tuple[Tensor, Tensor]:
        """Return a tree as it is: products are steady whatever the number of nodes."""
        return tokens, ancestors

    def read(
        self, windows: Windows, ancestors: Tensor, positions: Tensor, slots: Slots, copies: int
    ) -> tuple[Masks, Attention]:
        """Return the masks of a tree's nodes at `positions` (B, n), and the attention that they are for."""
        extent = self.shapes.round_extent(slots.longest)
        slots.extent = max(slots.extent, extent)
        masks = position_masks(windows, positions, extent, self.dtype, copies, self.shapes.rows)
        tails = find_tails(ancestors, slots.lengths).expand(len(positions), -1, -1).clamp(min=0)
        return masks, partial(attend_by_position, tail_slots=tails, most=self.shapes.most)


def find_tails(ancestors: Tensor, lengths: Tensor, tail: int = TAIL) -> Tensor:
    """Find the slots of the last tokens up to each node, in order: (B or 1, n, n), (B,) -> (B, n, tail).

    Slots of tokens that would stand before the text are negative.
    """
    depths, numbers = ancestors.sum(-1) - 1, torch.arange(ancestors.shape[1], device=lengths.device)
    depth_of = depths[:, None].where(ancestors, tail)  # (B or 1, n, n) of ancestors; of others, where it is cut off
    path = torch.zeros(*depths.shape, tail + 1, dtype=torch.long, device=lengths.device)
    path.scatter_(2, depth_of, numbers.expand_as(depth_of))  # (B or 1, n, tail + 1) the node at each depth
    depth = depths[..., None] + torch.arange(1 - tail, 1, device=lengths.device)  # of these tokens; verified: negative
    return lengths[:, None, None] + depth.where(depth < 0, path.gather(2, depth.clamp(min=0)))


def position_masks(
    windows: Windows, positions: Tensor, extent: int, dtype: torch.dtype, copies: int, rows: int
) -> Masks:
    """Make the masks of the first `extent` slots and then of the tail, for nodes at `positions` (B, n).

    Returns:
        (B, 1, R, extent + TAIL), added to scores, R a multiple of `rows` that has room for copies * n; by kind of layer
        if there are several.
    """
    more = -positions.shape[1] * copies % rows
    slots = torch.arange(extent, device=positions.device)
    back, at = torch.arange(1 - TAIL, 1, device=positions.device), positions[..., None]
    masks = {}
    for kind, window in windows.items():
        hidden = (at - window).clamp(min=-1) if window else -1  # the last position that is not seen
        seen = torch.cat([(slots <= at - TAIL) & (slots > hidden), at + back > hidden], dim=-1)
        mask = torch.zeros_like(seen, dtype=dtype).masked_fill_(~seen, torch.finfo(dtype).min)
        masks[kind] = pad(mask.repeat(1, copies, 1), (0, 0, 0, more))[:, None]
    return masks if len(masks) > 1 else masks.popitem()[1]


def attend_by_position(
    queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scale: float | None, tail_slots: Tensor, most: int
) -> Tensor:
    """Attend from (B, H, n, d) to a cache's keys and values (B, kv heads, S, d): (B, n, H, d).

    Args:
        mask: (B, 1, R, extent + TAIL), of `position_masks`, with copies for the heads that share keys.
        tail_slots: (B, n, TAIL), of `find_tails`.
        most: queries that read a context together.
    """
    extent, (batch, nodes) = mask.shape[-1] - TAIL, tail_slots.shape[:2]
    grouped = queries.unflatten(1, (keys.shape[1], -1))  # (B, kv, g, n, d)
    # 1. What is before the tails, for all nodes at once.
    rows = grouped.shape[2] * nodes
    folded = pad(grouped.flatten(2, 3), (0, 0, 0, mask.shape[2] - rows))  # (B, kv, R, d)
    before = keys[:, :, :extent], values[:, :, :extent]
    parts = [
        _attend(some, *before, attn_mask=seen, scale=scale)
        for some, seen in zip(folded.split(most, 2), mask[..., :extent].split(most, 2), strict=True)
    ]
    found = (torch.cat(part, dim=2)[:, :, :rows] for part in zip(*parts, strict=True))
    context, norm = (x.unflatten(2, grouped.shape[2:4]).movedim(3, 1) for x in found)  # (B, n, kv, g, ...)
    # 2. The tails, node by node, in float32: faster than bfloat16 for so few numbers.
    by_node = grouped.movedim(3, 1).flatten(0, 1).float()  # (B * n, kv, g, d)
    gathered = (_gather(x, tail_slots.flatten(1)).unflatten(0, (-1, TAIL)).transpose(1, 2) for x in (keys, values))
    own_mask = mask[:, 0, :nodes, extent:].reshape(batch * nodes, 1, 1, TAIL).float()
    own_mask = own_mask.expand(-1, -1, by_node.shape[2], -1)
    tail, tail_norm = _attend(by_node, *gathered, attn_mask=own_mask, scale=scale)
    # 3. One softmax over both. `sigmoid`, or a fused product and sum, may have other bits for other numbers of nodes.
    tail, tail_norm = (x.unflatten(0, (batch, nodes)) for x in (tail, tail_norm))
    first, second = torch.stack([norm, tail_norm], dim=-1).softmax(-1).split(1, dim=-1)  # (B, n, kv, g, 1)
    return (context * first + tail * second).flatten(2, 3).to(queries.dtype)


def _gather(x: Tensor, slots: Tensor) -> Tensor:
    """Take slots (B, m) of every row: (B, kv, S, d) -> (B * m, kv, d), in float32."""
    if len(slots) == 1:  # several times as fast
        return x[0].transpose(0, 1).index_select(0, slots[0]).float()
    rows = torch.arange(len(slots), device=x.device)[:, None]
    return x.transpose(1, 2)[rows, slots].flatten(0, 1).float()


class Shapes(NamedTuple):
    """Shapes of the products in attention that sum in one order, whatever the tree."""

    rows: int  # the queries that read a context together are a multiple of so many,
    most: int  # and at most so many
    extents: tuple[int, ...]  # of a context, up to `BLOCK`

    def round_extent(self, count: int) -> int:
        """Round a number of slots up to whole blocks and one of the extents."""
        blocks, rest = divmod(max(count, 1), BLOCK)
        return blocks * BLOCK + min(size for size in (0, *self.extents) if size >= rest)


@cache
def find_shapes(dtype: torch.dtype, head_dim: int, threads: int) -> Shapes:
    """Find by trial the fewest rows that sum in the order of many, and the extents that sum in the order of `BLOCK`.

    Keys that a mask hides add zeros, but products of some shapes sum in another order. What is summed here cancels, so
    that a result is the error of its sum.

    Raises:
        NotImplementedError: no shapes do.
    """
    numbers = torch.Generator().manual_seed(0)

    def agree(seen: int, *shapes: tuple[int, int]) -> bool:
        first, second = torch.randperm(seen, generator=numbers).chunk(2)
        queries, keys, values = torch.randn(3, 1, 1, BLOCK, head_dim, generator=numbers).to(dtype)
        keys[:, :, second], values[:, :, second] = keys[:, :, first], -values[:, :, first]
        queries, found = queries[:, :, :1].repeat(1, 1, BLOCK, 1), []
        for rows, extent in shapes:
            mask = torch.zeros(1, 1, rows, extent, dtype=dtype)
            mask[..., seen:] = torch.finfo(dtype).min
            found.append(_attend(queries[:, :, :rows], keys[:, :, :extent], values[:, :, :extent], attn_mask=mask)[0])
        return all(out.eq(found[0][:, :, :1]).all() for out in found)

    lengths = range(STEP // 2, BLOCK, 2 * STEP)
    for rows, most in ROWS:
        counts = sorted({min(count, most) for count in (rows, 3 * rows, 64 + rows, 192)})
        if all(agree(seen, *((count, BLOCK) for count in counts)) for seen in lengths):
            extents = []
            for extent in range(STEP, BLOCK, STEP):
                shapes = (rows, BLOCK), *((count, extent) for count in counts)
                if all(agree(seen, *shapes) for seen in lengths if seen < extent):
                    extents.append(extent)
            return Shapes(rows, most, (*extents, BLOCK))
    raise NotImplementedError("this CPU sums attention in an order that depends on the number of nodes")
