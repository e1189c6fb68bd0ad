"""What stands beside an unfinished store: any number of processes write it together, and a killed one is made good.

store/unfinished/        gone when the store is finished
  settings.json          what the store will be; other settings are refused
  shard-00000.json       the note of a shard that is there, so that nobody reads it again for its digest
  shard-00000.lock       held while a process is at the shard; the system frees the lock of a dead one
  claim.lock             held while the settings or the manifest are written
"""

import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

from filelock import AcquireReturnProxy, FileLock, Timeout

from poss_lightning.features.manifest import MANIFEST, FileNote, Manifest, StoreError, check
from poss_lightning.files import atomic
from poss_lightning.target.spec import TargetSpec

FOLDER, SETTINGS = "unfinished", "settings.json"


class Rank(NamedTuple):
    """Which of several processes this is; only the order of its work follows from it."""

    rank: int
    world: int
    local: int  # on its machine


def this_rank(environment: Mapping[str, str]) -> Rank:
    """As torchrun or SLURM say it; alone where neither does."""
    for names in (("RANK", "WORLD_SIZE", "LOCAL_RANK"), ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID")):
        if all(environment.get(name, "").isdecimal() for name in names):
            return Rank(*(int(environment[name]) for name in names))
    return Rank(0, 1, 0)


def order(count: int, rank: int, world: int) -> list[int]:
    """Shards in the order a rank takes them: every world-th, then what the others may have left, from the end.

    So a dead rank's share is done by the others, and a rank that is alone does everything.
    """
    own = range(rank, count, world)
    return [*own, *(number for number in reversed(range(count)) if number not in own)]


def shard(folder: Path, number: int) -> Path:
    return folder / f"shard-{number:05d}.arrow"


def kind(spec: TargetSpec, dtype: str, stored: str, layers: tuple[int, ...], max_length: int, corpus: str) -> dict:
    """What makes two stores the same."""
    return {
        "target": spec.fingerprint,
        "template": spec.template,
        "dtype": dtype,
        "stored": stored,
        "layers": list(layers),
        "max_length": max_length,
        "corpus": corpus,
    }


def claim(folder: Path, kind: dict, sizes: dict) -> bool:
    """Write down what the store will be; False where just this store is finished.

    Args:
        folder: of the store.
        kind: see `kind`.
        sizes: how its shards are cut, which must not change under way either.

    Raises:
        StoreError: the folder holds another store, or shards of an unknown one.
    """
    settings = there = kind | sizes
    path = folder / FOLDER / SETTINGS
    shards = any(folder.glob("shard-*"))  # looked for first: settings come before shards and go after the manifest
    if shards and not path.exists() and not finished(folder):
        raise StoreError(f"{folder} holds shards of an unknown store: choose another folder or remove it")
    if not finished(folder):
        with alone(folder):
            if path.exists():
                there = json.loads(path.read_text())
            elif not finished(folder):
                with atomic(path) as temporary:
                    temporary.write_text(json.dumps(settings, indent=1))
    if finished(folder):
        there = _kind(check(folder))
    if changed := [f"{name} {there[name]} (now {settings[name]})" for name in there if there[name] != settings[name]]:
        words = ", ".join(changed)
        raise StoreError(f"{folder} holds a store of another kind, {words}: choose another folder or remove it")
    return not finished(folder)


def finished(folder: Path) -> bool:
    return (folder / MANIFEST).exists()


@contextmanager
def turn(folder: Path, number: int) -> Iterator[bool]:
    """True while the shard is this process's to write; False where it is there or another process is at it."""
    if _done(folder, number):  # before the lock, which would leave a file in a store that was just finished
        yield False
        return
    try:
        lock = _acquire(folder, f"{shard(folder, number).stem}.lock", blocking=False)
    except Timeout:
        yield False
        return
    with lock:
        yield not _done(folder, number)


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Only one process at a time is in here."""
    with _acquire(folder, "claim.lock"):
        yield


def leave_note(folder: Path, number: int, note: FileNote) -> None:
    with atomic(_note(folder, number)) as path:
        path.write_text(json.dumps(asdict(note)))


def note(folder: Path, number: int) -> FileNote | None:
    """The note of a shard; None where it is not there, or not as the note says."""
    try:
        found = FileNote(**json.loads(_note(folder, number).read_text()))
        return found if shard(folder, number).stat().st_size == found.bytes else None
    except FileNotFoundError:
        return None


def clear(folder: Path) -> None:
    """Remove what only an unfinished store needs."""
    if (folder / FOLDER).exists():
        with alone(folder):
            shutil.rmtree(folder / FOLDER, ignore_errors=True)


def _done(folder: Path, number: int) -> bool:
    return note(folder, number) is not None or finished(folder)  # in this order: notes go after the manifest


def _note(folder: Path, number: int) -> Path:
    return folder / FOLDER / f"{shard(folder, number).stem}.json"


def _acquire(folder: Path, name: str, blocking: bool = True) -> AcquireReturnProxy:
    while True:
        (folder / FOLDER).mkdir(parents=True, exist_ok=True)
        try:
            return FileLock(folder / FOLDER / name).acquire(blocking=blocking)
        except FileNotFoundError:  # another process has just finished the store, and the folder is gone
            continue


def _kind(manifest: Manifest) -> dict:
    return kind(manifest.target, manifest.dtype, manifest.stored, manifest.layers, manifest.max_length, manifest.corpus)
