"""What a draft costs from its sizes alone: trained parameters, and the matmul FLOPs of a training step."""

from collections.abc import Iterator
from math import prod

from poss_lightning.draft.specialists import DraftConfig


def shapes(config: DraftConfig) -> Iterator[tuple[int, ...]]:
    """Of every parameter of the draft."""
    width, inner, attended, shared = widths(config)
    read = read_width(config)
    if config.layers:
        yield (width, len(config.layers) * width)
    else:
        yield from ((width, 2 * width), (width,))
    for _ in config.allocation:
        yield from ((attended, read), (shared, read), (shared, read), (width, attended))
        yield from ((width,), (inner, width), (inner, width), (width, inner))
        yield from ((width,), (width,)) if config.layers else ()
    if config.layers:
        yield from ((width,), (head_parameters(config) // width, width))


def head_parameters(config: DraftConfig) -> int:
    """Trained numbers of the draft's own head; 0 where the target's is asked."""
    rows = config.vocabulary_size or config.target.vocab_size
    return rows * config.target.hidden_size if config.layers else 0


def parameters(config: DraftConfig) -> int:
    """Trained numbers of the draft: `fc`, a layer a specialist, and an own head."""
    return sum(map(prod, shapes(config)))


def specialist_parameters(config: DraftConfig) -> int:
    """Trained numbers of one specialist."""
    width, inner, attended, shared = widths(config)
    norms = 3 if config.layers else 1
    return read_width(config) * (attended + 2 * shared) + width * (attended + 3 * inner + norms)


def step_flops(config: DraftConfig, vocabulary: int, tokens: int, slots: int, context: float) -> float:
    """FLOPs of the matrix products of one training step, forward and backward; what is made twice counts once.

    Args:
        vocabulary: rows of the head.
        tokens: slots of the batch, counting or not.
        slots: those where a loss is taken; a tensor will do.
        context: keys that a query sees, on average.
    """
    width, inner, attended, shared = widths(config)
    depth, read = config.depth, read_width(config)
    inputs = 0 if config.detach else depth - 1  # passes whose `fc` hands a gradient on to the pass before
    joins = 2 * len(config.layers) * width * width if config.layers else (2 * depth + inputs) * 2 * width * width
    layers = 3 * depth * (read * attended + width * (attended + 3 * inner))  # queries, output, and the gated MLP
    pairs = 3 * len(config.kv_pairs(depth)) * read * 2 * shared
    attention = 3 * depth * 2 * attended * context  # scores and values
    # the target's logits; a pass's, and its gradient by what is read; and by an own head
    head = (1 + (3 if config.layers else 2) * depth) * width * vocabulary
    return 2 * tokens * (joins + layers + pairs + attention) + 2 * slots * head


def read_width(config: DraftConfig) -> int:
    """Width of what queries, keys and values are projected from."""
    return config.target.hidden_size * (2 if config.layers else 1)


def widths(config: DraftConfig) -> tuple[int, int, int, int]:
    """Widths: of the model, the MLP, all queries of a slot, all keys of a slot."""
    spec = config.target
    inner = config.intermediate_size or spec.intermediate_size
    return spec.hidden_size, inner, spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
