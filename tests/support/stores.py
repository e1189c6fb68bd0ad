"""Conversations of random words, and what a killed extraction leaves."""

import os
import random
from pathlib import Path

from poss_lightning import files
from poss_lightning.corpus.readers import Conversation
from poss_lightning.target.model import Target

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
    """Every file, hidden ones too."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def dies_after(monkeypatch, target: Target, forwards: int) -> None:
    read, calls = target.text_layers, []

    def dying(*given):
        calls.append(given)
        if len(calls) > forwards:
            raise KeyboardInterrupt
        return read(*given)

    monkeypatch.setattr(target, "text_layers", dying)


def dies_at(monkeypatch, name: str, when: str) -> None:
    """As SIGKILL does it: nothing is cleaned up."""
    replace = os.replace

    def dying_replace(source, destination):
        if Path(destination).name == name:
            if when == "after":
                replace(source, destination)
            monkeypatch.setattr(files, "_remove", lambda folder: None)
            raise KeyboardInterrupt
        replace(source, destination)

    monkeypatch.setattr(os, "replace", dying_replace)
