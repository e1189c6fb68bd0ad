"""Long work in parts, which the same command resumes after a kill, and which several processes may share.

FOLDER/              beside what is being made; gone when it is finished
  work.lock          held while the settings, or the result, are written; the mark that the folder is ours to clear
  settings.json      what the result depends on; different settings are refused
  PART.part.json     receipt of a finished part: its content, or what tells it from a torn one
  PART.part.lock     held while a process works on the part; the system frees the lock of a dead one
"""

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import AcquireReturnProxy, FileLock, Timeout

from poss_lightning.files import atomic, remove

MARK = "work.lock"
SETTINGS, RECEIPT, LOCK = "settings.json", ".part.json", ".part.lock"


class Work:
    """Unfinished work, kept in `folder`.

    Args:
        folder: has its receipts; files that this package did not write stay.
        settings: what the result depends on; work begun with different ones is refused. None where nobody resumes it.
        out: what is being made, for messages; by default the parent of `folder`.
    """

    def __init__(self, folder: str | Path, settings: Mapping[str, Any] | None = None, out: str | Path | None = None):
        self.folder, self.settings = Path(folder), settings
        self.out = self.folder.parent if out is None else out
        self._lock = FileLock(self.folder / MARK)  # one object, as `clear` may be called inside `exclusive`

    def receipt(self, part: str) -> Any | None:
        """Return the receipt of a finished part; None if it is not finished."""
        try:
            return json.loads((self.folder / f"{part}{RECEIPT}").read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None

    def write_receipt(self, part: str, receipt: Any) -> None:
        """Declare a part finished."""
        with atomic(self.folder / f"{part}{RECEIPT}") as path:
            path.write_text(json.dumps(receipt, ensure_ascii=False), encoding="utf-8")

    @contextmanager
    def part(self, part: str) -> Iterator[bool]:
        """Yield whether this process may make the part, or another one is making it."""
        try:
            lock = self._acquire(FileLock(self.folder / f"{part}{LOCK}"), blocking=False)
        except Timeout:
            yield False
            return
        with lock:
            yield True

    def begin(self) -> None:
        """Write down the settings, or refuse as `exclusive` does."""
        with self.exclusive():
            pass

    @contextmanager
    def exclusive(self, wait: bool = True) -> Iterator[None]:
        """Let one process at a time into the block; the first writes down the settings.

        Raises:
            ValueError: it was begun with other settings; another process is in the block, and this one should not
                wait; or the folder has only files that this package did not write.
        """
        with self._locked(wait):
            earlier = begun_with(self.folder)
            if self.settings is not None and not earlier:
                with atomic(self.folder / SETTINGS) as path:
                    path.write_text(json.dumps(self.settings, indent=1))
            elif self.settings is not None:
                check_same(self.folder, earlier, self.settings)
            yield

    @contextmanager
    def _locked(self, wait: bool = True) -> Iterator[None]:
        if self._is_foreign():
            raise ValueError(f"{self.folder} has unknown files, and {self.out} needs that name: rename one of them")
        try:
            lock = self._acquire(self._lock, blocking=wait)
        except Timeout:
            raise ValueError(f"{self.out}: another process writes there; wait for it, or choose another name") from None
        with lock:
            yield

    def clear(self) -> None:
        """Delete our files when the result is complete, then the folder if it is empty.

        Receipts go first and the mark last, so half-cleared work still refuses different settings; each with what a
        kill left of writing it.
        """
        if (self.folder / MARK).is_file():
            with self._locked():
                remove(
                    self.folder, *(f"*{name}{end}" for name in (RECEIPT, LOCK, SETTINGS) for end in ("", ".tmp")), MARK
                )
        remove(self.folder)

    def _is_foreign(self) -> bool:
        """Whether there are files, but none of ours."""
        try:
            names = os.listdir(self.folder)  # at once: another process may be clearing it
        except FileNotFoundError:
            return False
        return bool(names) and MARK not in names and not any(self.folder.rglob(f"*{LOCK}"))

    def _acquire(self, lock: FileLock, blocking: bool) -> AcquireReturnProxy:
        while True:
            try:
                Path(lock.lock_file).parent.mkdir(parents=True, exist_ok=True)
                return lock.acquire(blocking=blocking)
            except (FileNotFoundError, FileExistsError):  # another process has just finished and removed the folder
                if self.folder.is_file():
                    raise


def begun_with(folder: Path) -> dict[str, Any]:
    """Return the settings that the work in a folder was begun with; {} if it is new."""
    return json.loads((folder / SETTINGS).read_text()) if (folder / SETTINGS).exists() else {}


def check_same(folder: Path, earlier: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
    """Raise ValueError if what is in a folder was begun with other settings; what only `earlier` has does not count."""
    if changed := differences({name: earlier.get(name) for name in settings}, settings):
        raise ValueError(
            f"{folder} was begun with other settings ({'; '.join(changed)}): resume with those, choose a different "
            "name, or remove it"
        )


def differences(earlier: Mapping[str, Any], settings: Mapping[str, Any]) -> list[str]:
    """In which settings two pieces of work differ, as "NAME OLD, now NEW"; nested names have dots."""
    old, new = (flat(json.loads(json.dumps(nested))) for nested in (earlier, settings))
    names = [name for name in dict.fromkeys([*new, *old]) if old.get(name) != new.get(name)]
    return [f"{name} {old.get(name)!r}, now {new.get(name)!r}" for name in names]


def flat(nested: Mapping[str, Any]) -> dict[str, Any]:
    """Return nested settings with dots between the names."""
    dotted: dict[str, Any] = {}
    for name, value in nested.items():
        inner = flat(value) if isinstance(value, Mapping) else {}
        dotted |= {f"{name}.{below}": leaf for below, leaf in inner.items()} or {name: value}
    return dotted
