"""The feature store: Arrow shards of samples, the target's embedding and head, and a manifest that says what they are.

store/
  manifest.json           target, dtype, layers, corpus digest, and every file's size and digest; written last
  ends.safetensors        embedding and LM head, so that training needs no target, and cannot mix up two
  shard-00000.arrow       samples: id, length, tokens, greedy, spans, draws, features, layers; memory-mapped when read
  asked.json              what `poss extract` was asked for, so that the same command ends at once
  unfinished/             only while `poss extract` is at work; see `work.py`
"""

import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from poss_lightning.features.manifest import EMBED_HEAD, Manifest, StoreError, check_files, decode, schema, vector_bytes
from poss_lightning.features.source import SampleSource
from poss_lightning.sampling import Draw
from poss_lightning.target_model.spec import EmbedHead


class Sample(NamedTuple):
    """One conversation, read by the target."""

    id: str
    tokens: Tensor  # (T,) int64
    greedy: Tensor  # (T,) int64, the target's most likely token after each; -1 outside assistant spans
    spans: list[tuple[int, int]]  # half-open token ranges the assistant wrote
    features: Tensor  # (T, D), in the target's dtype
    layers: Tensor = torch.empty(0, 0, 0)  # (T, n, D), outputs of inner layers; n is 0 where there are none
    draws: Sequence[Draw | None] = ()  # how each span was drawn; () where nothing was

    @property
    def draft_input(self) -> Tensor:
        """(T, R), what a draft reads: the inner layers side by side where there are any, else the features."""
        return self.layers.flatten(1) if self.layers.shape[1] else self.features


