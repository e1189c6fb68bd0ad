"""The feature store: Arrow shards of samples, the target's embedding and head, and a manifest that says what they are.

store/
  manifest.json           target, dtype, layers, corpus digest, and every file's size and digest; written last
  ends.safetensors        embedding and LM head, so that training needs no target, and cannot mix up two
  shard-00000.arrow       samples: id, length, tokens, greedy, spans, draws, features, layers; memory-mapped when read
  unfinished/             only while `poss extract` is at work; see `work.py`
"""

import itertools
import json
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from poss_lightning.features.checks import check_alike, check_whole, open_shard
from poss_lightning.features.encoding import decode, vector_bytes
from poss_lightning.features.manifest import EMBED_HEAD, StoreError, check
from poss_lightning.features.remote import local_copy
from poss_lightning.features.texts import Texts
from poss_lightning.machine import SUMS
from poss_lightning.sampling import Draw
from poss_lightning.target.spec import EmbedHead, TargetSpec

STATISTICS = 64  # samples whose root mean square stands for all


class Sample(NamedTuple):
    """One conversation, read by the target."""

    id: str
    tokens: Tensor  # (T,) int64
    greedy: Tensor  # (T,) int64, the target's most likely token after each; -1 outside assistant spans
    spans: list[tuple[int, int]]  # half-open token ranges the assistant wrote
    features: Tensor  # (T, D), in the target's dtype
    layers: Tensor = torch.empty(0, 0, 0)  # (T, n, D), outputs of inner layers; n is 0 where there are none
    draws: Sequence[Draw | None] = ()  # of every span, how it was drawn; () where nothing was

    @property
    def draft_input(self) -> Tensor:
        """(T, R), what a draft reads: the inner layers side by side where there are any, else the features."""
        return self.layers.flatten(1) if self.layers.shape[1] else self.features


