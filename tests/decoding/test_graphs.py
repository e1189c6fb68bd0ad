"""Rounds as graphs, without a GPU: on a stand-in."""

from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from poss_lightning.decoding.autoregressive import Autoregressive
from poss_lightning.decoding.budget import Settled
from poss_lightning.decoding.engine import Speculative
from poss_lightning.sampling import Sampling
from poss_lightning.target.cache import CUDA_STEP
from poss_lightning.target.graphs import Graphs
from tests.support.graphs import baked
from tests.support.tiny import tiny_draft, tiny_target

PROMPTS = [[5, 6, 7, 8], [9] * 11, [3, 4]]
GREEDY, DRAWN, TIMID = Sampling(), Sampling(1.0, top_p=0.9), Sampling(0.5, repetition_penalty=1.3)


def speculative(target):
    return Speculative(target, tiny_draft(target, [2, 2]), 4, 12, 5)


def tokens_of(decoder, law, prompts=PROMPTS, limit=40, seed=3):
    return [
        decoded.tokens
        for decoded in decoder.decode(prompts, limit, frozenset(), law, torch.Generator().manual_seed(seed))
    ]


@pytest.mark.parametrize("kind", ["eagle2", "eagle3"])
def test_rounds_replayed_are_lossless_whatever_came_before(kind):
    """One engine, other laws, seeds, batches and lengths in turn: no graph may speak of what is gone."""
    target = tiny_target(0, num_hidden_layers=4 if kind == "eagle3" else 2)
    draft = tiny_draft(target, [1, 1], kind=kind)
    engine = baked(Speculative(target, draft, 2, 6, 3))
    long = [[7] * 90, [8] * 3, [9] * 5]
    for law, prompts, seed in (
        (GREEDY, PROMPTS, 0),
        (DRAWN, PROMPTS, 1),
        (DRAWN, PROMPTS, 2),
        (GREEDY, PROMPTS, 0),
        (TIMID, PROMPTS, 1),
        (GREEDY, long, 0),
        (GREEDY, PROMPTS[:1], 0),
    ):
        assert tokens_of(engine, law, prompts, 12, seed) == tokens_of(Autoregressive(target), law, prompts, 12, seed)


@pytest.mark.parametrize("sampling", [GREEDY, DRAWN], ids=["greedy", "drawn"])
@pytest.mark.parametrize("make", [speculative, Autoregressive], ids=["drafting", "plain"])
def test_a_graph_serves_many_rounds_the_next_text_and_a_longer_one(monkeypatch, make, sampling):
    """One for every 512 slots, as on CUDA; both caches take the next 512 at the same time."""
    monkeypatch.setattr("poss_lightning.target.cache.STEP", CUDA_STEP)
    decoder = baked(make(tiny_target(0, max_position_embeddings=2048)))
    graphs = decoder.graphs if make is speculative else decoder.loop.graphs
    tokens_of(decoder, sampling, PROMPTS[:1], limit=300)
    assert graphs.captures == 1
    tokens_of(decoder, sampling, PROMPTS[:1], limit=300, seed=4)
    tokens_of(decoder, sampling, [[7] * 90], limit=300)
    if sampling.temperature:
        tokens_of(decoder, replace(sampling, temperature=0.4), PROMPTS[:1], limit=300)
    assert graphs.captures == 1
    for law in (GREEDY, DRAWN) * 2:  # in turn: one for each
        tokens_of(decoder, law, PROMPTS[:1], limit=12)
    assert graphs.captures == 2
    tokens_of(decoder, sampling, [[7] * 300], limit=300)
    assert graphs.captures == 3


def test_captures_beyond_the_most_are_dropped_and_made_again(monkeypatch):
    monkeypatch.setattr("poss_lightning.target.graphs.MOST", 1)
    target = tiny_target(0)
    engine = baked(speculative(target))
    for _ in range(2):  # over two extents each
        assert tokens_of(engine, GREEDY, PROMPTS[:1], 80) == tokens_of(Autoregressive(target), GREEDY, PROMPTS[:1], 80)
        assert len(engine.graphs.captured) == 1
    assert engine.graphs.captures == 4


def test_the_total_holds_rounds_and_no_capture():
    """A capture is paid once for many texts; parts are those of rounds, not of warm-ups."""
    engine = baked(speculative(tiny_target(0)))
    first, second = (engine.decode(PROMPTS[:1], 30, frozenset())[0].seconds for _ in range(2))
    assert first["capture"] > 0 and "capture" not in second
    for seconds in (first, second):
        assert {*seconds} - {"capture"} == {"prefill", "whole", "total"}
        assert seconds["prefill"] + seconds["whole"] <= seconds["total"]


def test_a_settled_tree_runs_as_a_graph(monkeypatch):
    monkeypatch.setattr("poss_lightning.decoding.engine.PerRound", Settled)
    target = tiny_target(0)
    engine = baked(Speculative(target, tiny_draft(target, [1, 1]), 2, 6, 3, tree="auto"))
    assert tokens_of(engine, GREEDY, limit=60) == tokens_of(Autoregressive(target), GREEDY, limit=60)
    assert engine.budget.plan is not None


@pytest.mark.parametrize("law", [GREEDY, DRAWN], ids=["greedy", "drawn"])
def test_plain_decoding_replayed_says_the_same(law):
    """The baseline runs as graphs where drafting does, so that a speed-up is the draft's alone."""
    target = tiny_target(0)
    plain = baked(Autoregressive(target))
    long = [[7] * 90, [8] * 3, [9] * 5]
    cases = (PROMPTS, 80, 0), (PROMPTS, 80, 1), (PROMPTS[:1], 12, 0), (long, 12, 0), (PROMPTS, 9, 2)
    for prompts, limit, seed in cases:
        expected = tokens_of(Autoregressive(target), law, prompts, limit, seed)
        assert tokens_of(plain, law, prompts, limit, seed) == expected


@pytest.mark.parametrize("where", ["warm-up", "capture"])
def test_where_a_capture_fails_work_is_done_without(monkeypatch, caplog, where):
    """As CUDA would have it: streams of the device of the work, whichever is current."""
    chosen, state, runs = [], torch.zeros(1), []

    def fails(*_, **__):
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    stream = SimpleNamespace(wait_stream=lambda other: None)
    monkeypatch.setattr(torch.cuda, "device", lambda device: chosen.append(device) or nullcontext())
    monkeypatch.setattr(torch.cuda, "Stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "CUDAGraph", SimpleNamespace)
    monkeypatch.setattr(torch.cuda, "graph", fails)
    graphs = Graphs(torch.device("cuda", 1))
    clock = SimpleNamespace(part=lambda name: nullcontext(), excluded=lambda name: nullcontext())

    def work(part):
        with part("work"):
            state.add_(1)
        runs.append(part)
        if where == "warm-up" and len(runs) == 1:  # as where memory runs out halfway
            fails()
        return state

    assert graphs.run("key", work, [state], clock) == 1  # not 2: the warm-up left no trace
    assert not graphs.enabled and chosen == [torch.device("cuda", 1)]
    (line,) = caplog.messages
    assert line.endswith("without CUDA graphs, so more slowly: operation not permitted when stream is capturing")