class FeatureStore(SampleSource):
    """A finished store, or several of one target as one, memory-mapped.

    Opening checks every file's size and columns; `verify_files` compares the digests of all bytes.

    Args:
        folder: of the store, or several.
        layers: inner layers whose outputs a sample carries; None for all that are kept.

    Attributes:
        folders: of the stores, in order.
        manifest: of the first; target, dtype, stored and layers are those of all.

    Raises:
        StoreError: no finished store there, or a file is missing or damaged; several do not belong together; or one
            does not keep one of the layers.
    """

    def __init__(self, folder: str | Path | Sequence[str | Path], layers: tuple[int, ...] | None = None):
        self.folders = [Path(each) for each in ([folder] if isinstance(folder, str | Path) else folder)]
        if not self.folders:
            raise StoreError("store is []; name one or more")
        manifests = [check_files(folder) for folder in self.folders]
        self.manifest = manifests[0]
        self._batches: list[pa.RecordBatch] = []
        for folder, manifest in zip(self.folders, manifests, strict=True):
            _check_alike(self.folders[0], self.manifest, folder, manifest)
            for entry in manifest.shards:
                self._batches += open_shard(folder / entry.name, manifest)
        self._starts = np.cumsum([0, *(batch.num_rows for batch in self._batches)])  # first sample of every batch
        table = pa.Table.from_batches([batch.select(["id", "length", "spans"]) for batch in self._batches])
        self.ids: list[str] = table["id"].to_pylist()
        self.lengths = table["length"].to_numpy()
        column = table["spans"].combine_chunks()
        edges, offsets = column.values.to_numpy().reshape(-1, 2), column.offsets.to_pylist()
        self.spans = [edges[start // 2 : stop // 2] for start, stop in itertools.pairwise(offsets)]
        self.target = self.manifest.target
        self._dtype = getattr(torch, self.manifest.dtype)
        self.layers = self.manifest.layers if layers is None else layers
        if missing := [layer for layer in self.layers if layer not in self.manifest.layers]:
            needed = ", ".join(map(str, dict.fromkeys(self.layers)))  # a shallow target's layers may coincide
            raise StoreError(
                f"{self.folders[0]} keeps no outputs of layer {missing[0]}, and the draft reads those of {needed}: "
                f"extract it with --layers [{needed.replace(' ', '')}]"
            )

    def __reduce__(self) -> tuple:
        # A loader's process maps the files itself; Arrow would send their bytes.
        return FeatureStore, (self.folders, self.layers)

    def __getitem__(self, index: int) -> Sample:
        index = range(len(self))[index]
        columns, row = self._find(index)
        tokens, greedy = (_values(columns, row, name).astype(np.int64) for name in ("tokens", "greedy"))
        features = self._vectors(columns, row, "features", 1)[:, 0]
        layers, stored = features.new_empty(len(tokens), 0, features.shape[1]), self.manifest.layers
        if self.layers:
            layers = self._vectors(columns, row, "layers", len(stored))
        if self.layers not in ((), stored):
            layers = layers[:, [stored.index(layer) for layer in self.layers]]
        return Sample(
            self.ids[index],
            torch.from_numpy(tokens),
            torch.from_numpy(greedy),
            [tuple(span) for span in self.spans[index].tolist()],
            features,
            layers,
            [draw and Draw.of(draw) for draw in map(json.loads, columns["draws"][row].as_py())],
        )

    def tokens(self, index: int) -> np.ndarray:
        """Return the tokens of a sample, (T,), as the file's own memory."""
        return _values(*self._find(index), "tokens")

    def conversations(self) -> list[str]:
        return [digest for batch in self._batches for digest in batch["conversation"].to_pylist()]

    def draft_input(self, index: int) -> Tensor:
        return self[index].draft_input

    def select(self, layers: tuple[int, ...]) -> "FeatureStore":
        """Return the store with samples that carry these layers' outputs; StoreError if one is not kept."""
        return self if layers == self.layers else FeatureStore(self.folders, layers)

    def embed_head(self) -> EmbedHead:
        path = self.folders[0] / EMBED_HEAD
        try:
            stored = load_file(path)
        except SafetensorError as error:
            raise StoreError(f"{path} cannot be read ({error})") from error
        embedding, head = stored["embedding"], stored.get("head", stored["embedding"])
        return EmbedHead(embedding, head, scale=self.target.logit_scale, cap=self.target.logit_cap)

    def _find(self, index: int) -> tuple[pa.RecordBatch, int]:
        """Return the batch of a sample and its row there."""
        batch = int(np.searchsorted(self._starts, index, side="right")) - 1
        return self._batches[batch], index - int(self._starts[batch])

    def _vectors(self, columns: pa.RecordBatch, row: int, name: str, count: int) -> Tensor:
        """Copy vectors out of the map, as a tensor may be written to and the files may not: (T, count, D)"""
        stored = self.manifest.stored
        size = vector_bytes(self.target.hidden_size, self._dtype, stored)
        _, offsets, blobs = columns[name].buffers()  # a scalar of Arrow would be a copy
        start, stop = np.frombuffer(offsets, np.int64)[row : row + 2]
        raw = torch.from_numpy(np.frombuffer(blobs, np.uint8)[start:stop].copy())
        return decode(raw.view(-1, count, size), stored, self._dtype)


def open_shard(shard: Path, manifest: Manifest) -> list[pa.RecordBatch]:
    """Map the batches of a shard into memory.

    Raises:
        StoreError: it cannot be parsed, or has other columns.
    """
    try:
        table = pa.ipc.open_stream(pa.memory_map(str(shard))).read_all()
        if table.schema != schema(manifest.layers):
            raise ValueError(f"its columns are {', '.join(table.schema.names)}")
        table.validate(full=True)
    except (OSError, ValueError, pa.ArrowException) as error:
        raise StoreError(f"{shard} cannot be read ({error}): `poss extract --verify true` checks every byte") from error
    return table.to_batches()


def _check_alike(first: Path, ours: Manifest, folder: Path, theirs: Manifest) -> None:
    """Raise StoreError if two stores cannot be read as one."""
    if difference := ours.target.difference(theirs.target):
        raise StoreError(f"{folder} and {first} are of different targets: {difference}")
    for name in ("dtype", "stored", "layers"):
        values = getattr(theirs, name), getattr(ours, name)
        if values[0] != values[1]:
            raise StoreError(f"{folder} and {first} differ in {name}: {values[0]} and {values[1]}. Extract one again")


def _values(columns: pa.RecordBatch, row: int, name: str) -> np.ndarray:
    """Return a list of a row, as the file's own memory."""
    return columns[name][row].values.to_numpy()
