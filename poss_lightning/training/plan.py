"""What a training needs: parameters, FLOPs, memory apart from activations, disk and hours."""

from functools import cache
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from poss_lightning.draft.config import DraftConfig, DraftOptions
from poss_lightning.draft.kinds import make_draft
from poss_lightning.draft.specialists import Specialists
from poss_lightning.features.encoding import vector_bytes
from poss_lightning.ranges import Amount, Processes, Tokens, check_numbers
from poss_lightning.target.describe import spec_of
from poss_lightning.target.loading import load_config
from poss_lightning.target.spec import TargetSpec
from poss_lightning.training.optimizers import UNDIVIDED
from poss_lightning.training.start import check_reach

GIB, GB = 2**30, 10**9
Number = TypeVar("Number", float, Tensor)

# Of their config.json files.
SIZE_FIELDS = ("hidden_size", "intermediate_size", "heads", "kv_heads", "head_dim", "vocab_size")
SIZE_FIELDS += ("context", "rope_theta", "norm_eps", "layers")
TARGETS = {
    name: TargetSpec(name=name, **dict[str, Any](zip(SIZE_FIELDS, sizes, strict=True)))
    for name, *sizes in (
        ("llama-3-8b", 4096, 14336, 32, 8, 128, 128256, 8192, 500000.0, 1e-5, 32),
        ("llama-3.1-8b", 4096, 14336, 32, 8, 128, 128256, 131072, 500000.0, 1e-5, 32),
        ("llama-2-13b", 5120, 13824, 40, 40, 128, 32000, 4096, 10000.0, 1e-5, 40),
        ("qwen3-8b", 4096, 12288, 32, 8, 128, 151936, 40960, 1000000.0, 1e-6, 36),
        ("smollm2-135m", 576, 1536, 9, 3, 64, 49152, 8192, 100000.0, 1e-5, 30),
    )
}
TIED = {"smollm2-135m"}  # the head is the embedding


@check_numbers
def plan(
    target: str = "llama-3-8b",
    strategy: Literal["one", "ddp", "zero1", "zero2", "zero3"] | None = None,
    processes: Processes = 1,
    optimizer: Literal["adamw", "muon"] = "adamw",
    stored: Literal["exact", "float8"] = "exact",
    conversation: Tokens = 2048,
    corpus_tokens: Amount = 1e8,
    rate: Amount = 200.0,
    **draft: Any,
) -> None:
    """Print what a training would need with precision bf16-mixed, without a target, a store or a GPU.

    Activations come on top. They grow with the batch and the depth; a training logs the peak of a GPU's memory as
    `throughput/peak_gib`.

    Args:
        target: llama-3-8b, llama-3.1-8b, llama-2-13b, qwen3-8b, smollm2-135m, or a local folder with a config.json.
        strategy: how processes share the work; "one" (a single process) by default, or "ddp" for several.
        processes: number of processes.
        optimizer: adamw or muon.
        stored: features in the target's bfloat16 (exact) or in 8 bits (float8).
        conversation: tokens per conversation, for the cost of attention.
        corpus_tokens: tokens per epoch, all taken to be in the loss.
        rate: TFLOP/s of one process (`throughput/teraflops` is that of all processes).
        draft: options of the draft, see `DraftOptions`.

    Raises:
        ValueError: an unknown target, a value out of its range, or a strategy that Muon cannot train with.
    """
    strategy = strategy or ("one" if processes == 1 else "ddp")
    if strategy == "one" and processes > 1:
        raise ValueError(f"processes is {processes} with strategy one: name the strategy by which they share the work")
    if optimizer == "muon" and strategy.startswith("zero"):
        raise ValueError(UNDIVIDED)
    spec, tied = find_target(target)
    config = DraftOptions(**draft).config_for(spec)
    check_reach(config)
    if (vocabulary := config.vocabulary_size or spec.vocab_size) > spec.vocab_size:
        raise ValueError(f"vocabulary_size is {vocabulary}; it must lie between 1 and {spec.vocab_size} ({target})")
    count = count_parameters(config)
    memory = state_bytes(config, strategy, processes, optimizer)
    rows = spec.vocab_size + (0 if tied and not config.vocabulary_size else vocabulary)
    memory["embedding and head"] = 2 * spec.hidden_size * rows
    flops = step_flops(config, vocabulary=vocabulary, tokens=1, slots=1, context=(conversation + 1) / 2) * corpus_tokens
    checkpoint, size = 4 * count + moment_bytes(config, optimizer), token_bytes(config, stored)
    who = "one process" if strategy == "one" else f"{strategy}, each of {processes} processes"
    print(
        f"{spec.name}, allocation {list(config.allocation)}, depth {config.depth}, vocabulary {vocabulary}: "
        f"{count / 1e6:.1f} M parameters, {count_specialist_parameters(config) / 1e6:.1f} M per specialist\n\n{who}:\n"
    )
    for name, value in (memory | {"together": sum(memory.values())}).items():
        print(f"  {name:<20}{value / GIB:8.2f} GiB")
    print(
        f"\n  a token in the store{size:8d} bytes; {size * corpus_tokens / GB:.1f} GB for {corpus_tokens:.3g} tokens"
        f"\n  a checkpoint        {checkpoint / GB:8.1f} GB"
        f"\n  an epoch            {flops / (rate * 1e12 * processes * 3600):8.2f} hours at {rate:g} TFLOP/s a process"
    )


