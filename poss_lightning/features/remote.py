"""A store at any address that fsspec reads, copied once into the user's cache and memory-mapped from there."""

import hashlib
from pathlib import Path

import fsspec
from filelock import FileLock
from tqdm import tqdm

from poss_lightning.features.manifest import MANIFEST, FileEntry, Manifest, StoreError, is_finished
from poss_lightning.files import atomic, user_cache, without_secrets


def local_copy(address: str | Path) -> Path:
    """Return the folder of a store: the path itself, or the copy of an address, made at first use.

    The digest of its manifest names the copy, so a store that was extracted again is copied again. A killed copy
    resumes with the first missing file; several processes share one copy.

    Raises:
        StoreError: no store at the address, it cannot be reached, or a file arrives changed.
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
                part, copy = entry.name, folder / entry.name
                if copy.is_file() and copy.stat().st_size == entry.bytes:
                    continue
                with atomic(copy) as path:
                    files.get_file(f"{root}/{part}", str(path))
                    if FileEntry.of(path, part) != entry:
                        raise StoreError(f"{name}/{part} arrived changed: its digest is not the manifest's")
            if not is_finished(folder):
                with atomic(folder / MANIFEST) as path:
                    path.write_bytes(text)
    except StoreError:
        raise
    except FileNotFoundError as error:
        raise StoreError(f"{name}/{part}: no such file, so there is no finished feature store") from error
    except Exception as error:  # every protocol has its own errors
        reason = without_secrets(str(error)) or type(error).__name__
        raise StoreError(f"{name}/{part} cannot be read: {reason}") from error
    return folder
