"""What a feature store holds, file by file; written last, so that a folder with a manifest is a finished store."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from poss_lightning.features.encoding import STORED
from poss_lightning.files import Hashed, atomic, sha256
from poss_lightning.target.spec import TargetSpec

MANIFEST, ENDS = "manifest.json", "ends.safetensors"


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
        """Of a file that is there; reads it all."""
        return cls(path.name, path.stat().st_size, sha256(path))

    @classmethod
    def written(cls, name: str, file: Hashed) -> "FileNote":
        """Of a file that is open and whole."""
        return cls(name, file.tell(), file.sha256())


@dataclass(frozen=True)
class Manifest:
    """What a store holds."""

    target: TargetSpec
    dtype: str  # of the target, and so of the features when they are read
    max_length: int  # tokens a conversation is cut at
    corpus: str  # digest of the conversations
    samples: int
    tokens: int
    ends: FileNote
    shards: tuple[FileNote, ...]
    stored: str = "exact"  # one of encoding.STORED; these two were not in the first stores, which stay readable
    layers: tuple[int, ...] = ()  # whose outputs are kept too, as `Target.read_layers` counts them

    @property
    def files(self) -> tuple[FileNote, ...]:
        """All but the manifest itself."""
        return (self.ends, *self.shards)

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
            how = "go on with the same `poss extract`" if any(folder.glob("shard-*")) else "`poss extract` writes one"
            raise StoreError(f"{folder} is no finished feature store: it has no {MANIFEST} ({how})")
        return cls.parse(path.read_bytes(), str(path))

    @classmethod
    def parse(cls, text: bytes, source: str) -> "Manifest":
        """Parse the bytes of a manifest.json found at `source`, which a StoreError names."""
        try:
            stored = json.loads(text)
            stored["target"] = TargetSpec(**stored["target"])
            stored["ends"] = FileNote(**stored["ends"])
            stored["shards"] = tuple(FileNote(**note) for note in stored["shards"])
            stored["layers"] = tuple(stored.get("layers", ()))
            manifest = cls(**stored)
            if manifest.stored not in STORED:
                raise ValueError(f"stored is {manifest.stored!r}")
            for note in manifest.files:
                if Path(note.name).name != note.name:  # a manifest from elsewhere must not write outside its folder
                    raise ValueError(f"{note.name!r} is not the name of a file")
            return manifest
        except (ValueError, KeyError, TypeError) as error:
            raise StoreError(f"{source} is not a manifest this version reads: {error}") from error


def check(folder: Path) -> Manifest:
    """The manifest, after a look whether every file is there in full size.

    Raises:
        StoreError: no finished store there, or a file is missing or truncated.
    """
    manifest = Manifest.read(folder)
    for note in manifest.files:
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
    for note in check(folder).files:
        if sha256(folder / note.name) != note.sha256:
            raise StoreError(f"{folder / note.name} was changed since it was written: its digest is not the manifest's")
