"""The feature store: Arrow shards of samples, the target's embedding and head, and a manifest that says what they are.

store/
  manifest.json           target, dtype, layers, corpus digest, and every file's size and digest; written last
  ends.safetensors        embedding and LM head, so that training needs no target, and cannot mix up two
  shard-00000.arrow       samples: id, length, tokens, greedy, spans, features, layers; memory-mapped when read
  unfinished/             only while `poss extract` is at work; see `work.py`
"""

import hashlib
import itertools
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import ArrayLike
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from poss_lightning.corpus.tokens import count_tokens, most_frequent
from poss_lightning.features.encoding import decode, vector_bytes
from poss_lightning.features.manifest import EMBED_HEAD, Manifest, StoreError, check
from poss_lightning.features.remote import local_copy
from poss_lightning.features.trained import text_digest
from poss_lightning.target.spec import EmbedHead, TargetSpec
from poss_lightning.terminal import announced

STATISTICS = 64  # samples whose root mean square stands for all


def schema(layers: tuple[int, ...]) -> pa.Schema:
    """Columns of a shard. Features are the encoded vectors of a sample, one token after another; see `encoding`."""
    columns = {
        "id": pa.string(),
        "conversation": pa.string(),  # digest of its content; the first stores lack it
        "length": pa.int32(),
        "tokens": pa.list_(pa.int32()),
        "greedy": pa.list_(pa.int32()),
        "spans": pa.list_(pa.int32()),
        "features": pa.large_binary(),
    }
    return pa.schema(columns | ({"layers": pa.large_binary()} if layers else {}))


class Sample(NamedTuple):
    """One conversation, read by the target."""

    id: str
    tokens: Tensor  # (T,) int64
    greedy: Tensor  # (T,) int64, the target's likeliest token after each; -1 outside assistant spans
    spans: list[tuple[int, int]]  # half-open token ranges the assistant wrote
    features: Tensor  # (T, D), in the target's dtype
    layers: Tensor = torch.empty(0, 0, 0)  # (T, n, D), outputs of inner layers; n is 0 where there are none

    @property
    def draft_input(self) -> Tensor:
        """(T, R), what a draft reads: the inner layers side by side where there are any, else the features."""
        return self.layers.flatten(1) if self.layers.shape[1] else self.features


