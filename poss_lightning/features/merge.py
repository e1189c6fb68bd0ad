"""Several feature stores of one target as one: `poss merge`. Text can be added without reading the old anew."""

import hashlib
import os
import shutil
from dataclasses import replace
from pathlib import Path

from poss_lightning.features.manifest import ENDS, FileNote, StoreError
from poss_lightning.features.store import FeatureStore
from poss_lightning.features.unfinished import shard

ALIKE = ("dtype", "stored", "layers", "max_length")  # of manifests


def merge(out: str, stores: list[str]) -> None:
    """Write a store of all samples of others, in their order. Where the file system can, no byte is copied.

    Args:
        out: folder to write.
        stores: folders written by `poss extract`, or any address of one that fsspec reads; as [a,b].

    Raises:
        FileExistsError: there is something at `out`.
        StoreError: a store is damaged; they differ in target, dtype, stored, layers or max_length; or a conversation is
            in two of them, by its id.
    """
    if os.path.lexists(out):
        raise FileExistsError(f"{out} is there already: remove it, or name another folder")
    opened = [FeatureStore(address) for address in stores]
    if not opened:
        raise ValueError("stores is empty; name those to merge, as [a,b]")
    _check(stores, opened)
    first, folder, notes = opened[0], Path(out).with_name(f".{Path(out).name}.tmp"), []
    shutil.rmtree(folder, ignore_errors=True)  # of a killed one
    folder.mkdir(parents=True)
    for store in opened:
        for note in store.manifest.shards:
            path = shard(folder, len(notes))
            _link(store.folder / note.name, path)
            notes.append(FileNote(path.name, note.bytes, note.sha256))
    _link(first.folder / ENDS, folder / ENDS)
    whole = replace(
        first.manifest,
        corpus=hashlib.sha256("".join(store.manifest.corpus for store in opened).encode()).hexdigest(),
        samples=sum(store.manifest.samples for store in opened),
        tokens=sum(store.manifest.tokens for store in opened),
        shards=tuple(notes),
    )
    whole.write(folder)
    folder.rename(out)
    print(f"{out}: {whole.samples:,} samples, {whole.tokens:,} tokens of {len(opened)} stores")


def _check(names: list[str], stores: list[FeatureStore]) -> None:
    seen: dict[str, str] = {}
    for name, store in zip(names, stores, strict=True):
        if difference := stores[0].target.difference(store.target):
            raise StoreError(f"{name} and {names[0]} are of different targets: {difference}")
        for field in ALIKE:
            one, other = (getattr(each.manifest, field) for each in (stores[0], store))
            if one != other:
                raise StoreError(
                    f"{name} and {names[0]} differ in {field}: {other} and {one}. Extract one of them anew"
                )
        for sample in store.ids:
            if sample in seen:
                raise StoreError(
                    f"conversation {sample!r} is in {seen[sample]} and in {name}; each must be there once, for the "
                    "split and the noise go by ids"
                )
            seen[sample] = name


def _link(source: Path, path: Path) -> None:
    try:
        os.link(source.resolve(), path)
    except OSError:  # another file system, or one without links
        shutil.copyfile(source, path)
