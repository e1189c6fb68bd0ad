"""Memory, store and time of a training before it starts, from config numbers alone: `poss plan`."""

import json
from pathlib import Path
from typing import Annotated, Any, Literal

import torch

from poss_lightning.draft.specialists import DraftConfig
from poss_lightning.features.encoding import vector_bytes
from poss_lightning.losses.passes import chunk_on
from poss_lightning.ranges import (
    Amount,
    Count,
    Position,
    Processes,
    Range,
    Share,
    Size,
    Tokens,
    check_numbers,
)
from poss_lightning.target.spec import TargetSpec
from poss_lightning.training.costs import count_parameters, count_specialist_parameters, muon_flops, step_flops
from poss_lightning.training.memory import checkpoint_bytes, memory, most_tokens
from poss_lightning.training.setup import Setup

GIB, GB = 2**30, 10**9
POSS = ([1] * 6, [2] * 3, [3] * 2)  # PosS-1, PosS-2, PosS-3 at depth 6

# Of their config.json files. Only the embedded target's head is its embedding.
SIZES = ("hidden_size", "intermediate_size", "heads", "kv_heads", "head_dim", "vocab_size")
SIZES += ("context", "rope_theta", "norm_eps", "layers")
TARGETS = {
    name: TargetSpec(name=name, **dict[str, Any](zip(SIZES, sizes, strict=True)))
    for name, *sizes in (
        ("llama-3-8b", 4096, 14336, 32, 8, 128, 128256, 8192, 500000.0, 1e-5, 32),
        ("llama-3.1-8b", 4096, 14336, 32, 8, 128, 128256, 131072, 500000.0, 1e-5, 32),
        ("llama-2-13b", 5120, 13824, 40, 40, 128, 32000, 4096, 10000.0, 1e-5, 40),
        ("qwen3-8b", 4096, 12288, 32, 8, 128, 151936, 40960, 1000000.0, 1e-6, 36),
        ("smollm2-135m", 576, 1536, 9, 3, 64, 49152, 8192, 100000.0, 1e-5, 30),
    )
}
TIED = {"smollm2-135m"}


@check_numbers
def plan(
    target: str | None = None,
    allocation: list[Position] | None = None,
    depth: Position | None = None,
    tokens: Annotated[int, Range(2, 2**24)] = 4096,
    strategy: Literal["one", "ddp", "fsdp2", "zero1", "zero2", "zero3"] | None = None,
    processes: Processes = 1,
    gpu: Amount = 80.0,
    device: Literal["cuda", "cpu"] = "cuda",
    precision: Literal["bf16-mixed", "32-true"] = "bf16-mixed",
    offload: bool = False,
    detach: bool = True,
    intermediate_size: Size | None = None,
    vocabulary_size: Size | None = None,
    kv: Literal["separate", "shared"] = "separate",
    kind: Literal["eagle2", "eagle3"] = "eagle2",
    optimizer: Literal["adamw", "muon"] = "adamw",
    chunk: Count | None = None,
    answers: Share = 1.0,
    conversation: Tokens = 2048,
    stored: Literal["exact", "float8"] = "exact",
    corpus_tokens: Amount = 1e8,
    rate: Amount = 200.0,
    accumulate: Count = 1,
) -> None:
    """Print what a training would need, without a target, a store or a GPU.

    Memory is that of a process's tensors at their peak. A GPU's context and the gaps of its allocator come on top, so
    give `gpu` somewhat less than the card has.

    Args:
        target: llama-3-8b, llama-3.1-8b, llama-2-13b, qwen3-8b, smollm2-135m, or a local folder with a config.json; all
            these by default.
        allocation: positions served by each specialist, e.g. [2, 2, 2]; PosS-1, PosS-2 and PosS-3 by default.
        depth: passes of the unroll in training; None for the sum of the allocation.
        tokens: T, of a batch of one process, padding included; a slot joins two of them.
        strategy: how processes share the work; by default "one", a process alone, or for several "ddp".
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
        chunk: slots whose (chunk, V) matrices exist at once; None for 512 on a GPU and 128 on a CPU.
        answers: share of the slots that count; 1 is the worst case.
        conversation: tokens of the longest conversation.
        stored: features in the target's bfloat16 (exact) or in 8 bits (float8).
        corpus_tokens: of an epoch.
        rate: TFLOP/s of one process, as `throughput/teraflops` logs it for all of them.
        accumulate: batches of a step.

    Raises:
        ValueError: an unknown target, or a value out of its range; the message names it.
    """
    strategy = strategy or ("one" if processes == 1 else "ddp")
    options: dict[str, Any] = {
        "detach": detach,
        "intermediate_size": intermediate_size,
        "vocabulary_size": vocabulary_size,
        "kv": kv,
        "kind": kind,
    }
    specs = [find_target(target)] if target else [(spec, spec.name in TIED) for spec in TARGETS.values()]
    setups = [
        Setup(
            config=_draft_config(spec, runs, depth, **options),
            tied=tied,
            tokens=tokens,
            conversation=conversation,
            answers=answers,
            strategy=strategy,
            processes=processes,
            offload=offload,
            precision=precision,
            device=device,
            chunk=chunk_on(device) if chunk is None else chunk,
            accumulate=accumulate,
            optimizer=optimizer,
        )
        for spec, tied in specs
        for runs in ([allocation] if allocation else POSS)
    ]
    print(_describe_processes(setups[0]))
    if len(setups) == 1:
        print("\n".join(_describe(setups[0], gpu, stored, corpus_tokens, rate)))
    else:
        print("\n".join(_compare(setups, gpu, stored, corpus_tokens, rate)))


