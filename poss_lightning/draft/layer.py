"""A draft's decoder layer, of the target's shape, in the EAGLE-2, the EAGLE-3 or the DFlash layout.

The layer is cut in two around attention, because training (unroll) and decoding (drafting) bring different keys:

    z --+--> queries --------> attention -> o_proj -> + z -> norm, gated MLP, residual -> F̂ (predicts the next feature)
        +--> keys_values --^      ^---- keys and values of earlier slots

In EAGLE-2 z is one vector, and there is no norm before attention. In EAGLE-3 (arXiv 2503.01840) z is [e; h], an
embedding and a feature: attention reads both, each normed, and the residual continues from h, or from the normed h with
`norm_before_residual`.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from poss_lightning.draft.config import DraftConfig, RopeScaling


class Rope(NamedTuple):
    """Rotary cosines and sines, (B or 1, 1, T, d) each."""

    cos: Tensor
    sin: Tensor

    def at(self, i: int) -> "Rope":
        """Return the angles of one of the T positions, for any number of slots there."""
        return Rope(self.cos[:, :, i : i + 1], self.sin[:, :, i : i + 1])


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


class Norm(nn.RMSNorm):
    """RMSNorm in its input's dtype: torch is slow with mixed dtypes, and CUDA's autocast returns float32."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps).to(x.dtype)


class Specialist(nn.Module):
    """A decoder layer that serves one run of draft positions, in the EAGLE-2 layout: Z is D."""

    parts = 1  # of z, each D wide

    def __init__(self, config: DraftConfig):
        super().__init__()
        spec = config.target
        width, inner = spec.hidden_size, config.intermediate_size or spec.intermediate_size
        self.head_dim, self.norm_before_residual = spec.head_dim, config.norm_before_residual
        self.q_proj = nn.Linear(self.parts * width, spec.heads * spec.head_dim, bias=False)
        self.k_proj = nn.Linear(self.parts * width, spec.kv_heads * spec.head_dim, bias=False)
        self.v_proj = nn.Linear(self.parts * width, spec.kv_heads * spec.head_dim, bias=False)
        self.o_proj = nn.Linear(spec.heads * spec.head_dim, width, bias=False)
        self.norm = Norm(width, eps=config.eps)
        self.gate_proj = nn.Linear(width, inner, bias=False)
        self.up_proj = nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)

    def queries(self, z: Tensor, rope: Rope) -> Tensor:
        """Project queries: (B, T, Z) -> (B, H, T, d)."""
        return apply_rope(_heads(self.q_proj(self.attention_input(z)), self.head_dim), rope)

    def keys_values(self, z: Tensor, rope: Rope) -> tuple[Tensor, Tensor]:
        """Project keys and values: (B, T, Z) -> (B, kv heads, T, d) each."""
        x = self.attention_input(z)
        keys, values = _heads(self.k_proj(x), self.head_dim), _heads(self.v_proj(x), self.head_dim)
        return apply_rope(keys, rope), values

    def after_attention(self, z: Tensor, attended: Tensor) -> Tensor:
        """Compute the rest of the layer: z (B, T, Z), attended values (B, H, T, d) -> predicted features (B, T, D)."""
        hidden = self.residual(z) + self.o_proj(attended.transpose(1, 2).flatten(2))
        normed = self.norm(hidden)
        return hidden + self.down_proj(nn.functional.silu(self.gate_proj(normed)) * self.up_proj(normed))

    def start_from(self, other: "Specialist") -> None:
        """Copy `other`. The part by which an MLP is wider is random, and adds nothing until it learns.

        Raises:
            RuntimeError: other sizes, or a narrower MLP.
        """
        new, state = self.state_dict(), other.state_dict()
        inner = other.down_proj.in_features
        for name in ("gate_proj.weight", "up_proj.weight"):
            state[name] = torch.cat([state[name], new[name][inner:]])
        beyond = torch.zeros_like(new["down_proj.weight"][:, inner:])
        state["down_proj.weight"] = torch.cat([state["down_proj.weight"], beyond], dim=1)
        self.load_state_dict(state)
        self.norm_before_residual = other.norm_before_residual

    # --- where the layouts differ ---

    def attention_input(self, z: Tensor) -> Tensor:
        """Return what queries, keys and values are projected from: (B, T, Z) -> (B, T, Z)."""
        return z

    def residual(self, z: Tensor) -> Tensor:
        """Return what attention is added to: (B, T, Z) -> (B, T, D)."""
        return z

    def shared_input(self, z: Tensor) -> Tensor:
        """Return the part of `attention_input` that is the same for all specialists: (B, T, Z) -> (B, T, Z)."""
        return z

    def kv_weight(self) -> Tensor:
        """Return the weights from `shared_input` to keys and values before rotation: (2 * kv heads * d, Z)."""
        return torch.cat([self.k_proj.weight, self.v_proj.weight])


class NormedSpecialist(Specialist):
    """The EAGLE-3 layout: z is [e; h], not yet normed, and Z is 2D."""

    parts = 2

    def __init__(self, config: DraftConfig):
        super().__init__(config)
        self.input_norm, self.hidden_norm = (Norm(config.target.hidden_size, eps=config.eps) for _ in range(2))

    def attention_input(self, z: Tensor) -> Tensor:
        return self.shared_input(z) * self._norm_weights().to(z.dtype)

    def residual(self, z: Tensor) -> Tensor:
        hidden = z.chunk(2, dim=-1)[1]
        return self.hidden_norm(hidden) if self.norm_before_residual else hidden

    def shared_input(self, z: Tensor) -> Tensor:
        halves = z.unflatten(-1, (2, -1))  # (B, T, 2, D)
        return nn.functional.rms_norm(halves, self.norm.normalized_shape, None, self.norm.eps).flatten(-2).to(z.dtype)

    def kv_weight(self) -> Tensor:
        return super().kv_weight() * self._norm_weights()

    def _norm_weights(self) -> Tensor:
        return torch.cat([self.input_norm.weight, self.hidden_norm.weight])  # (Z,)


class BlockLayer(Specialist):
    """A layer of a block draft, in the layout of DFlash: z is the block's hidden state, and Z is D.

    Its keys and values are of the block and of the context, which is the same for all layers. Queries and keys are
    normed head by head, as in Qwen3.
    """

    def __init__(self, config: DraftConfig):
        super().__init__(config)
        self.input_norm = Norm(config.target.hidden_size, eps=config.eps)
        self.q_norm, self.k_norm = (Norm(self.head_dim, eps=config.eps) for _ in range(2))

    def queries(self, z: Tensor, rope: Rope) -> Tensor:
        return apply_rope(self.q_norm(_heads(self.q_proj(self.input_norm(z)), self.head_dim)), rope)

    def keys_values(self, z: Tensor, rope: Rope) -> tuple[Tensor, Tensor]:
        return self.context_keys_values(self.input_norm(z), rope)

    def context_keys_values(self, context: Tensor, rope: Rope) -> tuple[Tensor, Tensor]:
        """Project keys and values of the context: (B, T, D) -> (B, kv heads, T, d) each."""
        keys, values = _heads(self.k_proj(context), self.head_dim), _heads(self.v_proj(context), self.head_dim)
        return apply_rope(self.k_norm(keys), rope), values


def _heads(x: Tensor, head_dim: int) -> Tensor:
    return x.unflatten(-1, (-1, head_dim)).transpose(1, 2)  # (B, T, H*d) -> (B, H, T, d)
