"""`make bench-gpu`: training, rounds, extraction, real answers and memory on a GPU.

step      a training step at the sizes of Llama-3-8B and SmolLM2-135M, beside the published one, the rate of products
          and the time to read and write what its loss does
rounds    rounds and plain steps at the sizes of Llama-3-8B, with and without graphs, beside the bandwidth floor
extract   tokens per second of extraction, beside the bare forward
answers   `poss benchmark` of the embedded target's suites, with a shipped draft

Prints each part and writes runs/bench/gpu.json. A row that fails does not end the others; the exit status is then 1.
After a kill or a failure, the same command resumes with the rows that are missing. With POSS_DEVICE=cpu every line runs
at tiny sizes and without graphs, to find typing errors; these figures mean nothing.
"""

import argparse
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
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
from poss_lightning.decoding.baselines import Autoregressive
from poss_lightning.decoding.decoder import Decoder, Request
from poss_lightning.decoding.drafting import TreeDrafter
from poss_lightning.decoding.engine import Speculative
from poss_lightning.decoding.lookup import DEFAULT_LOOKUP
from poss_lightning.decoding.plans import TreePlan
from poss_lightning.evaluation.benchmark import benchmark
from poss_lightning.evaluation.provenance import provenance
from poss_lightning.machine import choose_dtype
from poss_lightning.reports.results import results
from poss_lightning.sampling import Sampling
from poss_lightning.target_model.cache import SlotStore, TreeCache
from poss_lightning.target_model.model import Target
from poss_lightning.work import Work

WARMUP = 4  # the prefill, and rounds that capture graphs
# Bytes that the loss reads and writes per slot, token of the vocabulary and pass, in bfloat16 (losses/chunks.py): the
# logits are written, then read for their norm, and with the target's for the terms and for the slope, which is written.
LOSS_BYTES = 2 + 2 + 4 + 4 + 2

Figures = dict[str, Any]
Rows = Iterator[tuple[str, Callable[[], Figures]]]  # of a part: each row's name, and what measures it


class Scale(NamedTuple):
    """How large everything is; by default as on a GPU."""

    sizes: tuple[int, ...] = train.LLAMA_3_8B
    layers: int = 32
    steps: tuple[tuple[str, int], ...] = (("8B", 2048), ("8B", 8192), ("135M", 4096))  # sizes and slots of a step
    small_sizes: tuple[int, ...] = train.SMOLLM2
    batches: tuple[int, ...] = (4, 16)  # texts side by side
    nodes: int = 60
    prompt_tokens: int = 512
    long_tokens: int = 7900  # with the rounds nearly the whole context
    repeats: int = 20
    conversations: int = 64
    questions: int = 5  # of each suite
    new_tokens: int = 128


TINY = Scale(
    sizes=(64, 96, 4, 2, 16, 500),
    layers=2,
    steps=(("8B", 64), ("135M", 32)),
    small_sizes=(32, 48, 4, 2, 8, 300),
    batches=(2, 3),
    nodes=8,
    prompt_tokens=16,
    long_tokens=40,
    repeats=2,
    conversations=2,
    questions=1,
    new_tokens=4,
)


def step(scale: Scale, device: str) -> Rows:
    dtype, sizes = getattr(torch, choose_dtype("auto", device)), {"8B": scale.sizes, "135M": scale.small_sizes}
    rate = _rate(device)

    def measure(sizes: tuple[int, ...], slots: int) -> Figures:
        read = LOSS_BYTES * slots * sizes[-1] * sum(train.ALLOCATION)
        of_loss = {"loss_gigabytes": read / 1e9, "loss_floor_ms": 1000 * read / rate}
        return train.figures(sizes, slots, device, dtype) | of_loss

    for name, slots in scale.steps:
        yield f"{name}, {slots} slots", partial(measure, sizes[name], slots)


