"""Several feature stores of one target as one: `poss merge`. Text can be added without reading the old again."""

import hashlib
import os
import shutil
from dataclasses import replace
from pathlib import Path

from tqdm import tqdm

from poss_lightning.features.extract import shard_path
from poss_lightning.features.manifest import EMBED_HEAD, FileEntry, StoreError
from poss_lightning.features.store import FeatureStore
from poss_lightning.files import atomic_folder, check_new
from poss_lightning.terminal import announced

ALIKE = ("dtype", "stored", "layers", "max_length")  # fields of manifests


def merge(stores: list[str], out: str) -> None:
    """Write a store of all samples of others, in their order. Where the file system can, no byte is copied.

    Args:
        stores: folders written by `poss extract`, or any address of one that fsspec reads; as [a,b].
        out: folder to write.

    Raises:
        FileExistsError: there is something at `out`.
        StoreError: a store is damaged; they differ in target, dtype, stored, layers or max_length; or a conversation is
            in two of them, by its id.
    """
    check_new(out)
    with announced(f"opening {len(stores)} stores"):
        opened = [FeatureStore(address) for address in stores]
    if not opened:
        raise ValueError("stores is empty; name those to merge, as [a,b]")
    with announced("comparing their conversations"):
        _check(stores, opened)
    first, entries = opened[0], []
    shards = [(store.folder / entry.name, entry) for store in opened for entry in store.manifest.shards]
    with atomic_folder(out) as folder:
        for source, entry in tqdm(shards, desc="merge", unit="shard"):
            path = shard_path(folder, len(entries))
            _link(source, path)
            entries.append(FileEntry(path.name, entry.bytes, entry.sha256))
        _link(first.folder / EMBED_HEAD, folder / EMBED_HEAD)
        merged = replace(
            first.manifest,
            corpus=hashlib.sha256("".join(store.manifest.corpus for store in opened).encode()).hexdigest(),
            samples=sum(store.manifest.samples for store in opened),
            tokens=sum(store.manifest.tokens for store in opened),
            shards=tuple(entries),
        )
        merged.write(folder)
        for store in opened:
            store.check_unchanged()  # else its digests are not those of what was copied
    print(f"{out}: {merged.samples:,} samples, {merged.tokens:,} tokens of {len(opened)} stores")


def _check(names: list[str], stores: list[FeatureStore]) -> None:
    store_of: dict[str, str] = {}
    for name, store in zip(names, stores, strict=True):
        if difference := stores[0].target.difference(store.target):
            raise StoreError(f"{name} and {names[0]} are of different targets: {difference}")
        for field in ALIKE:
            first, other = (getattr(source.manifest, field) for source in (stores[0], store))
            if first != other:
                raise StoreError(
                    f"{name} and {names[0]} differ in {field}: {other} and {first}. Extract one of them anew"
                )
        for sample in store.ids:
            if sample in store_of:
                raise StoreError(
                    f"conversation {sample!r} is in {store_of[sample]} and in {name}; each must be there once, for the "
                    "split and the noise go by ids"
                )
            store_of[sample] = name


def _link(source: Path, path: Path) -> None:
    try:
        os.link(source.resolve(), path)
    except OSError:  # another file system, or one without links
        shutil.copyfile(source, path)
