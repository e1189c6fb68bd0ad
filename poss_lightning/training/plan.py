"""Memory, store and time of a training before it starts, from config numbers alone: `poss plan`."""

import json
from pathlib import Path
from typing import Literal

import torch

from poss_lightning.draft.specialists import DraftConfig
from poss_lightning.features.encoding import vector_bytes
from poss_lightning.target.spec import TargetSpec
from poss_lightning.training.costs import parameters, specialist_parameters, step_flops
from poss_lightning.training.memory import memory, most_tokens
from poss_lightning.training.setup import Setup

GIB, GB = 2**30, 10**9
POSS = ([1] * 6, [2] * 3, [3] * 2)  # PosS-1, PosS-2, PosS-3 at depth 6


def _published(
    name: str,
    hidden_size: int,
    intermediate_size: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    vocab_size: int,
    context: int,
    rope_theta: float,
    norm_eps: float,
    layers: int,
) -> TargetSpec:
    sizes = (hidden_size, intermediate_size, heads, kv_heads, head_dim, vocab_size, context, rope_theta, norm_eps)
    return TargetSpec(name, "", "", *sizes, layers=layers)  # no weights, so no fingerprint, and no template


# Of their config.json files. Only the embedded one's head is its embedding.
TARGETS = {
    spec.name: spec
    for spec in (
        _published("llama-3-8b", 4096, 14336, 32, 8, 128, 128256, 8192, 500000.0, 1e-5, 32),
        _published("llama-3.1-8b", 4096, 14336, 32, 8, 128, 128256, 131072, 500000.0, 1e-5, 32),
        _published("llama-2-13b", 5120, 13824, 40, 40, 128, 32000, 4096, 10000.0, 1e-5, 40),
        _published("qwen3-8b", 4096, 12288, 32, 8, 128, 151936, 40960, 1000000.0, 1e-6, 36),
        _published("smollm2-135m", 576, 1536, 9, 3, 64, 49152, 8192, 100000.0, 1e-5, 30),
    )
}
TIED = {"smollm2-135m"}


def plan(
    target: str | None = None,
    allocation: list[int] | None = None,
    depth: int | None = None,
    tokens: int = 4096,
    strategy: Literal["one", "ddp", "fsdp2", "zero1", "zero2", "zero3"] = "one",
    processes: int = 1,
    gpu: float = 80.0,
    device: Literal["cuda", "cpu"] = "cuda",
    precision: Literal["bf16-mixed", "32-true"] = "bf16-mixed",
    offload: bool = False,
    detach: bool = True,
    intermediate_size: int | None = None,
    vocabulary_size: int | None = None,
    kv: Literal["separate", "shared"] = "separate",
    kind: Literal["eagle2", "eagle3"] = "eagle2",
    optimizer: Literal["adamw", "muon"] = "adamw",
    chunk: int = 128,
    answers: float = 1.0,
    conversation: int = 2048,
    stored: Literal["exact", "float8"] = "exact",
    corpus_tokens: float = 1e8,
    rate: float = 200.0,
    accumulate: int = 1,
) -> None:
    """Print what a training would need, without a target, a store or a GPU.

    Memory is that of a process's tensors at their peak. A GPU's context and the gaps of its allocator come on top, so
    give `gpu` somewhat less than the card has.

    Args:
        target: llama-3-8b, llama-3.1-8b, llama-2-13b, qwen3-8b, smollm2-135m, or a local folder with a config.json; all
            these by default.
        allocation: positions served by each specialist, e.g. [2, 2, 2]; PosS-1, PosS-2 and PosS-3 by default.
        depth: passes of the unroll in training; None for the sum of the allocation.
        tokens: T, of a batch of one process, padding included.
        strategy: how processes share the work; "one" is a process alone.
        processes: how many.
        gpu: GiB a process may fill.
        device: cuda or cpu.
        precision: bf16-mixed or 32-true.
        offload: ZeRO keeps the optimizer's part on the CPU, stage 3 the weights too.
        detach: whether features are detached between passes.
        intermediate_size: width of a specialist's MLP; None for the target's.
        vocabulary_size: propose only that many tokens; None for all.
        kv: whether specialists have keys and values of their own.
        kind: of the draft; "eagle3" reads three inner layers, which the store keeps too, and learns a head of its own.
        optimizer: adamw or muon.
        chunk: slots whose (chunk, V) matrices exist at once.
        answers: share of the slots that count; 1 is the worst case.
        conversation: tokens of the longest conversation.
        stored: features in the target's bfloat16 (exact) or in 8 bits (float8).
        corpus_tokens: of an epoch.
        rate: TFLOP/s of one process, as `throughput/teraflops` logs it for all of them.
        accumulate: batches of a step.

    Raises:
        ValueError: an unknown target, or a value out of its range; the message names it.
    """
    for name, value in (("gpu", gpu), ("corpus_tokens", corpus_tokens), ("rate", rate)):
        if value <= 0:
            raise ValueError(f"{name} is {value}; it must be above 0")
    options = {
        "detach": detach,
        "intermediate_size": intermediate_size,
        "vocabulary_size": vocabulary_size,
        "kv": kv,
        "kind": kind,
    }
    specs = [find(target)] if target else [(spec, spec.name in TIED) for spec in TARGETS.values()]
    setups = [
        Setup(
            _config(spec, own, depth, **options),
            tied,
            tokens,
            conversation,
            answers,
            strategy,
            processes,
            offload,
            precision,
            device,
            chunk,
            accumulate=accumulate,
            optimizer=optimizer,
        )
        for spec, tied in specs
        for own in ([allocation] if allocation else POSS)
    ]
    print(_sharing(setups[0]))
    if len(setups) == 1:
        print("\n".join(_report(setups[0], gpu, stored, corpus_tokens, rate)))
    else:
        print("\n".join(_overview(setups, gpu, stored, corpus_tokens, rate)))


