"""Long work in parts: a killed process leaves it so that the same command resumes, and several may share it.

FOLDER/              beside what is being made; gone when it is finished
  work.lock          held while the settings, or the result, are written; the mark that the folder is ours to clear
  settings.json      what the result depends on; other settings are refused
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

from poss_lightning.files import MARK, atomic, remove, remove_leftovers

SETTINGS, RECEIPT, LOCK = "settings.json", ".part.json", ".part.lock"


class Work:
    """What stands in `folder` while work is unfinished.

    Args:
        folder: the work's.
        out: what is being made; by default the folder that it stands in.
    """

    def __init__(self, folder: str | Path, out: str | Path | None = None):
        self.folder = Path(folder)
        self.out = self.folder.parent if out is None else out
        self._lock = FileLock(self.folder / MARK)  # one object: `claim` and `clear` may stand inside `exclusive`
        remove_leftovers(self.folder.parent)

    @property
    def is_claimed(self) -> bool:
        """Whether somebody has begun it."""
        return (self.folder / SETTINGS).exists()

    @property
    def settings(self) -> dict[str, Any]:
        """Those that it was begun with; empty where nobody has."""
        path = self.folder / SETTINGS
        return json.loads(path.read_text()) if path.exists() else {}

    def claim(self, settings: Mapping[str, Any]) -> None:
        """Write down what the result depends on, or hold it against what stands there.

        Raises:
            ValueError: the work was begun with other settings; the message names them.
        """
        with self.exclusive():
            path = self.folder / SETTINGS
            if path.exists():
                if changed := differences(self.settings, settings):
                    raise ValueError(
                        f"{self.folder} was begun with other settings ({'; '.join(changed)}): resume with those, "
                        "choose another name, or remove it"
                    )
                return
            with atomic(path) as temporary:
                temporary.write_text(json.dumps(settings, indent=1))

    def receipt(self, part: str) -> Any | None:
        """What `write_receipt` wrote of a finished part; None for one that is not finished."""
        try:
            return json.loads((self.folder / f"{part}{RECEIPT}").read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None

    def write_receipt(self, part: str, receipt: Any) -> None:
        """Call a part finished."""
        with atomic(self.folder / f"{part}{RECEIPT}") as path:
            path.write_text(json.dumps(receipt, ensure_ascii=False), encoding="utf-8")

    @contextmanager
    def part(self, part: str) -> Iterator[bool]:
        """True while the part is this process's to make; False where another one is at it."""
        try:
            lock = self._acquire(FileLock(self.folder / f"{part}{LOCK}"), blocking=False)
        except Timeout:
            yield False
            return
        with lock:
            yield True

    @contextmanager
    def exclusive(self, wait: bool = True) -> Iterator[None]:
        """Only one process at a time is in here.

        Raises:
            ValueError: another one is, and this one should not wait; or the folder has files of others.
        """
        if self._is_foreign():
            raise ValueError(f"{self.folder} has files of others, and {self.out} needs that name: rename one of them")
        try:
            lock = self._acquire(self._lock, blocking=wait)
        except Timeout:
            raise ValueError(f"{self.out}: another process writes there; wait for it, or choose another name") from None
        with lock:
            yield

    def clear(self) -> None:
        """Remove it, as the result is there, or what a process left that was killed while it did; no file of others.

        Receipts go first, and the mark last: what is half cleared is still refused to other settings.
        """
        if (self.folder / MARK).is_file():
            with self.exclusive():
                remove_leftovers(self.folder)
                remove(self.folder, f"*{RECEIPT}", f"*{LOCK}", SETTINGS, MARK)
        remove(self.folder)

    def _is_foreign(self) -> bool:
        """Whether there are files, and none of ours."""
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
            except (FileNotFoundError, FileExistsError):  # another process has just finished, and the folder is gone
                if self.folder.is_file():
                    raise


def differences(earlier: Mapping[str, Any], settings: Mapping[str, Any]) -> list[str]:
    """In which settings two pieces of work differ, in words; nested names have dots."""
    old, new = (flat(json.loads(json.dumps(nested))) for nested in (earlier, settings))
    names = [name for name in dict.fromkeys([*new, *old]) if old.get(name) != new.get(name)]
    return [f"{name} {old.get(name)!r}, now {new.get(name)!r}" for name in names]


def flat(nested: Mapping[str, Any]) -> dict[str, Any]:
    """Nested settings with dots between the names."""
    dotted: dict[str, Any] = {}
    for name, value in nested.items():
        inner = flat(value) if isinstance(value, Mapping) else {}
        dotted |= {f"{name}.{below}": leaf for below, leaf in inner.items()} or {name: value}
    return dotted
