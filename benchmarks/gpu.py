"""`make bench-gpu`: training, rounds, extraction, real answers and memory on a GPU, in under twenty minutes.

step      a training step at the sizes of Llama-3-8B, against the published twin and the rate of products
rounds    rounds and plain steps at these sizes, as graphs and without, beside the bandwidth floor
extract   tokens a second of extraction, against the bare forward
answers   the embedded target's suites, with a shipped draft, against plain decoding

Prints each part and writes runs/bench/gpu.json. After a kill, the same command goes on with the parts that are missing.
With POSS_DEVICE=cpu every line runs at tiny sizes, so that the first GPU finds no typing error; these figures mean
nothing.
"""

import argparse
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import LlamaConfig

from benchmarks import core, decode, floor, soak, train
from benchmarks.random_target import random_target
from poss_lightning.draft.specialists import Specialists
from poss_lightning.evaluation.provenance import provenance
from poss_lightning.evaluation.suites import read_suites
from poss_lightning.files import atomic
from poss_lightning.machine import choose_dtype
from poss_lightning.target.model import Target
from poss_lightning.work import Work


@dataclass(frozen=True)
class Sizes:
    """How large everything is."""

    draft: tuple[int, ...]  # hidden, intermediate, heads, kv heads, head_dim, vocabulary
    slots: tuple[int, ...]  # of a training step
    target: LlamaConfig
    batches: tuple[int, ...]  # texts side by side
    nodes: int
    prompt_tokens: int
    repeats: int
    conversations: int
    questions: int  # of each suite
    new_tokens: int


FULL = Sizes(
    draft=train.LLAMA_3_8B,
    slots=(2048, 8192),
    target=floor.LLAMA_3_8B,
    batches=(1, 4, 16),
    nodes=60,
    prompt_tokens=512,
    repeats=20,
    conversations=64,
    questions=5,
    new_tokens=128,
)
TINY = Sizes(
    draft=(64, 96, 4, 2, 16, 500),
    slots=(32, 64),
    target=soak.TINY,
    batches=(1, 2),
    nodes=8,
    prompt_tokens=16,
    repeats=2,
    conversations=2,
    questions=1,
    new_tokens=4,
)


def step(sizes: Sizes, device: str) -> dict[str, object]:
    dtype = getattr(torch, choose_dtype("auto", device))
    return {f"T {slots}": train.figures(sizes.draft, slots, device, dtype) for slots in sizes.slots}


def rounds(sizes: Sizes, device: str) -> dict[str, object]:
    target = random_target(sizes.target, _large_dtype(device), device)
    return floor.rounds_by_batch(
        target, sizes.batches, nodes=sizes.nodes, prompt_tokens=sizes.prompt_tokens, repeats=sizes.repeats
    )


def extract(sizes: Sizes, device: str) -> dict[str, object]:
    large = random_target(sizes.target, _large_dtype(device), device)
    found = {"random weights": core.extraction(large, sizes.conversations)}
    return found | {"embedded": core.extraction(Target.load("embedded", device=device), sizes.conversations)}


def answers(sizes: Sizes, device: str) -> dict[str, object]:
    target, draft = Target.load("embedded", device=device), Specialists.from_pretrained("embedded-hass")
    return decode.suites(target, draft, read_suites(None, sizes.questions), sizes.new_tokens)


PARTS: dict[str, Callable[..., dict[str, object]]] = {part.__name__: part for part in (step, rounds, extract, answers)}


def _large_dtype(device: str) -> torch.dtype:
    return torch.bfloat16 if device == "cuda" else torch.float32


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="all by default")
    parser.add_argument("--out", default="runs/bench/gpu.json")
    options = parser.parse_args(arguments)
    device = os.environ.get("POSS_DEVICE", "cuda")
    if device == "cuda" and not torch.cuda.is_available():
        parser.error("there is no CUDA device; POSS_DEVICE=cpu runs every line at tiny sizes")
    sizes, facts = FULL if device == "cuda" else TINY, provenance(torch.device(device))
    work = Work(Path(options.out).with_suffix(".unfinished"))
    work.claim({name: facts[name] for name in ("machine", "device", "git", "versions")})
    for part in options.parts:
        if work.receipt(part) is None:
            work.write_receipt(part, PARTS[part](sizes, device))
            if device == "cuda":
                torch.cuda.empty_cache()
        print(f"\n{part}")
        decode.show(work.receipt(part))
    with atomic(options.out) as path:
        found = {part: work.receipt(part) for part in PARTS}
        path.write_text(json.dumps({**facts, **{part: of for part, of in found.items() if of}}, indent=1) + "\n")
    if all(found.values()):
        work.clear()


if __name__ == "__main__":
    main()
