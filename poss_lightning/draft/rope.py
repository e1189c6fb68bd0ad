"""Rotary angles: of positions, and Llama 3.1's scaling of them."""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from poss_lightning.ranges import refuse_types


class Rope(NamedTuple):
    """Rotary cosines and sines, (B or 1, 1, T, d) each."""

    cos: Tensor
    sin: Tensor

    def at(self, i: int) -> "Rope":
        """Return the angles of one of the T positions, for any number of slots there."""
        return Rope(self.cos[:, :, i : i + 1], self.sin[:, :, i : i + 1])


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """Llama 3.1's rotary angles (`rope_type: llama3`), under its names: slow waves rotate `factor` times more slowly.

    Waves that rotate `high_freq_factor` times or more in the original context stay as they are, those that rotate
    `low_freq_factor` times or less are slowed, and the two are mixed for those between.

    Raises:
        ValueError: a number that cannot be; the message names it.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int

    def __post_init__(self):
        refuse_types(self, "rope_scaling's ")
        ascending = 0 < self.low_freq_factor < self.high_freq_factor < math.inf
        if not (ascending and 1 <= self.factor < math.inf and self.original_max_position_embeddings >= 1):
            raise ValueError(
                f"rope_scaling is {self}; it must have a factor and an original length of at least 1, and "
                "0 < low_freq_factor < high_freq_factor"
            )

    def __call__(self, frequencies: Tensor) -> Tensor:
        turns = self.original_max_position_embeddings * frequencies / (2 * math.pi)
        fast = ((turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)).clamp(0, 1)
        return frequencies * (fast + (1 - fast) / self.factor)


def rope_at(positions: Tensor, head_dim: int, theta: float, scaling: RopeScaling | None = None) -> Rope:
    """Compute rotary angles of positions (B or 1, T)."""
    exponents = torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float32) / head_dim
    frequencies = theta**-exponents
    angles = positions[:, None, :, None].float() * (scaling(frequencies) if scaling else frequencies)  # (B, 1, T, d/2)
    angles = torch.cat([angles, angles], dim=-1)
    return Rope(angles.cos(), angles.sin())


def apply_rope(x: Tensor, rope: Rope) -> Tensor:
    """Rotate (B, H, T, d) by the angles of its slots; computed in float32, returned in its own dtype."""
    first, second = x.float().chunk(2, dim=-1)
    half = torch.cat([-second, first], dim=-1)
    return (x.float() * rope.cos + half * rope.sin).to(x.dtype)
