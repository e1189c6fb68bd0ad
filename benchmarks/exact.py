"""Which drafted answers have plain decoding's tokens, all of them: `python -m benchmarks.exact`.

Every draft with every tree, greedy and drawn, in bfloat16 where this machine multiplies it, and in float32; the speed
is that of this run, × plain decoding. `--inexact` shows the same without `exact`.
"""

import argparse
import time
from collections.abc import Callable

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
    "60 nodes + 10 looked up": (TreePlan(nodes=60, lookup=10), "fixed"),
    "8 nodes": (TreePlan(nodes=8), "fixed"),
    "auto": (TreePlan(lookup=10), "auto"),
}


def answers(
    decoder: Decoder, prompts: list[list[int]], tokens: int, temperature: float
) -> tuple[list[list[int]], float]:
    """Decode each prompt alone: the answers, and the seconds of all."""
    found, began = [], time.perf_counter()
    for seed, prompt in enumerate(prompts):
        generator = torch.Generator().manual_seed(seed)
        found.append(decoder.decode([prompt], tokens, None, Sampling(temperature), generator)[0].tokens)
    return found, time.perf_counter() - began


def main(arguments: list[str] | None = None, say: Callable[[str], None] = tqdm.write) -> int:
    """Print a line per dtype, temperature, draft and tree; return how many answers differ."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="embedded")
    parser.add_argument("--drafts", nargs="+", default=DRAFTS)
    parser.add_argument("--dtypes", nargs="+", default=sorted({choose_dtype("auto", "cpu"), "float32"}))
    parser.add_argument("--prompts", type=int, default=60)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--inexact", action="store_true")
    given = parser.parse_args(arguments)
    questions, different = (read_suites() * given.prompts)[: given.prompts], 0
    for dtype in given.dtypes:
        target = Target.load(given.target, dtype, exact=not given.inexact)
        prompts = [question.first_prompt(target.chat) for question in questions]
        plain = Autoregressive(target)
        for temperature in (0.0, 1.0):
            expected, seconds = answers(plain, prompts, given.tokens, temperature)
            for draft in given.drafts:
                for name, (plan, tree) in TREES.items():
                    engine = Speculative.from_draft(target, load_draft(draft), plan, tree)
                    found, taken = answers(engine, prompts, given.tokens, temperature)
                    equal = sum(ours == theirs for ours, theirs in zip(found, expected, strict=True))
                    different += len(prompts) - equal
                    say(
                        f"{dtype}, T {temperature:g}, {draft}, {name}: {equal} of {len(prompts)} answers have plain "
                        f"decoding's tokens; {seconds / taken:.2f} × its speed"
                    )
    return different


if __name__ == "__main__":
    raise SystemExit(min(main(), 1))
