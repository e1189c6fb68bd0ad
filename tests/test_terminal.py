"""What takes long is announced until it is done; bars and lines of libraries are shown to who asks for them."""

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
from poss_lightning.terminal import announced, is_told, mute_deepspeed, one_line, without_bars


class Twice(logging.Handler):
    """Sets an event at the second record."""

    def __init__(self):
        super().__init__()
        self.said, self.heard = [], Event()

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())
        if len(self.said) == 2:
            self.heard.set()


def test_what_takes_long_is_announced_until_it_is_done(monkeypatch, caplog):
    caplog.set_level("INFO", "poss_lightning")
    with announced("adding"):
        assert 1 + 1 == 2
    assert caplog.messages == []
    handler = Twice()
    monkeypatch.setattr(terminal, "FIRST", 0.001)
    monkeypatch.setattr(terminal, "NEXT", 0.001)
    monkeypatch.setattr(terminal.logger, "handlers", [handler])
    with pytest.raises(KeyError), announced("waiting"):
        assert handler.heard.wait(60)
        raise KeyError
    said = list(handler.said)
    assert set(said) == {"waiting: 0 s"} and handler.said == said


@pytest.mark.parametrize("bar", [tqdm, auto])
def test_bars_of_libraries_are_shown_to_who_asks(bar, monkeypatch):
    def shown() -> str:
        return bar(total=1, file=(file := io.StringIO())).close() or file.getvalue()

    with without_bars():
        assert shown() == ""
    assert "0/1" in shown()
    monkeypatch.setenv(terminal.VERBOSE, "1")
    with without_bars():
        assert "0/1" in shown()


@pytest.mark.parametrize(
    ("value", "verbose"), [(None, False), ("", False), ("0", False), ("False", False), ("1", True), ("true", True)]
)
def test_libraries_speak_where_the_user_says_so(value, verbose, monkeypatch):
    monkeypatch.delenv(terminal.VERBOSE, raising=False)
    if value is not None:
        monkeypatch.setenv(terminal.VERBOSE, value)
    assert terminal.is_verbose() == verbose


def test_deepspeed_says_on_no_machine_that_it_has_no_gpu(monkeypatch):
    logger, handler = logging.getLogger("DeepSpeed"), Twice()
    monkeypatch.setattr(logger, "handlers", [handler])
    monkeypatch.setattr(logger, "filters", [])
    monkeypatch.setenv(terminal.VERBOSE, "1")
    mute_deepspeed()
    logger.warning("Setting accelerator to CPU. If you have GPU")
    monkeypatch.delenv(terminal.VERBOSE)
    mute_deepspeed()
    logger.warning("Setting accelerator to CPU. If you have GPU")
    logger.warning("the loss overflowed")
    assert handler.said == ["Setting accelerator to CPU. If you have GPU", "the loss overflowed"]


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
def test_what_a_user_can_mend_is_one_line(error, line):
    assert is_told(error) and one_line(error) == line


def test_a_fault_of_ours_is_not():
    assert not any(map(is_told, (KeyError("x"), TypeError("x"), AttributeError("x"), RuntimeError("x"))))
