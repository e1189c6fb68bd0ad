"""Trees and their judging, batched, against walks over lists; the drawing is the expected value."""

import random

import pytest
import torch

from poss_lightning.decoding.trees import Tree, ancestor_mask, rerank
from poss_lightning.decoding.verification import judge
from tests.support import naive
from tests.support.trees import random_tree

DRAWN = """
x . . . .
x x . . .
x . x . .
x x . x .
x . x . x
"""


def test_ancestors_are_the_drawing():
    above = ancestor_mask(torch.tensor([[0, 0, 0, 1, 2]]), 2)
    drawn = "\n".join(" ".join("x" if seen else "." for seen in row) for row in above[0].tolist())
    assert drawn == DRAWN.strip()


def test_ancestors_against_a_walk_batched():
    parents = [random_tree(seed)[1] for seed in range(8)]
    above = ancestor_mask(torch.tensor(parents), 14)
    assert above.tolist() == [naive.ancestor_mask(row) for row in parents]


@pytest.mark.parametrize("nodes", [1, 5, 9, 14, 40])
def test_rerank_keeps_the_best_and_stays_a_tree(nodes):
    rows = [random_tree(seed) for seed in range(6)]
    parents = torch.tensor([p for _, p in rows])
    steps = -torch.rand(parents.shape, generator=torch.Generator().manual_seed(0)).round(decimals=1)  # ties happen
    steps[:, 0] = 0
    scores = (ancestor_mask(parents, 13) * steps[:, None]).sum(-1)
    tree = Tree(torch.tensor([t for t, _ in rows]), parents, scores)
    kept = rerank(tree, nodes)
    assert kept.tokens.shape[1] == min(nodes, 14)
    best = scores.sort(dim=1, descending=True).values[:, :nodes]
    torch.testing.assert_close(kept.scores.sort(dim=1, descending=True).values, best)
    numbers = torch.arange(kept.parents.shape[1])
    assert (kept.parents[:, 1:] < numbers[1:]).all() and (kept.parents[:, 0] == 0).all()
    for row in range(6):  # every kept path spells what it spelled before
        words = {path_words(tree, row, node) for node in range(14)}
        assert all(path_words(kept, row, node) in words for node in range(kept.tokens.shape[1]))


def path_words(tree: Tree, row: int, node: int) -> tuple[int, ...]:
    words = []
    while node:
        words.append(int(tree.tokens[row, node]))
        node = int(tree.parents[row, node])
    return (*reversed(words), int(tree.tokens[row, 0]))


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
