"""A store from elsewhere: any address that fsspec reads, copied once into the user's cache and mapped from there.

A copy that was killed resumes with the first file that is not there; several processes share one copy.
"""

import hashlib
from pathlib import Path
from typing import Any

import fsspec
from filelock import FileLock
from tqdm import tqdm

from poss_lightning.features.manifest import MANIFEST, FileEntry, Manifest, StoreError, is_finished
from poss_lightning.files import atomic, user_cache, without_secrets


def local_copy(address: str | Path) -> Path:
    """The folder of a store: the path itself, or for an address with a protocol its copy, made when first asked for.

    The copy is known by its manifest's digest, so a store that was extracted anew is copied anew.

    Raises:
        StoreError: no store at the address, it cannot be reached, or a file arrives other than it was written.
    """
    if "://" not in str(address):
        return Path(address)
    name, part = without_secrets(str(address)), MANIFEST
    try:
        files, root = fsspec.core.url_to_fs(str(address))
        text = files.cat_file(f"{root}/{MANIFEST}")
        folder = user_cache() / "stores" / hashlib.sha256(text).hexdigest()[:16]
        entries = Manifest.parse(text, f"{name}/{MANIFEST}").files
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(folder.with_suffix(".lock")):
            for entry in tqdm(entries, desc=f"copy {name}", unit="file", disable=is_finished(folder)):
                part = entry.name
                if not _is_there(folder / part, entry):
                    _copy(files, root, entry, folder, name)
            if not is_finished(folder):
                with atomic(folder / MANIFEST) as path:
                    path.write_bytes(text)
    except StoreError:
        raise
    except FileNotFoundError as error:
        raise StoreError(f"{name}/{part}: no such file, so there is no finished feature store") from error
    except Exception as error:  # every protocol has errors of its own
        reason = without_secrets(str(error)) or type(error).__name__
        raise StoreError(f"{name}/{part} cannot be read: {reason}") from error
    return folder


def _copy(files: Any, root: str, entry: FileEntry, folder: Path, name: str) -> None:
    with atomic(folder / entry.name) as path:
        files.get_file(f"{root}/{entry.name}", str(path))
        if FileEntry.of(path) != entry:
            raise StoreError(f"{name}/{entry.name} is not as it was written: its digest is not the manifest's")


def _is_there(path: Path, entry: FileEntry) -> bool:
    return path.is_file() and path.stat().st_size == entry.bytes
