"""Write a corpus batch by batch, so that a killed run resumes where it stopped."""

import gzip
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from poss_lightning.files import atomic, check_file, check_new
from poss_lightning.work import Work, begun_with

Messages = list[dict[str, Any]]


class CorpusWriter:
    """A file of conversations; its finished batches are in `OUT.parts` until all are finished.

    Raises:
        ValueError: the name of `out` does not end in .jsonl or .jsonl.gz.
        OSError: it exists, or cannot be written.
    """

    def __init__(self, out: str):
        check_file(out, ".jsonl", ".jsonl.gz")
        self.out, self.work = Path(out), Work(f"{out}.parts", out=out)
        if not self.work.folder.exists():  # with both, an earlier run was killed at its very end
            self.work.clear()  # left by a run that was killed even later
            check_new(out)

    @contextmanager
    def claim(self, settings: Mapping[str, Any]) -> Iterator[None]:
        """Let only this process write the corpus; `settings` are what the conversations depend on.

        Raises:
            FileExistsError: another process has just finished it.
            ValueError: as `Work.exclusive`.
        """
        if not begun_with(self.work.folder):
            check_new(self.out)
        self.work.settings = settings
        with self.work.exclusive(wait=False):
            yield

    def batch(self, number: int, write: Callable[[], list[Messages]]) -> list[Messages]:
        """Return the conversations of a batch, from a killed run or from `write`."""
        part = f"{number:06d}"
        if (conversations := self.work.receipt(part)) is None:
            self.work.write_receipt(part, conversations := write())
        return conversations

    def finish(self, records: Iterable[dict]) -> None:
        """Write the corpus and remove the batches."""
        lines = [json.dumps(record, ensure_ascii=False) + "\n" for record in records]
        text = "".join(lines).encode()
        with atomic(self.out) as path:
            path.write_bytes(gzip.compress(text, 9, mtime=0) if self.out.suffix == ".gz" else text)
        self.work.clear()
        print(f"{self.out}: {len(lines)} conversations")
