"""Slow work is announced until it is done; errors that a user can fix are one line."""

import re
from logging.handlers import QueueHandler
from queue import SimpleQueue
from threading import active_count

import pytest
import torch

from poss_lightning import terminal
from poss_lightning.terminal import announced, is_user_error, one_line


def test_slow_work_is_announced_until_it_is_done(monkeypatch, caplog):
    said, threads = SimpleQueue(), active_count()
    monkeypatch.setattr(terminal.logger, "handlers", [QueueHandler(said)])
    caplog.set_level("INFO", terminal.logger.name)
    with announced("adding"):
        assert said.empty()
    monkeypatch.setattr(terminal, "FIRST", 0.001)
    monkeypatch.setattr(terminal, "NEXT", 0.001)
    with pytest.raises(KeyError), announced("waiting"):
        assert all(re.fullmatch(r"waiting: \d+ s", said.get().message) for _ in range(2))
        raise KeyError
    assert active_count() <= threads


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ImportError("Loading needs x.\nInstall it: `pip install x`"), "Loading needs x.; Install it: `pip install x`"),
        (torch.OutOfMemoryError("no memory"), "no memory"),
        (MemoryError(), "MemoryError"),
    ],
    ids=repr,
)
def test_an_error_that_a_user_can_fix_is_one_line(error, line):
    assert is_user_error(error) and one_line(error) == line
    assert not any(map(is_user_error, (KeyError("x"), TypeError("x"), RuntimeError("x"))))  # bugs, with a traceback


@pytest.mark.parametrize(
    "broken", ["[*zip([1], [], strict=True)]", "[*zip([], [1], strict=True)]", "(x,) = 1, 2", "x, y = [1]"]
)
def test_an_invariant_is_no_error_of_the_user_although_python_calls_it_a_value_error(broken):
    with pytest.raises(ValueError) as error:
        exec(broken)
    assert not is_user_error(error.value)
