"""A store from elsewhere: any address that fsspec reads, copied once into the user's cache and mapped from there.

A copy that was killed goes on with the first file that is not there; several processes share one copy.
"""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import fsspec
from filelock import FileLock
from tqdm import tqdm

from poss_lightning.features.manifest import MANIFEST, FileEntry, Manifest, StoreError
from poss_lightning.files import atomic, user_cache, without_secrets


def local_copy(address: str | Path) -> Path:
    """The folder of a store: the path itself, or for an address with a protocol its copy, made when first asked for.

    The copy is known by its manifest's digest, so a store that was extracted anew is copied anew.

    Raises:
        StoreError: no store at the address, it cannot be reached, or a file arrives other than it was written.
    """
    if "://" not in str(address):
        return Path(address)
    name = without_secrets(str(address))
    with _named(name):
        files, root = fsspec.core.url_to_fs(str(address))
    with _named(f"{name}/{MANIFEST}"):
        text = files.cat_file(f"{root}/{MANIFEST}")
    manifest = Manifest.parse(text, f"{name}/{MANIFEST}")
    folder = user_cache() / "stores" / hashlib.sha256(text).hexdigest()[:16]
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.with_suffix(".lock")):
        missing = [entry for entry in manifest.files if not _is_there(folder / entry.name, entry)]
        for entry in tqdm(missing, desc=f"copy {name}", unit="file", disable=not missing):
            with atomic(folder / entry.name) as path:
                with _named(f"{name}/{entry.name}"):
                    files.get_file(f"{root}/{entry.name}", str(path))
                if FileEntry.of(path) != entry:
                    raise StoreError(f"{name}/{entry.name} is not as it was written: its digest is not the manifest's")
        if missing or not (folder / MANIFEST).exists():
            with atomic(folder / MANIFEST) as path:
                path.write_bytes(text)
    return folder


def _is_there(path: Path, entry: FileEntry) -> bool:
    return path.is_file() and path.stat().st_size == entry.bytes


@contextmanager
def _named(address: str) -> Iterator[None]:
    """Let whatever goes wrong be a StoreError that names the address: every protocol has errors of its own."""
    try:
        yield
    except FileNotFoundError as error:
        raise StoreError(f"{address}: no such file, so there is no finished feature store") from error
    except Exception as error:
        reason = without_secrets(str(error)) or type(error).__name__
        raise StoreError(f"{address} cannot be read: {reason}") from error
