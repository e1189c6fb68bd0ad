"""The memory of a training step, tensor by tensor, from the sizes alone.

It is counted at the moments of a step where it may be highest: at the end of forward (inside the loss, with the
gradients of the step before still there), at the beginning of backward, when gradients are reduced, and in the update.
It is that of tensors; a GPU's context and the gaps of its allocator come on top.
"""

from bisect import bisect_right
from dataclasses import replace
from typing import NamedTuple

from poss_lightning.draft.attention import ROWS
from poss_lightning.draft.specialists import DraftConfig
from poss_lightning.training.costs import (
    count_head_parameters,
    count_parameters,
    count_specialist_parameters,
    muon_matrices,
    shapes,
    widths,
)
from poss_lightning.training.muon import waves
from poss_lightning.training.setup import Setup

BUCKET = 200_000_000  # numbers; Lightning's reduce_bucket_size of DeepSpeed, allocated however small the draft is
LIVE = 1_000_000_000  # numbers; its max_live_parameters at stage 3
FEATURE = 2  # bytes of a number of the target's features, as a store has them
MOST = 2**26  # tokens of the largest batch that `most_tokens` considers


class Memory(NamedTuple):
    """Bytes of one process at the peak, part by part."""

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


class DraftBytes(NamedTuple):
    """What a process holds of the draft at some moment: bytes for each parameter, if not said otherwise."""

    weights: float
    gradients: float
    optimizer: float
    copies: float  # bytes in total
    buckets: float = 0  # bytes in total; they count as gradients


def memory(setup: Setup) -> Memory:
    """Peak memory of one process in a step that is not the first."""
    moments = [_forward(setup), _backward(setup), _update(setup)]
    if setup.strategy != "one":
        moments.append(_memory_at("reduction", setup))
    return max(moments, key=lambda moment: moment.total)


def most_tokens(setup: Setup, limit: float) -> int:
    """The largest batch, in tokens, whose peak is within `limit` bytes; 0 where 2 tokens already need more."""

    def peak(tokens: int) -> float:
        return memory(replace(setup, tokens=tokens)).total

    fitting = bisect_right(range(2, MOST), limit, key=peak)
    return fitting + 1 if fitting else 0


def checkpoint_bytes(setup: Setup) -> tuple[float, float]:
    """Bytes of a checkpoint, weights and moments in float32, and of the first process's own copy while it is written.

    A tensor that is whole on the device goes from there into the file; parts are gathered on the CPU first.
    """
    count = count_parameters(setup.config)
    file = (4 + _moment_bytes(setup, count)) * count
    return file, 0 if setup.strategy in ("one", "ddp") else file


def unroll_bytes(setup: Setup) -> float:
    """Bytes for each slot that autograd keeps of the unroll until backward."""
    spec, item = setup.config.target, setup.item
    width, inner, attended, shared = widths(setup.config)
    total = 2 * 4 * spec.head_dim  # cosines and sines
    kv_pairs = setup.config.kv_pairs(setup.config.depth)
    total += len({maker for maker, m in kv_pairs if m == 0}) * 2 * shared * item  # of z^0, which the causal block reads
    if setup.config.reads_inner_layers:
        total += len(setup.config.layers) * width * item  # the input of `fc`, once
        total += (len(kv_pairs) + setup.config.depth) * _halves_bytes(setup)  # keys and values, and queries
    for k in range(1, setup.config.depth + 1):
        total += (2 if setup.config.reads_inner_layers else 3) * width * item  # z, and the input of `fc`
        total += 2 * attended * item + 4 * spec.heads  # queries, the block's output and norm
        total += _norm_bytes(setup) + 4 * inner * item  # gate, its silu, up, and their product
        if k > 1:
            total += attended * item  # block and diagonals together
            total += (k - 1) * (2 * shared * item + 1)  # of every diagonal: shifted keys and values, and the mask
            total += k * spec.heads * (4 if item == 4 else 4 + item)  # the softmax that joins them
    return total


