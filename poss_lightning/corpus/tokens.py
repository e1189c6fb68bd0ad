"""Which tokens a corpus' answers are made of: how often each occurs, and the most frequent of them.

The one rule behind a draft's vocabulary, whether a training store or `poss vocabulary` chooses it.
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
        np.add.at(counts, answer, 1)
    return counts


def most_frequent(counts: np.ndarray, size: int, always: Collection[int] = ()) -> Tensor | None:
    """The tokens of `always` and then the most frequent ones, `size` in all, as ascending ids (size,); None for all.

    A draft that may propose as many as there are has no list of them. Of tokens equally frequent the lower id goes
    first; so where fewer than `size` occur, the lowest unused ids fill up.

    Args:
        counts: (vocabulary,), as of `count_tokens`.
        size: from 1, or the number of `always`, to the number of counts.
        always: ids taken whatever their counts.
    """
    if size == len(counts):
        return None
    ranks = counts.copy()
    ranks[list(always)] = np.iinfo(np.int64).max
    return torch.from_numpy(np.sort(np.argsort(-ranks, kind="stable")[:size]))
