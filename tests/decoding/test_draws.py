"""Replayed rounds of drawn texts are the engine's, whether drafts see the noise or not; the text is the same."""

import pytest

from poss_lightning.decoding.drafting import Drafter
from poss_lightning.decoding.engine import Speculative
from poss_lightning.sampling import Sampling, TokenSampler
from tests.support.decoders import PROMPTS
from tests.support.draws import drawn_text, rounds, seeded
from tests.support.tiny import tiny_draft


@pytest.mark.parametrize("sees", [True, False])
@pytest.mark.parametrize("tree", [(4, 5, 1), (4, 20, 5)], ids=str)
def test_replayed_draws_are_the_engines(target, tree, sees):
    (depth, nodes, width), law, draft = tree, Sampling(1.0), tiny_draft(target, [2, 2])
    engine = Speculative(target, draft, depth, nodes, width, int8_head=False)
    if not sees:
        see = engine.drafter.draft_tree
        engine.drafter.draft_tree = lambda budget, noise=None: see(budget)
    total = 0
    for prompt in PROMPTS:
        text, features = drawn_text(target, prompt, 40, law, seed=5)
        (decoded,) = engine.decode([prompt], 40, sampling=law, generator=seeded(5))
        assert prompt + decoded.tokens == text
        sampler = TokenSampler(1, 320, target.device)
        sampler.begin(law, [prompt], seeded(5))
        drafter = Drafter(draft, target.embed_head, depth, width)
        found = rounds(drafter, sampler if sees else None, text, features, len(prompt), nodes)
        assert found == decoded.accepted[: len(found)] and len(decoded.accepted) - len(found) < depth + 1
        total += sum(found)
    assert total > 5 if sees else total >= 0
