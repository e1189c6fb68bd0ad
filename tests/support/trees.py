"""Random trees, and noise that is given."""

import random
from types import SimpleNamespace

from torch import Tensor


def given_noise(noise: Tensor) -> SimpleNamespace:
    """A `Noise` of these values (B, n, V)."""
    return SimpleNamespace(first=lambda count: noise[:, :count])


def random_tree(seed: int, nodes: int = 14, vocabulary: int = 6) -> tuple[list[int], list[int]]:
    """Tokens and parents; children of a node differ."""
    chance, tokens, parents = random.Random(seed), [0], [0]
    while len(tokens) < nodes:
        parent, token = chance.randrange(len(tokens)), chance.randrange(vocabulary)
        if (parent, token) not in zip(parents[1:], tokens[1:], strict=True):
            tokens.append(token)
            parents.append(parent)
    return tokens, parents