def find_target(target: str) -> tuple[TargetSpec, bool]:
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
        spec = TargetSpec(
            name=target,
            hidden_size=width,
            intermediate_size=config.get("intermediate_size") or 4 * width,
            heads=heads,
            kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or width // heads,
            vocab_size=config["vocab_size"],
            context=config["max_position_embeddings"],
            rope_theta=(config.get("rope_parameters") or config).get("rope_theta", 10000.0),
            norm_eps=config.get("rms_norm_eps", 1e-6),
            layers=config["num_hidden_layers"],
        )
        return spec, bool(stored.get("tie_word_embeddings", False))
    except (ValueError, KeyError, TypeError, AttributeError, ZeroDivisionError) as error:
        raise ValueError(f"{path} is no config of a language model: {type(error).__name__} {error}") from error


def token_bytes(config: DraftConfig, stored: str) -> int:
    """Bytes of a token in a feature store: its vectors, its id and the greedy id. A conversation adds some 60."""
    return (1 + len(config.layers)) * vector_bytes(config.target.hidden_size, torch.bfloat16, stored) + 4 + 4


def epoch_flops(setup: Setup, corpus_tokens: float) -> float:
    """FLOPs of one epoch, as `step_flops` counts them, with all conversations as long as the longest."""
    step = step_flops(
        setup.config,
        vocabulary=setup.vocabulary,
        tokens=setup.slots,
        slots=setup.counting,
        context=(min(setup.conversation or setup.tokens, setup.tokens) + 1) / 2,
    )
    return step * corpus_tokens / setup.tokens


def _epoch_hours(setup: Setup, corpus_tokens: float, rate: float) -> float:
    return (epoch_flops(setup, corpus_tokens) + _optimizer_flops(setup, corpus_tokens)) / _hourly(setup, rate)


def _optimizer_flops(setup: Setup, corpus_tokens: float) -> float:
    """FLOPs of an epoch's steps of Muon, which all processes share; AdamW has no products."""
    if setup.optimizer == "adamw":
        return 0
    return muon_flops(setup.config) * corpus_tokens / (setup.tokens * setup.processes * setup.accumulate)


def _hourly(setup: Setup, rate: float) -> float:
    """FLOPs of all processes in an hour."""
    return rate * 1e12 * setup.processes * 3600


