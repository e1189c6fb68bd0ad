"""The format of a feature store: its manifest, the columns of its shards, and features as bytes.

The manifest is written last: a folder with a manifest is a finished store.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import pyarrow as pa
import torch
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from torch import Tensor
from tqdm import tqdm

from poss_lightning.files import atomic, sha256
from poss_lightning.machine import DTYPES
from poss_lightning.ranges import describe_refusal
from poss_lightning.target_model.spec import TargetSpec

MANIFEST, EMBED_HEAD = "manifest.json", "ends.safetensors"
Stored = Literal["exact", "float8"]
SCALE_BYTES = 4  # a float32 before the codes of its vector
Dtype = Annotated[str, Field(pattern=f"^({'|'.join(DTYPES)})$")]


class StoreError(ValueError):
    """A store that is damaged, unfinished or of another kind; the message names the file."""


@dataclass(frozen=True)
class FileEntry:
    """A file of the store as it was written."""

    name: str
    bytes: int
    sha256: str

    @classmethod
    def of(cls, path: Path, name: str) -> "FileEntry":
        """Read an existing file and return its entry under this name."""
        return cls(name, path.stat().st_size, sha256(path))


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What a store holds."""

    __pydantic_config__ = ConfigDict(extra="forbid", strict=True)

    target: TargetSpec
    dtype: Dtype  # of the target, and so of the features when they are read
    max_length: int  # tokens a conversation is cut at
    corpus: str  # digest of the conversations
    samples: int
    tokens: int
    embed_head: Annotated[FileEntry, Field(alias="ends")]
    shards: tuple[FileEntry, ...]
    stored: Stored
    chat_template_kwargs: dict[str, Any]  # variables of the chat template
    layers: tuple[int, ...]  # whose outputs are kept too, as `Target.text_layers` counts them
    left_out: tuple[str, ...]  # texts whose features are not finite

    @property
    def files(self) -> tuple[FileEntry, ...]:
        """All but the manifest itself."""
        return (self.embed_head, *self.shards)

    def write(self, folder: Path) -> None:
        """Write manifest.json, which makes the store a finished one."""
        with atomic(folder / MANIFEST) as path:
            path.write_bytes(MANIFESTS.dump_json(self, by_alias=True, indent=1) + b"\n")

    @classmethod
    def load(cls, folder: Path) -> "Manifest":
        """Read manifest.json; StoreError if it is missing or not a manifest."""
        path = folder / MANIFEST
        if not path.is_file():
            raise StoreError(
                f"{folder} is not a finished feature store: it has no {MANIFEST}; `poss extract` writes it"
            )
        try:
            return MANIFESTS.validate_json(path.read_bytes())
        except ValidationError as error:
            raise StoreError(f"{path} is not a manifest this version reads: {describe_refusal(error)}") from error


MANIFESTS = TypeAdapter(Manifest)


def schema(layers: tuple[int, ...]) -> pa.Schema:
    """Return the columns of a shard. Features are the encoded vectors of a sample, token by token; see `encode`."""
    columns = {
        "id": pa.string(),
        "conversation": pa.string(),  # digest of all that is said in it
        "length": pa.int32(),
        "tokens": pa.list_(pa.int32()),
        "greedy": pa.list_(pa.int32()),
        "spans": pa.list_(pa.int32()),
        "draws": pa.list_(pa.string()),  # how each span was drawn, as JSON; empty where none was
        "features": pa.large_binary(),
    }
    return pa.schema(columns | ({"layers": pa.large_binary()} if layers else {}))


def is_finished(folder: Path) -> bool:
    """Return whether the folder holds a finished store."""
    return (folder / MANIFEST).exists()


def check_files(folder: Path) -> Manifest:
    """Return the manifest of a store; StoreError if a file is missing or has another size."""
    manifest = Manifest.load(folder)
    for entry in manifest.files:
        path = folder / entry.name
        size = path.stat().st_size if path.is_file() else None
        if size != entry.bytes:
            fault = "is missing" if size is None else f"has {size} bytes"
            raise StoreError(f"{path} {fault}, the manifest says {entry.bytes}: remove {folder} and extract it again")
    return manifest


def verify_files(folder: Path) -> None:
    """Read every byte and compare digests; StoreError names the first file that changed. Nothing is parsed."""
    entries = check_files(folder).files
    with tqdm(total=sum(entry.bytes for entry in entries), unit="B", unit_scale=True, desc="verify") as bar:
        for entry in entries:
            if sha256(path := folder / entry.name) != entry.sha256:
                raise StoreError(f"{path} was changed since it was written: its digest is not the manifest's")
            bar.update(entry.bytes)


# --- features as bytes: exactly as the target computed them, or in 8 bits with one scale per vector ---
#
# `float8` is e4m3 and not int8: a few dimensions of a hidden state are some 20 times larger than the rest, and would
# leave the median entry about six of int8's 127 levels. A floating-point number keeps its relative precision.


def vector_bytes(width: int, dtype: torch.dtype, stored: str) -> int:
    """Return the bytes of one vector of `width` numbers of the target's dtype."""
    return width * dtype.itemsize if stored == "exact" else SCALE_BYTES + width


def encode(features: Tensor, stored: str) -> Tensor:
    """Encode (..., D) as (..., vector_bytes) uint8. In 8 bits, one inf or nan makes its whole vector non-finite."""
    if stored == "exact":
        return features.contiguous().view(torch.uint8)
    scales = _scales(features)  # (..., 1)
    codes = (features / scales).to(torch.float8_e4m3fn)  # (..., D)
    return torch.cat([scales.view(torch.uint8), codes.view(torch.uint8)], -1)


def decode(raw: Tensor, stored: str, dtype: torch.dtype) -> Tensor:
    """Decode (..., vector_bytes) uint8 to (..., D) of `dtype`; exact features are a view of `raw`."""
    if stored == "exact":
        return raw.view(dtype)
    scales = raw[..., :SCALE_BYTES].contiguous().view(torch.float32)  # (..., 1)
    wide = torch.float32 if dtype == torch.float16 else dtype  # a scale may lie below the smallest float16
    return _numbers(raw[..., SCALE_BYTES:]).to(wide).mul_(scales.to(wide)).to(dtype)


def _scales(features: Tensor) -> Tensor:
    """Return absmax / the largest e4m3 number, up to a power of two so products are exact: (..., D) -> (..., 1)."""
    largest = features.abs().amax(-1, keepdim=True).float()
    quotient = (largest / torch.finfo(torch.float8_e4m3fn).max).clamp(min=torch.finfo(torch.float32).tiny)
    power = (quotient.view(torch.int32) + 0x7FFFFF & 0x7F800000).view(torch.float32)  # the bits of the exponent alone
    return power.where(largest.isfinite(), torch.inf)


def _numbers(codes: Tensor) -> Tensor:
    """Convert e4m3 (uint8) to bfloat16, exactly, and on a CPU some ten times faster than torch does.

    The bits move to their places in bfloat16, s...eeee mmm....; the factor is the difference of the biases.
    """
    bits = codes.view(torch.int8).to(torch.int16)  # the sign fills the upper byte
    bits.bitwise_left_shift_(4).bitwise_and_(0x07F0 - 0x8000)
    return bits.view(torch.bfloat16).mul_(2.0 ** (127 - 7))
