"""Lookups: the match and the joined path against their definitions; no round accepts less."""

import pytest
import torch

from poss_lightning.decoding.baselines import Autoregressive
from poss_lightning.decoding.costs import Costs
from poss_lightning.decoding.lookup import NGRAM, Lookup, join
from poss_lightning.decoding.trees import Tree, ancestor_mask
from poss_lightning.decoding.verification import judge
from poss_lightning.sampling import GREEDY
from tests.support.decoders import speculate, tokens_of
from tests.support.trees import random_tree

REPEATED = [[5, 6, 7, 8, 5, 6, 7, 8, 5]]


def looked_up(text: list[int], count: int) -> tuple[list[int], int]:
    """The twin: of the latest earlier place with the most of the last tokens, what follows; then that again."""
    last = len(text) - 1
    for n in range(min(NGRAM, last), 0, -1):
        for place in range(last - 1, n - 2, -1):
            if text[place - n + 1 : place + 1] == text[last - n + 1 :]:
                following = text[place + 1 :]
                return [following[i % len(following)] for i in range(count)], n
    return [-1] * count, 0


@pytest.mark.parametrize("words", [2, 4, 30])
def test_the_match_is_its_twins(words):
    generator = torch.Generator().manual_seed(words)
    lengths = torch.randint(1, 24, (40,), generator=generator)
    texts = [torch.randint(words, (int(n),), generator=generator).tolist() for n in lengths]
    lookup = Lookup(5)
    lookup.start(torch.tensor([text + [0] * (24 - len(text)) for text in texts]), 40)
    for _ in range(2):  # as begun, and after some more tokens, the rest of which are not emitted
        roots = torch.tensor([len(text) for text in texts]) - 1
        tokens, found = lookup.find(roots)
        expected = [looked_up(text, 5) for text in texts]
        assert list(zip(tokens.tolist(), found.tolist(), strict=True)) == expected
        more = torch.randint(words, (len(texts), 4), generator=generator)
        lookup.append(more, roots)
        texts = [text + row[:3] for text, row in zip(texts, more.tolist(), strict=True)]


@pytest.mark.parametrize("seed", range(20))
def test_a_tree_with_a_path_accepts_what_the_longer_of_the_two_does(seed):
    generator = torch.Generator().manual_seed(seed)
    tree = Tree(*torch.tensor(random_tree(seed, 12, 3))[:, None], torch.zeros(1, 12))
    path, text = (torch.randint(3, (n,), generator=generator) for n in (6, 13))  # text: what the target says, by depth
    joined, accepted = join(tree, path[None]), []
    for one in (tree, joined):
        ancestors = ancestor_mask(one.parents, 12)
        verdict = judge(one, ancestors, text[ancestors.sum(-1) - 1], 12)
        accepted.append(int(verdict.accepted))
        assert torch.equal(verdict.tokens[0, : accepted[-1] + 1], text[: accepted[-1] + 1])
    said = next((i for i in range(6) if path[i] != text[i]), 6)
    assert accepted[1] == max(accepted[0], said)
    assert joined.tokens.shape == (1, 12 + 6) and torch.equal(joined.tokens[:, :12], tree.tokens)


def test_without_a_draft_auto_looks_up_where_that_pays(target):
    """A text that repeats itself brings tokens for the time of the nodes; nothing is added where nothing matches."""
    engine, sizes, found = speculate(target, None, tree="auto", lookup=6), [], []
    engine.auto.measured[1, 0, GREEDY.steps] = Costs(0.0, dict(zip((1, 2, 4, 7), (1.0, 1.1, 1.2, 1.3), strict=True)))

    def watch(step):
        """The nodes of a round, and how many tokens match for the next."""
        sizes.append(step.tree.tokens.shape[1] if step.tree else 1)
        found.append(int(engine.lookup.find(engine.cache.slots.lengths)[1]))

    (decoded,) = engine.decode(REPEATED, 60, frozenset(), watch=watch)
    assert [decoded.tokens] == tokens_of(Autoregressive(target), REPEATED, 60, frozenset())
    assert all(size == 1 for size, matched in zip(sizes[1:], found[:-1], strict=True) if not matched)
    assert max(sizes) > 3 and engine.auto.why_plain is None
