"""`make bench-train`: a training step beside the published one, and beside the rate of matrix products.

Same weights, same batch, one process, in turn. On a CPU with the embedded target's sizes, on CUDA with Llama-3-8B's.
Weights and features are random, since neither time nor memory depends on them. Prints figures and writes
runs/bench/train.json.
"""

import argparse
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks import published
from benchmarks.measure import compare_steps, report, seconds
from benchmarks.random_target import llama
from poss_lightning.draft.attention import Packing
from poss_lightning.draft.config import DraftConfig
from poss_lightning.draft.kinds import make_draft
from poss_lightning.losses.chunks import Heads
from poss_lightning.losses.passes import pass_losses
from poss_lightning.machine import choose_dtype
from poss_lightning.target_model.describe import spec_of

ALLOCATION, PAIRS = (3, 3), 5
# hidden, intermediate, heads, kv heads, head_dim, vocabulary
SMOLLM2 = (576, 1536, 9, 3, 64, 49152)
LLAMA_3_8B = (4096, 14336, 32, 8, 128, 128256)


class Problem:
    """A draft with random float32 weights, and one row of `slots` slots that all count; products are in `dtype`."""

    def __init__(self, config: DraftConfig, slots: int, device: str, dtype: torch.dtype):
        torch.manual_seed(0)
        self.device, self.dtype, self.depth = device, dtype, config.depth
        size, width = config.vocabulary_size, config.target.hidden_size
        with torch.device(device):
            self.draft = make_draft(config, None if size is None else torch.arange(size))
            self.head = (torch.randn(config.target.vocab_size, width) * 0.1).to(dtype)
            self.embedded, self.features = torch.randn(2, 1, slots, width).to(dtype)
            self.inputs = torch.randn(1, slots, max(1, len(config.aux_layers)) * width).to(dtype)
            self.counts = torch.arange(1, slots + 1).clamp(max=self.depth)[None]  # a pass counts from its own slot on
            self.packing = Packing.one_per_row(1, slots, torch.device(device))
        self.optimizers = dict.fromkeys(("ours", "twin"), torch.optim.AdamW(self.draft.parameters(), lr=0.0))

    def ours(self) -> Tensor:
        predictions = self.draft(self.embedded, self.inputs, self.depth, self.packing)
        total = pass_losses(predictions, self.features, self.counts, Heads(self.head), find_top=False).total
        return total / self.counts.shape[1]

    def twin(self) -> Tensor:
        given = self.embedded, self.inputs, self.features, self.counts
        return torch.stack(published.step(self.draft, self.head, *given)).sum() / self.counts.shape[1]

    def step(self, name: str) -> None:
        """A step of the loss of that name, in Lightning's order: the forward, then old gradients are freed."""
        with torch.autocast(self.device, torch.bfloat16, enabled=self.dtype == torch.bfloat16):
            loss = getattr(self, name)()
        self.optimizers[name].zero_grad()
        loss.backward()
        self.optimizers[name].step()

    def gradient_difference(self) -> float:
        """The largest relative difference of a parameter's gradient from the twin's."""
        found = []
        for name in ("ours", "twin"):
            self.step(name)
            found.append([p.grad for p in self.draft.parameters()])
        return largest_difference(zip(*found, strict=True))


def largest_difference(pairs: Iterable[tuple[Tensor, Tensor]]) -> float:
    """The largest distance of two tensors relative to the length of the second."""
    return max(float((ours - theirs).norm() / theirs.norm()) for ours, theirs in pairs)


def make_config(sizes: tuple[int, ...]) -> DraftConfig:
    return DraftConfig(target=spec_of(llama(*sizes), "random"), allocation=ALLOCATION, depth=sum(ALLOCATION))


def step_flops(config: DraftConfig, *, vocabulary: int, tokens: int, slots: int, context: float) -> float:
    """FLOPs of the matrix products of one training step, forward and backward; recomputation is not counted.

    Args:
        vocabulary: rows of the head.
        tokens: slots of the batch, with or without a loss.
        slots: slots with a loss, where a block begins.
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
    sets = {(config.kv_specialist(k, m + 1), m) for k in range(1, depth + 1) for m in range(k)}  # of keys and values
    keys_values = 3 * len(sets) * joined * 2 * shared
    attention = 3 * depth * 2 * queried * context  # scores and values
    return 2 * tokens * (fc + specialists + keys_values + attention) + 2 * slots * head


def matmul_rate(device: str, size: int, dtype: torch.dtype) -> float:
    """FLOP/s of one large product."""
    a, b = torch.randn(2, size, size, device=device).to(dtype)
    return 2 * size**3 / seconds(lambda: a @ b, 9, device)


def figures(sizes: tuple[int, ...], slots: int, device: str, dtype: torch.dtype) -> dict[str, Any]:
    """Time and memory of our step and the twin's, and of ours the share of the matmul rate.

    Where the twin does not fit the device's memory, there are no figures of it.
    """
    problem = Problem(make_config(sizes), slots, device, dtype)
    steps = {name: partial(problem.step, name) for name in problem.optimizers}
    try:
        steps["twin"]()
    except torch.OutOfMemoryError:
        del steps["twin"]
        problem.draft.zero_grad()
        torch.cuda.empty_cache()
    compared = compare_steps(steps, PAIRS, device)
    flops = step_flops(problem.draft.config, vocabulary=sizes[-1], tokens=slots, slots=slots, context=(slots + 1) / 2)
    rate, speed = matmul_rate(device, 2048 if device == "cpu" else 8192, dtype), slots / compared["seconds"]["ours"]
    return {
        "sizes": sizes,
        "slots": slots,
        "allocation": ALLOCATION,
        **compared,
        "slots_per_second": speed,
        "matmul_rate_fraction": flops / slots * speed / rate,
        "matmul_teraflops": rate / 1e12,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--slots", type=int, default=2048)
    options = parser.parse_args()
    device, sizes = options.device, SMOLLM2 if options.device == "cpu" else LLAMA_3_8B
    dtype = choose_dtype("auto", device)
    difference = Problem(make_config(sizes), 512, device, torch.float32).gradient_difference()
    results = {"dtype": dtype, "max_relative_gradient_difference": difference}
    results |= figures(sizes, options.slots, device, getattr(torch, dtype))
    report(results, "runs/bench/train.json", device)


if __name__ == "__main__":
    main()
