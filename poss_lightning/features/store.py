"""The feature store: Arrow shards of samples, the target's frozen ends, and a manifest that says what they are.

store/
  manifest.json           target, dtype, max_length, corpus digest, and every file's size and digest; written last
  ends.safetensors        embedding and LM head, so that training needs no target and cannot meet another one's
  shard-00000.arrow       samples: id, tokens, greedy, spans, features (raw bytes), memory-mapped when read
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import datasets
import numpy as np
import pyarrow as pa
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from poss_lightning.files import atomic, sha256
from poss_lightning.target.model import Ends, TargetSpec

MANIFEST, ENDS = "manifest.json", "ends.safetensors"
SCHEMA = pa.schema(
    {
        "id": pa.string(),
        "length": pa.int32(),
        "tokens": pa.list_(pa.int32()),
        "greedy": pa.list_(pa.int32()),
        "spans": pa.list_(pa.int32()),
        "features": pa.large_binary(),
    }
)


class StoreError(ValueError):
    """A store that is damaged, unfinished or of another kind; the message names the file."""


@dataclass(frozen=True)
class FileNote:
    """A file of the store as it was when written."""

    name: str
    bytes: int
    sha256: str

    @classmethod
    def of(cls, path: Path) -> "FileNote":
        return cls(path.name, path.stat().st_size, sha256(path))


@dataclass(frozen=True)
class Manifest:
    """What a store holds."""

    target: TargetSpec
    dtype: str  # of the features
    max_length: int  # tokens a conversation is cut at
    corpus: str  # digest of the conversations
    samples: int
    tokens: int
    ends: FileNote
    shards: tuple[FileNote, ...]

    def write(self, folder: Path) -> None:
        with atomic(folder / MANIFEST) as path:
            path.write_text(json.dumps(asdict(self), indent=1) + "\n")

    @classmethod
    def read(cls, folder: Path) -> "Manifest":
        """Read and parse manifest.json.

        Raises:
            StoreError: it is missing or is not a manifest.
        """
        path = folder / MANIFEST
        if not path.is_file():
            raise StoreError(f"{folder} is no finished feature store: it has no {MANIFEST} (`poss extract` writes one)")
        try:
            stored = json.loads(path.read_text())
            stored["target"] = TargetSpec(**stored["target"])
            stored["ends"] = FileNote(**stored["ends"])
            stored["shards"] = tuple(FileNote(**note) for note in stored["shards"])
            return cls(**stored)
        except (ValueError, KeyError, TypeError) as error:
            raise StoreError(f"{path} is not a manifest this version reads: {error}") from error


class Sample(NamedTuple):
    """One conversation, read by the target."""

    id: str
    tokens: Tensor  # (T,) int64
    greedy: Tensor  # (T,) int64, the target's likeliest token after each; -1 outside assistant spans
    spans: list[tuple[int, int]]  # half-open token ranges the assistant wrote
    features: Tensor  # (T, D)


def check(folder: Path) -> Manifest:
    """The manifest, after a look whether every file is there in full size.

    Raises:
        StoreError: no finished store there, or a file is missing or truncated.
    """
    manifest = Manifest.read(folder)
    for note in (manifest.ends, *manifest.shards):
        path = folder / note.name
        size = path.stat().st_size if path.is_file() else None
        if size != note.bytes:
            found = "is missing" if size is None else f"has {size} bytes"
            raise StoreError(f"{path} {found}, the manifest says {note.bytes}: remove {folder} and extract it again")
    return manifest


def verify(folder: Path) -> None:
    """Read every byte and compare digests; nothing of a damaged file is parsed.

    Raises:
        StoreError: as in `check`; or names the first file that is not as it was written.
    """
    manifest = check(folder)
    for note in (manifest.ends, *manifest.shards):
        if sha256(folder / note.name) != note.sha256:
            raise StoreError(f"{folder / note.name} was changed since it was written: its digest is not the manifest's")


class FeatureStore:
    """A finished store, memory-mapped. Opening checks every file's size; `verify` reads them all.

    Raises:
        StoreError: no finished store there, or a file is missing or damaged.
    """

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        self.manifest = check(self.folder)
        rows = datasets.concatenate_datasets([_open(self.folder / note.name) for note in self.manifest.shards])
        self.ids: list[str] = list(rows["id"])
        self.lengths = np.asarray(rows["length"])  # (samples,)
        self._rows = rows.with_format("arrow")
        self._dtype = getattr(torch, self.manifest.dtype)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> Sample:
        row = self._rows[int(index)]
        lists = (row[name][0].values.to_numpy() for name in ("tokens", "greedy", "spans"))
        tokens, greedy, spans = (values.astype(np.int64) for values in lists)
        raw = np.frombuffer(row["features"][0].as_buffer(), dtype=np.uint8).copy()
        features = torch.from_numpy(raw).view(self._dtype).view(len(tokens), -1)
        return Sample(
            self.ids[index],
            torch.from_numpy(tokens),
            torch.from_numpy(greedy),
            [tuple(span) for span in spans.reshape(-1, 2).tolist()],
            features,
        )

    def ends(self) -> Ends:
        """The target's embedding and head."""
        try:
            stored = load_file(self.folder / ENDS)
        except SafetensorError as error:
            raise StoreError(f"{self.folder / ENDS} cannot be read ({error})") from error
        return Ends(stored["embedding"], stored.get("head", stored["embedding"]))

    def common_tokens(self, size: int) -> Tensor:
        """The `size` commonest tokens of the assistants' answers, as ascending ids (V,).

        Raises:
            ValueError: size below 1 or above the target's vocabulary.
        """
        most = self.manifest.target.vocab_size
        if not 1 <= size <= most:
            raise ValueError(f"vocabulary_size is {size}; it must lie between 1 and the target's {most}")
        counts = np.zeros(most, dtype=np.int64)
        for row in self._rows.select_columns(["tokens", "spans"]).iter(batch_size=1):
            tokens, spans = (row[name][0].values.to_numpy() for name in ("tokens", "spans"))
            for start, stop in spans.reshape(-1, 2):
                np.add.at(counts, tokens[start:stop], 1)
        commonest = np.argsort(-counts, kind="stable")[:size]
        return torch.from_numpy(np.sort(commonest))


def _open(shard: Path) -> datasets.Dataset:
    try:
        return datasets.Dataset.from_file(str(shard))
    except (OSError, ValueError, KeyError) as error:
        raise StoreError(f"{shard} cannot be read ({error}): `poss extract --verify true` checks every byte") from error
