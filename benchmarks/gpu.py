"""`make bench-gpu`: training, rounds, extraction, real answers and memory on a GPU, in less than twenty minutes.

step      a training step at the sizes of Llama-3-8B, beside the published one and the rate of products
rounds    rounds and plain steps at these sizes, with and without graphs, beside the bandwidth floor
extract   tokens per second of extraction, beside the bare forward
answers   `poss benchmark` of the embedded target's suites, with a shipped draft

Prints each part and writes runs/bench/gpu.json. After a kill, the same command resumes with the parts that are missing.
With POSS_DEVICE=cpu every line runs at tiny sizes, so that the first GPU finds no typing error; these figures mean
nothing.
"""

import argparse
import os
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
from transformers import LlamaConfig

from benchmarks import core, floor, train
from benchmarks.measure import show, write
from benchmarks.random_target import random_target
from poss_lightning.evaluation.benchmark import benchmark
from poss_lightning.evaluation.provenance import provenance
from poss_lightning.machine import choose_dtype
from poss_lightning.reports.findings import find
from poss_lightning.target.model import Target
from poss_lightning.work import Work
from tests.support.tiny import tiny_model


class Scale(NamedTuple):
    """How large everything is."""

    draft: tuple[int, ...]  # hidden, intermediate, heads, kv heads, head_dim, vocabulary
    slots: tuple[int, ...]  # of a training step
    target: LlamaConfig
    batches: tuple[int, ...]  # texts side by side
    rounds: dict[str, int]  # further arguments of `rounds_by_batch`
    conversations: int
    questions: int  # of each suite
    new_tokens: int


FULL = Scale(
    draft=train.LLAMA_3_8B,
    slots=(2048, 8192),
    target=floor.LLAMA_3_8B,
    batches=(1, 4, 16),
    rounds={},
    conversations=64,
    questions=5,
    new_tokens=128,
)
TINY = Scale(
    draft=(64, 96, 4, 2, 16, 500),
    slots=(32, 64),
    target=tiny_model().config,
    batches=(1, 2),
    rounds={"nodes": 8, "prompt_tokens": 16, "repeats": 2},
    conversations=2,
    questions=1,
    new_tokens=4,
)


def step(scale: Scale, device: str) -> dict[str, Any]:
    dtype = getattr(torch, choose_dtype("auto", device))
    return {f"T {slots}": train.figures(scale.draft, slots, device, dtype) for slots in scale.slots}


def rounds(scale: Scale, device: str) -> dict[str, Any]:
    return floor.rounds_by_batch(_large_target(scale, device), scale.batches, **scale.rounds)


def extract(scale: Scale, device: str) -> dict[str, Any]:
    targets = {"random weights": _large_target(scale, device), "embedded": Target.load("embedded", device=device)}
    return {name: core.extraction(target, scale.conversations) for name, target in targets.items()}


def answers(scale: Scale, device: str) -> dict[str, Any]:
    """The measures of `poss compare` by method, over all suites."""
    with TemporaryDirectory() as folder:
        benchmark(
            folder,
            drafts={"hass": "embedded-hass"},
            limit=scale.questions,
            max_new_tokens=scale.new_tokens,
            tree="auto",
            lookup=10,
            baselines=["plain", "generate", "lookup"],
            device=device,
        )
        rows = find(folder).overall
    return {row.method: {name: value.value for name, value in row.values.items()} for row in rows}


PARTS: dict[str, Callable[..., dict[str, Any]]] = {part.__name__: part for part in (step, rounds, extract, answers)}


def _large_target(scale: Scale, device: str) -> Target:
    return random_target(scale.target, torch.bfloat16 if device == "cuda" else torch.float32, device)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="all by default")
    parser.add_argument("--out", default="runs/bench/gpu.json")
    options = parser.parse_args(arguments)
    device = os.environ.get("POSS_DEVICE", "cuda")
    if device == "cuda" and not torch.cuda.is_available():
        parser.error("there is no CUDA device; POSS_DEVICE=cpu runs every line at tiny sizes")
    scale, facts = FULL if device == "cuda" else TINY, provenance(torch.device(device))
    work = Work(Path(options.out).with_suffix(".unfinished"))
    work.claim({name: facts[name] for name in ("machine", "device", "git", "versions")})
    for part in options.parts:
        if work.receipt(part) is None:
            work.write_receipt(part, PARTS[part](scale, device))
            if device == "cuda":
                torch.cuda.empty_cache()
        print(f"\n{part}")
        show(work.receipt(part))
    found = {part: work.receipt(part) for part in PARTS}
    write(options.out, {part: figures for part, figures in found.items() if figures}, device)
    if all(found.values()):
        work.clear()


if __name__ == "__main__":
    main()
