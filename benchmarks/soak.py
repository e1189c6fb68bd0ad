"""Random prompts, batches, sampling, trees and drafts, compared with plain decoding: `python -m benchmarks.soak`.

Every case follows from its seed, so `--seed N` begins with the case that failed (trees of the kind `auto` also depend
on the clock). Every token must be plain decoding's, greedy or drawn, in float32 and bfloat16. Memory must not grow.
"""

import argparse
import ctypes
import gc
import os
import sys
import time
from collections import Counter
from dataclasses import asdict, dataclass
from itertools import chain, count
from random import Random

import torch
from tqdm import tqdm

from benchmarks.random_target import random_draft
from poss_lightning.decoding.baselines import Autoregressive
from poss_lightning.decoding.engine import Speculative
from poss_lightning.decoding.plans import TreePlan
from poss_lightning.evaluation.suites import read_suites
from poss_lightning.sampling import Sampling
from poss_lightning.target_model.model import Target
from tests.support.tiny import tiny_model, tiny_tokenizer

GROWTH = 0.05  # allowed, of resident memory after the first fifth of the time
TINY = [(weights, dtype) for weights in range(2) for dtype in (torch.float32, torch.bfloat16)]
EVERY = 20  # cases, of which one is the embedded target's


@dataclass(frozen=True)
class Case:
    """What is decoded, and how."""

    seed: int
    prompts: list[list[int]]
    limit: int
    stops: frozenset[int]
    sampling: Sampling
    allocation: tuple[int, ...]
    proposals: int | None  # size of the draft's vocabulary, the answers' most common tokens: else few are accepted
    plan: TreePlan

    def generator(self) -> torch.Generator:
        """A new generator with the seed."""
        return torch.Generator().manual_seed(self.seed)


class Mismatch(AssertionError):
    """A case whose tokens are not plain decoding's."""


def make_case(seed: int, target: Target, sentences: list[str], rows: int, longest: int, limit: int) -> Case:
    """The case of a seed: up to `rows` prompts of 1 to `longest` tokens, answers of up to `limit`."""
    random = Random(seed)
    size = target.spec.vocab_size
    prompts = []
    for _ in range(random.randint(1, rows)):
        length = random.randint(1, longest)
        words = target.tokenizer(random.choice(sentences)).input_ids[:length]
        prompts.append(words if random.random() < 0.5 else [random.randrange(size) for _ in range(length)])
    depth, width = random.randint(1, 8), random.choice([1, 1, 2, 4, 10])
    return Case(
        seed,
        prompts,
        limit=random.randint(1, limit),
        stops=frozenset(random.sample(range(size), random.choice([0, 1, 8]))),
        sampling=Sampling(
            temperature=random.choice([0.0, 0.5, 1.0]),
            top_k=random.choice([0, 5, 50]),
            top_p=random.choice([1.0, 0.9, 0.5]),
            min_p=random.choice([0.0, 0.0, 0.1]),
            repetition_penalty=random.choice([1.0, 1.0, 1.3]),
        ),
        allocation=random.choice([(6,), (1,) * 6, (2, 2, 2), (3, 3), (1, 3), (1,), (4, 1)]),
        proposals=random.choice([None, 4, 12, 40]),
        plan=TreePlan(
            depth,
            nodes=depth + 1 + (0 if width == 1 else random.randint(0, 60)),
            tree_width=width,
            lookup=random.choice([0, 0, 6]),
            tree=random.choice(["fixed", "fixed", "auto"]),
        ),
    )


def check(case: Case, target: Target) -> Counter[str]:
    """Decode a case, then in reverse order, then half of it, with one engine: no text may affect the next.

    Returns:
        Numbers of tokens and of accepted tokens.

    Raises:
        Mismatch: the tokens are not plain decoding's.
    """
    engine, found = None, Counter()
    for prompts in (case.prompts, case.prompts[::-1], case.prompts[: 1 + len(case.prompts) // 2]):
        given = prompts, case.limit, case.stops, case.sampling
        plain = Autoregressive(target).decode(*given, case.generator())
        engine = engine or _engine(case, target, [row.tokens for row in plain])
        ours = engine.decode(*given, case.generator())
        for row, (a, b) in enumerate(zip(ours, plain, strict=True)):
            found.update(tokens=len(b.tokens), accepted=sum(a.accepted))
            if a.tokens != b.tokens:
                raise Mismatch(f"row {row} of {len(prompts)}: {a.tokens}, plainly {b.tokens}")
    return found


def _engine(case: Case, target: Target, answers: list[list[int]]) -> Speculative:
    common = [token for token, _ in Counter(chain(*answers)).most_common(case.proposals)]
    vocabulary = None if case.proposals is None else sorted(common)
    draft = random_draft(target, case.allocation, depth=case.plan.depth, seed=case.seed, vocabulary=vocabulary)
    return Speculative.from_draft(target, draft, case.plan)


def soak(minutes: float, seed: int = 0, embedded: Target | None = None) -> dict[str, float]:
    """Check one case after the other until the time is over; what was counted, and how memory grew.

    Raises:
        Mismatch: names the case.
    """
    sentences = [question.turns[0] for question in read_suites()]
    tiny = [Target(tiny_model(weights).to(dtype), tiny_tokenizer(), "tiny", exact=True) for weights, dtype in TINY]
    found, began, warm = Counter(cases=0, tokens=0, accepted=0), time.monotonic(), None
    with tqdm(total=round(60 * minutes), unit="s", desc="soak") as bar:
        for number in count(seed):
            elapsed = time.monotonic() - began
            bar.update(min(round(elapsed), bar.total) - bar.n)
            bar.set_postfix(found, refresh=False)
            if warm is None and elapsed > 12 * minutes:  # a fifth, in seconds
                warm = resident()
            if elapsed >= 60 * minutes:
                break
            is_embedded = embedded is not None and number % EVERY == EVERY - 1
            target = embedded if is_embedded else tiny[number % len(tiny)]
            case = make_case(number, target, sentences, *((2, 60, 8) if is_embedded else (6, 300, 60)))
            try:
                found.update(check(case, target), cases=1)
            except Exception as error:
                raise Mismatch(f"--seed {number}, {target.spec.name}: {error}\n{asdict(case)}") from error
    end = resident()
    return {**found, "resident_start": warm or end, "resident_end": end, "growth": end / (warm or end) - 1}


def resident() -> int:
    """Bytes of memory that this process holds, without what the C library (glibc) keeps of what was freed."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--seed", type=int, default=0, help="the first case")
    options = parser.parse_args(arguments)
    found = soak(options.minutes, options.seed, Target.load("embedded", "auto", "cpu", exact=True))
    for name, value in found.items():
        print(f"  {name:<18} {value:,.4g}" if isinstance(value, float) else f"  {name:<18} {value:,}")
    if found["growth"] > GROWTH:
        sys.exit(f"memory grew by {found['growth']:.1%} after the first fifth; {GROWTH:.0%} are allowed")


if __name__ == "__main__":
    main()
