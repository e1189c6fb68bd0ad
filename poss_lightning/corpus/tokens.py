"""The tokens of a corpus' answers: how often each occurs, and the most frequent ones, a draft's vocabulary."""

from collections.abc import Collection, Iterable

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor


def count_tokens(answers: Iterable[ArrayLike], vocabulary: int) -> np.ndarray:
    """Count each of the target's tokens in the answers, lists of ids: (vocabulary,) int64."""
    counts = np.zeros(vocabulary, dtype=np.int64)
    for answer in answers:
        np.add.at(counts, np.asarray(answer, dtype=np.int64), 1)
    return counts


def most_frequent(counts: np.ndarray, size: int, always: Collection[int] = ()) -> Tensor | None:
    """Choose `always` and the most frequent tokens, `size` in all, as ascending ids (size,); None for all tokens.

    Of equally frequent tokens the lower id goes first, so the lowest ids fill up if fewer than `size` tokens occur.

    Args:
        counts: (vocabulary,), from `count_tokens`.
        size: at least the number of `always`.
        always: ids that are taken whatever their counts.
    """
    if size == len(counts):
        return None
    ranks = counts.copy()
    ranks[list(always)] = np.iinfo(np.int64).max
    return torch.from_numpy(np.sort(np.argsort(-ranks, kind="stable")[:size]))