def _draft_config(spec: TargetSpec, allocation: list[int], depth: int | None, **options: Any) -> DraftConfig:
    config = DraftConfig(target=spec, allocation=tuple(allocation), depth=depth or sum(allocation), **options)
    if config.unreached(config.depth):
        least = sum(allocation[:-1]) + 1
        raise ValueError(f"depth is {depth}, which never reaches the last of {list(allocation)}: give at least {least}")
    if config.vocabulary_size is not None and not 1 <= config.vocabulary_size <= spec.vocab_size:
        raise ValueError(
            f"vocabulary_size is {config.vocabulary_size}; it must lie between 1 and {spec.vocab_size} ({spec.name})"
        )
    return config


def _describe_processes(setup: Setup) -> str:
    offload = ", offloaded" if setup.offload else ""
    sharing = f"{setup.strategy}{offload}, each of {setup.processes} processes"
    who = "one process" if setup.strategy == "one" else sharing
    return f"{who}: a batch of {setup.tokens} tokens, {setup.precision} on {setup.device}"


def _describe(setup: Setup, gpu: float, stored: str, corpus_tokens: float, rate: float) -> list[str]:
    config, spec, peak = setup.config, setup.config.target, memory(setup)
    steps = _optimizer_flops(setup, corpus_tokens) / _hourly(setup, rate)
    muon = f", {steps:.2f} of them in Muon's steps" if steps else ""
    file, held = checkpoint_bytes(setup)
    hours, size = _epoch_hours(setup, corpus_tokens, rate), token_bytes(config, stored)
    parts = {name: value for name, value in peak._asdict().items() if name != "moment"}
    fits = "fits" if peak.total <= gpu * GIB else "does not fit"
    return [
        f"{spec.name}, allocation {list(config.allocation)}, depth {config.depth}, vocabulary {setup.vocabulary}: "
        f"{count_parameters(config) / 1e6:.1f} M parameters, "
        f"{count_specialist_parameters(config) / 1e6:.1f} M a specialist",
        "",
        *(f"  {name:<14}{value / GIB:9.2f} GiB" for name, value in parts.items()),
        f"  {'peak':<14}{peak.total / GIB:9.2f} GiB  in the {peak.moment}; {fits} in {gpu:g} GiB",
        "",
        f"  largest batch {most_tokens(setup, gpu * GIB):9d} tokens",
        f"  checkpoint    {file / GB:9.1f} GB; {held / GB:.1f} GB of CPU memory of the first process as it is written",
        f"  store         {size:9d} bytes a token; {size * corpus_tokens / GB:.1f} GB for {corpus_tokens:.3g} tokens",
        f"  an epoch      {hours:9.2f} hours at {rate:g} TFLOP/s a process{muon}",
    ]


def _compare(setups: list[Setup], gpu: float, stored: str, corpus_tokens: float, rate: float) -> list[str]:
    head = ("target", "allocation", "depth", "M parameters", "peak GiB", f"T in {gpu:g} GiB", "B/token", "store GB")
    lines = [f"{head[0]:<14}{head[1]:<20}" + "".join(f"{name:>14}" for name in (*head[2:], "epoch hours"))]
    for setup in setups:
        config, size = setup.config, token_bytes(setup.config, stored)
        cells = (
            f"{config.depth}",
            f"{count_parameters(config) / 1e6:.1f}",
            f"{memory(setup).total / GIB:.2f}",
            f"{most_tokens(setup, gpu * GIB)}",
            f"{size}",
            f"{size * corpus_tokens / GB:.1f}",
            f"{_epoch_hours(setup, corpus_tokens, rate):.2f}",
        )
        lines += [f"{config.target.name:<14}{list(config.allocation)!s:<20}" + "".join(f"{text:>14}" for text in cells)]
    return [*lines, f"an epoch has {corpus_tokens:.3g} tokens, a process does {rate:g} TFLOP/s"]
