"""Conversations of random words, and what a killed extraction leaves."""

import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from poss_lightning import files
from poss_lightning.corpus.readers import Conversation

ROLES = ("user", "assistant")
SIZES = {"max_length": 60, "batch_tokens": 200, "shard_bytes": 25_000}
WORDS = ["the", "draft", "says", "what", "a", "horse", "would", "say", "four", "legs", "question", "answer", "please"]


def make_conversations(count: int = 24, seed: int = 0) -> list[Conversation]:
    """One or two turns of random words, of very different length."""
    draw = random.Random(seed)

    def text() -> str:
        return " ".join(draw.choices(WORDS, k=draw.randint(1, 12)))

    return [
        Conversation(f"c{i}", [{"role": role, "content": text()} for _ in range(1 + i % 2) for role in ROLES])
        for i in range(count)
    ]


def contents(folder: Path) -> dict[str, bytes]:
    """Every file, hidden ones too, but what a killed process was writing."""
    found = (path for path in sorted(folder.rglob("*")) if path.is_file() and not path.name.startswith(files.TEMPORARY))
    return {str(path.relative_to(folder)): path.read_bytes() for path in found}


@contextmanager
def dies_after(owner: Any, name: str, calls: int) -> Iterator[None]:
    """Interrupt the block after so many calls of the function `name` of a module, a class or an object."""
    plain, left = getattr(owner, name), iter(range(calls))

    def dying(*given, **options):
        if next(left, None) is None:
            raise KeyboardInterrupt
        return plain(*given, **options)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(owner, name, dying)
        yield


def dies_at(monkeypatch, name: str, when: str) -> None:
    """As SIGKILL does it: nothing is cleaned up."""
    replace = os.replace

    def dying_replace(source, destination):
        dies = Path(destination).name == name
        if not dies or when == "after":
            replace(source, destination)
        if dies:
            monkeypatch.setattr(files, "_discard", lambda temporary: None)
            raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", dying_replace)
