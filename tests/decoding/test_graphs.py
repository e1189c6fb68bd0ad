"""Captures: how many are kept, what they count as, and what is done where one fails. Rounds as graphs are tried on the
pretended device (test_pretended_decoding.py)."""

from contextlib import nullcontext
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
