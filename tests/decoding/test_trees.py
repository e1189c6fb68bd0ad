"""Trees, batched, against walks over lists; the drawing is the expected value."""

import pytest
import torch

from poss_lightning.decoding.trees import Tree, ancestor_mask, rerank
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
