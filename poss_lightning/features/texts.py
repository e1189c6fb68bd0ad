"""Texts without their features: which are the same, which tokens answers have, what a draft was trained on."""

import hashlib
import logging
from collections.abc import Iterable
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components
from torch import Tensor

from poss_lightning.corpus.tokens import count_tokens, most_frequent
from poss_lightning.target.spec import TargetSpec
from poss_lightning.terminal import announced

logger = logging.getLogger(__name__)


class Texts:
    """What a `FeatureStore` and `OnlineFeatures` both offer.

    Attributes:
        ids: of the samples.
        spans: the assistants' token ranges of every sample, (n, 2) each.
    """

    ids: list[str]
    spans: list[np.ndarray]

    @property
    def target(self) -> TargetSpec:
        """Whose tokens they are."""
        raise NotImplementedError

    def __len__(self) -> int:
        return len(self.ids)

    def tokens(self, index: int) -> np.ndarray:
        """Of a sample: (T,); no feature is read."""
        raise NotImplementedError

    def conversations(self) -> list[str]:
        """Of every sample the digest of all that is said in its conversation; "" where it is not known."""
        raise NotImplementedError

    def digest(self, index: int) -> int:
        """`text_digest` of a sample."""
        return text_digest(self.tokens(index), self.spans[index])

    @cached_property
    def origins(self) -> list[str]:
        """For every sample the id that stands for its conversation: what is there twice, whatever the ids, has one."""
        whole = [token_digest(self.tokens(index)) for index in range(len(self))]
        if repeated := len(whole) - len(set(whole)):
            logger.warning(
                "%d of %d texts are there more than once, each on one side of the split", repeated, len(whole)
            )
        return first_of_each(self.ids, self.conversations(), whole)

    def common_tokens(self, size: int) -> Tensor | None:
        """The `size` most common tokens of the assistants' answers, as ascending ids (size,); None for all.

        A store does not know the target's stop tokens. They end the answers, so they are counted with the rest.

        Raises:
            ValueError: size below 1 or above the target's vocabulary.
        """
        if not 1 <= size <= self.target.vocab_size:
            raise ValueError(
                f"vocabulary_size is {size}; it must lie between 1 and the target's {self.target.vocab_size}"
            )
        answers = (self.tokens(i)[start:stop] for i in range(len(self)) for start, stop in self.spans[i])
        with announced("counting the tokens of the answers"):
            return most_frequent(count_tokens(answers, self.target.vocab_size), size)


def first_of_each(ids: list[str], *keys: list[str]) -> list[str]:
    """For every sample the least id of all that share a key with it, directly or by others; an empty key is none."""
    links = []
    for column in keys:
        first: dict[str, int] = {}
        links += [(i, first.setdefault(key, i)) for i, key in enumerate(column) if key]
    ends = np.array(links, dtype=np.int64).reshape(-1, 2).T
    group = connected_components(coo_array((np.ones(len(links)), tuple(ends)), (len(ids),) * 2), directed=False)[1]
    least = {group[i]: ids[i] for i in sorted(range(len(ids)), key=ids.__getitem__, reverse=True)}
    return [least[each] for each in group]


def token_digest(tokens: ArrayLike) -> str:
    """Of a whole text."""
    return hashlib.sha256(np.asarray(tokens, "<i4").tobytes()).hexdigest()[:16]


# --- what a draft was trained on: acceptance on these texts says how well it remembers them ---


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
