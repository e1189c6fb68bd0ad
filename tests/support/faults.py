"""Faults while a command writes, and the command in a forked process that meets them.

An audit hook sees and counts every file operation below the command's folder before it happens. A fault is `KIND:AT`:

  kill:N       the process ends before its N-th operation
  foreign:N    the same, and then somebody puts files into every folder, and beside what is written
  torn:N       the same, and the file that it was writing has half of its bytes
  full:N       from the N-th operation on, the disk is full
  limit:BYTES  no file may become larger
  beside:N     the process stops before its N-th operation, while another one runs the same command
"""

import errno
import multiprocessing
import os
import resource
import signal
import sys
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

from tests.support.command import Result, run_in
from tests.support.processes import SECONDS

KILLED = 137
CREATES = ("open", "append", "os.mkdir", "os.link", "os.symlink")  # operations that need space
CHANGES = (*CREATES, "os.rename", "os.remove", "os.rmdir", "os.chmod", "os.truncate")
fork = multiprocessing.get_context("fork")


class Operation(NamedTuple):
    event: str  # as the audit hook names it
    path: str  # of what is written, renamed or removed


class Fault(NamedTuple):
    kind: str
    at: int

    def __str__(self) -> str:
        return f"{self.kind}:{self.at}"

    @classmethod
    def parse(cls, text: str) -> "Fault":
        kind, _, at = text.partition(":")
        return cls(kind, int(at))


class Ended(NamedTuple):
    """What a command ended with."""

    code: int | str | None  # as in a `Result`; of a killed one what the system says
    text: str = ""  # everything printed
    operations: tuple[Operation, ...] = ()  # of a command without a fault
    modules: tuple[str, ...] = ()  # that it had imported

    def __str__(self) -> str:
        return f"{self.code}\n{self.text[-3000:]}"


class Child:
    """A forked process that runs `poss` in a folder, and meets the fault if one is given."""

    def __init__(self, folder: Path, arguments: list[str], fault: Fault | None = None):
        self._messages, sending = fork.Pipe(duplex=False)
        self.process = fork.Process(target=_run, args=(sending, folder, arguments, fault))
        self.process.start()
        sending.close()

    def wait(self, seconds: float = SECONDS) -> Ended | None:
        """What it ended with; None if it stops, or still runs after so many seconds."""
        if not self._messages.poll(seconds):
            return None
        try:
            return self._messages.recv()
        except EOFError:  # it was killed
            self.process.join()
            return Ended(self.process.exitcode)

    def end(self) -> Ended:
        """What it ended with; it is killed if it does not end."""
        ended = self.wait()
        self.process.kill()
        self.process.join()
        return ended or Ended("it does not end")

    def resume(self) -> None:
        os.kill(self.process.pid or 0, signal.SIGCONT)


def _run(sending: Connection, folder: Path, arguments: list[str], fault: Fault | None) -> None:
    operations: list[Operation] = []
    watch(folder, operations.append) if fault is None else arm(fault, folder, sending)
    try:
        result = run_in(folder, *arguments)
    except BaseException:
        result = Result(1, "", traceback.format_exc())
    sending.send(Ended(result.code, f"{result.out}{result.err}", tuple(operations), tuple(sys.modules)))
    os._exit(0)


# --- faults ---


def watch(folder: Path, see: Callable[[Operation], object]) -> None:
    """Call `see` before each operation below a folder, as long as this process lives."""
    inside, busy = f"{folder}{os.sep}", False

    def hook(event: str, arguments: tuple) -> None:
        nonlocal busy
        if busy or event not in CHANGES or not isinstance(arguments[0], str | bytes | os.PathLike):
            return
        if event == "open" and not arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC):
            return
        if event == "open" and arguments[2] & os.O_APPEND:
            event = "append"
        path = _absolute(event, arguments)
        if path.startswith(inside):
            busy = True
            try:
                see(Operation(event, path))
            finally:
                busy = False

    sys.addaudithook(hook)


def _absolute(event: str, arguments: tuple) -> str:
    """The path that an operation changes; of a rename, its source."""
    path = os.fsdecode(arguments[1] if event in ("os.link", "os.symlink") else arguments[0])
    if event in ("os.remove", "os.rmdir") and arguments[-1] not in (-1, None):
        path = os.path.join(os.readlink(f"/proc/self/fd/{arguments[-1]}"), path)
    return os.path.abspath(path)


def arm(fault: Fault, folder: Path, sending: Connection) -> None:
    """Make this process meet the fault; before it stops it says so."""
    if fault.kind == "limit":
        resource.setrlimit(resource.RLIMIT_FSIZE, (fault.at, resource.RLIM_INFINITY))
        return
    number, written = 0, folder

    def see(operation: Operation) -> None:
        nonlocal number, written
        number += 1
        if fault.kind == "full" and number >= fault.at and operation.event in CREATES:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), operation.path)
        if fault.kind != "full" and number == fault.at:
            end_or_stop(Path(operation.path if operation.event == "os.chmod" else written))
        if operation.event == "open":
            written = Path(operation.path)

    def end_or_stop(written: Path) -> None:
        if fault.kind == "beside":
            sending.send(None)
            os.kill(os.getpid(), signal.SIGSTOP)
            return
        if fault.kind == "torn" and written.is_file():
            os.truncate(written, written.stat().st_size // 2)
        os._exit(KILLED)

    watch(folder, see)
