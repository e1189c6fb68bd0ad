"""Readers of texts for a store: the target itself here, a serving engine in `serving/features.py`."""

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from poss_lightning.target.generation import pad_right
from poss_lightning.target.model import Target


class TextFeatures(NamedTuple):
    """A target's outputs for some texts, concatenated without padding, on the device of its head."""

    features: Tensor  # (tokens, D)
    layers: Tensor  # (tokens, n, D), outputs of inner layers; n is 0 where none are kept


class Reader(Protocol):
    """Computes the features of texts."""

    target: Target
    layers: tuple[int, ...]  # inner layers that are kept too, as `Target.text_layers` counts them

    def read(self, texts: list[list[int]]) -> TextFeatures:
        """Features of token lists, each of which the target sees alone and in full."""
        ...


class TargetReader:
    """Reads a batch of texts in one forward of the target."""

    def __init__(self, target: Target, layers: tuple[int, ...]):
        self.target, self.layers = target, layers

    def read(self, texts: list[list[int]]) -> TextFeatures:
        tokens, lengths = pad_right(texts, self.target.device), [len(text) for text in texts]
        return TextFeatures(*(_join(rows, lengths) for rows in self.target.text_layers(tokens, self.layers)))


def _join(rows: Tensor, lengths: list[int]) -> Tensor:
    """(B, T, …) -> (tokens, …), without padding."""
    return torch.cat([row[:length] for row, length in zip(rows, lengths, strict=True)])
