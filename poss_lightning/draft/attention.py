"""The unroll's attention: one causal block and some diagonals in one softmax, conversation by conversation.

Keys are hidden before the softmax. The block's scores are never kept: its output and the logarithm of its norm are,
with which the diagonals join the softmax afterwards. Backward computes the scores again, some rows of queries at a
time, so memory grows linearly in T. On CUDA the block is FlexAttention's.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention

from poss_lightning.machine import compiled

KeysValues = tuple[Tensor, Tensor]  # (B, kv heads, T, d) each
QUERY_ROWS = 128  # queries whose scores exist at once: they should stay in a CPU's cache
FLEX_BLOCK = 128  # slots on a side of FlexAttention's blocks


class Packing(NamedTuple):
    """Which conversation a slot belongs to: a row holds one or several, one after another, and then padding."""

    lengths: list[list[int]]  # of the conversations of each row, in slots; cut at T
    positions: Tensor  # (B or 1, T) a slot's place in its conversation; 0 in the padding

    @classmethod
    def one_per_row(cls, batch: int, count: int, device: torch.device) -> "Packing":
        """Pack one conversation per row, without padding."""
        return cls([[count]] * batch, torch.arange(count, device=device)[None])


def attend(
    queries: Tensor,
    context: KeysValues,
    diagonals: list[KeysValues],
    packing: Packing,
    window: int | None = None,
) -> Tensor:
    """Attend over one causal block and some diagonals, in one softmax.

    Args:
        queries: (B, H, T, d)
        context: of z^0; slot t sees the slots s <= t - len(diagonals) of its own conversation.
        diagonals: the i-th holds the key and value that slot t sees at slot t - i, stored at t - i.
        window: slots that a query sees, itself and those on its left, more than the diagonals; None for all.

    Returns:
        (B, H, T, d). The first len(diagonals) slots of a conversation have no such past and see its first slot instead,
        so they are finite; no pass that counts reads them.
    """
    keys, values = context
    attended, norm = causal_block(queries, keys, values, len(diagonals), packing, window)  # (B, H, T, d), (B, H, T)
    if not diagonals:
        return attended
    grouped = queries.unflatten(1, (keys.shape[1], -1))  # (B, kv, H/kv, T, d)
    scores, neighbours = [norm.view(grouped.shape[:-1])], []
    for i, (key, value) in enumerate(diagonals):
        # What enters on the left is hidden: it is not a slot of this conversation.
        score = (grouped * _shift_right(key, i)).sum(-1, dtype=torch.float32) * queries.shape[-1] ** -0.5
        scores.append(score.masked_fill((packing.positions < i)[:, None, None], -torch.inf))  # (B, kv, H/kv, T)
        neighbours.append(_shift_right(value, i))
    first, *weights = torch.stack(scores).softmax(0).to(values.dtype)[..., None]  # (B, kv, H/kv, T, 1) each
    attended = attended.view(grouped.shape) * first
    for weight, neighbour in zip(weights, neighbours, strict=True):
        attended = attended + weight * neighbour
    return attended.flatten(1, 2)


def _shift_right(x: Tensor, steps: int) -> Tensor:
    """Move (B, kv, T, d) to the right, for the heads that share it: (B, kv, 1, T, d)."""
    return (x.roll(steps, 2) if steps else x)[:, :, None]


def causal_block(
    queries: Tensor, keys: Tensor, values: Tensor, skip: int, packing: Packing, window: int | None = None
) -> tuple[Tensor, Tensor]:
    """Attend to the slots t - window < s <= t - skip of the same conversation, some queries at a time.

    On CUDA this is `flex_block`.

    Returns:
        The output (B, H, T, d) and the logarithm of the softmax's norm (B, H, T), float32; 0 in the padding.
    """
    if queries.device.type == "cuda":
        return flex_block(queries, keys, values, skip, packing, window)
    return _CausalBlock.apply(queries, keys, values, skip, packing.lengths, window)


class _CausalBlock(torch.autograd.Function):
    """Backward computes the weights again from queries, keys and norms (FlashAttention, 2205.14135, algorithm 4)."""

    @staticmethod
    def forward(ctx, queries, keys, values, skip, lengths, window):
        scaled = queries * queries.shape[-1] ** -0.5
        out, norm = torch.zeros_like(queries), queries.new_zeros(queries.shape[:3], dtype=torch.float32)
        for tile in _tiles(lengths, queries.shape[2], skip, window):
            scores = tile.scores(scaled, keys)  # (kv, H/kv * r, n)
            highest = scores.amax(-1, keepdim=True)
            weights = scores.sub_(highest).exp_()
            total = weights.sum(-1, keepdim=True)
            tile.put(norm, highest + total.log())
            tile.put(out, weights.to(values.dtype) @ values[tile.keys] / total)
        ctx.save_for_backward(queries, keys, values, out, norm)
        ctx.tiling = lengths, queries.shape[2], skip, window
        return out, norm

    @staticmethod
    def backward(ctx, grad_out, grad_norm):
        queries, keys, values, out, norm = ctx.saved_tensors
        scale = queries.shape[-1] ** -0.5
        scaled, grad_queries = queries * scale, torch.zeros_like(queries)
        grad_keys, grad_values = (torch.zeros_like(keys, dtype=torch.float32) for _ in range(2))
        # d score = weight * (d weight - Σ weights * d weights + d norm), and Σ weights * d weights = out · d out
        level = grad_norm - torch.linalg.vecdot(out.float(), grad_out.float())  # (B, H, T)
        for tile in _tiles(*ctx.tiling):
            weights = tile.scores(scaled, keys).sub_(tile.take(norm, keys)).exp_()
            slope = tile.take(grad_out, keys)  # (kv, H/kv * r, d)
            grad_values[tile.keys] += weights.to(slope.dtype).mT @ slope
            grad_scores = weights.mul_((slope @ values[tile.keys].mT).float().add_(tile.take(level, keys)))
            grad_scores = grad_scores.to(queries.dtype)
            tile.put(grad_queries, grad_scores @ keys[tile.keys] * scale)
            grad_keys[tile.keys] += grad_scores.mT @ tile.take(scaled, keys)
        return grad_queries, grad_keys.to(keys.dtype), grad_values.to(values.dtype), None, None, None


class _Tile(NamedTuple):
    """Some queries of one conversation, and the keys they may see; heads that share keys are stacked."""

    row: int
    start: int  # first slot of the conversation
    first: int  # first query
    stop: int
    skip: int
    window: int | None

    @property
    def oldest(self) -> int:
        """The first slot that any of its queries sees."""
        return self.start if self.window is None else max(self.start, self.first - self.window + 1)

    @property
    def keys(self) -> tuple:
        return self.row, slice(None), slice(self.oldest, max(self.stop - self.skip, self.start + 1))

    def take(self, x: Tensor, keys: Tensor) -> Tensor:
        """Group rows by key head: (B, H, T, ...) -> (kv, H/kv * r, ...)."""
        picked = x[self.row, :, self.first : self.stop]
        return picked.reshape(keys.shape[1], -1, *picked.shape[2:] or (1,))

    def put(self, x: Tensor, value: Tensor) -> None:
        x[self.row, :, self.first : self.stop] = value.reshape(x[self.row, :, self.first : self.stop].shape)

    def scores(self, scaled: Tensor, keys: Tensor) -> Tensor:
        """Return scores (kv, H/kv * r, n) in float32, hidden keys -inf."""
        seen = keys[self.keys]  # (kv, n, d)
        scores = (self.take(scaled, keys) @ seen.mT).float()
        slots = torch.arange(self.oldest, self.oldest + seen.shape[1], device=keys.device)  # (n,)
        queried = torch.arange(self.first, self.stop, device=keys.device)[:, None]  # (r, 1)
        by_row = scores.view(len(seen), -1, len(queried), len(slots))
        near = max(self.first - self.skip, self.start) - self.oldest  # every query sees the slots before
        by_row[..., near:].masked_fill_(slots[near:] > (queried - self.skip).clamp(min=self.start), -torch.inf)
        if self.window is not None:
            far = self.stop - self.oldest - self.window  # every query sees the slots after
            by_row[..., : max(far, 0)].masked_fill_(slots[: max(far, 0)] <= queried - self.window, -torch.inf)
        return scores


def _tiles(lengths: list[list[int]], count: int, skip: int, window: int | None) -> list[_Tile]:
    tiles = []
    for row, conversations in enumerate(lengths):
        start = 0
        for length in conversations:
            end = min(start + length, count)
            firsts = range(start, end, QUERY_ROWS)
            tiles += [_Tile(row, start, first, min(first + QUERY_ROWS, end), skip, window) for first in firsts]
            start += length
    return tiles


def flex_block(
    queries: Tensor, keys: Tensor, values: Tensor, skip: int, packing: Packing, window: int | None = None
) -> tuple[Tensor, Tensor]:
    """Compute `causal_block` by FlexAttention; its mask is made block by block, never (T, T).

    Rows are laid end to end and padded to whole blocks, at least two, and `skip` is inside a tensor, so all batches and
    passes have one form. Otherwise dynamo compiles again for one row, for one block, and for fewer slots than a block.
    """
    batch, _, count, _ = queries.shape
    total = max(-(-batch * count // FLEX_BLOCK), 2) * FLEX_BLOCK  # S
    positions = nn.functional.pad(packing.positions.expand(batch, -1).flatten(), (0, total - batch * count))  # (S,)
    first = torch.arange(total, device=queries.device) - positions  # of the slot's conversation; of padding, itself
    last = first + (positions - skip).clamp(min=0)
    if window is not None:
        first = first + (positions - window + 1).clamp(min=0)

    def visible(b, h, t, s):
        return (first[t] <= s) & (s <= last[t])

    laid = [_lay_end_to_end(x, total) for x in (queries, keys, values)]
    for x in laid:  # else equal sizes, of blocks and heads or of S and d, are taken for one
        torch._dynamo.mark_static(x, [1, 3])
    with torch.no_grad():  # so that training and validation share the compiled code
        mask = compiled(create_block_mask)(
            visible, None, None, total, total, device=queries.device, BLOCK_SIZE=FLEX_BLOCK
        )
    # Eager FlexAttention would keep all T x T scores.
    out, aux = compiled(flex_attention)(*laid, block_mask=mask, enable_gqa=True, return_aux=AuxRequest(lse=True))
    out, norm = (x[0, :, : batch * count].unflatten(1, (batch, count)) for x in (out, aux.lse))  # (H, B, T, ...)
    return out.transpose(0, 1), norm.transpose(0, 1)


def _lay_end_to_end(x: Tensor, total: int) -> Tensor:
    """(B, H, T, d) -> (1, H, total, d): row after row, then zeros. A copy, as dynamo guards the base of a view, too."""
    row = x.transpose(0, 1).flatten(1, 2)[None]  # (1, H, B * T, d)
    return nn.functional.pad(row, (0, 0, 0, total - row.shape[2]))
