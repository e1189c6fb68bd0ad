"""The noise of a round's places, made where a round needs it."""

import torch
from torch import Tensor

from poss_lightning.sampling import TokenSampler


class Noise:
    """T g at some places of the texts: a place's costs as much as a small product, so it is made when it is needed."""

    def __init__(self, sampler: TokenSampler, places: Tensor):
        self.sampler, self.places = sampler, places
        self.made: Tensor | None = None  # (B, as many places as were asked for, V)

    def first(self, count: int) -> Tensor | None:
        """At the first `count` of n places: (B, count, V); None at temperature 0."""
        known = 0 if self.made is None else self.made.shape[1]
        if count > known and (more := self.sampler.noise(self.places[:, known:count])) is not None:
            self.made = more if self.made is None else torch.cat([self.made, more], dim=1)
        return None if self.made is None else self.made[:, :count]
