"""What a store and online features share: which texts are the same, their common tokens, what a draft trained on."""

import hashlib
import logging
from collections.abc import Hashable, Iterable, Sequence
from functools import cached_property
from typing import Self

import numpy as np
import torch
from torch import Tensor

from poss_lightning.machine import SUMS
from poss_lightning.target_model.spec import EmbedHead, TargetSpec
from poss_lightning.terminal import announced

STATISTICS = 64  # samples whose root mean square stands for all
logger = logging.getLogger(__name__)


class SampleSource:
    """Tokenized conversations of a target, whose features a subclass reads or computes."""

    target: TargetSpec
    ids: list[str]
    lengths: np.ndarray  # (samples,)
    spans: list[np.ndarray]  # (n, 2) of every sample, half-open token ranges that the assistant wrote
    layers: tuple[int, ...]  # inner layers whose outputs a sample carries

    def __len__(self) -> int:
        return len(self.ids)

    def tokens(self, index: int) -> np.ndarray:
        """Return the tokens of a sample, (T,), without its features."""
        raise NotImplementedError

    def conversations(self) -> list[str]:
        """List for every sample the digest of all that its conversation says; "" where it is not known."""
        raise NotImplementedError

    def draft_input(self, index: int) -> Tensor:
        """Return what a draft reads of a sample: (T, R)."""
        raise NotImplementedError

    def select(self, layers: tuple[int, ...]) -> Self:
        """Return the same samples for a draft that reads these layers."""
        raise NotImplementedError

    def embed_head(self) -> EmbedHead:
        """Return the target's embedding and head."""
        raise NotImplementedError

    def digest(self, index: int) -> int:
        """Hash a sample up to the end of its first answer to 64 bits: a draft keeps those it was trained on."""
        tokens, spans = self.tokens(index), self.spans[index]
        return int.from_bytes(_digest(tokens[: spans[0][1]] if len(spans) else tokens)[:8], "little")

    @cached_property
    def origins(self) -> list[str]:
        """For every sample the id that stands for its conversation; duplicates share one, whatever their ids."""
        digests = [_digest(self.tokens(index)) for index in range(len(self))]
        if repeated := len(digests) - len(set(digests)):
            logger.warning(
                "%d of %d texts appear more than once; copies are on the same side of the split", repeated, len(digests)
            )
        return first_of_each(self.ids, self.conversations(), digests)

    def common_tokens(self, size: int) -> Tensor | None:
        """Return the `size` most common tokens of the answers, as ascending ids (size,), or None for all tokens.

        Stop tokens end the answers, so they are counted. Of equally common tokens the lower id goes first.

        Raises:
            ValueError: size below 1 or above the target's vocabulary.
        """
        vocabulary = self.target.vocab_size
        if not 1 <= size <= vocabulary:
            raise ValueError(f"vocabulary_size is {size}; it must lie between 1 and the target's {vocabulary}")
        if size == vocabulary:
            return None
        with announced("counting the tokens of the answers"):
            answers = [self.tokens(i)[start:stop] for i in range(len(self)) for start, stop in self.spans[i]]
            counts = np.bincount(np.concatenate(answers), minlength=vocabulary)
        return torch.from_numpy(np.sort(np.argsort(-counts, kind="stable")[:size]))

    def root_mean_square(self) -> Tensor:
        """Compute the root mean square of each dimension of the draft input, over some samples: (R,) float32.

        Raises:
            ValueError: none of them is finite.
        """
        squares, count = torch.zeros((), dtype=SUMS), 0
        for index in range(0, len(self), max(1, len(self) // STATISTICS)):
            rows = self.draft_input(index)
            if rows.isfinite().all():
                squares, count = squares.to(rows.device) + rows.float().square().sum(0, dtype=SUMS), count + len(rows)
        if not count:
            raise ValueError(f"{self.target.name} gives no text features that are finite: choose another dtype")
        return (squares / count).sqrt().float().cpu()


def first_of_each(ids: list[str], *keys: Sequence[Hashable]) -> list[str]:
    """Return for each sample the least id of all that share a key with it, directly or through others; "" is no key."""
    before, least = [], ids
    while least != before:
        before = least
        for column in keys:
            first: dict[Hashable, str] = {}
            for key, name in zip(column, least, strict=True):
                first[key] = min(first.get(key, name), name)
            least = [first[key] if key else name for key, name in zip(column, least, strict=True)]
    return least


def _digest(tokens: np.ndarray) -> bytes:
    return hashlib.sha256(np.asarray(tokens, "<i4").tobytes()).digest()


def warn_of_training(who: str, trained_on: frozenset[int], source: SampleSource, indices: Iterable[int]) -> str | None:
    """Return a warning with the number of samples that a draft was trained on; None if no such sample is known."""
    digests = [source.digest(index) for index in indices] if trained_on else []
    seen = sum(digest in trained_on for digest in digests)
    if not seen:
        return None
    return (
        f"{who} was trained on {seen} of these {len(digests)} conversations: acceptance there is higher than on new "
        "text; measure it on conversations that were held out"
    )
