"""`by_position` on a GPU: kernels whose bits for a node are those of a plain step at its place (Triton).

Keys are folded in the order of positions, in tiles of `TILE` and splits of `SPLIT` tokens that begin at fixed places.
The ancestors of a node among the new nodes stand in slots by their numbers, so they are gathered by depth, `paths`.

    split        0               1                     whole tiles below the length: `_context`, all nodes together
    tile         a b c d         e f | g               the last tiles, node by node, and the sum of all: `_tail`
"""

from functools import partial

import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor

from poss_lightning.target_model.cache import TreeCache
from poss_lightning.target_model.grouped_attention import Attention
from poss_lightning.target_model.masks import Masks, Windows, find_paths, one_or_each

SPLIT, TILE = 256, 64  # tokens
ROWS, WARPS, STAGES = 32, 4, 3  # of a program of `_context`
NODES = 64  # of every forward, so that its products have one shape; and the longest path
LOG2_E = 1.4426950408889634


class TreeKernel:
    """How a target on a GPU attends by position; with the methods of `ByPosition`."""

    room = NODES  # slots after a text that every forward writes

    def limit(self, nodes: int, path: int) -> str | None:
        """Say which trees are exact, if one of `nodes` nodes in all with paths of `path` is not."""
        return f"trees of up to {NODES} nodes" if nodes > NODES else None

    def fit(self, capacity: int) -> int:
        """Return the slots of a cache that holds texts of this length and a tree."""
        return capacity + NODES

    def added_nodes(self, batch: int, nodes: int) -> int:
        """Count the nodes that are added to a tree, so that every forward has products of the same shapes."""
        return NODES - nodes

    def read(
        self, windows: Windows, ancestors: Tensor, positions: Tensor, cache: TreeCache, group: int
    ) -> tuple[Masks, Attention]:
        """Return masks of a tree's nodes, which only stand for the windows, and the attention that they are for."""
        masks = {kind: positions.new_zeros(1, 1, 1, 1) for kind in windows}
        depths, paths = find_paths(ancestors)

        def attend(
            layer: int, queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scale: float | None
        ) -> Tensor:
            window = next(window for kind, window in windows.items() if masks[kind] is mask)
            return tree_attention(queries, keys, values, cache.slots.lengths, depths, paths, scale, window)

        return one_or_each(masks), attend


def tree_attention(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    lengths: Tensor,
    depths: Tensor,
    paths: Tensor,
    scale: float | None = None,
    window: int | None = None,
) -> Tensor:
    """Attend from (B, H, n, d) to a cache's slots (B, kv heads, S, d): (B, n, H, d).

    Args:
        lengths: (B,) verified slots; the nodes stand in the n slots after them.
        depths, paths: of `find_paths`, (B or 1, n) and (B or 1, n, n).
        window: tokens that a node sees, itself included; None for all.
    """
    (batch, heads, nodes, width), (kv, extent) = queries.shape, keys.shape[1:3]
    group, splits = heads // kv, triton.cdiv(extent, SPLIT)
    empty = partial(queries.new_empty, dtype=torch.float32)
    sums = empty(batch * kv * splits * nodes * group, width)  # of values, by text, key head, split, node and head
    highest, norms = empty(2, len(sums)).unbind()
    out = queries.new_empty(batch, nodes, heads, width)
    scale = (width**-0.5 if scale is None else scale) * LOG2_E
    of_text = [0 if len(x) == 1 else x.stride(0) for x in (depths, paths)]
    sizes = {"D": width, "D_POW2": max(triton.next_power_of_2(width), 16), "TILE": TILE, "SPLIT": SPLIT}
    sizes |= {"WINDOW": window or 0}
    if not INTERPRETED:
        sizes |= {"enable_fp_fusion": False}  # else a product and a sum round once here and twice there
    common = lengths, depths, scale, nodes, group, kv, splits, *queries.stride()[:3], *keys.stride()[:3], of_text[0]
    _context[splits, triton.cdiv(nodes * group, ROWS), batch * kv](  # pyright: ignore[reportIndexIssue]
        queries,
        keys,
        values,
        sums,
        highest,
        norms,
        *common,
        ROWS=ROWS,
        num_warps=WARPS,
        num_stages=STAGES - (width > 128),
        **sizes,
    )
    grouped = max(16, triton.next_power_of_2(group))
    _tail[nodes, batch * kv](  # pyright: ignore[reportIndexIssue]
        queries, keys, values, sums, highest, norms, *common, out, paths, of_text[1], paths.stride(1), GROUP=grouped,
        num_warps=4, num_stages=1, **sizes,
    )  # fmt: skip
    return out


