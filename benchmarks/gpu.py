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
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch

from benchmarks import core, train
from benchmarks.measure import in_turn, seconds, show, write
from benchmarks.random_target import llama, random_draft, random_target
from poss_lightning.clock import Clock
from poss_lightning.decoding.autoregressive import Autoregressive
from poss_lightning.decoding.decoder import Decoder, Request
from poss_lightning.decoding.drafting import TreeDrafter
from poss_lightning.decoding.engine import Speculative
from poss_lightning.decoding.plans import Plan
from poss_lightning.evaluation.benchmark import benchmark
from poss_lightning.evaluation.provenance import provenance
from poss_lightning.machine import choose_dtype
from poss_lightning.reports.findings import find
from poss_lightning.target.cache import SlotStore
from poss_lightning.target.model import Target
from poss_lightning.work import Work

WARMUP = 4  # the prefill, and rounds that capture graphs
# Milliseconds by arithmetic (bytes over bandwidth, and launches), which no GPU has confirmed yet.
EXPECTED = {"plain_step_ms": 5.6, "round_ms": 8.0}


class Scale(NamedTuple):
    """How large everything is; by default as on a GPU."""

    sizes: tuple[int, ...] = train.LLAMA_3_8B
    layers: int = 32
    slots: tuple[int, ...] = (2048, 8192)  # of a training step
    batches: tuple[int, ...] = (1, 4, 16)  # texts side by side
    nodes: int = 60
    prompt_tokens: int = 512
    repeats: int = 20
    conversations: int = 64
    questions: int = 5  # of each suite
    new_tokens: int = 128


TINY = Scale(
    sizes=(64, 96, 4, 2, 16, 500),
    layers=2,
    slots=(32, 64),
    batches=(1, 2),
    nodes=8,
    prompt_tokens=16,
    repeats=2,
    conversations=2,
    questions=1,
    new_tokens=4,
)


def step(scale: Scale, device: str) -> dict[str, Any]:
    dtype = getattr(torch, choose_dtype("auto", device))
    return {f"T {slots}": train.figures(scale.sizes, slots, device, dtype) for slots in scale.slots}


@torch.inference_mode()
def rounds(scale: Scale, device: str) -> dict[str, Any]:
    """Rounds, their parts and plain steps of batches, with and without graphs, beside the time to read what they need.

    A forward of few tokens cannot be faster than its weights and caches can be read: the floor is their bytes over the
    rate at which the device copies. A plain step is a round of one node without a draft.
    """
    target, depth = _large_target(scale, device), 6
    rate, draft = copy_rate(device, 2**30 if device == "cuda" else 2**22), random_draft(target, (3, 3))
    found: dict[str, Any] = {"copy_gigabytes_per_second": rate / 1e9, "expected, 8B, batch 1, H100": EXPECTED}
    for batch in scale.batches:
        prompts = torch.randint(target.spec.vocab_size, (batch, scale.prompt_tokens)).tolist()
        request = Request(prompts, 1 + (scale.repeats + WARMUP) * (depth + 1), frozenset())
        for name, graphs in (("graphs", None), ("no graphs", False)):
            engine = Speculative.from_draft(target, draft, Plan(depth, scale.nodes), graphs=graphs)
            own, step = (_seconds(one, request, scale.repeats) for one in (engine, Autoregressive(target, graphs)))
            read = {"draft": draft_bytes(engine, depth), "verify": verify_bytes(engine, scale.nodes)}
            read["round"] = sum(read.values())
            found[f"batch {batch}, {name}"] = {
                **{part: _compare_floor(own[part], needed, rate) for part, needed in read.items()},
                "commit": {"ms": 1000 * own["commit"]},
                "plain step": _compare_floor(step["round"], verify_bytes(engine, 1), rate),
            }
    return found


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
    return random_target(
        llama(*scale.sizes, scale.layers), torch.bfloat16 if device == "cuda" else torch.float32, device
    )


# --- the floor of rounds ---


def copy_rate(device: str, size: int = 2**30) -> float:
    """Bytes per second that the device reads and writes while it copies `size` bytes."""
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * size / seconds(lambda: target.copy_(source), 9, device)


def verify_bytes(engine: Speculative, nodes: int) -> int:
    """What a verifying forward must read: all weights but the embedding's other rows, keys and values."""
    target, cache = engine.target, engine.cache
    embedding = 0 if target.embed_head.tied else target.embed_head.embedding.nbytes
    weights = sum(parameter.nbytes for parameter in target.model.parameters()) - embedding
    (store,) = cache.stores.values()
    return weights + _cached(store, cache.slots.longest + nodes) * target.config.num_hidden_layers


def draft_bytes(engine: Speculative, depth: int) -> int:
    """What `depth` draft steps of single-layer specialists must read.

    At each step layer, head, keys and values; between steps `fc` and the projections.
    """
    drafter, slots, total = engine.drafter, engine.cache.slots, 0
    assert isinstance(drafter, TreeDrafter), "only trees are drafted step by step"
    draft, width = drafter.specialists, drafter.plan.tree_width
    projected = drafter.kv_weights.nbytes // len(draft.layers)  # weights of one specialist's keys and values
    for k in range(1, depth + 1):
        layer = draft.layers[draft.config.specialist_at(k)]
        own = sum(parameter.nbytes for parameter in layer.parameters()) - projected
        total += own + drafter.embed_head.head.nbytes
        total += _cached(drafter.store, slots.longest + (k - 1) * width)
        if k < depth:
            readers = len({draft.config.kv_specialist(j, k + 1) for j in range(k + 1, drafter.depth + 1)})
            total += readers * projected + draft.fc.weight.nbytes
    return total


def _seconds(decoder: Decoder, request: Request, repeats: int) -> dict[str, float]:
    """Seconds of a round, the median, and of its parts, after the prefill and the rounds that capture graphs."""
    device = decoder.target.device
    clock = Clock(device)
    text = decoder.rounds(request, clock)
    in_turn({"round": partial(next, text)}, 0, device.type, WARMUP)
    before = clock.total()
    times = in_turn({"round": partial(next, text)}, repeats, device.type, warmup=0)["round"]
    parts = {name: (total - before.get(name, 0)) / repeats for name, total in clock.total().items()}
    return parts | {"round": median(times)}


def _compare_floor(measured: float, read: int, rate: float) -> dict[str, float]:
    return {"ms": 1000 * measured, "floor_ms": 1000 * read / rate, "over_floor": measured * rate / read}


def _cached(store: SlotStore, slots: int) -> int:
    """Bytes of keys and values of one layer's slots."""
    return 2 * store.keys[0, 0].nbytes * slots * store.batch


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="all by default")
    parser.add_argument("--out", default="runs/bench/gpu.json")
    options = parser.parse_args(arguments)
    device = os.environ.get("POSS_DEVICE", "cuda")
    if device == "cuda" and not torch.cuda.is_available():
        parser.error("there is no CUDA device; POSS_DEVICE=cpu runs every line at tiny sizes")
    scale, facts = Scale() if device == "cuda" else TINY, provenance(torch.device(device))
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
