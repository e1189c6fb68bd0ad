"""Attention of a tree's nodes where several heads share keys and values, for a draft and for the target.

On CUDA only the slowest kernel takes both a mask and shared heads, so transformers repeats keys and values for every
head, in every layer and round. Here the queries of a group stand side by side instead, as more nodes of one head.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

GROUPED = "poss_grouped"
# The number of the layer, its queries, keys and values, the mask and the factor of scores.
Attention = Callable[[int, Tensor, Tensor, Tensor, Tensor, float | None], Tensor]
NODES = 128  # more queries than that are a text, whose mask would grow more than keys and values


def grouped_attention(
    queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scale: float | None = None
) -> Tensor:
    """Attend from (B, H, M, d) to keys and values (B, kv heads, S, d): (B, H, M, d).

    `mask` (B, 1, M or H/kv * M, S) is True where visible, or added to the scores; `scale` multiplies them, by default
    d ** -0.5.
    """
    group = queries.shape[1] // keys.shape[1]
    folded = queries.unflatten(1, (-1, group)).flatten(2, 3)  # (B, kv heads, H/kv * M, d)
    if (copies := folded.shape[2] // mask.shape[2]) > 1:
        mask = mask.repeat(1, 1, copies, 1)
    attended = scaled_dot_product_attention(folded, keys, values, attn_mask=mask, scale=scale)
    return attended.unflatten(2, (group, -1)).flatten(1, 2)


@contextmanager
def attending_by(attention: Attention, config: PreTrainedConfig, nodes: int) -> Iterator[None]:
    """Let the modules with this config attend by a function in the block: the first `nodes`, and zeros for the rest."""

    def attend(layer: int, queries: Tensor, *others: Any) -> Tensor:
        attended, more = attention(layer, queries[:, :, :nodes], *others), queries.shape[2] - nodes
        return pad(attended, (0, 0, 0, 0, 0, more)) if more else attended

    config.poss_attention = attend
    try:
        yield
    finally:
        vars(config).pop("poss_attention")


def _attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """Attend as transformers' modules ask: (B, H, n, d) to (B, kv heads, S, d) -> (B, n, H, d)."""
    if attention := getattr(module.config, "poss_attention", None):
        return attention(module.layer_idx, query, key, value, attention_mask, options.get("scaling")), None
    shares = query.shape[1] > key.shape[1] and query.shape[2] <= NODES
    if attention_mask is None or attention_mask.shape[1] > 1 or not shares or options.get("position_bias") is not None:
        mask = attention_mask if attention_mask is None else attention_mask[:, :, : query.shape[2]]
        return sdpa_attention_forward(module, query, key, value, mask, **options)
    attended = grouped_attention(query, key, value, attention_mask, options.get("scaling"))
    return attended.transpose(1, 2).contiguous(), None


AttentionInterface.register(GROUPED, _attend)
AttentionMaskInterface.register(GROUPED, sdpa_mask)


def mask_copies(config: PreTrainedConfig, nodes: int) -> int:
    """Count the copies of a mask of so many nodes that `grouped_attention` stacks, in every layer alike."""
    if config._attn_implementation != GROUPED or nodes > NODES:
        return 1
    return config.num_attention_heads // (getattr(config, "num_key_value_heads", None) or config.num_attention_heads)
