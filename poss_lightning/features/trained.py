"""Which texts a draft was trained on: acceptance on these says how well it remembers them, not how well it drafts."""

import hashlib
from collections.abc import Iterable
from typing import Protocol

import numpy as np


class Texts(Protocol):
    """What `FeatureStore` and `OnlineFeatures` offer."""

    def digest(self, index: int) -> int:
        """`text_digest` of a sample."""
        ...


def text_digest(tokens: np.ndarray, spans: np.ndarray) -> int:
    """32 bits of a text up to the end of its first answer: the name of a corpus or of a conversation does not matter.

    Args:
        tokens: (T,)
        spans: (n, 2) tokens of its answers.
    """
    head = tokens[: spans[0][1]] if len(spans) else tokens
    return int.from_bytes(hashlib.sha256(np.asarray(head, "<i4").tobytes()).digest()[:4], "little")


def warn_of_training(who: str, trained_on: frozenset[int], texts: Texts, indices: Iterable[int]) -> str | None:
    """How many of the texts a draft was trained on, in words; None for none, or where it does not know."""
    digests = [texts.digest(index) for index in indices] if trained_on else []
    seen = sum(digest in trained_on for digest in digests)
    if not seen:
        return None
    return (
        f"{who} was trained on {seen} of these {len(digests)} conversations: acceptance there is higher than on new "
        "text; measure it on conversations that were held out"
    )
