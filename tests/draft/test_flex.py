"""The causal block, and FlexAttention's on a CPU: output, norm, gradients, rounding, and how often it is compiled."""

from functools import cache, partial

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.attention import flex_attention

from poss_lightning.draft import attention
from tests.support.tolerance import LAYER, close
from tests.support.unrolling import packed

HEADS, KV_HEADS, WIDTH = 4, 2, 32
BLOCKS = (attention.causal_block, attention.flex_block)


def run(
    block, rows: list[list[int]], count: int, skip: int, dtype=torch.float32, window: int | None = None
) -> list[torch.Tensor]:
    """Output and norm where a slot is real, and their gradients to queries, keys and values, in float32."""
    generator = torch.Generator().manual_seed(count)
    queries, keys, values, grad_out = (
        torch.randn(len(rows), heads, count, WIDTH, generator=generator).to(dtype)
        for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)
    )
    grad_norm = torch.randn(len(rows), HEADS, count, generator=generator)
    leaves = [x.requires_grad_(torch.is_grad_enabled()) for x in (queries, keys, values)]
    out, norm = block(*leaves, skip, packed(rows, count), window)
    real = torch.tensor([[t < sum(lengths) for t in range(count)] for lengths in rows])[:, None]  # (B, 1, T)
    out, norm = out.masked_fill(~real[..., None], 0), norm.masked_fill(~real, 0)
    if not torch.is_grad_enabled():
        return [out.float(), norm]
    loss = (out * grad_out).sum(dtype=torch.float32) + (norm * grad_norm).sum()
    return [x.detach().float() for x in (out, norm, *torch.autograd.grad(loss, leaves))]


def naive_block(queries, keys, values, skip, packing, window):
    """One query at a time: it sees t - window < s <= t - skip of its conversation, or else its first slot."""
    out, norm = torch.zeros_like(queries), torch.zeros_like(queries[..., 0])
    keys, values = (x.repeat_interleave(HEADS // KV_HEADS, dim=1) for x in (keys, values))
    for row, lengths in enumerate(packing.lengths):
        start = 0
        for length in lengths:
            for t in range(start, min(start + length, queries.shape[2])):
                seen = slice(max(start, t - (window or 99) + 1), max(t - skip, start) + 1)
                scores = keys[row, :, seen] @ queries[row, :, t, :, None] * WIDTH**-0.5  # (H, n, 1)
                out[row, :, t] = (scores.softmax(1) * values[row, :, seen]).sum(1)
                norm[row, :, t] = scores.logsumexp(1)[:, 0]
            start += length
    return out, norm


@pytest.mark.parametrize(("skip", "window"), [(0, None), (1, None), (4, None), (0, 1), (2, 3), (4, 40)])
@pytest.mark.parametrize(("query_rows", "dtype"), [(3, torch.float32), (256, torch.bfloat16)], ids=str)
def test_output_norm_and_gradients_are_the_definition_s(skip, window, query_rows, dtype, monkeypatch):
    """Conversations and padding; one that goes a slot beyond the row; a row in which nothing is left over."""
    monkeypatch.setattr(attention, "QUERY_ROWS", query_rows)
    monkeypatch.setattr(attention, "compiled", lambda function: function)
    # FlexAttention refuses gradients on a CPU, where its compiled kernel has none; uncompiled, it has them.
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *tensors: None)
    rows = [[13, 31, 7], [65], [64]]
    expected = run(naive_block, rows, 64, skip, window=window)
    for block in BLOCKS:
        found = run(block, rows, 64, skip, dtype, window)
        for name, ours, right in zip(["output", "norm", "queries", "keys", "values"], found, expected, strict=True):
            assert close(ours, right, sums=3 * LAYER, dtype=dtype), name


# Slots of the conversations of each batch: exactly one, two (as many as a head is wide) and eight blocks, and others.
EPOCH = [[16], [32], [128], [17, 30, 22], [76, 15], [11, 64, 9, 13], [64], [200], [5], [1]]


def test_an_epoch_compiles_three_frames_at_any_depth(monkeypatch):
    """The mask, attention, and in validation attention without gradients. Six would be the bar.

    More than eight of one function would end in an error (`fullgraph`), not in eager code, which keeps all scores.
    """
    counter = CompileCounterWithBackend("aot_eager")
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=counter))
    monkeypatch.setattr(attention, "compiled", cache(attention.compiled.__wrapped__))
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *tensors: None)
    monkeypatch.setattr(attention, "FLEX_BLOCK", WIDTH // KV_HEADS)
    torch._dynamo.reset()
    frames = []
    for depth, training in ((6, True), (12, True), (12, False)):
        for lengths in EPOCH:
            for skip in (0, 1, depth - 1):
                with torch.set_grad_enabled(training):
                    ours, flex = (run(block, [lengths], sum(lengths), skip) for block in BLOCKS)
                    assert close(ours, flex, sums=3 * LAYER)
        frames.append(counter.frame_count)
    assert frames == [2, 2, 3]
