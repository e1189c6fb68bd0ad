"""The memory of a training step, tensor by tensor, from the sizes alone.

It is counted at the moments of a step where it may be highest: at the end of forward (inside the loss, with the
gradients of the step before still there), at the beginning of backward, when gradients are reduced, and in the update.
It is that of tensors; a GPU's context and the gaps of its allocator come on top.
"""

from bisect import bisect_right
from dataclasses import replace
from math import prod
from typing import NamedTuple

from poss_lightning.draft.attention import ROWS
from poss_lightning.draft.specialists import DraftConfig
from poss_lightning.training.costs import head_parameters, parameters, shapes, widths
from poss_lightning.training.setup import Setup

BUCKET = 200_000_000  # numbers; Lightning's reduce_bucket_size of DeepSpeed, made whole however small the draft is
LIVE = 1_000_000_000  # numbers; its max_live_parameters at stage 3
MOST = 2**26  # tokens of a batch that `most_tokens` looks at


class Memory(NamedTuple):
    """Bytes of one process when they are most, part by part."""

    moment: str  # "forward", "backward", "reduction" or "update"
    weights: float
    gradients: float
    optimizer: float  # its moments, and what its step needs
    copies: float  # weights in bfloat16, or gathered
    embed_head: float  # the target's embedding and head
    batch: float
    activations: float
    loss: float

    @property
    def total(self) -> float:
        return sum(self[1:])


class Held(NamedTuple):
    """Bytes a parameter at some moment: what a strategy divides."""

    weights: float
    gradients: float
    optimizer: float
    copies: float  # bytes in all
    buckets: float = 0  # bytes in all; they count as gradients


def memory(setup: Setup) -> Memory:
    """Peak memory of one process in a step that is not the first."""
    found = [_forward(setup), _backward(setup), _update(setup)]
    if setup.strategy != "one":
        found.append(_at("reduction", setup))
    return max(found, key=lambda parts: parts.total)


def most_tokens(setup: Setup, limit: float) -> int:
    """The largest batch, in tokens, whose peak is within `limit` bytes; 0 where not even 2 tokens are."""

    def peak(tokens: int) -> float:
        return memory(replace(setup, tokens=tokens)).total

    fitting = bisect_right(range(2, MOST), limit, key=peak)
    return fitting + 1 if fitting else 0


def kept(setup: Setup) -> float:
    """Bytes a slot that autograd keeps of the unroll for backward."""
    spec, item = setup.config.target, setup.item
    width, inner, attended, shared = widths(setup.config)
    total = 2 * 4 * spec.head_dim  # cosines and sines
    kv_pairs = setup.config.kv_pairs(setup.config.depth)
    total += len({maker for maker, m in kv_pairs if m == 0}) * 2 * shared * item  # of z^0, which the block reads
    if setup.config.layers:
        total += len(setup.config.layers) * width * item  # what `fc` read, once
        total += (len(kv_pairs) + setup.config.depth) * _halves(setup)  # keys and values, and queries
    for k in range(1, setup.config.depth + 1):
        total += (2 if setup.config.layers else 3) * width * item  # z, and what `fc` read
        total += 2 * attended * item + 4 * spec.heads  # queries, the block's output and norm
        total += _norm(setup) + 4 * inner * item  # gate, its silu, up, and their product
        if k > 1:
            total += attended * item  # block and diagonals together
            total += (k - 1) * (2 * shared * item + 1)  # of every diagonal: keys and values moved, and what is hidden
            total += k * spec.heads * (4 if item == 4 else 4 + item)  # the softmax that joins them
    return total


def _norm(setup: Setup) -> int:
    """Bytes a slot that the norm and its readers keep."""
    width, item = setup.config.target.hidden_size, setup.item
    if setup.device == "cpu":
        return width * (4 + 4 + item) + 4  # in float32: its input, and what its weight is multiplied with; its output
    if setup.zero or item == 4:
        return 2 * width * item + 4  # input and output
    return width * (4 + item) + 4  # autocast norms in float32; what gate and up read is bfloat16 again


def _halves(setup: Setup) -> int:
    """Bytes a slot that the norms of both halves of EAGLE-3's z keep, each time that z is read."""
    copied = setup.item == 2 and (setup.device == "cpu" or not setup.zero)  # in float32, to norm it
    return 2 * setup.config.target.hidden_size * ((4 if copied else 0) + 2 * setup.item) + 2 * 4


def _inputs(setup: Setup) -> int:
    """Width of what a draft reads of the target."""
    return setup.config.target.hidden_size * (len(setup.config.layers) or 1)


def _forward(setup: Setup) -> Memory:
    """Inside the loss: the passes are over, and a chunk's matrices are there."""
    width, slots, counting = setup.config.target.hidden_size, setup.slots, setup.counting
    inputs = 0 if setup.zero or setup.embed_head == 4 else 4 * slots * _inputs(setup)  # as the draft's own numbers
    passes = setup.config.depth * width * setup.item
    loss = passes * (slots + 2 * counting)  # predictions; those that count, and their gradients
    loss += counting * (
        width * setup.embed_head + 9 * setup.config.depth
    )  # the features wanted there, guesses, what is live
    rows = min(setup.chunk, counting)
    loss += (
        rows * setup.vocabulary * (16 + setup.embed_head * (setup.config.depth + 1))
    )  # four in float32, and all logits
    if setup.config.layers:
        loss += setup.config.depth * slots * _norm(setup)  # of the predictions, before their own head
        loss += head_parameters(setup.config) * (4 + 2 * setup.embed_head)  # its gradient and a chunk's, and its copy
    return _at("forward", setup, slots * (kept(setup) + width * setup.embed_head) + inputs, loss)


