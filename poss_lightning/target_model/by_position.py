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

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from poss_lightning.target_model.cache import STEP, TreeCache
from poss_lightning.target_model.grouped_attention import Attention
from poss_lightning.target_model.masks import Masks, Windows, find_paths, one_or_each

TAIL = 16  # tokens: the longest path, root included
BLOCK = 512  # keys that torch's attention on a CPU folds at once
ROWS = (4, 512), (8, 512), (16, 512), (12, 24)  # of `Shapes`, the fastest first
_attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu  # scaled_dot_product_attention, with the norm


class ByPosition:
    """How a target on a CPU attends: with masks and with a function for each tree.

    Args:
        dtype, head_dim: of keys.
        group: query heads that share a key head.
        rows: from which all products are steady.

    Raises:
        NotImplementedError: this CPU sums in an order that depends on the tree.
    """

    def __init__(self, dtype: torch.dtype, head_dim: int, group: int, rows: int):
        self.dtype, self.rows = dtype, rows
        self.shapes = find_shapes(dtype, head_dim, group, torch.get_num_threads())

    room = 0  # slots after a text that every forward writes, whatever the tree

    def limit(self, nodes: int, path: int) -> str | None:
        """Say which trees are exact, if one of `nodes` nodes in all with paths of `path` is not."""
        return f"paths of up to {TAIL - 1} drafted or looked-up tokens" if path > TAIL else None

    def fit(self, capacity: int) -> int:
        """Return the slots of a cache that holds texts of this length and a tree."""
        return self.shapes.round_extent(capacity + self.rows)

    def added_nodes(self, batch: int, nodes: int) -> int:
        """Count the nodes that are added to a tree of few, so that its products are steady."""
        return max(-(-self.rows // batch) - nodes, 0)

    def read(
        self, windows: Windows, ancestors: Tensor, positions: Tensor, cache: TreeCache, group: int
    ) -> tuple[Masks, Attention]:
        """Return the masks of a tree's nodes at `positions` (B, n), and the attention that they are for."""
        slots, (store,) = cache.slots, cache.stores.values()
        slots.extent = self.shapes.round_extent(slots.longest)  # what a layer is shown: the context
        rows = positions.shape[1] * group
        more = 0 if rows == group and self.shapes.group_alone else -rows % self.shapes.rows
        heads = store.slots.shape[3]
        contexts, tails = position_masks(windows, positions, slots.extent, self.dtype, heads, group, more)
        flat = (find_tails(ancestors, slots.lengths).clamp(min=0) + slots.first[:, None, None])[..., None, :]
        parts = torch.arange(2 * heads, device=flat.device).view(2, 1, 1, heads, 1)  # keys and values, by head
        index = (flat * (2 * heads) + parts).flatten()  # (2 * B * n * heads * TAIL,)

        def attend(
            layer: int, queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scale: float | None
        ) -> Tensor:
            tail_mask = next(tails[kind] for kind in contexts if contexts[kind] is mask)
            gathered = store.slots[layer].flatten(0, 2).index_select(0, index)
            return attend_by_position(queries, keys, values, mask, gathered, tail_mask, scale, self.shapes.most)

        return one_or_each(contexts), attend


def find_tails(ancestors: Tensor, lengths: Tensor, tail: int = TAIL) -> Tensor:
    """Find the slots of the last tokens up to each node, in order: (B or 1, n, n), (B,) -> (B, n, tail).

    Slots of tokens that would stand before the text are negative.
    """
    depths, paths = find_paths(ancestors)
    depth = depths[..., None] + torch.arange(1 - tail, 1, device=lengths.device)  # of these tokens; verified: negative
    return lengths[:, None, None] + depth.where(depth < 0, paths.gather(2, depth.clamp(min=0)))


def position_masks(
    windows: Windows, positions: Tensor, extent: int, dtype: torch.dtype, shared: int, group: int, more: int
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Make masks of the contexts and of the tails of nodes at `positions` (B, n), added to scores, by kind of layer.

    Returns:
        (B, 1, R, extent), for the queries of a `group` that share keys, one below the other, and `more` that mean
        nothing; (B * n * shared, 1, TAIL) in float32, for `shared` key heads.
    """
    slots, back = (torch.arange(*ends, device=positions.device) for ends in ((0, extent), (1 - TAIL, 1)))
    contexts, tails, at = {}, {}, positions[..., None]
    for kind, window in windows.items():
        hidden = (at - window).clamp(min=-1) if window else -1  # the last position that is not seen
        context, tail = (slots > at - TAIL) | (slots <= hidden), at + back <= hidden  # where nothing is seen
        context = torch.zeros_like(context, dtype=dtype).masked_fill_(context, torch.finfo(dtype).min)
        contexts[kind] = pad(context.repeat(1, group, 1), (0, 0, 0, more))[:, None]
        tail = torch.zeros(tail.shape, device=tail.device).masked_fill_(tail, torch.finfo(torch.float32).min)
        tails[kind] = tail.flatten(0, 1).repeat_interleave(shared, 0)[:, None]
    return contexts, tails


def attend_by_position(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor,
    gathered: Tensor,
    tail_mask: Tensor,
    scale: float | None,
    most: int,
) -> Tensor:
    """Attend from (B, H, n, d) to a context's keys and values (B, kv heads, S, d), and to tails: (B, n, H, d).

    Args:
        mask, tail_mask: of `position_masks`.
        gathered: (2 * B * n * kv * TAIL, d) keys, then values, of the tails.
        most: queries that read a context together.
    """
    batch, heads, nodes, width = queries.shape
    shared, group = keys.shape[1], heads // keys.shape[1]
    factor = width**-0.5 if scale is None else scale
    # 1. The context, for all nodes at once.
    folded = queries.reshape(batch, shared, group * nodes, width)
    if more := mask.shape[2] - group * nodes:
        folded = pad(folded, (0, 0, 0, more))
    context, norm = _fold(folded, keys, values, mask, factor, most)  # (B, kv, R, d), (B, kv, R)
    if more:
        context, norm = context[:, :, : group * nodes], norm[..., : group * nodes]
    if nodes > 1:
        context, norm = (x.unflatten(2, (group, nodes)).movedim(3, 1) for x in (context, norm))  # (B, n, kv, g, …)
    context, norm = context.reshape(-1, group, width), norm.reshape(-1, group, 1)  # (B * n * kv, g, …)
    # 2. The tails, node by node, in one softmax with the context, which has its norm as a score; in float32.
    tail_keys, tail_values = gathered.float().view(2, -1, TAIL, width).unbind()  # (B * n * kv, TAIL, d)
    by_node = queries.transpose(1, 2).reshape(-1, group, width).float()  # (B * n * kv, g, d)
    scores = torch.baddbmm(tail_mask, by_node, tail_keys.mT, alpha=factor)  # (B * n * kv, g, TAIL)
    weights, share = torch.cat([scores, norm], dim=2).softmax(-1).split((TAIL, 1), dim=2)
    joined = torch.baddbmm(context * share, weights, tail_values)
    return joined.view(batch, nodes, heads, width).to(queries.dtype)


def _fold(
    queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scale: float, most: int
) -> tuple[Tensor, Tensor]:
    """Attend to a context, at most so many queries at once: the output and the logarithm of the softmax's norm."""
    if queries.shape[2] <= most:
        return _attend(queries, keys, values, attn_mask=mask, scale=scale)
    blocks = zip(queries.split(most, 2), mask.split(most, 2), strict=True)
    parts = [_attend(some, keys, values, attn_mask=seen, scale=scale) for some, seen in blocks]
    out, norm = (torch.cat(part, dim=2) for part in zip(*parts, strict=True))
    return out, norm


class Shapes(NamedTuple):
    """Shapes of the products in attention that sum in one order, whatever the tree."""

    rows: int  # the queries that read a context together are a multiple of so many,
    most: int  # and at most so many;
    group_alone: bool  # or they are those of one node
    extents: tuple[int, ...]  # of a context, up to `BLOCK`

    def round_extent(self, count: int) -> int:
        """Round a number of slots up to whole blocks and one of the extents."""
        blocks, rest = divmod(max(count, 1), BLOCK)
        return blocks * BLOCK + min(size for size in (0, *self.extents) if size >= rest)


@cache
def find_shapes(dtype: torch.dtype, head_dim: int, group: int, threads: int) -> Shapes:
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
            group_alone = all(agree(seen, (rows, BLOCK), (group, BLOCK)) for seen in lengths)
            return Shapes(rows, most, group_alone, (*extents, BLOCK))
    raise NotImplementedError("this CPU sums attention in an order that depends on the number of nodes")
