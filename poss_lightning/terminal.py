"""What a terminal shows: errors in one line, and what takes long."""

import logging
import re
import time
from argparse import ArgumentError
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Event, Thread

FIRST, NEXT = 3.0, 10.0  # seconds until slow work is announced, and announced again

# Errors whose text is enough for a user; those of libraries by name, so that nothing need be imported.
USER_ERRORS = (ValueError, OSError, NotImplementedError, ImportError, MemoryError, ArgumentError)
INVARIANT = re.compile(r"zip\(\) argument|not enough values to unpack|too many values to unpack")
LIBRARY_KINDS = {
    "OutOfMemoryError",
    "AcceleratorError",
    "SafetensorError",
    "TemplateError",
    "HTTPError",
    "DatasetsError",
    "ArrowException",
    "MisconfigurationException",
}

logger = logging.getLogger(__name__)


def is_user_error(error: BaseException) -> bool:
    """Whether an error's text tells a user what to do; any other error is a bug, and keeps its traceback.

    So is Python's own ValueError of `zip(strict=True)` and of unpacking, which no user's input should reach.
    """
    if INVARIANT.match(str(error)):
        return False
    return isinstance(error, USER_ERRORS) or any(kind.__name__ in LIBRARY_KINDS for kind in type(error).__mro__)


def one_line(error: BaseException) -> str:
    """Return the text of an error in one line."""
    lines = (line.strip() for line in str(error).splitlines() if line.strip())
    return printable("; ".join(lines).replace(":; ", ": ")) or type(error).__name__


def printable(text: str) -> str:
    """Return the text with control characters spelt out, which might steer the terminal; line ends and tabs stay."""
    return "".join(char if char.isprintable() or char in "\n\t" else ascii(char)[1:-1] for char in text)


@contextmanager
def announced(what: str) -> Iterator[None]:
    """Log what the block does if it takes long, and its seconds again and again until it ends."""
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