def _backward(setup: Setup) -> Memory:
    """The gradients of all predictions are there, and what the last pass makes in its MLP, or then in its attention."""
    config, item = setup.config, setup.item
    width, inner, attended, shared = widths(config)
    held = setup.slots * kept(setup)
    most = setup.slots * 2 * inner * item  # gradients of the product, silu and up, less the product
    if setup.device == "cpu":
        freed = _norm(setup) + 4 * inner * item + attended * item + config.depth * config.target.heads * (4 + item)
        # scaled queries, gradients of queries (from block and diagonals) and output; of keys and values in float32
        own = 4 * attended * item + 2 * 4 * shared
        seen = min(setup.conversation or setup.slots, setup.slots)
        scores = 12 * config.target.heads * min(ROWS, seen) * seen  # weights, their gradients, the tile's before
        most = max(most, setup.slots * (own - freed) + scores)
    loss = setup.slots * config.depth * width * item + 4 * head_parameters(config)
    return _at("backward", setup, held + most, loss)


def _update(setup: Setup) -> Memory:
    parts = _at("update", setup)
    if setup.offload:
        return parts
    if setup.optimizer == "muon":
        # Of one matrix at a time: its step, three times in bfloat16 while it is turned, and two of its smaller square.
        matrices = [shape for shape in shapes(setup.config) if len(shape) == 2]
        return parts._replace(optimizer=parts.optimizer + max(8 * n * m + 4 * min(n, m) ** 2 for n, m in matrices))
    # AdamW's denominator: of all parameters on CUDA; on a CPU two, of one tensor at a time, and ZeRO has but one.
    largest = max(map(prod, shapes(setup.config))) / (setup.processes if setup.strategy == "fsdp2" else 1)
    on_cpu = parts.optimizer if setup.zero else 8 * largest
    workspace = on_cpu if setup.device == "cpu" else parts.optimizer / 2
    return parts._replace(optimizer=parts.optimizer + workspace)


def _at(moment: str, setup: Setup, activations: float = 0, loss: float = 0) -> Memory:
    count, (width, *_) = parameters(setup.config), widths(setup.config)
    held = _held(setup, moment, count)
    rows = setup.config.target.vocab_size + (0 if setup.tied and not setup.config.vocabulary_size else setup.vocabulary)
    return Memory(
        moment,
        weights=held.weights * count,
        gradients=held.gradients * count + held.buckets,
        optimizer=held.optimizer * count,
        copies=held.copies,
        embed_head=rows * width * setup.embed_head,
        # tokens, greedy, counts and positions in 64 bits, features, and what is read, with noise
        batch=setup.accumulate * setup.tokens * (4 * 8 + (width + _inputs(setup)) * setup.embed_head),
        activations=activations,
        loss=loss,
    )


def _casts(config: DraftConfig) -> int:
    """Bytes of weights cast to bfloat16, once each; `fc`'s is kept where a gradient goes on to a pass before.

    An own head's belongs to the loss.
    """
    fused = len(config.layers)
    spared = (fused or 2) * config.target.hidden_size**2 if fused or config.detach or config.depth == 1 else 0
    return 2 * (parameters(config) - spared - head_parameters(config))


def _moments(setup: Setup, count: int) -> float:
    """Bytes a parameter: two of AdamW, one of Muon for a matrix."""
    if setup.optimizer == "adamw":
        return 8
    return 8 - 4 * sum(prod(shape) for shape in shapes(setup.config) if len(shape) == 2) / count


def _held(setup: Setup, moment: str, count: int) -> Held:
    """What a strategy holds of the draft at a moment; float32 is 4 bytes a number, AdamW's moments 8."""
    item, share = setup.item, 1 / setup.processes
    backward = moment in ("backward", "reduction")
    if setup.strategy in ("one", "ddp"):
        # Lightning drops the old gradients between forward and backward; DDP keeps a bucket beside every gradient.
        gradients = (0 if moment == "backward" else 4) + (4 if setup.strategy == "ddp" else 0)
        casts = _casts(setup.config) if item == 2 and moment != "update" else 0
        return Held(4, gradients, _moments(setup, count), casts)
    if setup.strategy == "fsdp2":
        # Gathered from the first pass to the end of backward; then all gradients go into one float32 buffer, and from
        # there into shards. gloo clones the buffer.
        reduction = 4 + max(item, 4 * share) if setup.device == "cuda" else 8 + 4 * share
        gradients = {"forward": 4 * share, "backward": 0, "reduction": reduction, "update": 4 * share}
        return Held(4 * share, gradients[moment], 8 * share, item * count if moment in ("forward", "backward") else 0)
    away = 0 if setup.offload else share
    masters, moments = 4 * away, 8 * away
    update = (item + 4) * away if moment == "update" else 0  # gradients as they were reduced, and in float32
    if setup.strategy == "zero3":
        # gathered in one buffer, and copied out of it
        gathered = 2 * item * min(count, LIVE) if moment in ("forward", "backward") else 0
        return Held(item * away + masters, item * away + update, moments, gathered, item * BUCKET)
    # Stage 1 too hands gradients to their owners bucket by bucket, and keeps its own share.
    reduced = item * away if moment == "reduction" else 0
    return Held(item + masters, reduced + update, moments, 0, 2 * item * BUCKET if backward else 0)