def find(target: str) -> tuple[TargetSpec, bool]:
    """Sizes of a target, and whether its head is its embedding; from `TARGETS` or a folder's config.json.

    Raises:
        ValueError: neither, or the file lacks a size.
    """
    if target in TARGETS:
        return TARGETS[target], target in TIED
    path = Path(target) / "config.json"
    if not path.is_file():
        raise ValueError(f"target is {target!r}; it must be {', '.join(TARGETS)}, or a folder with a config.json")
    try:
        stored = json.loads(path.read_text())
        config = stored.get("text_config", stored)
        width, heads = config["hidden_size"], config["num_attention_heads"]
        spec = _published(
            target,
            width,
            config.get("intermediate_size") or 4 * width,
            heads,
            config.get("num_key_value_heads") or heads,
            config.get("head_dim") or width // heads,
            config["vocab_size"],
            config["max_position_embeddings"],
            (config.get("rope_parameters") or config).get("rope_theta", 10000.0),
            config.get("rms_norm_eps", 1e-6),
            config["num_hidden_layers"],
        )
        return spec, bool(stored.get("tie_word_embeddings", False))
    except (ValueError, KeyError, AttributeError) as error:
        raise ValueError(f"{path} is no config of a language model: {type(error).__name__} {error}") from error


def token_bytes(config: DraftConfig, stored: str) -> int:
    """Bytes of a token in a feature store: its vectors, itself and the greedy token; conversations add some 60 each."""
    return (1 + len(config.layers)) * vector_bytes(config.target.hidden_size, torch.bfloat16, stored) + 4 + 4


def epoch_flops(setup: Setup, corpus_tokens: float) -> float:
    """FLOPs of one epoch, as `step_flops` counts them, with all conversations as long as the longest."""
    context = (min(setup.conversation or setup.tokens, setup.tokens) + 1) / 2
    step = step_flops(setup.config, setup.vocabulary, setup.slots, setup.counting, context)
    return step * corpus_tokens / setup.tokens


def _hours(setup: Setup, corpus_tokens: float, rate: float) -> float:
    """Of one epoch."""
    return epoch_flops(setup, corpus_tokens) / (rate * 1e12 * setup.processes) / 3600


def _config(spec: TargetSpec, allocation: list[int], depth: int | None, **options) -> DraftConfig:
    config = DraftConfig(spec, tuple(allocation), depth or sum(allocation), **options)
    if config.unreached(config.depth):
        least = sum(allocation[:-1]) + 1
        raise ValueError(f"depth is {depth}, which never reaches the last of {list(allocation)}: give at least {least}")
    if config.vocabulary_size is not None and not 1 <= config.vocabulary_size <= spec.vocab_size:
        raise ValueError(
            f"vocabulary_size is {config.vocabulary_size}; it must lie between 1 and {spec.vocab_size} ({spec.name})"
        )
    return config


def _sharing(setup: Setup) -> str:
    away = ", offloaded" if setup.offload else ""
    who = "one process" if setup.strategy == "one" else f"{setup.strategy}{away}, each of {setup.processes} processes"
    return f"{who}: a batch of {setup.tokens} tokens, {setup.precision} on {setup.device}"


def _report(setup: Setup, gpu: float, stored: str, corpus_tokens: float, rate: float) -> list[str]:
    config, spec, peak = setup.config, setup.config.target, memory(setup)
    hours, size = _hours(setup, corpus_tokens, rate), token_bytes(config, stored)
    parts = {name: value for name, value in peak._asdict().items() if name != "moment"}
    fits = "fits" if peak.total <= gpu * GIB else "does not fit"
    return [
        f"{spec.name}, allocation {list(config.allocation)}, depth {config.depth}, vocabulary {setup.vocabulary}: "
        f"{parameters(config) / 1e6:.1f} M parameters, {specialist_parameters(config) / 1e6:.1f} M a specialist",
        "",
        *(f"  {name:<14}{value / GIB:9.2f} GiB" for name, value in parts.items()),
        f"  {'peak':<14}{peak.total / GIB:9.2f} GiB  in the {peak.moment}; {fits} in {gpu:g} GiB",
        "",
        f"  largest batch {most_tokens(setup, gpu * GIB):9d} tokens",
        f"  store         {size:9d} bytes a token; {size * corpus_tokens / GB:.1f} GB for {corpus_tokens:.3g} tokens",
        f"  an epoch      {hours:9.2f} hours at {rate:g} TFLOP/s a process",
    ]


def _overview(setups: list[Setup], gpu: float, stored: str, corpus_tokens: float, rate: float) -> list[str]:
    head = ("target", "allocation", "depth", "M parameters", "peak GiB", f"T in {gpu:g} GiB", "B/token", "store GB")
    lines = [f"{head[0]:<14}{head[1]:<20}" + "".join(f"{name:>14}" for name in (*head[2:], "epoch hours"))]
    for setup in setups:
        config, size = setup.config, token_bytes(setup.config, stored)
        numbers = (
            f"{config.depth}",
            f"{parameters(config) / 1e6:.1f}",
            f"{memory(setup).total / GIB:.2f}",
            f"{most_tokens(setup, gpu * GIB)}",
            f"{size}",
            f"{size * corpus_tokens / GB:.1f}",
            f"{_hours(setup, corpus_tokens, rate):.2f}",
        )
        lines.append(
            f"{config.target.name:<14}{list(config.allocation)!s:<20}" + "".join(f"{text:>14}" for text in numbers)
        )
    return [*lines, f"an epoch has {corpus_tokens:.3g} tokens, a process does {rate:g} TFLOP/s"]