def rounds(scale: Scale, device: str) -> Rows:
    """Milliseconds of rounds and their parts by method, beside the time to read what they need.

    A forward of few tokens cannot be faster than its weights and caches can be read: the floor is their bytes over the
    rate at which the device copies. Random drafts are never accepted, but random targets repeat themselves, and lookups
    then bring as many tokens as a round can.
    """
    target, rate = _large_target(scale, device), _rate(device)
    yield "copy", lambda: {"gigabytes_per_second": rate / 1e9}
    draft, tree = random_draft(target, (3, 3)), TreePlan(6, scale.nodes, tree="fixed")
    methods = {"plain": partial(Autoregressive, target)} | {
        name: partial(Speculative.from_draft, target, own, plan)
        for name, own, plan in (
            ("lookup", None, TreePlan(lookup=DEFAULT_LOOKUP, tree="fixed")),
            ("draft", draft, tree),
            ("draft+lookup", draft, replace(tree, lookup=DEFAULT_LOOKUP)),
            ("chain", draft, TreePlan(6, 7, 1, tree="fixed")),
        )
    }
    texts = [(1, scale.prompt_tokens, 0.0), (1, scale.prompt_tokens, 1.0), (1, scale.long_tokens, 0.0)]
    texts += [(batch, scale.prompt_tokens, 0.0) for batch in scale.batches]
    cases = [(*text, device == "cuda") for text in texts]
    cases[1:1] = [(*texts[0], False)] * (device == "cuda")
    for batch, tokens, temperature, graphs in cases:
        mode = "graphs" if graphs else "no graphs"
        for name, make in methods.items():
            make, limit = partial(make, graphs=graphs), 1 + (scale.repeats + WARMUP) * (DEFAULT_LOOKUP + 1)
            generator = torch.Generator().manual_seed(0)
            prompts = torch.randint(target.spec.vocab_size, (batch, tokens), generator=generator).tolist()
            request = Request(prompts, limit, frozenset(), Sampling(temperature), generator)
            row = f"batch {batch}, {tokens} tokens, T {temperature:g}, {mode}, {name}"
            yield row, partial(time_round, make, request, scale.repeats, rate)


def extract(scale: Scale, device: str) -> Rows:
    for name, load in (
        ("random weights", partial(_large_target, scale, device)),
        ("embedded", partial(Target.load, "embedded", device=device)),
    ):
        yield name, lambda load=load: core.extraction(load(), scale.conversations)


def answers(scale: Scale, device: str) -> Rows:
    """The measures of `poss compare` by method, over all suites."""

    def measure() -> Figures:
        with TemporaryDirectory() as folder:
            benchmark(
                folder,
                drafts={"hass": "embedded-hass"},
                limit=scale.questions,
                max_new_tokens=scale.new_tokens,
                lookup=DEFAULT_LOOKUP,
                baselines=["plain", "generate", "lookup"],
                device=device,
            )
            found = results(folder).query("suite == 'all' and position == 0")
        return {method: dict(zip(own["measure"], own["value"], strict=True)) for method, own in found.groupby("method")}

    yield "tree: auto", measure


PARTS: dict[str, Callable[[Scale, str], Rows]] = {part.__name__: part for part in (step, rounds, extract, answers)}


def _large_target(scale: Scale, device: str) -> Target:
    return random_target(
        llama(*scale.sizes, scale.layers), torch.bfloat16 if device == "cuda" else torch.float32, device
    )


# --- the floor of rounds ---


def _rate(device: str) -> float:
    """Bytes per second that the device reads and writes while it copies."""
    size = 2**30 if device == "cuda" else 2**22
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * size / seconds(lambda: target.copy_(source), 9, device)


def round_bytes(decoder: Autoregressive | Speculative) -> dict[str, int]:
    """What the parts of a round, and the whole, must read; a plain step is a round of one node."""
    if isinstance(decoder, Autoregressive):
        return {"round": verify_bytes(decoder.target, decoder.loop.cache, 1)}
    nodes = decoder.plan.nodes + decoder.plan.lookup
    read = {"verify": verify_bytes(decoder.target, decoder.cache, nodes)}
    if isinstance(decoder.drafter, TreeDrafter):
        read["draft"] = draft_bytes(decoder.drafter, decoder.cache.slots.longest)
    return read | {"round": sum(read.values())}


