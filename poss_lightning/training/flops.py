"""The size of a draft: its trained parameters, and the matmul FLOPs of a training step."""

from functools import cache
from typing import TypeVar

import torch
from torch import Tensor

from poss_lightning.draft.config import DraftConfig
from poss_lightning.draft.kinds import make_draft
from poss_lightning.draft.specialists import Specialists

Number = TypeVar("Number", float, Tensor)


@cache
def empty_draft(config: DraftConfig) -> Specialists:
    """Build a draft on the meta device: its parameters have shapes, but take no memory."""
    size = config.vocabulary_size
    with torch.device("meta"):
        return make_draft(config, None if size is None else torch.arange(size, device="cpu"))


def count_parameters(config: DraftConfig) -> int:
    """Trained numbers of the draft: `fc`, the layers of each specialist, and its own head, if it has one."""
    return sum(parameter.numel() for parameter in empty_draft(config).parameters())


def count_specialist_parameters(config: DraftConfig) -> int:
    """Trained numbers of one specialist."""
    return sum(parameter.numel() for parameter in empty_draft(config).layers[0].parameters())


def step_flops(config: DraftConfig, *, vocabulary: int, tokens: int, slots: Number, context: float) -> Number:
    """FLOPs of the matrix products of one training step, forward and backward; recomputation is not counted.

    Args:
        vocabulary: rows of the head.
        tokens: slots of the batch, with or without a loss.
        slots: slots with a loss, where a block begins; a tensor gives a tensor.
        context: mean number of keys per query.
    """
    spec, depth, layers = config.target, config.depth, len(config.aux_layers)
    width, inner = spec.hidden_size, config.intermediate_size or spec.intermediate_size
    queried, shared = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim  # widths of all queries, of all keys
    # The target's logits; of each pass its logits and their gradient by the features, and by an own head.
    head = (1 + (3 if config.own_head else 2) * depth) * width * vocabulary
    if config.one_pass:  # queries, output, MLP, keys and values of all places; keys and values of the context
        places = depth + 1
        block = places * (width * (2 * queried + 3 * inner + 2 * shared) + 2 * queried * (context + places))
        of_context = 2 * layers * width * width + 3 * config.block_layers * 2 * width * shared
        return 2 * tokens * of_context + 2 * slots * (3 * config.block_layers * block + head)
    joined = width * (2 if layers else 1)  # width of z, which queries, keys and values project
    inputs = 0 if config.detach else depth - 1  # passes whose `fc` hands a gradient on to the pass before
    fc = 2 * layers * width * width if layers else (2 * depth + inputs) * 2 * width * width
    specialists = 3 * depth * (joined * queried + width * (queried + 3 * inner))  # queries; output and gated MLP
    keys_values = 3 * len(config.kv_pairs(depth)) * joined * 2 * shared
    attention = 3 * depth * 2 * queried * context  # scores and values
    return 2 * tokens * (fc + specialists + keys_values + attention) + 2 * slots * head
