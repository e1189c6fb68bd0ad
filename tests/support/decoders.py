"""Prompts, and a drafter that knows what the target will say."""

import torch

from poss_lightning.decoding.drafting import Drafter

PROMPTS = [[5, 6, 7, 8], [9] * 11, [3, 4]]
STOPS = frozenset({1})


def tokens_of(decoder, prompts=PROMPTS, limit=40, stops=STOPS):
    return [decoded.tokens for decoded in decoder.decode(prompts, limit, stops)]


def drawn(decoder, sampling, seed, prompts=PROMPTS, limit=40, stops=STOPS):
    generator = torch.Generator().manual_seed(seed)
    return [decoded.tokens for decoded in decoder.decode(prompts, limit, stops, sampling, generator)]


class Oracle(Drafter):
    """Drafts what the target will say, so that whole paths are accepted; then, on demand, something else."""

    def __init__(self, drafter: Drafter, future: list[int], wrong_every: int):
        self.__dict__.update(drafter.__dict__)
        self.future, self.wrong_every, self.turn = future, wrong_every, 0

    def draft_tree(self, budget, noise=None):
        tree, self.turn = super().draft_tree(budget, noise), self.turn + 1
        at = int(self.slots.lengths[0]) - len(PROMPTS[0])  # tokens emitted before the root
        tokens = tree.tokens.clone()
        for node in range(1, tokens.shape[1]):
            ahead = at + node
            tokens[0, node] = self.future[ahead] if ahead < len(self.future) else 7
        if self.wrong_every and self.turn % self.wrong_every == 0:
            tokens[0, 1 + self.turn % (tokens.shape[1] - 1)] = 319
        return tree._replace(tokens=tokens)