def _norm_bytes(setup: Setup) -> int:
    """Bytes for each slot that the norm and the layers behind it keep."""
    width, item = setup.config.target.hidden_size, setup.item
    if setup.device == "cpu":
        return width * (4 + 4 + item) + 4  # in float32: its input, and what its weight is multiplied with; its output
    if setup.zero or item == 4:
        return 2 * width * item + 4  # input and output
    return width * (4 + item) + 4  # autocast norms in float32; what gate and up read is bfloat16 again


def _halves_bytes(setup: Setup) -> int:
    """Bytes for each slot that the norms of both halves of EAGLE-3's z keep, each time that z is read."""
    copied = setup.item == 2 and (setup.device == "cpu" or not setup.zero)  # in float32, to norm it
    return 2 * setup.config.target.hidden_size * ((4 if copied else 0) + 2 * setup.item) + 2 * 4


def _input_width(setup: Setup) -> int:
    """R, the width of the draft's input."""
    return setup.config.target.hidden_size * (len(setup.config.layers) or 1)


def _forward(setup: Setup) -> Memory:
    """Inside the loss: the passes are over, and a chunk's matrices are there."""
    width, slots, counting = setup.config.target.hidden_size, setup.slots, setup.counting
    inputs = 0 if setup.zero else 4 * slots * _input_width(setup)  # as the draft's own numbers
    passes = setup.config.depth * width * setup.item
    loss = passes * (slots + 2 * counting)  # predictions; those that count, and their gradients
    # the target's features there, the draft's top tokens, and which slots count
    loss += counting * (width * FEATURE + 9 * setup.config.depth)
    rows = min(setup.chunk, counting)
    # four matrices in float32, and all logits
    loss += rows * setup.vocabulary * (16 + setup.item * (setup.config.depth + 1))
    if setup.config.own_head:
        loss += setup.config.depth * slots * _norm_bytes(setup)  # of the predictions, before their own head
        # its gradient and a chunk's, and its copy
        loss += count_head_parameters(setup.config) * (4 + 2 * setup.item)
    return _memory_at("forward", setup, slots * (unroll_bytes(setup) + width * FEATURE) + inputs, loss)


def _backward(setup: Setup) -> Memory:
    """The gradients of all predictions are there, and what the last pass makes in its MLP, or then in its attention."""
    config, item = setup.config, setup.item
    width, inner, attended, shared = widths(config)
    held = setup.slots * unroll_bytes(setup)
    most = setup.slots * 2 * inner * item  # gradients of the product, silu and up, less the product
    if setup.device == "cpu":
        freed = _norm_bytes(setup) + 4 * inner * item + attended * item
        freed += config.depth * config.target.heads * (4 + item)
        # scaled queries, gradients of queries (from block and diagonals) and output; of keys and values in float32
        needed = 4 * attended * item + 2 * 4 * shared
        keys = min(setup.conversation or setup.slots, setup.slots)
        scores = 12 * config.target.heads * min(ROWS, keys) * keys  # weights, their gradients, the previous tile's
        most = max(most, setup.slots * (needed - freed) + scores)
    loss = setup.slots * config.depth * width * item + 4 * count_head_parameters(config)
    return _memory_at("backward", setup, held + most, loss)


def _update(setup: Setup) -> Memory:
    parts = _memory_at("update", setup)
    if setup.offload:
        return parts
    if setup.optimizer == "muon":
        return parts._replace(optimizer=parts.optimizer + _muon_bytes(setup))
    largest = max(shape.numel() for shape in shapes(setup.config))
    if setup.strategy == "fsdp2":
        largest /= setup.processes
    # AdamW's denominator: of all parameters on CUDA. On a CPU two, of one tensor at a time; ZeRO has only one tensor.
    on_cpu = parts.optimizer if setup.zero else 8 * largest
    workspace = on_cpu if setup.device == "cpu" else parts.optimizer / 2
    return parts._replace(optimizer=parts.optimizer + workspace)


