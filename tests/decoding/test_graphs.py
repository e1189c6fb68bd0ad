"""Captures: how many are kept, what they count as, and what is done where one fails. Rounds as graphs are tried on the
pretended device (test_pretended_decoding.py)."""

from contextlib import contextmanager, nullcontext
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from poss_lightning.clock import Clock
from poss_lightning.target.graphs import MOST, Graphs

CPU = torch.device("cpu")


def counted(captures: list[str]) -> Graphs:
    """Graphs whose captures only do the work again."""
    graphs = Graphs(CPU)
    graphs.enabled = True

    def capture(work, state):
        captures.append("captured")
        return [("work", lambda: None)], work(lambda name: nullcontext())

    graphs._capture = capture
    return graphs


def test_captures_beyond_the_most_are_dropped_the_oldest_used_first_and_made_again():
    captures: list[str] = []
    graphs, clock = counted(captures), Clock(CPU)
    for key in (*range(MOST), 0, MOST, 0, 1):
        assert graphs.run(key, lambda part, key=key: key, [], clock) == key
    assert len(captures) == MOST + 2 and len(graphs.captured) == MOST  # 1 was made again, 0 was not


def test_a_capture_is_no_part_of_the_total():
    """It is paid once for many texts."""
    graphs, clock = counted([]), Clock(CPU)
    for _ in range(2):
        graphs.run("key", lambda part: torch.linalg.inv(torch.eye(200)), [], clock)
    seconds = clock.total()
    assert set(seconds) == {"capture", "work", "total"} and seconds["work"] <= seconds["total"]
    assert seconds["capture"] > seconds["work"]


class Streams:
    """CUDA's streams, of which one is current. As in torch, a graph goes back to the usual one where it ends well."""

    def __init__(self, fails: str | None = None):
        self.fails, self.made, self.devices, self.used = fails, 0, [], []
        self.current = self.usual = self.Stream()

    def Stream(self):
        self.made += 1
        return SimpleNamespace(wait_stream=lambda other: None)

    def device(self, device):
        self.devices.append(device)
        return nullcontext()

    @contextmanager
    def stream(self, stream):
        self.current, before = stream, self.current
        try:
            yield
        finally:
            self.current = before

    @contextmanager
    def graph(self, graph, *, stream, **_):
        self.current, before = stream, self.current
        self.used.append(stream)
        self.fail("begin")
        yield
        self.fail("end")
        self.current = before

    def fail(self, where: str | None) -> None:
        if where and where == self.fails:
            raise RuntimeError("operation not permitted when stream is capturing\nmore")

    def replace(self, monkeypatch: pytest.MonkeyPatch) -> None:
        fakes = {"CUDAGraph": lambda: SimpleNamespace(pool=lambda: "pool", replay=lambda: None)}
        fakes |= {name: getattr(self, name) for name in ("Stream", "device", "stream", "graph")}
        fakes |= {"current_stream": lambda: self.current, "set_stream": partial(setattr, self, "current")}
        for name, fake in fakes.items():
            monkeypatch.setattr(torch.cuda, name, fake)


CLOCK = SimpleNamespace(part=lambda name: nullcontext(), excluded=lambda name: nullcontext())


@pytest.mark.parametrize("where", ["warm-up", "begin", "work", "end"])
def test_where_a_capture_fails_work_is_done_without_on_the_usual_stream(monkeypatch, caplog, where):
    """As CUDA would have it: streams of the device of the work, whichever is current."""
    streams, state, runs = Streams(where), torch.zeros(1), []
    streams.replace(monkeypatch)
    graphs = Graphs(torch.device("cuda", 1))

    def work(part):
        runs.append(part)
        with part("work"):
            state.add_(1)
            streams.fail({1: "warm-up", 2: "work"}.get(len(runs)))  # as where memory runs out halfway
        return state

    done = graphs.run("key", work, [state], CLOCK)
    assert done == (1 if where in ("warm-up", "begin") else 2)  # the warm-up left no trace; what is captured does, here
    assert not graphs.enabled and streams.devices == [torch.device("cuda", 1)]
    assert streams.current is streams.usual
    (line,) = caplog.messages
    assert line.endswith("without CUDA graphs, so more slowly: operation not permitted when stream is capturing")


def test_where_graphs_were_asked_for_a_capture_that_fails_is_an_error(monkeypatch):
    """As in a benchmark, where a method without them would be slower than it is. The usual stream is current again."""
    streams = Streams("end")
    streams.replace(monkeypatch)
    graphs = Graphs(torch.device("cuda", 0), True)

    def work(part):
        with part("work"):
            pass

    with pytest.raises(RuntimeError, match="a capture failed; without CUDA graphs: graphs false"):
        graphs.run("key", work, [], CLOCK)
    assert streams.current is streams.usual


def test_all_captures_are_of_one_stream(monkeypatch):
    """Their pool gives a block again on its own stream alone, and each stream has its own workspaces."""
    streams = Streams()
    streams.replace(monkeypatch)
    graphs = Graphs(torch.device("cuda", 0))

    def work(part):
        for name in ("draft", "verify"):
            with part(name):
                pass

    for key in (1, 2):
        graphs.run(key, work, [], CLOCK)
    graphs.clear()
    graphs.run(1, work, [], CLOCK)
    assert len(streams.used) == 6 and len({id(stream) for stream in streams.used}) == 1 and streams.made == 2
