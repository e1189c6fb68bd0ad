"""`make bench-decode`: what rounds cost, and how fast real answers are. Prints tables, writes runs/bench/decode.json.

overhead    a whole round over its verify forward and draft steps
naive       a naive round over ours
costs       a round's time and a draft's memory, by allocation, width and kind of cache
suites      tokens a second per suite, against generate, our own plain loop and prompt lookup
batch       the same for batches of prompts
vocabulary  the same by the size of the draft's vocabulary
llama       at the sizes of Llama-3-8B, beside the bandwidth floor (only with --device cuda)
"""

import argparse
import json
from collections.abc import Mapping

import torch

from benchmarks.floor import LLAMA_3_8B, round_times
from benchmarks.random_target import random_draft, random_target
from benchmarks.rounds import against_naive, costs, overhead
from benchmarks.speed import batch, suites, vocabularies
from poss_lightning.draft.specialists import Specialists
from poss_lightning.evaluation.provenance import provenance
from poss_lightning.evaluation.suites import Question, read_suites
from poss_lightning.files import atomic
from poss_lightning.target.model import Target

PARTS = ("overhead", "naive", "costs", "suites", "batch", "vocabulary", "llama")
ALLOCATIONS = ((6,), (2, 2, 2), (1,) * 6)
KINDS = {  # experiments/methods and size have the same, trained
    "[6]": {"allocation": (6,)},
    "[6] wide": {"allocation": (6,), "intermediate_size": 5632},  # of the embedded target: as many weights as [2, 2, 2]
    "[3, 3]": {"allocation": (3, 3)},
    "[2, 2, 2]": {"allocation": (2, 2, 2)},
    "[2, 2, 2] shared": {"allocation": (2, 2, 2), "kv": "shared"},
    "[1] * 6": {"allocation": (1,) * 6},
}
VOCABULARY = 8192  # of the drafts whose costs are held against each other
BATCHES = {"cpu": (8,), "cuda": (1, 4, 16)}


def measure(
    part: str, target: Target, draft: Specialists, questions: list[Question], max_new_tokens: int, rounds: int
) -> Mapping[str, object]:
    """The figures of one part."""
    device = target.device.type
    if part == "overhead":
        return {str(list(allocation)): overhead(target, allocation, rounds) for allocation in ALLOCATIONS}
    if part == "naive":
        return against_naive(target, rounds=rounds)
    if part == "costs":
        kept = list(range(min(VOCABULARY, target.spec.vocab_size)))
        drafts = {name: random_draft(target, vocabulary=kept, **kind) for name, kind in KINDS.items()}
        return costs(target, drafts, rounds)
    if part == "suites":
        return suites(target, draft, questions, max_new_tokens)
    if part == "batch":
        return {str(size): batch(target, draft, questions, size, max_new_tokens) for size in BATCHES[device]}
    if part == "vocabulary":
        return vocabularies(target, draft, questions, max_new_tokens)
    return round_times(random_target(LLAMA_3_8B, torch.bfloat16, device))


def show(figures: Mapping[str, object], indent: int = 2) -> None:
    """Print nested figures; those of one thing on one line where they are numbers."""
    for name, value in figures.items():
        if isinstance(value, dict) and any(isinstance(inner, dict) for inner in value.values()):
            print(f"{' ' * indent}{name}")
            show(value, indent + 2)
        elif isinstance(value, dict):
            print(f"{' ' * indent}{name:<32}" + "  ".join(f"{key} {_number(inner)}" for key, inner in value.items()))
        else:
            print(f"{' ' * indent}{name:<32}{_number(value)}")


def _number(value: object) -> str:
    return format(value, ".4g") if isinstance(value, float) else str(value)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, help="all that the device can do by default")
    parser.add_argument("--device", default="cpu", choices=list(BATCHES))
    parser.add_argument("--draft", help="draft folder for suites, batch and vocabulary; a random one by default")
    parser.add_argument("--suites", nargs="+", help="files, folders or names of the project's own suites")
    parser.add_argument("--limit", type=int, help="questions of each suite")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=24, help="that are timed for overhead, naive and costs")
    parser.add_argument("--out", default="runs/bench/decode.json")
    options = parser.parse_args(arguments)
    if options.device == "cpu" and "llama" in (options.parts or ()):
        parser.error("the part llama needs --device cuda")
    parts = options.parts or [part for part in PARTS if part != "llama" or options.device == "cuda"]
    questions = read_suites(options.suites, options.limit)
    target = Target.load("embedded", device=options.device)
    draft = Specialists.from_pretrained(options.draft) if options.draft else random_draft(target, (1,) * 6)
    results: dict[str, object] = {
        **provenance(target.device),
        "dtype": target.dtype_name,
        "draft": options.draft or "random: it was never trained, so its speed-ups mean nothing",
        "allocation": draft.config.allocation,
        "max_new_tokens": options.max_new_tokens,
        "questions": len(questions),
    }
    print(f"{target.dtype_name} on {target.device}; draft: {results['draft']}")
    for part in parts:
        results[part] = measured = measure(part, target, draft, questions, options.max_new_tokens, options.rounds)
        print(f"\n{part}")
        show(measured)
        with atomic(options.out) as path:  # part by part: a killed run keeps what it has
            path.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
