"""Slow work is announced until it is done; bars and lines of libraries are shown to those who ask for them."""

import io
import logging
from threading import Event

import pytest
import torch
from jinja2 import UndefinedError
from lightning.fabric.utilities.exceptions import MisconfigurationException
from safetensors import SafetensorError
from tqdm import tqdm
from tqdm.auto import tqdm as auto

from poss_lightning import terminal
from poss_lightning.terminal import announced, is_user_error, mute_deepspeed, one_line, without_bars


class Recorder(logging.Handler):
    """Keeps messages, and sets an event at the second."""

    def __init__(self):
        super().__init__()
        self.messages, self.second = [], Event()

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())
        if len(self.messages) == 2:
            self.second.set()


def test_slow_work_is_announced_until_it_is_done(monkeypatch, caplog):
    caplog.set_level("INFO", "poss_lightning")
    with announced("adding"):
        assert 1 + 1 == 2
    assert caplog.messages == []
    recorder = Recorder()
    monkeypatch.setattr(terminal, "FIRST", 0.001)
    monkeypatch.setattr(terminal, "NEXT", 0.001)
    monkeypatch.setattr(terminal.logger, "handlers", [recorder])
    with pytest.raises(KeyError), announced("waiting"):
        assert recorder.second.wait(60)
        raise KeyError
    at_the_end = list(recorder.messages)
    assert set(at_the_end) == {"waiting: 0 s"} and recorder.messages == at_the_end


@pytest.mark.parametrize("bar", [tqdm, auto])
@pytest.mark.parametrize(
    ("value", "verbose"), [(None, False), ("", False), ("0", False), ("False", False), ("1", True), ("true", True)]
)
def test_bars_of_libraries_are_shown_on_demand(bar, value, verbose, monkeypatch):
    def shown() -> bool:
        bar(total=1, file=(file := io.StringIO())).close()
        return "0/1" in file.getvalue()

    monkeypatch.delenv(terminal.VERBOSE, raising=False)
    if value is not None:
        monkeypatch.setenv(terminal.VERBOSE, value)
    with without_bars():
        assert shown() == verbose
    assert shown()


def test_deepspeed_reports_a_missing_gpu_on_demand(monkeypatch):
    logger, recorder = logging.getLogger("DeepSpeed"), Recorder()
    monkeypatch.setattr(logger, "handlers", [recorder])
    monkeypatch.setattr(logger, "filters", [])
    line = "Setting accelerator to CPU. If you have GPU"
    for value in ("1", "0"):
        monkeypatch.setenv(terminal.VERBOSE, value)
        mute_deepspeed()
        logger.warning(line)
    logger.warning("the loss overflowed")
    assert recorder.messages == [line, "the loss overflowed"]


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ImportError("Loading needs x.\nInstall it: `pip install x`"), "Loading needs x.; Install it: `pip install x`"),
        (torch.OutOfMemoryError("CUDA out of memory."), "CUDA out of memory."),
        (SafetensorError("header too large"), "header too large"),
        (UndefinedError("'date' is undefined"), "'date' is undefined"),
        (MemoryError(), "MemoryError"),
        (MisconfigurationException("no GPU"), "no GPU"),
    ],
    ids=repr,
)
def test_an_error_that_a_user_can_fix_is_one_line(error, line):
    assert is_user_error(error) and one_line(error) == line


@pytest.mark.parametrize("kind", [KeyError, TypeError, AttributeError, RuntimeError])
def test_a_bug_keeps_its_traceback(kind):
    assert not is_user_error(kind("x"))
