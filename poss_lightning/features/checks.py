"""What is checked when a store is opened: that its samples are whole, and that several stores belong together."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute
import torch

from poss_lightning.features.encoding import vector_bytes
from poss_lightning.features.manifest import Manifest, StoreError

LATER = {"conversation", "draws"}  # columns that the first stores lack
pc: Any = pyarrow.compute  # whose functions no type checker sees


def schema(layers: tuple[int, ...]) -> pa.Schema:
    """Columns of a shard. Features are the encoded vectors of a sample, one token after another; see `encoding`."""
    columns = {
        "id": pa.string(),
        "conversation": pa.string(),  # digest of all that is said in it; the first stores lack it
        "length": pa.int32(),
        "tokens": pa.list_(pa.int32()),
        "greedy": pa.list_(pa.int32()),
        "spans": pa.list_(pa.int32()),
        "draws": pa.list_(pa.string()),  # of each span, as JSON, how it was drawn; empty where none was; once not there
        "features": pa.large_binary(),
    }
    return pa.schema(columns | ({"layers": pa.large_binary()} if layers else {}))


def open_shard(shard: Path, manifest: Manifest) -> list[pa.RecordBatch]:
    """The batches of a shard, each sample of which is whole; offsets and tokens are read for it, no features."""
    try:
        table = pa.ipc.open_stream(pa.memory_map(str(shard))).read_all()
        missing = set(schema(manifest.layers).names) - set(table.schema.names)
        expected = pa.schema([field for field in schema(manifest.layers) if field.name not in missing & LATER])
        if table.schema != expected:
            raise ValueError(f"its columns are {', '.join(table.schema.names)}")
        table.validate(full=True)
        _check_samples(table, manifest)
    except (OSError, ValueError, pa.ArrowException) as error:
        raise StoreError(f"{shard} cannot be read ({error}): `poss extract --verify true` checks every byte") from error
    return table.to_batches()


def _check_samples(table: pa.Table, manifest: Manifest) -> None:
    """Raise ValueError for a sample whose columns are not of one length, or have what is not a token of the target."""
    lengths, vocabulary = table["length"].to_numpy(), manifest.target.vocab_size
    vector = vector_bytes(manifest.target.hidden_size, getattr(torch, manifest.dtype), manifest.stored)
    sizes = {"tokens": lengths, "greedy": lengths, "features": lengths * np.int64(vector)}
    if manifest.layers:
        sizes["layers"] = sizes["features"] * len(manifest.layers)
    for name, size in sizes.items():
        measure = pc.list_value_length if size is lengths else pc.binary_length
        if table[name].null_count or (measure(table[name]).to_numpy() != size).any():
            raise ValueError(f"{name} of a sample are not as many as its length says")
    for name, least in (("tokens", 0), ("greedy", -1)):
        values = pc.list_flatten(table[name]).to_numpy()
        if len(values) and not least <= values.min() <= values.max() < vocabulary:
            raise ValueError(f"{name} go from {values.min()} to {values.max()}; the target has {vocabulary} tokens")
    counts = pc.list_value_length(table["spans"]).to_numpy()
    edges = pc.list_flatten(table["spans"]).to_numpy()
    if (counts % 2).any() or (edges < 0).any() or (edges > np.repeat(lengths, counts)).any():
        raise ValueError("spans go beyond a sample")
    if "draws" in table.schema.names:
        drawn = pc.list_value_length(table["draws"]).to_numpy()
        if (drawn * 2 != counts)[drawn > 0].any():
            raise ValueError("draws of a sample are not as many as its spans")


def check_whole(folder: Path, manifest: Manifest, batches: list[pa.RecordBatch]) -> None:
    """Raise StoreError where there are other samples than the manifest counts, or one twice."""
    ids = [name for batch in batches for name in batch["id"].to_pylist()]
    found = {"samples": len(ids), "tokens": sum(pc.sum(batch["length"]).as_py() for batch in batches)}
    for name, count in found.items():
        if count != (said := getattr(manifest, name)):
            raise StoreError(f"{folder} has {count} {name}, its manifest says {said}: remove it and extract it again")
    if len(set(ids)) < len(ids):
        raise StoreError(f"{folder} has {len(ids)} samples of {len(set(ids))} ids: remove it and extract it again")


def check_alike(first: Path, one: Manifest, folder: Path, other: Manifest) -> None:
    """Raise StoreError where two stores cannot be read as one."""
    if difference := one.target.difference(other.target):
        raise StoreError(f"{folder} and {first} are of different targets: {difference}")
    for name in ("dtype", "stored", "layers"):
        if (ours := getattr(one, name)) != (theirs := getattr(other, name)):
            raise StoreError(f"{folder} and {first} differ in {name}: {theirs} and {ours}. Extract one of them anew")
