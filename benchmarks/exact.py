"""Which drafted answers have plain decoding's tokens, all of them: `python -m benchmarks.exact`.

Every draft with every tree, greedy and drawn, in bfloat16 where this machine multiplies it, and in float32; the speed
is that of this run, × plain decoding. With `--cost` every prompt is also decoded without `exact`, in turn.
"""

import argparse
import time
from collections.abc import Callable
from itertools import product

import torch
from tqdm import tqdm

from poss_lightning.decoding.baselines import Autoregressive
from poss_lightning.decoding.decoder import Decoder
from poss_lightning.decoding.engine import Speculative
from poss_lightning.decoding.plans import TreePlan
from poss_lightning.draft.kinds import load_draft
from poss_lightning.evaluation.suites import read_suites
from poss_lightning.machine import choose_dtype
from poss_lightning.sampling import Sampling
from poss_lightning.target_model.model import Target

DRAFTS = "embedded-hass", "embedded-poss2"
TREES = {
    "60 nodes + 10 looked up": TreePlan(nodes=60, lookup=10, tree="fixed"),
    "8 nodes": TreePlan(nodes=8, tree="fixed"),
    "auto": TreePlan(lookup=10),
}


class Runs:
    """Decoders of one kind, with `exact` and perhaps without: their answers, and the seconds and tokens of each."""

    def __init__(self, decoders: list[Decoder], prompts: list[list[int]], limit: int, temperature: float):
        self.answers: list[list[list[int]]] = [[] for _ in decoders]
        self.seconds = [0.0] * len(decoders)
        for seed, prompt in enumerate(prompts):
            for i, decoder in enumerate(decoders):
                began, generator = time.perf_counter(), torch.Generator().manual_seed(seed)
                decoded = decoder.decode([prompt], limit, None, Sampling(temperature), generator)
                self.seconds[i] += time.perf_counter() - began
                self.answers[i].append(decoded[0].tokens)

    def rate(self, i: int) -> float:
        """Tokens per second."""
        return sum(map(len, self.answers[i])) / self.seconds[i]

    def equal(self, plain: "Runs", i: int) -> int:
        """Count the answers that are those of `plain`."""
        return sum(ours == expected for ours, expected in zip(self.answers[i], plain.answers[i], strict=True))


def main(arguments: list[str] | None = None, say: Callable[[str], None] = tqdm.write) -> int:
    """Print a line per dtype, temperature, draft and tree; return how many exact answers differ."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="embedded")
    parser.add_argument("--drafts", nargs="+", default=DRAFTS)
    parser.add_argument("--dtypes", nargs="+", default=sorted({choose_dtype("auto", "cpu"), "float32"}))
    parser.add_argument("--temperatures", nargs="+", type=float, default=(0.0, 1.0))
    parser.add_argument("--prompts", type=int, default=60)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--cost", action="store_true")
    given = parser.parse_args(arguments)
    questions, different = (read_suites() * given.prompts)[: given.prompts], 0
    for dtype in given.dtypes:
        targets = [Target.load(given.target, dtype, exact=exact) for exact in (True, False)[: 1 + given.cost]]
        prompts = [question.first_prompt(targets[0].chat) for question in questions]
        for temperature in given.temperatures:
            plain = Runs([Autoregressive(target) for target in targets], prompts, given.tokens, temperature)
            rates = " and ".join(f"{plain.rate(i):.1f}" for i in range(len(targets)))
            say(f"{dtype}, T {temperature:g}, plain: {rates} tokens/s" + given.cost * " without exact")
            for draft, (name, plan) in product(given.drafts, TREES.items()):
                engines: list[Decoder] = [Speculative.from_draft(target, load_draft(draft), plan) for target in targets]
                runs = Runs(engines, prompts, given.tokens, temperature)
                counts = [
                    f"{runs.equal(plain, i)} of {len(prompts)} answers have plain decoding's tokens, "
                    f"{runs.rate(i) / plain.rate(i):.2f} × its speed"
                    for i in range(len(targets))
                ]
                different += len(prompts) - runs.equal(plain, 0)
                say(f"{dtype}, T {temperature:g}, {draft}, {name}: " + "; without exact ".join(counts))
    return different


if __name__ == "__main__":
    raise SystemExit(min(main(), 1))
