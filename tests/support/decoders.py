"""Prompts, what decoders say to them, and drafts that know what the target will say."""

from itertools import count

import torch

from poss_lightning.decoding.engine import Speculative
from poss_lightning.decoding.plans import TreePlan
from poss_lightning.sampling import GREEDY

PROMPTS = [[5, 6, 7, 8], [9] * 11, [3, 4]]
STOPS = frozenset({1})


def speculate(target, draft, *plan, tree="fixed", graphs=None, **sizes) -> Speculative:
    return Speculative.from_draft(target, draft, TreePlan(*plan, tree=tree, **sizes), graphs)


def tokens_of(decoder, prompts=PROMPTS, limit=40, stops=STOPS):
    return drawn(decoder, GREEDY, 0, prompts, limit, stops)


def drawn(decoder, sampling, seed, prompts=PROMPTS, limit=40, stops=STOPS, watch=None):
    generator = torch.Generator().manual_seed(seed)
    return [decoded.tokens for decoded in decoder.decode(prompts, limit, stops, sampling, generator, watch)]


def plant(engine, truth, prompts=PROMPTS, wrong_every=0):
    """Let trees hold what the target will say, on a path through any of their nodes.

    In one of so many rounds a chain of each row has a wrong token.
    """
    draft, turns = engine.drafter.draft, count(1)

    def planted(*given):
        tree, turn = draft(*given), next(turns)
        tokens, parents = tree.tokens.clone(), tree.parents.tolist()
        rows = zip(engine.active.prompts, engine.cache.slots.host_lengths, strict=True)
        for row, (prompt, length) in enumerate(rows):
            node, wrong = 0, 1 + (turn + row) % (tokens.shape[1] - 1) if wrong_every and turn % wrong_every == 0 else 0
            for depth, token in enumerate(truth[prompt][length - len(prompts[prompt]) + 1 :]):
                children = [child for child, parent in enumerate(parents[row]) if parent == node and child]
                if not children:
                    break
                right = [child for child in children if tokens[row, child] == token]
                node = right[0] if right else children[(turn + depth) % len(children)]
                tokens[row, node] = (token + 1) % 320 if node == wrong else token
        return tree._replace(tokens=tokens)

    engine.drafter.draft = planted