INTERPRETED = triton.knobs.runtime.interpret


@triton.jit
def _fold(q, k, v, seen, top, norm, total, scale):
    """Fold a tile of keys into the highest score (R,), the norm (R, 16 alike) and the sum of values (R, d)."""
    score = tl.where(seen, tl.dot(q, tl.trans(k), input_precision="ieee") * scale, float("-inf"))
    higher = tl.maximum(top, tl.max(score, 1))
    base = tl.where(higher == float("-inf"), 0.0, higher)
    weight = tl.exp2(score - base[:, None]).to(v.dtype)
    shrink = tl.exp2(top - base)[:, None]
    ones = tl.full((k.shape[0], 16), 1.0, v.dtype)  # a product, as the order of a sum depends on the layout
    norm = norm * shrink + tl.dot(weight, ones, input_precision="ieee")
    total = total * shrink + tl.dot(weight, v, input_precision="ieee")
    return higher, norm, total


@triton.jit
def _join(top, norm, total, other_top, other_norm, other_total):
    """Join two parts of the keys: of each the highest score (R,), the norm (R, 16) and the sum of values (R, d)."""
    higher = tl.maximum(top, other_top)
    base = tl.where(higher == float("-inf"), 0.0, higher)
    weight, other_weight = tl.exp2(top - base)[:, None], tl.exp2(other_top - base)[:, None]
    return higher, norm * weight + other_norm * other_weight, total * weight + other_total * other_weight


@triton.jit
def _load(highest, norms, sums, rows, real, d, D):
    """Load what `_context` stored of a split."""
    lane = tl.arange(0, 16)[None]
    top = tl.load(highest + rows, mask=real, other=float("-inf"))
    norm = tl.load(norms + rows[:, None] + lane, mask=real[:, None] & (lane == 0), other=0.0)
    return top, norm, tl.load(sums + rows[:, None] * D + d[None], mask=real[:, None] & (d < D)[None], other=0.0)


