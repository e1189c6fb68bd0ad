"""A corpus that takes long to write: batch by batch in a folder beside it, so that a killed run goes on."""

import gzip
import json
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

from poss_lightning.files import atomic

Messages = list[dict[str, str]]


class Parts:
    """The folder `OUT.parts`: what it is made by, and every batch of conversations that is done.

    Args:
        out: file to write in the end.

    Raises:
        ValueError: it is named like no file of conversations.
        FileExistsError: it is there already.
    """

    def __init__(self, out: str):
        self.out, self.folder = Path(out), Path(f"{out}.parts")
        if not out.endswith((".jsonl", ".jsonl.gz")):
            raise ValueError(f"out is {out}; its name must end in .jsonl or .jsonl.gz, as `poss extract` reads it")
        if self.out.exists() and not self.folder.exists():  # with both, an earlier run was killed at its very end
            raise FileExistsError(f"{out} is there already: choose another name or remove it")

    def claim(self, settings: dict) -> None:
        """Note what the conversations depend on.

        Raises:
            ValueError: the folder was begun with other settings.
        """
        note = self.folder / "settings.json"
        if note.exists() and (earlier := json.loads(note.read_text())) != settings:
            changed = sorted(k for k in settings if settings[k] != earlier.get(k))
            raise ValueError(
                f"{self.folder} was begun with other settings ({', '.join(changed)}): go on with those or remove it"
            )
        with atomic(note) as path:
            path.write_text(json.dumps(settings, indent=1))

    def batch(self, number: int, write: Callable[[], list[Messages]]) -> list[Messages]:
        """The conversations of a batch: read where they are there, else written."""
        part = self.folder / f"{number:06d}.jsonl"
        if not part.exists():
            texts = write()
            with atomic(part) as path:
                lines = [json.dumps(messages, ensure_ascii=False) + "\n" for messages in texts]
                path.write_text("".join(lines), encoding="utf-8")
        return [json.loads(line) for line in part.read_text(encoding="utf-8").split("\n") if line]

    def finish(self, records: Iterable[dict]) -> None:
        """Write the corpus, and forget the parts."""
        lines = [json.dumps(record, ensure_ascii=False) + "\n" for record in records]
        text = "".join(lines).encode()
        with atomic(self.out) as path:
            path.write_bytes(gzip.compress(text, 9, mtime=0) if self.out.suffix == ".gz" else text)
        done = self.folder.rename(f"{self.folder}.done")  # at once: half a folder might be taken for another run's
        shutil.rmtree(done)
        print(f"{self.out}: {len(lines)} conversations")
