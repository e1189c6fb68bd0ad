"""What a terminal shows: text, bars and warnings of others; and while something takes long, what that is."""

import logging
import os
import re
import time
from argparse import ArgumentError
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partialmethod
from threading import Event, Thread

VERBOSE = "POSS_VERBOSE"  # where it is 1, libraries show their own bars and warnings, too
FIRST, NEXT = 3.0, 10.0  # seconds until something that goes on is announced, and announced again

# Errors whose text is enough for a user; libraries' own kinds by name, as nothing else need import them.
KINDS = (ValueError, OSError, NotImplementedError, ImportError, MemoryError, ArgumentError)
OF_LIBRARIES = {
    "OutOfMemoryError",
    "AcceleratorError",
    "SafetensorError",
    "TemplateError",
    "HTTPError",
    "ArrowException",
}
OF_LIBRARIES |= {"MisconfigurationException"}

logger = logging.getLogger(__name__)


def is_told(error: BaseException) -> bool:
    """Whether one line says what a user can do about an error; the others are faults of ours, with a traceback."""
    return isinstance(error, KINDS) or any(kind.__name__ in OF_LIBRARIES for kind in type(error).__mro__)


def one_line(error: BaseException) -> str:
    """What an error says, in one line."""
    # As jsonargparse words it that a class cannot be made, one of Lightning's loggers for example.
    if needs := re.search(r"class_path '(?:\w+\.)*(\w+)':\s*Requirement '([^']+)' not met", str(error)):
        return f"{needs[1]} needs {needs[2]}, which is not installed: pip install '{needs[2]}'"
    lines = (line.strip() for line in str(error).splitlines() if line.strip())
    return printable("; ".join(lines).replace(":; ", ": ")) or type(error).__name__


def printable(text: str) -> str:
    """The text with its control characters spelt out, but for line ends and tabs: they might steer the terminal."""
    return "".join(char if char.isprintable() or char in "\n\t" else ascii(char)[1:-1] for char in text)


@contextmanager
def announced(what: str) -> Iterator[None]:
    """Log what is done within the block if it takes long, and again with its seconds until it is done."""
    done, began = Event(), time.monotonic()

    def announce() -> None:
        wait = FIRST
        while not done.wait(wait):
            logger.info("%s: %.0f s", what, time.monotonic() - began)
            wait = NEXT

    thread = Thread(target=announce, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def is_verbose() -> bool:
    """Whether libraries may show what they like."""
    return os.environ.get(VERBOSE, "").lower() not in ("", "0", "false")


@contextmanager
def without_bars() -> Iterator[None]:
    """Within the block no bar of tqdm is shown, whoever makes it, unless the user asks for it."""
    from tqdm import tqdm  # `poss --help` need not wait for it

    usual = tqdm.__init__
    if not is_verbose():
        tqdm.__init__ = partialmethod(usual, disable=True)  # pyright: ignore[reportAttributeAccessIssue]
    try:
        yield
    finally:
        tqdm.__init__ = usual


@contextmanager
def without_retries() -> Iterator[None]:
    """Within the block the hub's client does not report each failed request, unless the user asks for it."""
    from huggingface_hub.utils import logging as hub_logging  # `poss --help` need not wait for it

    usual = hub_logging.get_verbosity()
    if not is_verbose():
        hub_logging.set_verbosity_error()
    try:
        yield
    finally:
        hub_logging.set_verbosity(usual)


def mute_deepspeed() -> None:
    """Drop its line that this machine has no GPU, which it prints wherever it is imported, unless the user asks."""
    if not is_verbose():
        logging.getLogger("DeepSpeed").addFilter(_is_news)


def _is_news(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith("Setting accelerator to CPU")
