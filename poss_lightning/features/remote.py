"""A store from elsewhere: any address that fsspec reads, copied once into the user's cache and mapped from there.

Files are checked against the manifest's digests while they are read. A copy that was killed goes on with the first file
that is not there; several processes share one copy, and one of them makes it.
"""

import hashlib
from pathlib import Path

import fsspec
from filelock import FileLock
from tqdm import tqdm

from poss_lightning.features.manifest import MANIFEST, FileEntry, Manifest, StoreError
from poss_lightning.files import Hashed, atomic, user_cache

CHUNK = 2**22  # bytes read at a time


def local_copy(address: str | Path) -> Path:
    """The folder of a store: the path itself, or for an address with a protocol its copy, made when first asked for.

    The copy is known by its manifest's digest, so a store that was extracted anew is copied anew.

    Raises:
        StoreError: no store at the address, it cannot be reached, or a file arrives other than it was written.
    """
    if "://" not in str(address):
        return Path(address)
    files, root = _reach(str(address))
    text = _manifest(files, root, str(address))
    manifest = Manifest.parse(text, f"{address}/{MANIFEST}")
    folder = user_cache() / "stores" / hashlib.sha256(text).hexdigest()[:16]
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.with_suffix(".lock")):
        missing = [entry for entry in manifest.files if not _is_there(folder / entry.name, entry)]
        size = sum(entry.bytes for entry in missing)
        with tqdm(total=size, unit="B", unit_scale=True, desc=f"copy {address}", disable=not missing) as bar:
            for entry in missing:
                _copy(files, root, str(address), entry, folder, bar)
        if missing or not (folder / MANIFEST).exists():
            with atomic(folder / MANIFEST) as path:
                path.write_bytes(text)
    return folder


def _reach(address: str) -> tuple[fsspec.AbstractFileSystem, str]:
    try:
        return fsspec.core.url_to_fs(address)
    except (ValueError, ImportError, OSError) as error:  # an unknown protocol, or one whose package is not installed
        raise StoreError(f"{address} cannot be reached: {error}") from error


def _manifest(files: fsspec.AbstractFileSystem, root: str, address: str) -> bytes:
    try:
        content = files.cat_file(f"{root}/{MANIFEST}")
        return content if isinstance(content, bytes) else content.encode()
    except FileNotFoundError as error:
        raise StoreError(f"{address} is no finished feature store: it has no {MANIFEST}") from error
    except Exception as error:  # every protocol has errors of its own
        raise StoreError(f"{address}/{MANIFEST} cannot be read: {error or type(error).__name__}") from error


def _is_there(path: Path, entry: FileEntry) -> bool:
    return path.is_file() and path.stat().st_size == entry.bytes


def _copy(files: fsspec.AbstractFileSystem, root: str, address: str, entry: FileEntry, folder: Path, bar: tqdm) -> None:
    with atomic(folder / entry.name) as path:
        with Hashed(path) as copy:
            try:
                with files.open(f"{root}/{entry.name}", "rb") as source:
                    while chunk := source.read(CHUNK):
                        copy.write(chunk)
                        bar.update(len(chunk))
            except Exception as error:  # every protocol has errors of its own
                raise StoreError(f"{address}/{entry.name} cannot be copied: {error or type(error).__name__}") from error
            arrived = FileEntry.written(entry.name, copy)
        if arrived != entry:
            raise StoreError(f"{address}/{entry.name} is not as it was written: its digest is not the manifest's")