def state_bytes(config: DraftConfig, strategy: str, processes: int, optimizer: str = "adamw") -> dict[str, float]:
    """Count the bytes of weights, gradients and moments in each process, by strategy (docs/clusters.md)."""
    count, share = count_parameters(config), 1 / processes
    moments = moment_bytes(config, optimizer) / count
    weights, gradients, state = {
        "one": (4 + 2, 4, moments),  # float32, and the bfloat16 copy for autocast
        "ddp": (4 + 2, 4 + 4, moments),  # and the buckets
        "zero1": (2, 2 * share, 12 * share),  # the float32 weights are in the optimizer's state
        "zero2": (2, 2 * share, 12 * share),
        "zero3": (2 * share, 2 * share, 12 * share),
    }[strategy]
    return {"weights": weights * count, "gradients": gradients * count, "optimizer": state * count}


def moment_bytes(config: DraftConfig, optimizer: str) -> int:
    """Count bytes of an optimizer's moments: AdamW has two, and Muon one of every matrix but an own head, AdamW's."""
    count = count_parameters(config)
    if optimizer == "adamw":
        return 8 * count
    return 4 * count + (4 * empty_draft(config).lm_head.weight.numel() if config.own_head else 0)


def find_target(target: str) -> tuple[TargetSpec, bool]:
    """Return the sizes of a target in `TARGETS` or in a folder with config.json, and whether its head is its embedding.

    Raises:
        ValueError: the target is neither, or the file lacks a size.
    """
    if target in TARGETS:
        return TARGETS[target], target in TIED
    if not (Path(target) / "config.json").is_file():
        raise ValueError(f"target is {target!r}; it must be {', '.join(TARGETS)}, or a folder with a config.json")
    config = load_config(target, Path(target))
    try:
        spec = spec_of(config, target)
    except (AttributeError, KeyError, NotImplementedError, TypeError, ZeroDivisionError) as error:
        raise ValueError(f"{target}/config.json is not a language model's: {error}") from error
    return spec, bool(getattr(config, "tie_word_embeddings", False))


def token_bytes(config: DraftConfig, stored: str) -> int:
    """Count the bytes per token in a feature store: vectors, token id and greedy id. A conversation adds about 60."""
    return (1 + len(config.aux_layers)) * vector_bytes(config.target.hidden_size, torch.bfloat16, stored) + 4 + 4


# --- the size of a draft ---


@cache
def empty_draft(config: DraftConfig) -> Specialists:
    """Build a draft on the meta device: its parameters have shapes, but take no memory."""
    size = config.vocabulary_size
    with torch.device("meta"):
        return make_draft(config, None if size is None else torch.arange(size, device="cpu"))


def count_parameters(config: DraftConfig) -> int:
    """Count the trained numbers of the draft: `fc`, the layers of each specialist, and its own head, if it has one."""
    return sum(parameter.numel() for parameter in empty_draft(config).parameters())


def count_specialist_parameters(config: DraftConfig) -> int:
    """Count the trained numbers of one specialist."""
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
