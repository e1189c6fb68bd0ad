"""Judging: against a walk over lists, and, for draws, every branch enumerated: nothing here is a matter of chance."""

import random
from collections import defaultdict
from itertools import product

import pytest
import torch

from poss_lightning.decoding.trees import Tree
from poss_lightning.decoding.verification import judge
from poss_lightning.sampling import Sampling
from tests.support import naive
from tests.support.trees import random_tree

VOCABULARY = 4


@pytest.mark.parametrize("batch", range(5))
def test_the_walk_batched_is_the_walk_over_lists(batch):
    trees = [random_tree(8 * batch + row) for row in range(8)]
    chance = random.Random(batch)
    choices = [[chance.randrange(6) for _ in tokens] for tokens, _ in trees]
    tree = Tree(torch.tensor([t for t, _ in trees]), torch.tensor([p for _, p in trees]), torch.zeros(8, 14))
    logits = torch.nn.functional.one_hot(torch.tensor(choices), 6).float()
    where, place = torch.arange(8 * 14).view(8, 14), torch.zeros(8, dtype=torch.long)
    verdict = judge(tree, logits.flatten(0, 1), where, lambda own, place: own.max(-1).indices, place, 13)
    for row, (tokens, parents) in enumerate(trees):
        path, emitted = naive.judge(tokens, parents, choices[row])
        count = int(verdict.accepted[row])
        assert count == len(path) - 1
        assert verdict.path[row].tolist() == path + [path[-1]] * (13 - count)
        assert verdict.tokens[row].tolist() == emitted + [emitted[-1]] * (13 - count)


@pytest.mark.parametrize("looks", [True, False])
def test_a_walk_ends_with_its_last_row(looks):
    """Where the host may look: each choice may sort the vocabulary. Elsewhere it goes on, and nothing changes."""
    tree = Tree(torch.tensor([[9, 1, 2], [9, 5, 6]]), torch.tensor([[0, 0, 1]] * 2), torch.zeros(2, 3))
    target, asked = torch.tensor([1, 3, 3, 4, 4, 4]), []  # after each node; row 0 takes one token, row 1 none

    def choose(own: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
        asked.append(place.tolist())
        return own[:, 0]

    place = torch.zeros(2, dtype=torch.long)
    verdict = judge(tree, target[:, None], torch.arange(6).view(2, 3), choose, place, 4, looks)
    assert asked[:2] == [[0, 0], [1, 0]] and len(asked) == (2 if looks else 5)
    assert verdict.accepted.tolist() == [1, 0]
    assert verdict.path.tolist() == [[0, 1, 1, 1, 1], [0, 0, 0, 0, 0]]
    assert verdict.tokens.tolist() == [[1, 3, 3, 3, 3], [4, 4, 4, 4, 4]]


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
    probabilities = torch.stack([target[said] for said in words(tokens, parents)])  # (N, V)
    rows = len(falls)
    tree = Tree(*(torch.tensor([own]).expand(rows, -1) for own in (tokens, parents)), torch.zeros(rows, len(tokens)))
    asked = torch.ones(rows, depth + 1, dtype=torch.float64)

    def choose(logits: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
        chosen = falls.gather(1, place[:, None])
        asked.scatter_(1, place[:, None], logits.gather(1, chosen))
        return chosen[:, 0]

    where = torch.arange(len(tokens)).expand(rows, -1)
    verdict = judge(tree, probabilities, where, choose, torch.zeros(rows, dtype=torch.long), depth, may_look=True)
    law: dict[tuple, float] = defaultdict(float)
    for row in range(rows):
        count = int(verdict.accepted[row])
        # draws past the bonus are not asked for: each way they can fall is one of many equal ones
        weight = float(asked[row, : count + 1].prod()) / VOCABULARY ** (depth - count)
        law[tuple(verdict.tokens[row, : count + 1].tolist())] += weight
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
