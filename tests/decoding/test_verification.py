"""Judging: against a walk over lists, and, for draws, every branch enumerated: nothing here is a matter of chance."""

import math
import random
from collections import defaultdict
from itertools import product

import pytest
import torch

from poss_lightning.decoding.trees import Tree, ancestor_mask
from poss_lightning.decoding.verification import judge
from poss_lightning.sampling import Sampling
from tests.support import naive
from tests.support.trees import random_tree

VOCABULARY = 4


@pytest.mark.parametrize("batch", range(5))
def test_all_nodes_at_once_is_the_walk_over_lists(batch):
    """Many a node has its parent's choice among its children, so that paths are long."""
    trees, chance = [random_tree(8 * batch + row) for row in range(8)], random.Random(batch)
    choices = [[chance.randrange(6) for _ in tokens] for tokens, _ in trees]
    for (tokens, parents), choice in zip(trees, choices, strict=True):
        for node in range(1, 14):
            if chance.random() < 0.5:
                choice[parents[node]] = tokens[node]
    tree = Tree(torch.tensor([t for t, _ in trees]), torch.tensor([p for _, p in trees]), torch.zeros(8, 14))
    verdict = judge(tree, ancestor_mask(tree.parents, 13), torch.tensor(choices), 13)
    for row, (tokens, parents) in enumerate(trees):
        path, emitted = naive.judge(tokens, parents, choices[row])
        count = int(verdict.accepted[row])
        assert count == len(path) - 1
        assert verdict.path[row].tolist() == path + [path[-1]] * (13 - count)
        assert verdict.tokens[row].tolist() == emitted + [emitted[-1]] * (13 - count)
    assert verdict.accepted.max() > 1


def language(seed: int, depth: int, law: dict) -> dict[tuple[int, ...], torch.Tensor]:
    """A target's processed distribution after each continuation of the root, in float64."""
    generator = torch.Generator().manual_seed(seed)
    texts = [text for length in range(depth + 1) for text in product(range(VOCABULARY), repeat=length)]
    logits = {text: 2 * torch.randn(VOCABULARY, generator=generator) for text in texts}
    processed = {text: Sampling(**law).probabilities(own).double() for text, own in logits.items()}
    return {text: own / own.sum() for text, own in processed.items()}


def words(tokens: list[int], parents: list[int]) -> list[tuple[int, ...]]:
    """What each node's path says, without the root."""
    said: list[tuple[int, ...]] = [()]
    for node in range(1, len(tokens)):
        said.append((*said[parents[node]], tokens[node]))
    return said


def ours(tokens, parents, target, depth) -> dict[tuple, float]:
    """Probability of every (path, bonus), over all draws: a row of the batch for each way they can fall."""
    falls = torch.tensor(list(product(range(VOCABULARY), repeat=depth + 1)))  # (R, K+1) tokens drawn, place by place
    said = words(tokens, parents)
    rows, depths = len(falls), torch.tensor([len(text) for text in said])
    tree = Tree(*(torch.tensor([own]).expand(rows, -1) for own in (tokens, parents)), torch.zeros(rows, len(tokens)))
    verdict = judge(tree, ancestor_mask(tree.parents, depth), falls[:, depths], depth)
    law: dict[tuple, float] = defaultdict(float)
    for row in range(rows):
        count = int(verdict.accepted[row])
        emitted = tuple(verdict.tokens[row, : count + 1].tolist())
        # draws past the bonus do not matter: each way they can fall is one of many equal ones
        weight = math.prod(float(target[emitted[:i]][token]) for i, token in enumerate(emitted))
        law[emitted] += weight / VOCABULARY ** (depth - count)
    return law


def rejection(tokens, parents, target) -> dict[tuple, float]:
    """The published rule, branch by branch: try each child, accept with p, else take it out and renormalise."""
    law: dict[tuple, float] = defaultdict(float)

    def visit(node: int, said: tuple, mass: float) -> None:
        p = target[said].clone()
        for child in (n for n in range(1, len(tokens)) if parents[n] == node):
            if p[tokens[child]] > 0:
                visit(child, (*said, tokens[child]), mass * float(p[tokens[child]]))
            mass *= 1 - float(p[tokens[child]])
            p[tokens[child]] = 0
            if mass <= 0 or p.sum() <= 0:
                return
            p /= p.sum()
        for bonus in range(VOCABULARY):
            law[(*said, bonus)] += mass * float(p[bonus])

    visit(0, (), 1.0)
    return law


LAWS = [
    {"temperature": 1.0},
    {"temperature": 0.6},
    {"temperature": 1.5, "top_k": 2},
    {"temperature": 1.0, "top_p": 0.7},
    {"temperature": 0.8, "top_k": 3, "top_p": 0.8},
    {"temperature": 0.0},
]


@pytest.mark.parametrize("law", LAWS, ids=str)
@pytest.mark.parametrize("seed", range(4))
def test_every_branch_has_the_law_of_the_target(seed, law):
    tokens, parents = random_tree(seed, nodes=8, vocabulary=VOCABULARY)
    said = words(tokens, parents)
    depth = max(map(len, said))
    target = language(seed, depth, law)
    found, published = ours(tokens, parents, target, depth), rejection(tokens, parents, target)
    for text in found.keys() | published.keys():
        assert abs(found.get(text, 0.0) - published.get(text, 0.0)) <= 1e-12
    assert abs(sum(found.values()) - 1) <= 1e-12
    for emitted, mass in found.items():  # as the target itself would write it
        chain = 1.0
        for i, token in enumerate(emitted):
            chain *= float(target[emitted[:i]][token])
        assert abs(mass - chain) <= 1e-12
