"""Rounds as graphs, without a GPU: a stand-in bakes in the tensors of a capture, as CUDA does, and runs no Python."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_flatten, tree_unflatten

from poss_lightning.decoding.autoregressive import Autoregressive
from poss_lightning.decoding.budget import Settled
from poss_lightning.decoding.engine import Speculative
from poss_lightning.sampling import Sampling
from poss_lightning.target.graphs import Graphs
from tests.support.tiny import tiny_draft, tiny_target

PROMPTS = [[5, 6, 7, 8], [9] * 11, [3, 4]]
GREEDY, DRAWN, TIMID = Sampling(), Sampling(1.0, top_p=0.9), Sampling(0.5)


class Baked(Graphs):
    """What is captured reads and writes the very tensors of its first run; its results stay in place."""

    def __init__(self):
        super().__init__(enabled=True)
        self.captures = 0

    def run(self, key, work, state):
        if key not in self.captured:
            kept = [tensor.clone() for tensor in state]

            def flat():
                leaves, self.form = tree_flatten(work())
                return leaves

            flat()
            for tensor, value in zip(state, kept, strict=True):
                tensor.copy_(value)
            graph = make_fx(flat)()
            for tensor, value in zip(state, kept, strict=True):
                tensor.copy_(value)
            self.captured[key] = (graph, self.form)
            self.captures += 1
        graph, form = self.captured[key]
        return tree_unflatten(graph(), form)


def tokens_of(decoder, law, prompts=PROMPTS, limit=40, seed=3):
    return [
        decoded.tokens
        for decoded in decoder.decode(prompts, limit, frozenset(), law, torch.Generator().manual_seed(seed))
    ]


@pytest.mark.parametrize("share, kind", [(False, "eagle2"), (True, "eagle3")])
def test_rounds_replayed_are_lossless_whatever_came_before(share, kind):
    """One engine, other laws, seeds, batches and lengths in turn: no graph may speak of what is gone."""
    target = tiny_target(0, num_hidden_layers=4 if kind == "eagle3" else 2)
    engine = Speculative(target, tiny_draft(target, [1, 1], kind=kind), 2, 6, 3, share=share)
    engine.graphs = Baked()
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


def test_a_graph_serves_many_rounds_and_the_next_text():
    target = tiny_target(0)
    engine = Speculative(target, tiny_draft(target, [2, 2]), 4, 12, 5)
    engine.graphs = Baked()
    tokens_of(engine, GREEDY, PROMPTS[:1])
    captures = engine.graphs.captures
    tokens_of(engine, GREEDY, PROMPTS[:1])
    assert captures == engine.graphs.captures <= 2  # one for every 64 tokens


@pytest.mark.parametrize("share", [False, True])
def test_a_settled_tree_runs_as_a_graph(monkeypatch, share):
    monkeypatch.setattr("poss_lightning.decoding.engine.PerRound", Settled)
    target = tiny_target(0)
    engine = Speculative(target, tiny_draft(target, [1, 1]), 2, 6, 3, tree="auto", share=share)
    engine.graphs = Baked()
    assert tokens_of(engine, GREEDY, limit=60) == tokens_of(Autoregressive(target), GREEDY, limit=60)
    assert engine.budgets[3].plan is not None


@pytest.mark.parametrize("law", [GREEDY, DRAWN], ids=["greedy", "drawn"])
def test_plain_decoding_replayed_says_the_same(law):
    """The baseline runs as graphs where drafting does, so that a speed-up is the draft's alone."""
    target = tiny_target(0)
    plain = Autoregressive(target)
    plain.loop.graphs = Baked()
    long = [[7] * 90, [8] * 3, [9] * 5]
    cases = (PROMPTS, 80, 0), (PROMPTS, 80, 1), (PROMPTS[:1], 12, 0), (long, 12, 0), (PROMPTS, 9, 2)
    for prompts, limit, seed in cases:
        expected = tokens_of(Autoregressive(target), law, prompts, limit, seed)
        assert tokens_of(plain, law, prompts, limit, seed) == expected


def test_a_graph_of_plain_decoding_serves_the_next_text():
    plain = Autoregressive(tiny_target(0))
    plain.loop.graphs = Baked()
    tokens_of(plain, GREEDY, PROMPTS[:1])
    captures = plain.loop.graphs.captures
    tokens_of(plain, GREEDY, PROMPTS[:1])
    assert captures == plain.loop.graphs.captures == 1  # one for every 64 slots


def test_where_a_capture_fails_work_is_done_without(monkeypatch, caplog):
    """As CUDA would have it: streams of the device of the work, whichever is current."""
    chosen, state = [], torch.zeros(1)

    def fails(*_, **__):
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    stream = SimpleNamespace(wait_stream=lambda other: None)
    monkeypatch.setattr(torch.cuda, "device", lambda device: chosen.append(device) or nullcontext())
    monkeypatch.setattr(torch.cuda, "Stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "CUDAGraph", SimpleNamespace)
    monkeypatch.setattr(torch.cuda, "graph", fails)
    graphs = Graphs(enabled=True, device=torch.device("cuda", 1))
    assert graphs.run("key", lambda: state.add_(1), [state]) == 1  # not 2: the warm-up left no trace
    assert not graphs.enabled and chosen == [torch.device("cuda", 1)]
    (line,) = caplog.messages
    assert line.endswith("without CUDA graphs, so more slowly: operation not permitted when stream is capturing")
