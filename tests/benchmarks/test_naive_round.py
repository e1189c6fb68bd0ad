"""The twin that `make bench-decode` is held against drafts the same trees and emits the same tokens."""

import pytest
import torch

from benchmarks.naive_round import NaiveRounds
from poss_lightning.clock import Clock
from poss_lightning.decoding.autoregressive import Autoregressive
from poss_lightning.decoding.decoder import Request
from poss_lightning.decoding.engine import Speculative
from poss_lightning.training.export import restrict_vocabulary
from tests.support.tiny import tiny_draft, tiny_target

PROMPTS = [[5, 6, 7, 8], [9] * 11, [3]]


def same_rounds(target, draft, prompt, depth=6, nodes=60, tree_width=10, limit=12) -> list[int]:
    """Decode with both, round by round; what was accepted."""
    naive = NaiveRounds(target, draft, depth, nodes, tree_width)
    ours = Speculative(target, draft, depth, nodes, tree_width)
    text = ours.rounds(Request([prompt], limit, frozenset()), Clock(target.device))
    assert next(text).tokens == {0: [naive.start(prompt)]}
    accepted = []
    for step in text:
        emitted = naive.round()
        assert step.tree.tokens[0].tolist() == [node.token for node in naive.tree]
        assert step.tree.parents[0].tolist() == [node.parent for node in naive.tree]
        scores = torch.tensor([node.score for node in naive.tree])
        torch.testing.assert_close(step.tree.scores[0], scores, rtol=1e-4, atol=1e-4)
        assert step.tokens[0] == emitted[: len(step.tokens[0])]
        accepted.append(len(emitted) - 1)
    return accepted


@pytest.mark.parametrize("allocation", [[6], [1] * 6, [2, 2, 2], [1, 3]], ids=str)
def test_the_naive_round_drafts_the_same_trees_and_emits_the_same_tokens(allocation):
    for seed, prompt in enumerate(PROMPTS):
        target = tiny_target(seed)
        same_rounds(target, tiny_draft(target, allocation, seed), prompt)


@pytest.mark.parametrize("allocation", [[6], [1] * 6, [2, 2, 2]], ids=str)
def test_also_where_paths_are_accepted(target, allocation):
    """A draft that can propose little but what the target will say."""
    accepted = []
    for prompt in PROMPTS:
        future = Autoregressive(target).decode([prompt], 40, frozenset())[0].tokens
        vocabulary = torch.tensor(sorted({*future, *range(10)}))
        draft = restrict_vocabulary(tiny_draft(target, allocation), vocabulary)
        accepted += same_rounds(target, draft, prompt, limit=40)
    assert max(accepted) > 1


@pytest.mark.parametrize("tree", [(6, 7, 1), (1, 5, 4), (3, 20, 5), (8, 40, 4)], ids=str)
def test_whatever_the_tree(target, tree):
    for prompt in PROMPTS:
        same_rounds(target, tiny_draft(target, [1, 1, 2]), prompt, *tree)


def test_a_smaller_vocabulary(target):
    same_rounds(target, restrict_vocabulary(tiny_draft(target, [2, 2]), torch.arange(0, 320, 5)), PROMPTS[0], 4, 20, 5)


@pytest.mark.parametrize(("allocation", "rows"), [([1] * 6, 168), ([2, 2, 2], 99), ([6], 53)], ids=str)
def test_rows_are_those_of_the_published_code(target, allocation, rows):
    """Depth 6, top-k 10, three new tokens."""
    naive = NaiveRounds(target, tiny_draft(target, allocation))
    naive.start([5, 6, 7])
    naive.round()
    assert naive.rows == rows
