"""What a draft costs from its sizes alone: trained parameters, and the matmul FLOPs of a training step."""

from collections.abc import Iterator
from math import prod

from poss_lightning.draft.specialists import DraftConfig


def shapes(config: DraftConfig) -> Iterator[tuple[int, ...]]:
    """Of every parameter of the draft."""
    width, inner, attended, shared = widths(config)
    yield from ((width, 2 * width), (width,))
    for _ in config.allocation:
        yield from ((attended, width), (shared, width), (shared, width), (width, attended))
        yield from ((width,), (inner, width), (inner, width), (width, inner))


def parameters(config: DraftConfig) -> int:
    """Trained numbers of the draft: `fc`, and a layer a specialist."""
    return sum(map(prod, shapes(config)))


def specialist_parameters(config: DraftConfig) -> int:
    """Trained numbers of one specialist."""
    width, inner, attended, shared = widths(config)
    return width * (2 * attended + 2 * shared + 3 * inner + 1)


def step_flops(config: DraftConfig, vocabulary: int, tokens: int, slots: int, context: float) -> float:
    """FLOPs of the matrix products of one training step, forward and backward; what is made twice counts once.

    Args:
        vocabulary: rows of the head.
        tokens: slots of the batch, counting or not.
        slots: those where a loss is taken; a tensor will do.
        context: keys that a query sees, on average.
    """
    width, inner, attended, shared = widths(config)
    depth = config.depth
    inputs = 0 if config.detach else depth - 1  # passes whose `fc` hands a gradient on to the pass before
    joins = (2 * depth + inputs) * 2 * width * width
    layers = 3 * depth * width * (2 * attended + 3 * inner)  # queries, output, and the gated MLP
    pairs = 3 * len(config.projections(depth)) * width * 2 * shared
    attention = 3 * depth * 2 * attended * context  # scores and values
    head = (1 + 2 * depth) * width * vocabulary  # the target's logits; a pass's, and its gradient
    return 2 * tokens * (joins + layers + pairs + attention) + 2 * slots * head


def widths(config: DraftConfig) -> tuple[int, int, int, int]:
    """Widths: of the model, the MLP, all queries of a slot, all keys of a slot."""
    spec = config.target
    inner = config.intermediate_size or spec.intermediate_size
    return spec.hidden_size, inner, spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