def _muon_bytes(setup: Setup) -> float:
    """Of one matrix: its step, three times in bfloat16 as it is made orthogonal, and two squares of its smaller side.

    Beside it are the steps in bfloat16 of those that other processes make at the same time.
    """
    most = 0
    for wave in waves(muon_matrices(setup.config), setup.processes):
        own = max(6 * matrix.numel() + 4 * min(matrix.shape) ** 2 for matrix in wave)
        most = max(most, own + 2 * sum(matrix.numel() for matrix in wave))
    return most


def _memory_at(moment: str, setup: Setup, activations: float = 0, loss: float = 0) -> Memory:
    count, (width, *_) = count_parameters(setup.config), widths(setup.config)
    draft = _draft_bytes(setup, moment, count)
    rows = setup.config.target.vocab_size + (0 if setup.tied and not setup.config.vocabulary_size else setup.vocabulary)
    return Memory(
        moment,
        weights=draft.weights * count,
        gradients=draft.gradients * count + draft.buckets,
        optimizer=draft.optimizer * count,
        copies=draft.copies,
        embed_head=rows * width * setup.item,
        # tokens, greedy, counts and positions in 64 bits, features, and the draft's input, with noise
        batch=setup.accumulate * setup.tokens * (4 * 8 + (width + _input_width(setup)) * FEATURE),
        activations=activations,
        loss=loss,
    )


def _cast_bytes(config: DraftConfig) -> int:
    """Bytes of weights cast to bfloat16, once each; `fc`'s is kept where a gradient goes on to an earlier pass.

    An own head's belongs to the loss.
    """
    fused = len(config.layers)
    not_kept = (fused or 2) * config.target.hidden_size**2 if fused or config.detach or config.depth == 1 else 0
    return 2 * (count_parameters(config) - not_kept - count_head_parameters(config))


def _moment_bytes(setup: Setup, count: int) -> float:
    """Bytes for each parameter, on average: two moments of AdamW, one of Muon for a matrix."""
    if setup.optimizer == "adamw":
        return 8
    return 8 - 4 * sum(matrix.numel() for matrix in muon_matrices(setup.config)) / count


def _draft_bytes(setup: Setup, moment: str, count: int) -> DraftBytes:
    """What a strategy holds of the draft at a moment; a number in float32 has 4 bytes, AdamW's moments 8."""
    item, share = setup.item, 1 / setup.processes
    backward = moment in ("backward", "reduction")
    keeps = setup.accumulate > 1 and moment != "update"  # the gradients of the batches before, complete
    if setup.strategy in ("one", "ddp"):
        # Lightning drops the old gradients between forward and backward; DDP keeps a bucket beside every gradient.
        gradients = (0 if moment == "backward" and not keeps else 4) + (4 if setup.strategy == "ddp" else 0)
        casts = _cast_bytes(setup.config) if item == 2 and moment != "update" else 0
        return DraftBytes(4, gradients, _moment_bytes(setup, count), casts)
    if setup.strategy == "fsdp2":
        # Gathered from a specialist's first pass to the end of its backward; then its gradients go into a float32
        # buffer, and from there into shards. gloo clones the buffer.
        specialist = count_specialist_parameters(setup.config)
        group = max(specialist, count - len(setup.config.allocation) * specialist)
        buffer = group * (4 + item if setup.device == "cuda" else 8) if backward else 0
        gathered = item * (group if moment == "reduction" else count) if moment != "update" else 0
        return DraftBytes(4 * share, 4 if keeps else 4 * share, 8 * share, gathered, buffer)
    away = 0 if setup.offload else share
    masters, moments = 4 * away, 8 * away
    update = (item + 4) * away if moment == "update" else 0  # gradients as they were reduced, and in float32
    if setup.strategy == "zero3":
        # gathered in one buffer, and copied out of it
        gathered = 2 * item * min(count, LIVE) if moment in ("forward", "backward") else 0
        gradients = item if keeps else item * away
        return DraftBytes(item * away + masters, gradients + update, moments, gathered, item * BUCKET)
    # Stage 1 too hands gradients to their owners bucket by bucket, and keeps its own share.
    reduced = item * away if moment == "reduction" else 0
    return DraftBytes(
        item + masters, (item if keeps else reduced) + update, moments, 0, 2 * item * BUCKET if backward else 0
    )