def verify_bytes(target: Target, cache: TreeCache, nodes: int) -> int:
    """What a verifying forward must read: all weights but the embedding's other rows, keys and values."""
    embedding = 0 if target.embed_head.tied else target.embed_head.embedding.nbytes
    weights = sum(parameter.nbytes for parameter in target.model.parameters()) - embedding
    (store,) = cache.stores.values()
    return weights + _cached(store, cache.slots.longest + nodes) * target.config.num_hidden_layers


def draft_bytes(drafter: TreeDrafter, slots: int) -> int:
    """What the draft steps of single-layer specialists must read, after so many slots.

    At each step layer, head, keys and values; between steps `fc` and the projections.
    """
    draft, total = drafter.specialists, 0
    projected = drafter.kv_weights.nbytes // len(draft.layers)  # weights of one specialist's keys and values
    for k in range(1, drafter.depth + 1):
        layer = draft.layers[draft.config.specialist_at(k)]
        own = sum(parameter.nbytes for parameter in layer.parameters()) - projected
        total += own + drafter.embed_head.head.nbytes
        total += _cached(drafter.store, slots + (k - 1) * drafter.plan.tree_width)
        if k < drafter.depth:
            readers = len({draft.config.kv_specialist(j, k + 1) for j in range(k + 1, drafter.depth + 1)})
            total += readers * projected + draft.fc.weight.nbytes
    return total


def time_round(
    make: Callable[[], Autoregressive | Speculative], request: Request, repeats: int, rate: float
) -> Figures:
    """Milliseconds of a round and its parts, and what reading takes at `rate` bytes per second."""
    decoder = make()
    taken = _seconds(decoder, request, repeats)
    read = round_bytes(decoder)
    found = {f"{part}_ms": 1000 * taken[part] for part in ("draft", "verify", "commit", "round") if part in taken}
    bytes_read = {f"{part}_gigabytes": needed / 1e9 for part, needed in read.items()}
    return found | bytes_read | {f"{part}_floor_ms": 1000 * needed / rate for part, needed in read.items()}


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


def _cached(store: SlotStore, slots: int) -> int:
    """Bytes of keys and values of one layer's slots."""
    return store.slots[0, 0].nbytes * slots * store.batch


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="all by default")
    parser.add_argument("--out", default="runs/bench/gpu.json")
    options = parser.parse_args(arguments)
    device = os.environ.get("POSS_DEVICE", "cuda")
    if device == "cuda" and not torch.cuda.is_available():
        parser.error("there is no CUDA device; POSS_DEVICE=cpu runs every line at tiny sizes")
    scale, facts = Scale() if device == "cuda" else TINY, provenance(torch.device(device))
    machine = {name: facts[name] for name in ("machine", "device", "git", "versions")}
    work, failed, found = Work(Path(options.out).with_suffix(".unfinished"), machine), list[str](), {}
    work.begin()
    for part in options.parts:
        found[part] = work.receipt(part) or {}
        with _noted(part, failed):
            for row, measure in PARTS[part](scale, device):
                with _noted(f"{part}, {row}", failed):
                    if row not in found[part]:
                        found[part][row] = measure()
                        work.write_receipt(part, found[part])
        torch.cuda.empty_cache()
        print(f"\n{part}")
        show(found[part])
        write(options.out, found, device)
    if failed:
        sys.exit("\n".join(["these failed, see above; the same command tries them again:", *failed]))
    work.clear()


@contextmanager
def _noted(name: str, failed: list[str]) -> Iterator[None]:
    """Print an exception and note the name, so that what follows runs."""
    try:
        yield
    except Exception:
        traceback.print_exc()
        failed.append(name)


if __name__ == "__main__":
    main()
