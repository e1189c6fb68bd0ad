"""Random trees, and noise that is given."""

import random
from types import SimpleNamespace

from torch import Tensor


def given_noise(noise: Tensor) -> SimpleNamespace:
    """A `Noise` of these values (B, n, V)."""
    return SimpleNamespace(first=lambda count: noise[:, :count])


def random_tree(seed: int, nodes: int = 14, vocabulary: int = 6) -> tuple[list[int], list[int]]:
    """Tokens and parents; children of a node differ."""
    chance = random.Random(seed)
    tokens, parents, used = [0], [0], {0: set()}
    while len(tokens) < nodes:
        parent, token = chance.randrange(len(tokens)), chance.randrange(vocabulary)
        if token not in used[parent]:
            used[parent].add(token)
            used[len(tokens)] = set()
            tokens.append(token)
            parents.append(parent)
    return tokens, parents
