"""Trees and their judging, batched, against walks over lists."""

import random

import pytest
import torch

from poss_lightning.decoding.trees import Tree, ancestor_mask, rerank
from poss_lightning.decoding.verification import judge
from tests.support import naive
from tests.support.trees import random_tree

ROWS = [random_tree(seed) for seed in range(20)]
TOKENS, PARENTS = (torch.tensor(each) for each in zip(*ROWS, strict=True))  # (20, 14) each


def test_ancestors_are_those_of_a_walk():
    walked = [naive.ancestor_mask(parents) for _, parents in ROWS]
    deepest = max(sum(row) for table in walked for row in table) - 1
    assert ancestor_mask(PARENTS, deepest).tolist() == walked


@pytest.mark.parametrize("nodes", [1, 5, 9, 40])
def test_rerank_keeps_the_best_and_stays_a_tree(nodes):
    steps = -torch.rand(PARENTS.shape, generator=torch.Generator().manual_seed(0)).round(decimals=1)  # ties happen
    steps[:, 0] = 0
    tree = Tree(TOKENS, PARENTS, (ancestor_mask(PARENTS, 13) * steps[:, None]).sum(-1))
    kept = rerank(tree, nodes)
    best = tree.scores.sort(dim=1, descending=True).values[:, :nodes]
    assert kept.scores.sort(dim=1, descending=True).values.equal(best)
    assert (kept.parents[:, 1:] < torch.arange(1, kept.parents.shape[1])).all() and (kept.parents[:, 0] == 0).all()
    for spelled, before in zip(paths(kept), paths(tree), strict=True):
        assert spelled <= before


def paths(tree: Tree) -> list[set[tuple[int, ...]]]:
    """What the paths to the nodes of each row spell."""
    masks = ancestor_mask(tree.parents, 13)
    return [{tuple(tokens[seen].tolist()) for seen in row} for tokens, row in zip(tree.tokens, masks, strict=True)]


@pytest.mark.parametrize("seed", range(3))
def test_all_nodes_at_once_is_the_walk_over_lists(seed):
    """Many a node has its parent's choice among its children, so that paths are long."""
    chance = random.Random(seed)
    choices = [[chance.randrange(6) for _ in tokens] for tokens, _ in ROWS]
    for (tokens, parents), choice in zip(ROWS, choices, strict=True):
        for node in range(1, 14):
            if chance.random() < 0.5:
                choice[parents[node]] = tokens[node]
    verdict = judge(Tree(TOKENS, PARENTS, torch.zeros(20, 14)), ancestor_mask(PARENTS, 13), torch.tensor(choices), 13)
    for (tokens, parents), choice, nodes, said, accepted in zip(ROWS, choices, *verdict, strict=True):
        path, emitted = naive.judge(tokens, parents, choice)
        fill = 14 - len(path)
        assert nodes.tolist() == path + path[-1:] * fill
        assert said.tolist() == emitted + emitted[-1:] * fill
        assert accepted == len(path) - 1
    assert verdict.accepted.max() > 1