class FeatureStore(Texts):
    """A finished store, or several of one target as one, memory-mapped.

    Opening checks every file's size, and that the samples are whole; `verify_files` reads all bytes.

    Args:
        address: a folder; any address that fsspec reads ("s3://…", "hf://…"), which is copied once, see `remote`; or
            several of these.
        layers: inner layers whose outputs a sample carries; None for all that are kept.

    Attributes:
        folders: of each store.
        manifest: of the first; target, dtype, stored and layers are those of all.

    Raises:
        StoreError: no finished store there, or a file is missing or damaged; several do not belong together; or one
            does not keep one of the layers.
    """

    def __init__(self, address: str | Path | Sequence[str | Path], layers: tuple[int, ...] | None = None):
        self.folders = [local_copy(each) for each in ([address] if isinstance(address, str | Path) else address)]
        if not self.folders:
            raise StoreError("store is []; name one or more")
        manifests = [check(folder) for folder in self.folders]
        self.manifest = manifests[0]
        self._batches: list[pa.RecordBatch] = []
        for folder, manifest in zip(self.folders, manifests, strict=True):
            check_alike(self.folders[0], self.manifest, folder, manifest)
            batches = [batch for entry in manifest.shards for batch in open_shard(folder / entry.name, manifest)]
            check_whole(folder, manifest, batches)
            self._batches += batches
        self._table = pa.Table.from_batches([batch.select(["id", "length", "spans"]) for batch in self._batches])
        self._starts = np.cumsum([0, *(batch.num_rows for batch in self._batches)])  # first sample of every batch
        self.ids: list[str] = self._table["id"].to_pylist()
        self.lengths = self._table["length"].to_numpy()  # (samples,)
        self._dtype = getattr(torch, self.manifest.dtype)
        self.layers = self.manifest.layers if layers is None else layers
        if missing := [layer for layer in self.layers if layer not in self.manifest.layers]:
            needed = ", ".join(map(str, dict.fromkeys(self.layers)))  # of few layers two may be one
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
        drawn = columns["draws"][row].as_py() if "draws" in columns.schema.names else []
        return Sample(
            self.ids[index],
            torch.from_numpy(tokens),
            torch.from_numpy(greedy),
            [tuple(span) for span in self.spans[index].tolist()],
            self._vectors(columns, row, "features", 1)[:, 0],
            self._inner(columns, row),
            [draw and Draw.of(draw) for draw in map(json.loads, drawn)],
        )

    def tokens(self, index: int) -> np.ndarray:
        """As the file's own memory."""
        return _values(*self._find(index), "tokens")

    def conversations(self) -> list[str]:
        """The first stores do not know them."""
        found = []
        for batch in self._batches:
            is_known = "conversation" in batch.schema.names
            found += batch["conversation"].to_pylist() if is_known else [""] * batch.num_rows
        return found

    def _find(self, index: int) -> tuple[pa.RecordBatch, int]:
        """Where a sample stands: the batch, and its row there."""
        batch = int(np.searchsorted(self._starts, index, side="right")) - 1
        return self._batches[batch], index - int(self._starts[batch])

    def select(self, layers: tuple[int, ...]) -> "FeatureStore":
        """The same store with samples that carry the outputs of these layers; errors as above."""
        if layers == self.layers:
            return self
        return FeatureStore(self.folders, layers)

    @cached_property
    def spans(self) -> list[np.ndarray]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The assistants' token ranges of every sample, (n, 2) int32 each; no feature is read."""
        column = self._table["spans"].combine_chunks()
        offsets, edges = column.offsets.to_pylist(), column.values.to_numpy().reshape(-1, 2)
        return [edges[start // 2 : stop // 2] for start, stop in itertools.pairwise(offsets)]

    @property
    def target(self) -> TargetSpec:
        """The target whose features these are."""
        return self.manifest.target

    def embed_head(self) -> EmbedHead:
        """The target's embedding and head."""
        path = self.folders[0] / EMBED_HEAD
        try:
            stored = load_file(path)
            embedding, head = stored["embedding"], stored.get("head", stored["embedding"])
        except (SafetensorError, KeyError) as error:
            raise StoreError(f"{path} cannot be read ({error})") from error
        for rows in (embedding, head):
            if rows.shape[1:] != (self.target.hidden_size,) or not rows.is_floating_point():
                raise StoreError(f"{path} has {rows.dtype} of {list(rows.shape)}; the manifest says another target")
        return EmbedHead(embedding, head, scale=self.target.logit_scale, cap=self.target.logit_cap)

    def root_mean_square(self) -> Tensor:
        """Of every dimension of what a draft reads, over some samples: (R,) float32."""
        some = range(0, len(self), max(1, len(self) // STATISTICS))
        return root_mean_square(self[i].draft_input for i in some)

    def _inner(self, columns: pa.RecordBatch, row: int) -> Tensor:
        """(T, n, D)"""
        stored = self.manifest.layers
        if not self.layers:
            return self._vectors(columns, row, "layers", 0)
        outputs = self._vectors(columns, row, "layers", len(stored))
        return outputs if self.layers == stored else outputs[:, [stored.index(layer) for layer in self.layers]]

    def _vectors(self, columns: pa.RecordBatch, row: int, name: str, count: int) -> Tensor:
        """(T, count, D); copied out of the map once, since a tensor may be written to and the files may not."""
        width, stored = self.manifest.target.hidden_size, self.manifest.stored
        if not count:
            return torch.empty(columns["length"][row].as_py(), 0, width, dtype=self._dtype)
        raw = torch.from_numpy(_bytes(columns, row, name).copy())
        return decode(raw.view(-1, count, vector_bytes(width, self._dtype, stored)), stored, self._dtype)


def root_mean_square(rows: Iterable[Tensor]) -> Tensor:
    """Of every column of some (T, R), which are summed one after another: (R,) float32."""
    squares, count = torch.zeros((), dtype=SUMS), 0
    for each in rows:
        squares, count = squares.to(each.device) + each.float().square().sum(0, dtype=SUMS), count + len(each)
    return (squares / count).sqrt().float()


def _values(columns: pa.RecordBatch, row: int, name: str) -> np.ndarray:
    """A list of a row, as the file's own memory."""
    return columns[name][row].values.to_numpy()


def _bytes(columns: pa.RecordBatch, row: int, name: str) -> np.ndarray:
    """A blob of a row, as the file's own memory; as a scalar Arrow would give a copy of it."""
    _, offsets, blobs = columns[name].buffers()
    start, stop = np.frombuffer(offsets, np.int64)[row : row + 2]
    return np.frombuffer(blobs, np.uint8)[start:stop]
