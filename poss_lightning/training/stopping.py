"""The end of a training on a signal: every process stops at the same place, where all save one checkpoint."""

import logging
import os
import select
import signal
import threading
import time
from itertools import count
from math import inf
from types import FrameType
from typing import Any

import lightning
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch.distributed import HashStore, PrefixStore, distributed_c10d  # pyright: ignore[reportPrivateImportUsage]

ANSWER, ARRIVE = 30, 60  # seconds until all processes have said where they are, and until they have come to the place
FORWARDED = 1  # seconds in which a signal may arrive twice: from the system, and from a launcher that sends it on
FITS = count()  # of this process

logger = logging.getLogger(__name__)


class Stop:
    """Stops every process of a training at the same place after a signal to any of them.

    A place is where the training can stop: the end of a step, or of a batch of a validation. Every process counts the
    places that it has passed. After a signal each of them writes its next place into the store of the process group,
    and all stop at the last of these. Here the signal comes while process 0 is on its way to place 8:

        process 0   7 ──!── 8 ───── 9      says 8
        process 1   7 ───── 8 ──!── 9      says 9, so both stop at 9

    A thread says it, as the main thread may wait for another process in the middle of a step. Nothing waits for the
    device. A second signal ends the processes at once, and so does one that does not answer.
    """

    def __init__(self, trainer: lightning.Trainer):
        self.launcher, self.rank, self.world = trainer.strategy.launcher, trainer.global_rank, trainer.world_size
        group: Any = HashStore() if self.world == 1 else distributed_c10d._get_default_store()
        self.store = PrefixStore(f"stop/{next(FITS)}", group.clone())  # a clone, as a thread uses it
        self.place, self.last = 0, inf
        self.number: int = signal.SIGTERM
        self.asked, self.agreed, self.arrived, self.closed = (threading.Event() for _ in range(4))
        self.lock = threading.RLock()  # of `place`; a handler may interrupt the thread that has it
        environment = trainer._accelerator_connector.cluster_environment  # pyright: ignore[reportAttributeAccessIssue]
        self.requeues = isinstance(environment, SLURMEnvironment) and environment.auto_requeue
        self.handlers: dict[int, Any] = {}  # those before
        if threading.current_thread() is threading.main_thread():
            self._listen()

    def _listen(self) -> None:
        numbers = [signal.SIGTERM, *([signal.SIGUSR1] if self.requeues else [])]
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # nohup ignores it
            numbers.append(signal.SIGINT)
        self.handlers = {number: signal.signal(number, self._handle) for number in numbers}
        if self.world > 1:
            self.pipe, self.written = os.pipe()
            os.set_blocking(self.written, False)
            self.earlier = signal.set_wakeup_fd(self.written, warn_on_full_buffer=False)
            threading.Thread(target=self._watch, daemon=True, name="stop").start()

    # --- in the main thread ---

    def here(self) -> bool:
        """Return whether to stop at this place; otherwise pass it."""
        with self.lock:
            if not self.asked.is_set():
                self.place += 1
                return False
        self.agreed.wait()
        if self.place < self.last:
            self.place += 1
            return False
        self.arrived.set()
        return True

    def close(self) -> None:
        """Restore the handlers; again after Ctrl-C, as Lightning then lets the process ignore the next one."""
        for number, handler in self.handlers.items():
            signal.signal(number, handler)
        if self.handlers and self.world > 1:
            signal.set_wakeup_fd(self.earlier)
        self.closed.set()  # and the thread closes the pipe

    def interrupt(self) -> BaseException:
        """Return what ends this process: Lightning kills the first if a different one ends with a code other than 0."""
        if self.rank > 0:
            return SIGTERMException(0)
        return KeyboardInterrupt() if self.number == signal.SIGINT else SIGTERMException(128 + self.number)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.world > 1:  # the thread reads it from the pipe, as this is not called while a collective waits
            return
        if self.asked.is_set():
            raise self.interrupt()
        self._ask(number)
        self._agree()

    # --- in the thread, or in the handler of the only process ---

    def _ask(self, number: int) -> None:
        if self.rank == 0:
            logger.info("stopping after this batch; a second signal ends the training at once, without a checkpoint")
        self.number = int(self.store.compare_set("signal", "", str(int(number))))
        self.asked.set()
        with self.lock:
            self.store.set(str(self.rank), str(self.place))

    def _agree(self) -> None:
        ranks = [str(rank) for rank in range(self.world)]
        if self.store.check(ranks):
            self.last = max(int(place) for place in self.store.multi_get(ranks))
            self.agreed.set()

    def _watch(self) -> None:
        poll, since = select.poll(), inf
        poll.register(self.pipe, select.POLLIN)
        while not self.closed.is_set():
            ready = poll.poll(100 if self.asked.is_set() else 1000)  # milliseconds
            numbers = [each for each in os.read(self.pipe, 64) if each in self.handlers] if ready else []
            late = time.monotonic() - since
            if numbers and late > FORWARDED:
                self._end("a second signal")
            if numbers and since == inf:
                since = time.monotonic()
            try:
                if self.arrived.is_set():  # the first process, which has the store, may now end before this one
                    if numbers:
                        self.asked.set()
                elif not self.asked.is_set() and (numbers or self.store.check(["signal"])):
                    self._ask(numbers[0] if numbers else 0)
                    since = time.monotonic()
                elif self.asked.is_set() and not self.agreed.is_set():
                    self._agree()
            except RuntimeError:
                if not (self.arrived.is_set() or self.closed.is_set()):
                    self._end("the first process has ended")
            if late > (ARRIVE if self.agreed.is_set() else ANSWER) and not self.arrived.is_set():
                self._end("a process does not answer")
        os.close(self.pipe)
        os.close(self.written)

    def _end(self, reason: str) -> None:
        """End this process, and those that it has started, at once."""
        logger.warning("%s: ending at once, without a checkpoint", reason)
        if self.launcher is not None:
            self.launcher.kill(signal.SIGKILL)
        os._exit(128 + self.number)