class FeatureStore:
    """A finished store, memory-mapped. Opening checks every file's size; `verify` reads them all.

    Args:
        address: a folder; or any address that fsspec reads ("s3://…", "hf://…"), which is copied once, see `remote`.
        layers: inner layers whose outputs a sample carries; None for all that are kept.

    Raises:
        StoreError: no finished store there, or a file is missing or damaged; or it does not keep one of the layers.
            Later, of what is read: a file was changed meanwhile.
    """

    def __init__(self, address: str | Path, layers: tuple[int, ...] | None = None):
        self.folder = local_copy(address)
        self.manifest = check(self.folder)
        paths = [self.folder / entry.name for entry in self.manifest.shards]
        self._states = {path: _state(path) for path in paths}
        shards = {path: _open(path, self.manifest) for path in paths}
        self._batches = [batch for shard in shards.values() for batch in shard]
        self._paths = [path for path, shard in shards.items() for _ in shard]  # of every batch
        self._table = pa.Table.from_batches(self._batches).select(["id", "length", "spans", "conversation"])
        self._starts = np.cumsum([0, *(batch.num_rows for batch in self._batches)])  # first sample of every batch
        self.check_unchanged()
        self.ids: list[str] = self._table["id"].to_pylist()
        self.lengths = self._table["length"].to_numpy()  # (samples,)
        self._dtype = getattr(torch, self.manifest.dtype)
        self.layers = self.manifest.layers if layers is None else layers
        if missing := [layer for layer in self.layers if layer not in self.manifest.layers]:
            needed = ", ".join(map(str, dict.fromkeys(self.layers)))  # of few layers two may be one
            raise StoreError(
                f"{self.folder} keeps no outputs of layer {missing[0]}, and the draft reads those of {needed}: "
                f"extract it with --layers [{needed.replace(' ', '')}]"
            )

    def __reduce__(self) -> tuple:
        # A loader's process maps the files itself; Arrow would send their bytes.
        return FeatureStore, (self.folder, self.layers), [*self._states.values()]

    def __setstate__(self, states: list[tuple[int, ...]]) -> None:
        self._states = dict(zip(self._states, states, strict=False))
        self.check_unchanged()

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> Sample:
        index = range(len(self))[index]
        columns, row = self._find(index)
        tokens, greedy = (_values(columns, row, name).astype(np.int64) for name in ("tokens", "greedy"))
        return Sample(
            self.ids[index],
            torch.from_numpy(tokens),
            torch.from_numpy(greedy),
            [tuple(span) for span in self.spans[index].tolist()],
            self._vectors(columns, row, "features", 1)[:, 0],
            self._inner(columns, row),
        )

    def digest(self, index: int) -> int:
        """Of a sample's text, see `text_digest`; no feature is read."""
        return text_digest(_values(*self._find(index), "tokens"), self.spans[index])

    def _find(self, index: int) -> tuple[pa.RecordBatch, int]:
        """Where a sample stands: the batch, and its row there."""
        batch = int(np.searchsorted(self._starts, index, side="right")) - 1
        self._check_unchanged(self._paths[batch])
        return self._batches[batch], index - int(self._starts[batch])

    def select(self, layers: tuple[int, ...]) -> "FeatureStore":
        """The same store with samples that carry the outputs of these layers; errors as above."""
        if layers == self.layers:
            return self
        self.check_unchanged()
        return FeatureStore(self.folder, layers)

    def check_unchanged(self) -> None:
        """Raise StoreError where a shard is not the file that was opened; every sample's own is looked at anyway.

        Its memory is the file's: bytes that were written over would be read, and to read behind a new end is fatal.
        """
        for path in self._states:
            self._check_unchanged(path)

    def _check_unchanged(self, path: Path) -> None:
        if _state(path) != self._states[path]:
            raise StoreError(f"{path} was changed or removed while it was read: leave a store alone that is in use")

    @cached_property
    def spans(self) -> list[np.ndarray]:
        """The assistants' token ranges of every sample, (n, 2) int32 each; no feature is read."""
        column = self._table["spans"].combine_chunks()
        offsets, edges = column.offsets.to_pylist(), column.values.to_numpy().reshape(-1, 2)
        return [edges[start // 2 : stop // 2] for start, stop in itertools.pairwise(offsets)]

    @cached_property
    def origins(self) -> list[str]:
        """For every sample the id of the first one that is of the same conversation, whatever the ids of both."""
        return first_of_each(self._table["conversation"].to_pylist(), self.ids)

    @property
    def target(self) -> TargetSpec:
        """The target whose features these are."""
        return self.manifest.target

    def embed_head(self) -> EmbedHead:
        """The target's embedding and head."""
        try:
            stored = load_file(self.folder / EMBED_HEAD)
        except SafetensorError as error:
            raise StoreError(f"{self.folder / EMBED_HEAD} cannot be read ({error})") from error
        head = stored.get("head", stored["embedding"])
        return EmbedHead(stored["embedding"], head, scale=self.target.logit_scale, cap=self.target.logit_cap)

    def common_tokens(self, size: int) -> Tensor | None:
        """The `size` commonest tokens of the assistants' answers; see `most_common_tokens`."""
        rows = ((batch, row) for batch in self._batches for row in range(batch.num_rows))
        texts = (_values(batch, row, "tokens") for batch, row in rows)
        answers = (text[start:stop] for text, spans in zip(texts, self.spans, strict=True) for start, stop in spans)
        self.check_unchanged()
        with announced(f"counting the tokens of the answers in {self.folder}"):
            return most_common_tokens(answers, self.target.vocab_size, size)

    def root_mean_square(self) -> Tensor:
        """Of every dimension of what a draft reads, over some samples: (R,) float32."""
        some = range(0, len(self), max(1, len(self) // STATISTICS))
        return torch.cat([self[i].draft_input for i in some]).float().square().mean(0).sqrt()

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


def most_common_tokens(answers: Iterable[ArrayLike], vocabulary: int, size: int) -> Tensor | None:
    """The `size` commonest tokens, as ascending ids (size,), None for all; see `most_frequent`.

    A store does not know the target's stop tokens. They end the answers, so they are counted with the rest.

    Raises:
        ValueError: size below 1 or above the target's vocabulary.
    """
    if not 1 <= size <= vocabulary:
        raise ValueError(f"vocabulary_size is {size}; it must lie between 1 and the target's {vocabulary}")
    return most_frequent(count_tokens(answers, vocabulary), size)


def first_of_each(conversations: list[str], ids: list[str]) -> list[str]:
    """For every sample the id of the first of the same conversation."""
    first: dict[str, str] = {}
    return [first.setdefault(conversation, name) for conversation, name in zip(conversations, ids, strict=True)]


def _digest(tokens: pa.ListScalar) -> str:
    return hashlib.sha256(tokens.values.to_numpy().tobytes()).hexdigest()[:16]


def _values(columns: pa.RecordBatch, row: int, name: str) -> np.ndarray:
    """A list of a row, as the file's own memory."""
    return columns[name][row].values.to_numpy()


def _bytes(columns: pa.RecordBatch, row: int, name: str) -> np.ndarray:
    """A blob of a row, as the file's own memory; as a scalar Arrow would give a copy of it."""
    _, offsets, blobs = columns[name].buffers()
    start, stop = np.frombuffer(offsets, np.int64)[row : row + 2]
    return np.frombuffer(blobs, np.uint8)[start:stop]


def _state(shard: Path) -> tuple[int, ...]:
    """What differs where the file was written to or replaced; () where there is none."""
    try:
        facts = shard.stat()
    except FileNotFoundError:
        return ()
    return facts.st_ino, facts.st_size, facts.st_mtime_ns


def _open(shard: Path, manifest: Manifest) -> list[pa.RecordBatch]:
    try:
        table = pa.ipc.open_stream(pa.memory_map(str(shard))).read_all()
        if "conversation" not in table.column_names:
            table = table.add_column(1, "conversation", [list(map(_digest, table["tokens"]))])
        if table.schema != schema(manifest.layers):
            raise ValueError(f"its columns are {', '.join(table.schema.names)}")
    except (OSError, ValueError) as error:
        raise StoreError(f"{shard} cannot be read ({error}): `poss extract --verify true` checks every byte") from error
    return table.to_batches()
