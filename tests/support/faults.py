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
import json
import os
import re
import resource
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import chdir
from pathlib import Path
from typing import NamedTuple, NoReturn

from poss_lightning import cli

SECONDS = 120  # that a command of tiny sizes may take, even on a busy machine
PATIENCE = 4  # seconds that a second writer may wait for one that is stopped
KILLED = 137
CREATES = ("open", "append", "os.mkdir", "os.link", "os.symlink")  # operations that need space
CHANGES = (*CREATES, "os.rename", "os.remove", "os.rmdir", "os.chmod", "os.truncate")
STORE = "store"  # that a command reads in its folder


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


class Outcome(NamedTuple):
    code: int  # exit code; below 0, the signal that ended the process
    text: str  # everything printed

    @property
    def last(self) -> str:
        lines = re.split(r"[\r\n]|\x1b\[A", self.text)  # bars go back to their line, and up
        return next((line.strip() for line in reversed(lines) if line.strip()), "")

    def is_refusal(self, command: str) -> bool:
        """Whether the command ended with one clear line."""
        return self.code == 1 and self.last.startswith(f"poss {command}: ") and "Traceback" not in self.text


# --- a command in a process of its own ---


class Child:
    """A forked process that runs `poss` in a folder, and meets the fault if one is given."""

    def __init__(self, folder: Path, arguments: list[str], fault: Fault | None = None, record: Path | None = None):
        reading, writing = os.pipe()
        sys.stdout.flush()
        self.pid, self._pipe, self._text = os.fork(), reading, b""
        if not self.pid:
            for stream in (1, 2):
                os.dup2(writing, stream)
            _run(folder, arguments, fault, record)
        os.close(writing)

    def wait(self, seconds: float = SECONDS) -> Outcome | None:
        """Its outcome; None if it is stopped, or still runs after so many seconds."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if select.select([self._pipe], [], [], 0.01)[0] and (piece := os.read(self._pipe, 2**16)):
                self._text += piece
                continue
            pid, status = os.waitpid(self.pid, os.WNOHANG | os.WUNTRACED)
            if pid and os.WIFSTOPPED(status):
                return None
            if pid:
                while piece := os.read(self._pipe, 2**16):
                    self._text += piece
                os.close(self._pipe)
                return Outcome(os.waitstatus_to_exitcode(status), self._text.decode(errors="replace"))
        return None

    def end(self) -> Outcome:
        """Its outcome; it is killed if it does not end."""
        if (outcome := self.wait()) is None:
            self.kill()
            outcome = self.wait()
            assert outcome is not None
        return outcome

    def resume(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)


def _run(folder: Path, arguments: list[str], fault: Fault | None, record: Path | None) -> NoReturn:
    """Run `poss` and end this process."""
    code, operations = 1, []
    sys.stdout = sys.stderr = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
    sys.argv = ["poss", *arguments]
    try:
        with chdir(folder):
            watch(folder, operations.append) if fault is None else arm(fault, folder)
            cli.main()
        code = 0
    except SystemExit as stop:
        if stop.code not in (None, 0, 1):
            print(stop.code)
        code = 0 if stop.code in (None, 0) else 1
    except BaseException:
        traceback.print_exc()
    if record:
        record.write_text(json.dumps([operations, list(sys.modules)]))
    sys.stdout.flush()
    os._exit(code)


def recorded(record: Path) -> tuple[list[Operation], list[str]]:
    """The operations of a finished command, and the modules that it had imported."""
    operations, modules = json.loads(record.read_text())
    return [Operation(*operation) for operation in operations], modules


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


def arm(fault: Fault, folder: Path) -> None:
    """Make this process meet the fault."""
    if fault.kind == "limit":
        resource.setrlimit(resource.RLIMIT_FSIZE, (fault.at, resource.RLIM_INFINITY))
    else:
        number, written = 0, folder

        def see(operation: Operation) -> None:
            nonlocal number, written
            number += 1
            if number == fault.at or (number > fault.at and fault.kind == "full"):
                ACTS[fault.kind](operation, Path(operation.path if operation.event == "os.chmod" else written))
            if operation.event == "open":
                written = operation.path

        watch(folder, see)


def _kill(operation: Operation, written: Path) -> None:
    os._exit(KILLED)


def _tear(operation: Operation, written: Path) -> None:
    if written.is_file():
        os.truncate(written, written.stat().st_size // 2)
    os._exit(KILLED)


def _fill(operation: Operation, written: Path) -> None:
    if operation.event in CREATES:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), operation.path)


def _stop(operation: Operation, written: Path) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


ACTS = {"kill": _kill, "foreign": _kill, "torn": _tear, "full": _fill, "beside": _stop}
