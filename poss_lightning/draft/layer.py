"""One specialist: a target-shaped decoder layer without a norm before attention (the EAGLE-2 layout).

The layer is cut in two where attention happens, because training (unroll) and decoding (drafting) bring different keys:

    z --+--> queries --------> attention -> o_proj -> + z -> norm, gated MLP, residual -> F̂ (predicts the next feature)
        +--> keys_values --^      ^---- keys and values of earlier slots
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn


class Rotation(NamedTuple):
    """Rotary cosines and sines, (B or 1, 1, T, d) each."""

    cos: Tensor
    sin: Tensor


def rotation(positions: Tensor, head_dim: int, theta: float) -> Rotation:
    """Rotary angles of positions (B or 1, T)."""
    exponents = torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float32) / head_dim
    angles = positions[:, None, :, None].float() * theta**-exponents  # (B, 1, T, d/2)
    angles = torch.cat([angles, angles], dim=-1)
    return Rotation(angles.cos(), angles.sin())


def rotate(x: Tensor, turn: Rotation) -> Tensor:
    """Turn (B, H, T, d) by the angles of its slots; computed in float32, returned as it came."""
    first, second = x.float().chunk(2, dim=-1)
    half = torch.cat([-second, first], dim=-1)
    return (x.float() * turn.cos + half * turn.sin).to(x.dtype)


class Norm(nn.RMSNorm):
    """RMSNorm in the dtype of what it reads: mixed dtypes take torch's slow path, and CUDA's autocast gives float32."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps).to(x.dtype)


class Specialist(nn.Module):
    """A decoder layer that serves one run of draft positions."""

    def __init__(self, width: int, intermediate: int, heads: int, kv_heads: int, head_dim: int, norm_eps: float):
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, head_dim
        self.q_proj = nn.Linear(width, heads * head_dim, bias=False)
        self.k_proj = nn.Linear(width, kv_heads * head_dim, bias=False)
        self.v_proj = nn.Linear(width, kv_heads * head_dim, bias=False)
        self.o_proj = nn.Linear(heads * head_dim, width, bias=False)
        self.norm = Norm(width, eps=norm_eps)
        self.gate_proj = nn.Linear(width, intermediate, bias=False)
        self.up_proj = nn.Linear(width, intermediate, bias=False)
        self.down_proj = nn.Linear(intermediate, width, bias=False)

    def queries(self, z: Tensor, turn: Rotation) -> Tensor:
        """(B, T, D) -> (B, H, T, d)"""
        return rotate(_heads(self.q_proj(z), self.head_dim), turn)

    def keys_values(self, z: Tensor, turn: Rotation) -> tuple[Tensor, Tensor]:
        """(B, T, D) -> keys and values, (B, kv heads, T, d) each."""
        keys, values = _heads(self.k_proj(z), self.head_dim), _heads(self.v_proj(z), self.head_dim)
        return rotate(keys, turn), values

    def finish(self, z: Tensor, attended: Tensor) -> Tensor:
        """What follows attention: z (B, T, D) and attended values (B, H, T, d) -> predicted features (B, T, D)."""
        hidden = z + self.o_proj(attended.transpose(1, 2).flatten(2))
        normed = self.norm(hidden)
        return hidden + self.down_proj(nn.functional.silu(self.gate_proj(normed)) * self.up_proj(normed))

    def start_from(self, other: "Specialist") -> None:
        """Compute what `other` does. What an MLP is wider begins at random, and adds nothing until it has learnt.

        Raises:
            RuntimeError: other sizes, or a narrower MLP.
        """
        own, given = self.state_dict(), other.state_dict()
        inner = other.down_proj.in_features
        for name in ("gate_proj.weight", "up_proj.weight"):
            given[name] = torch.cat([given[name], own[name][inner:]])
        beyond = torch.zeros_like(own["down_proj.weight"][:, inner:])
        given["down_proj.weight"] = torch.cat([given["down_proj.weight"], beyond], dim=1)
        self.load_state_dict(given)


def _heads(x: Tensor, head_dim: int) -> Tensor:
    return x.unflatten(-1, (-1, head_dim)).transpose(1, 2)  # (B, T, H*d) -> (B, H, T, d)