@triton.jit
def _context(
    q, k, v, sums, highest, norms, lengths, depths, scale, n, G, KV, splits, q_b, q_h, q_n, k_b, k_h, k_s, depth_b,
    D: tl.constexpr, D_POW2: tl.constexpr, TILE: tl.constexpr, SPLIT: tl.constexpr, WINDOW: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """Fold the whole tiles of one split that lie below a text's length, for `ROWS` queries of a key head."""
    split, block, pair = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    b, head = (pair // KV).to(tl.int64), pair % KV
    length = tl.load(lengths + b).to(tl.int32)
    edge, start = length // TILE * TILE, split * SPLIT
    begin = start
    if WINDOW > 0:  # tiles that no node sees change nothing
        begin = tl.maximum(start, tl.maximum(length - WINDOW + 1, 0) // TILE * TILE)
    if start < edge:
        rows, d = block * ROWS + tl.arange(0, ROWS), tl.arange(0, D_POW2)
        node, real, wide = rows // G, rows < n * G, (d < D)[None]
        at = q + b * q_b + (head * G + rows % G)[:, None] * q_h + node[:, None] * q_n + d[None]
        query = tl.load(at, mask=real[:, None] & wide, other=0.0)
        position = length + tl.load(depths + b * depth_b + node, mask=real, other=0).to(tl.int32)
        top = tl.full((ROWS,), float("-inf"), tl.float32)
        norm, total = tl.zeros((ROWS, 16), tl.float32), tl.zeros((ROWS, D_POW2), tl.float32)
        for first in range(begin, tl.minimum(start + SPLIT, edge), TILE):
            slots = first + tl.arange(0, TILE)
            from_slots = b * k_b + head * k_h + slots[:, None].to(tl.int64) * k_s + d[None]
            key, value = tl.load(k + from_slots, mask=wide, other=0.0), tl.load(v + from_slots, mask=wide, other=0.0)
            seen = slots[None] <= position[:, None]
            if WINDOW > 0:
                seen = seen & (slots[None] > position[:, None] - WINDOW)
            top, norm, total = _fold(query, key, value, seen, top, norm, total, scale)
        to = (pair * splits + split).to(tl.int64) * n * G + rows
        lane = tl.arange(0, 16)[None]
        tl.store(highest + to, top, mask=real)
        tl.store(norms + to[:, None] + lane, norm, mask=real[:, None] & (lane == 0))
        tl.store(sums + to[:, None] * D + d[None], total, mask=real[:, None] & wide)


@triton.jit
def _tail(
    q, k, v, sums, highest, norms, lengths, depths, scale, n, G, KV, splits, q_b, q_h, q_n, k_b, k_h, k_s, depth_b,
    out, paths, path_b, path_n,
    D: tl.constexpr, D_POW2: tl.constexpr, TILE: tl.constexpr, SPLIT: tl.constexpr, WINDOW: tl.constexpr,
    GROUP: tl.constexpr,
):  # fmt: skip
    """Fold the one or two last tiles of a node, whose path is gathered, and join all splits, for one key head."""
    node, pair = tl.program_id(0), tl.program_id(1)
    b, head = (pair // KV).to(tl.int64), pair % KV
    length = tl.load(lengths + b).to(tl.int32)
    position = length + tl.load(depths + b * depth_b + node).to(tl.int32)
    edge = length // TILE * TILE
    g, d = tl.arange(0, GROUP), tl.arange(0, D_POW2)
    real = g < G
    wide = real[:, None] & (d < D)[None]
    query = tl.load(q + b * q_b + (head * G + g)[:, None] * q_h + node * q_n + d[None], mask=wide, other=0.0)
    # 1. The splits that `_context` has whole, in order, and what it has of the one that the last tiles continue.
    last, stored = edge // SPLIT, pair.to(tl.int64) * splits * n * G + node * G + g
    none, no_norm = tl.full((GROUP,), float("-inf"), tl.float32), tl.zeros((GROUP, 16), tl.float32)
    nothing = tl.zeros((GROUP, D_POW2), tl.float32)
    top, norm, total = none, no_norm, nothing
    for split in range(last):
        part_top, part_norm, part_total = _load(highest, norms, sums, stored + split * n * G, real, d, D)
        top, norm, total = _join(top, norm, total, part_top, part_norm, part_total)
    part_top, part_norm, part_total = none, no_norm, nothing
    if edge % SPLIT != 0:
        part_top, part_norm, part_total = _load(highest, norms, sums, stored + last * n * G, real, d, D)
    # 2. The last tiles; the second may begin a split of its own.
    for tile in tl.static_range(2):
        begin = edge + tile * TILE
        if begin % SPLIT == 0:
            top, norm, total = _join(top, norm, total, part_top, part_norm, part_total)
            part_top, part_norm, part_total = none, no_norm, nothing
        positions = begin + tl.arange(0, TILE)
        depth = positions - length
        seen = positions <= position
        if WINDOW > 0:
            seen = seen & (positions > position - WINDOW)
        new = tl.load(paths + b * path_b + node * path_n + depth, mask=(depth >= 0) & seen, other=0).to(tl.int32)
        slots = tl.where(depth < 0, positions, length + new).to(tl.int64)
        from_slots, there = b * k_b + head * k_h + slots[:, None] * k_s + d[None], seen[:, None] & (d < D)[None]
        key, value = tl.load(k + from_slots, mask=there, other=0.0), tl.load(v + from_slots, mask=there, other=0.0)
        part_top, part_norm, part_total = _fold(query, key, value, seen[None], part_top, part_norm, part_total, scale)
    top, norm, total = _join(top, norm, total, part_top, part_norm, part_total)
    one_norm = tl.sum(tl.where((tl.arange(0, 16) == 0)[None], norm, 0.0), 1)  # one number and zeros
    at = out + ((b * n + node) * G * KV + head * G + g)[:, None] * D + d[None]
    tl.store(at, (total / one_norm[:, None]).to(out.dtype.element_ty), mask=wide)
