"""The tokens of a corpus' answers: how often each occurs, and which are the most frequent.

This is the one rule for a draft's vocabulary, whether a training store or `poss export` chooses it.
"""

from collections.abc import Collection, Iterable

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor


def count_tokens(answers: Iterable[ArrayLike], vocabulary: int) -> np.ndarray:
    """How often each of the target's tokens occurs in the answers (token ids each): (vocabulary,) int64."""
    counts = np.zeros(vocabulary, dtype=np.int64)
    for answer in answers:
        np.add.at(counts, np.asarray(answer, dtype=np.int64), 1)
    return counts


def most_frequent(counts: np.ndarray, size: int, always: Collection[int] = ()) -> Tensor | None:
    """The tokens of `always` and then the most frequent ones, `size` in all, as ascending ids (size,); None for all.

    None means that the draft may propose every token. Of equally frequent tokens the lower id goes first. If fewer than
    `size` tokens occur, the lowest of the other ids fill up.

    Args:
        counts: (vocabulary,), from `count_tokens`.
        size: from 1, or the number of `always`, to the number of counts.
        always: ids that are taken whatever their counts.
    """
    if size == len(counts):
        return None
    ranks = counts.copy()
    ranks[list(always)] = np.iinfo(np.int64).max
    return torch.from_numpy(np.sort(np.argsort(-ranks, kind="stable")[:size]))
