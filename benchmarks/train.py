"""`make bench-train`: a training step beside the published one, and beside the rate of matrix products.

Same weights, same batch, one process, in turn. On a CPU with the embedded target's sizes, on CUDA with Llama-3-8B's.
Weights and features are random, since neither time nor memory depends on them. Prints figures and writes
runs/bench/train.json.
"""

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks import published
from benchmarks.measure import compare_steps, seconds, show, write
from benchmarks.random_target import random_spec
from poss_lightning.draft.attention import Packing
from poss_lightning.draft.specialists import DraftConfig, Specialists
from poss_lightning.losses.passes import pass_losses
from poss_lightning.machine import choose_dtype
from poss_lightning.training.flops import step_flops

DEPTH, ALLOCATION, PAIRS = 6, (3, 3), 5
SIZES = ("hidden", "intermediate", "heads", "kv_heads", "head_dim", "vocabulary")
SMOLLM2 = (576, 1536, 9, 3, 64, 49152)
LLAMA_3_8B = (4096, 14336, 32, 8, 128, 128256)


class Problem:
    """Random float32 weights and one packed row of `slots` slots that all count; products are in `dtype`."""

    def __init__(self, sizes: tuple[int, ...], slots: int, device: str, dtype: torch.dtype):
        torch.manual_seed(0)
        spec = random_spec(*sizes)
        width, vocabulary = spec.hidden_size, spec.vocab_size
        with torch.device(device):
            self.draft = Specialists(DraftConfig(target=spec, allocation=ALLOCATION, depth=DEPTH))
            self.head = (torch.randn(vocabulary, width) * 0.1).to(dtype)
            self.embedded, self.inputs, self.features = torch.randn(3, 1, slots, width).to(dtype)
            self.counts = torch.full((1, slots), DEPTH)
            self.counts[0, :DEPTH] = torch.arange(1, DEPTH + 1)  # a pass counts from its own slot on
            self.packing = Packing.one_per_row(1, slots, torch.device(device))
        self.device, self.mixed, self.slots = device, dtype == torch.bfloat16, slots
        self.optimizer = torch.optim.AdamW(self.draft.parameters(), lr=0.0)

    def ours(self) -> Tensor:
        predictions = self.draft(self.embedded, self.inputs, DEPTH, self.packing)
        return pass_losses(predictions, self.features, self.counts, self.head, find_top=False).total

    def twin(self) -> Tensor:
        given = self.embedded, self.inputs, self.features, self.counts
        return torch.stack(published.step(self.draft, self.head, *given)).sum()

    def step(self, loss_of: Callable[[], Tensor]) -> None:
        """In Lightning's order: the forward, then old gradients are freed."""
        with torch.autocast(self.device, torch.bfloat16, enabled=self.mixed):
            loss = loss_of() / self.slots
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()

    def resident(self) -> int:
        """Bytes of weights, gradients, optimizer state, head and batch, which are there all the time."""
        self.step(self.ours)
        state = [x for one in self.optimizer.state.values() for x in one.values()]
        kept = [self.head, self.embedded, self.inputs, self.features, self.counts, *self.draft.parameters(), *state]
        return sum(x.nbytes for x in kept + [p.grad for p in self.draft.parameters()])


def difference(sizes: tuple[int, ...], device: str, slots: int = 512) -> float:
    """Largest relative difference of the loss, or of a parameter's gradient, from the twin's, in float32."""
    problem, found = Problem(sizes, slots, device, torch.float32), []
    for loss_of in (problem.ours, problem.twin):
        problem.optimizer.zero_grad()
        (loss := loss_of()).backward()
        found.append([loss.detach()] + [p.grad.clone() for p in problem.draft.parameters()])
    return max(float((a - b).norm() / b.norm()) for a, b in zip(*found, strict=True))


def matmul_rate(device: str, size: int, dtype: torch.dtype) -> float:
    """FLOP/s of one large product."""
    a, b = torch.randn(2, size, size, device=device).to(dtype)
    return 2 * size**3 / seconds(lambda: a @ b, 9, device)


def figures(sizes: tuple[int, ...], slots: int, device: str, dtype: torch.dtype) -> dict[str, Any]:
    """Time and memory of our step and the twin's, and of ours the share of the matmul rate.

    Where the twin does not fit the device's memory, there are no figures of it.
    """
    problem = Problem(sizes, slots, device, dtype)
    steps = {"ours": partial(problem.step, problem.ours), "twin": partial(problem.step, problem.twin)}
    try:
        steps["twin"]()
    except torch.OutOfMemoryError:
        del steps["twin"]
        problem.optimizer.zero_grad()
        torch.cuda.empty_cache()
    compared = compare_steps(steps, PAIRS, device, problem.resident())
    flops = step_flops(problem.draft.config, vocabulary=sizes[-1], tokens=slots, slots=slots, context=(slots + 1) / 2)
    rate, speed = matmul_rate(device, 2048 if device == "cpu" else 8192, dtype), slots / compared["seconds"]["ours"]
    return {
        "sizes": dict(zip(SIZES, sizes, strict=True)),
        "slots": slots,
        "depth": DEPTH,
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
    results = {"dtype": dtype, "max_relative_gradient_difference": difference(sizes, device)}
    results |= figures(sizes, options.slots, device, getattr(torch, dtype))
    show(results)
    write("runs/bench/train.json", results, device)


if __name__ == "__main__":
    main()
