"""The end of a training on a signal: all its processes save one checkpoint after the same step, and end."""

import logging
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from subprocess import Popen
from types import FrameType

import lightning
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.pytorch.utilities.exceptions import SIGTERMException

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
REPEATED_S = 1.0  # within which the same signal may come again: from the system, and from a launcher that forwards it

logger = logging.getLogger(__name__)


class Stop:
    """Remembers that this process got a signal, until all processes of the training ask each other for one."""

    def __init__(self, trainer: lightning.Trainer):
        self.strategy = trainer.strategy
        self.number: int | None = None  # of the first signal
        requeues = [signal.SIGUSR1] if SLURMEnvironment.detect() else []
        self.close = handle_signals(self._handle, [*SIGNALS, *requeues])

    def is_agreed(self) -> bool:
        """Return whether any process got a signal. All must call this, and wait for each other."""
        return self.strategy.reduce_boolean_decision(self.number is not None, all=False)

    def interrupt(self) -> BaseException:
        """Return what ends this process: Lightning kills the first if a different one ends with a code other than 0."""
        if not self.strategy.is_global_zero:
            return SIGTERMException(0)
        return KeyboardInterrupt() if self.number == signal.SIGINT else SIGTERMException(128 + (self.number or 15))

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.number is None:
            self.number, self.since = number, time.monotonic()
            logger.info("stopping soon, with a checkpoint; a second signal ends the training at once, without one")
        elif time.monotonic() - self.since > REPEATED_S:
            raise self.interrupt()


@contextmanager
def forwarded_signals(process: Popen) -> Iterator[None]:
    """Send the signals that this process gets to one that it waits for, and end this one, too, after that one."""
    numbers: list[int] = []

    def forward(number: int, frame: FrameType | None) -> None:
        numbers.append(number)
        process.send_signal(number)

    close = handle_signals(forward, SIGNALS)
    try:
        yield
    finally:
        close()
    if numbers:
        raise KeyboardInterrupt if numbers[0] == signal.SIGINT else SystemExit(128 + numbers[0])


def handle_signals(handle: Callable[[int, FrameType | None], None], numbers: Iterable[int]) -> Callable[[], None]:
    """Handle these signals, but those that the process ignores, as `nohup` lets it; return what ends this."""
    if threading.current_thread() is not threading.main_thread():  # Python lets no other handle any
        return lambda: None
    before = {number: signal.getsignal(number) for number in numbers}
    before = {number: handler for number, handler in before.items() if handler is not signal.SIG_IGN}
    for number in before:
        signal.signal(number, handle)

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    return restore
