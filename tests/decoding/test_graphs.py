"""Captures: how many are kept, what they count as, and what is done where one fails. Rounds as graphs are tried on the
pretended device (test_pretended_decoding.py)."""

from contextlib import contextmanager, nullcontext
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from poss_lightning.clock import Clock
from poss_lightning.target_model.graphs import MOST, Graphs

CUDA, CLOCK = torch.device("cuda", 1), Clock(torch.device("cpu"))


class Streams:
    """CUDA's streams, of which one is current. As in torch, a graph goes back to the usual one where it ends well."""

    fails = ""  # where a capture does

    def __init__(self):
        self.made, self.used = 0, []
        self.current = self.usual = self.Stream()

    def Stream(self):
        self.made += 1
        return SimpleNamespace(wait_stream=lambda other: None)

    def device(self, device):
        assert device == CUDA, "streams are of the device of the work, whichever is current"
        return nullcontext()

    @contextmanager
    def graph(self, graph, *, stream, **_):
        self.current, before = stream, self.current
        self.used.append(stream)
        self.reach("begin")
        yield
        self.reach("end")
        self.current = before

    def reach(self, where: str) -> None:
        if where == self.fails:
            raise RuntimeError("operation not permitted when stream is capturing\nmore")


@pytest.fixture
def streams(monkeypatch) -> Streams:
    streams = Streams()
    fakes = {name: getattr(streams, name) for name in ("Stream", "device", "graph")} | {
        "CUDAGraph": lambda: SimpleNamespace(pool=lambda: "pool", replay=lambda: None),
        "stream": lambda stream: nullcontext(),
        "current_stream": lambda: streams.current,
        "set_stream": partial(setattr, streams, "current"),
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    return streams


def draft_and_verify(part) -> None:
    for name in ("draft", "verify"):
        with part(name):
            pass


def test_captures_beyond_the_most_are_dropped_the_oldest_used_first_and_made_again(streams):
    """All are of one stream: their pool gives a block again on its own alone, and each has its own workspaces."""
    graphs, clock = Graphs(CUDA), Clock(torch.device("cpu"))
    for key in (*range(MOST), 0, MOST, 0, 1):
        graphs.run(key, draft_and_verify, [], clock)
    assert len(streams.used) == 2 * (MOST + 2) and len(graphs.captured) == MOST  # 1 was made again, 0 was not
    assert set(clock.total()) == {"capture", "draft", "verify", "total"}
    graphs.clear()
    graphs.run(1, draft_and_verify, [], clock)
    assert len(graphs.captured) == 1 and streams.made == 2 and len({*map(id, streams.used)}) == 1


@pytest.mark.parametrize("where", ["warm-up", "begin", "work", "end"])
def test_where_a_capture_fails_work_is_done_without_on_the_usual_stream(streams, caplog, where):
    """Where graphs were asked for it is an error, as a benchmark's method would be slower without than it is."""
    state, runs, streams.fails = torch.zeros(1), [], where

    def work(part):
        runs.append(part)
        with part("work"):
            state.add_(1)
            streams.reach({1: "warm-up", 2: "work"}.get(len(runs), ""))  # as where memory runs out halfway
        return state

    graphs = Graphs(CUDA)
    done = graphs.run("key", work, [state], CLOCK)
    assert done == (1 if where in ("warm-up", "begin") else 2)  # the warm-up left no trace; what is captured does, here
    assert not graphs.enabled and streams.current is streams.usual
    (line,) = caplog.messages
    assert line.endswith("without CUDA graphs, so more slowly: operation not permitted when stream is capturing")
    runs.clear()
    with pytest.raises(RuntimeError, match="a capture failed; without CUDA graphs: graphs false"):
        Graphs(CUDA, True).run("key", work, [state], CLOCK)
    assert streams.current is streams.usual
