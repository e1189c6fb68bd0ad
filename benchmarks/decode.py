"""`make bench-decode`: what rounds cost, and how fast real answers are. Prints tables, writes runs/bench/decode.json.

costs       a round's time and a draft's memory, by allocation, width and kind of cache
heads       verification with repeated keys and values over that in groups, by nodes and tokens before them
draws       a round that draws beside a greedy one, tree by tree
suites      tokens a second per suite: plain (our own loop and generate), lookup alone, the draft, and both
batch       the same for batches of prompts
exact       tokens drawn at temperature 1 in float32 by the engine and by plain decoding: how many differ; on demand

Drafts of costs are random: what they say changes how many rounds a text takes, not how long a round does.
"""

import argparse
import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from functools import partial
from itertools import product
from pathlib import Path
from statistics import mean, median
from typing import NamedTuple
from unittest.mock import patch

import torch
from tqdm import tqdm

from benchmarks.measure import once, spread
from benchmarks.random_target import random_draft
from poss_lightning.clock import Clock
from poss_lightning.decoding.autoregressive import Autoregressive, Generate
from poss_lightning.decoding.decoder import Decoder, Progress, Request
from poss_lightning.decoding.engine import Speculative
from poss_lightning.draft.specialists import DraftConfig, Specialists
from poss_lightning.evaluation.provenance import provenance
from poss_lightning.evaluation.suites import Question, read_suites
from poss_lightning.files import atomic
from poss_lightning.sampling import GREEDY, Sampling
from poss_lightning.target import model
from poss_lightning.target.model import Target, causal_ancestors

QUESTION = "Why is the sky blue, and why is the evening sky red? Explain it to a child of ten."
UNCOUNTED = 2  # rounds at the start
KINDS = {  # experiments/methods and size have the same, trained
    "[6]": {"allocation": (6,)},
    "[6] wide": {"allocation": (6,), "intermediate_size": 5632},  # of the embedded target: as many weights as [2, 2, 2]
    "[3, 3]": {"allocation": (3, 3)},
    "[2, 2, 2]": {"allocation": (2, 2, 2)},
    "[2, 2, 2] shared": {"allocation": (2, 2, 2), "kv": "shared"},
    "[1] * 6": {"allocation": (1,) * 6},
    "block of 6": {"allocation": (6,), "kind": "block"},
    "block of 6, 3 layers": {"allocation": (6,), "kind": "block", "block_layers": 3},
    "block of 12": {"allocation": (12,), "depth": 12, "kind": "block"},
}
VOCABULARY = 8192  # of the drafts whose costs are compared
TREES = {"chain": (6, 7, 1), "16 nodes, width 4": (6, 16, 4), "60 nodes, width 10": (6, 60, 10)}
BATCHES = {"cpu": (8,), "cuda": (1, 4, 16)}
PARTS = ("costs", "heads", "draws", "suites", "batch", "exact")
AUTO, FIXED, BOTH = "auto", "fixed", "auto_and_lookup"
BASELINES = GENERATE, PLAIN, LOOKUP = "generate", "plain", "lookup"


# --- rounds ---


def costs(target: Target, drafts: dict[str, Specialists], rounds: int, **tree: int) -> dict[str, object]:
    """What each draft costs beside the first one: seconds a round, all drafts' rounds in turn, and memory.

    A draft whose round takes `round_ratio` times as long must bring that many times the tokens a round to break even.
    """
    engines = {name: Speculative(target, draft, **tree) for name, draft in drafts.items()}
    times = in_turn({name: rounds_of(engine, rounds) for name, engine in engines.items()}, rounds, target.device.type)
    first = next(iter(drafts))
    return {
        name: {
            "weights_MB": sum(weight.nbytes for weight in draft.parameters()) / 1e6,
            "cache_bytes_a_token": cache_bytes(draft.config, target.dtype),
            "round_ms": 1000 * median(times[name]),
            "round_ratio": spread([a / b for a, b in zip(times[name], times[first], strict=True)]),
        }
        for name, draft in drafts.items()
    }


@torch.inference_mode()
def heads(target: Target, rounds: int) -> dict[str, object]:
    """Seconds of the target's forward over a tree as transformers does it over ours, in turn."""
    found = {}
    for length, nodes in product((300, 1500), (8, 16, 60)):
        cache = target.new_cache(1, length + nodes)
        text = torch.arange(length, device=target.device)[None] % target.spec.vocab_size
        target.tree_features(text, causal_ancestors(length, target.device), cache)
        cache.append([length])
        ours = partial(target.tree_features, text[:, :nodes], causal_ancestors(nodes, target.device), cache)
        ratios = []
        for number in range(UNCOUNTED + rounds):
            with patch.object(model, "grouped_heads", lambda config: nullcontext()):
                repeated = once(ours, target.device.type)
            ratios += [repeated / once(ours, target.device.type)] * (number >= UNCOUNTED)
        found[f"{nodes} nodes, {length} tokens"] = spread(ratios)
    return found


def draws(target: Target, draft: Specialists, rounds: int) -> dict[str, object]:
    """Seconds of a round that draws over those of a greedy one, in turn; both read as many slots."""
    sampling, found = Sampling(1.0), {}
    for name, tree in TREES.items():
        texts = {law: rounds_of(Speculative(target, draft, *tree), rounds, law) for law in (GREEDY, sampling)}
        times = in_turn(texts, rounds, target.device.type)
        ratios = [drawn / greedy for greedy, drawn in zip(times[GREEDY], times[sampling], strict=True)]
        found[name] = {"greedy_ms": 1000 * median(times[GREEDY]), "drawn_over_greedy": spread(ratios)}
    return found


def in_turn(texts: Mapping[object, Iterator[Progress]], rounds: int, device: str) -> dict[object, list[float]]:
    """Seconds of each round of every text, after those that are not counted, in an order that rotates."""
    for text in texts.values():
        for _ in range(1 + UNCOUNTED):
            next(text)
    names, times = list(texts), defaultdict(list)
    for number in range(rounds):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            times[name].append(once(lambda text=texts[name]: next(text), device))
    return times


def rounds_of(engine: Speculative, count: int, sampling: Sampling = GREEDY) -> Iterator[Progress]:
    """The engine's own loop on a text with room for so many rounds and the uncounted ones."""
    limit = 1 + (count + 2 * UNCOUNTED) * (engine.drafter.depth + 1)
    prompt = engine.target.chat.prompt([{"role": "user", "content": QUESTION}])
    generator = torch.Generator().manual_seed(0)
    return engine.rounds(Request([prompt], limit, frozenset(), sampling, generator), Clock(engine.target.device))


def cache_bytes(config: DraftConfig, dtype: torch.dtype) -> int:
    """Keys and values that a draft keeps of a token."""
    caches = 1 if config.kv == "shared" else config.layer_count
    return 2 * caches * config.target.kv_heads * config.target.head_dim * dtype.itemsize


# --- answers ---


class Run(NamedTuple):
    """What one method did with one batch of prompts."""

    tokens: int
    seconds: float  # prefill included
    accepted: list[int]  # of every round of every prompt

    @property
    def rate(self) -> float:
        """Tokens a second."""
        return self.tokens / self.seconds


def run(decoder: Decoder, prompts: list[list[int]], limit: int) -> Run:
    decoded = decoder.decode(prompts, limit)
    accepted = [count for one in decoded for count in one.accepted]
    return Run(sum(len(one.tokens) for one in decoded), decoded[0].seconds["total"], accepted)


def answers(methods: dict[str, Decoder], batches: list[list[list[int]]], limit: int) -> list[dict[str, Run]]:
    """Every batch of prompts by every method, in an order that rotates, after a warm-up on the first."""
    for decoder in methods.values():
        run(decoder, batches[0], min(limit, 16))
    names, runs = list(methods), []
    for number, prompts in enumerate(tqdm(batches, desc=", ".join(names), unit="batch", leave=False)):
        first = number % len(names)
        runs.append({name: run(methods[name], prompts, limit) for name in names[first:] + names[:first]})
    return runs


def figures(runs: list[dict[str, Run]], trees: tuple[str, ...], others: tuple[str, ...]) -> dict[str, object]:
    """Of each method its rate, and τ over rounds; and how many times faster drafting was, the median over prompts."""
    found: dict[str, object] = {}
    for name in runs[0]:
        own = [one[name] for one in runs]
        rate = {"tokens_per_second": sum(one.tokens for one in own) / sum(one.seconds for one in own)}
        accepted = [count for one in own for count in one.accepted]
        found[name] = rate | ({"tau": 1 + mean(accepted)} if accepted else {})
    for tree in trees:
        for other in others:
            found[f"{tree}_speedup_vs_{other}"] = median(one[tree].rate / one[other].rate for one in runs)
    return found


def first_turns(target: Target, questions: list[Question]) -> list[list[int]]:
    """What the target reads before it answers each question."""
    return [target.chat.prompt([{"role": "user", "content": question.turns[0]}]) for question in questions]


def suites(target: Target, draft: Specialists, questions: list[Question], limit: int) -> dict[str, object]:
    """Per suite, and over all: every method's figures."""
    methods: dict[str, Decoder] = {AUTO: Speculative(target, draft, tree="auto"), FIXED: Speculative(target, draft)}
    methods[BOTH] = Speculative(target, draft, tree="auto", lookup=10)
    methods |= {PLAIN: Autoregressive(target), GENERATE: Generate(target), LOOKUP: Speculative(target, None, lookup=10)}
    runs, grouped = answers(methods, [[prompt] for prompt in first_turns(target, questions)], limit), defaultdict(list)
    for question, one in zip(questions, runs, strict=True):
        grouped[question.suite].append(one)
    return {suite: figures(own, (AUTO, FIXED, BOTH), BASELINES) for suite, own in (grouped | {"all": runs}).items()}


def batch(target: Target, draft: Specialists, questions: list[Question], size: int, limit: int) -> dict[str, object]:
    """`size` prompts side by side, those of a suite far apart, against batched plain decoding."""
    methods = {AUTO: Speculative(target, draft, tree="auto"), FIXED: Speculative(target, draft)}
    prompts = first_turns(target, questions[:: max(1, len(questions) // size)])[:size]
    return figures(answers(methods | {PLAIN: Autoregressive(target)}, [prompts] * 3, limit), (AUTO, FIXED), (PLAIN,))


def exact(questions: list[Question], limit: int, tokens: int = 100_000, rows: int = 30) -> dict[str, object]:
    """Tokens that are drawn, and texts that the engine draws otherwise: by chains, in every fourth batch by trees.

    It goes on after the batches that an earlier call has counted (`runs/bench/exact.json`).
    """
    target, sampling = Target.load("embedded", "float32", "cpu"), Sampling(1.0)
    draft, plain = Specialists.from_pretrained("embedded-hass"), Autoregressive(target)
    chain, tree = (Speculative(target, draft, *TREES[name]) for name in list(TREES)[:2])
    prompts, file, settings = (
        first_turns(target, questions),
        Path("runs/bench/exact.json"),
        [limit, rows, len(questions)],
    )
    found = {"settings": settings, "batches": 0, "tokens": 0, "texts": 0, "texts_that_differ": 0}
    if file.is_file() and (earlier := json.loads(file.read_text()))["settings"] == settings:
        found = earlier
    with tqdm(total=tokens, initial=found["tokens"], desc="exact", unit="token") as bar:
        while bar.n < tokens:
            batches = found["batches"]
            some, engine = (prompts * 2)[batches * rows % len(prompts) :][:rows], tree if batches % 4 == 3 else chain
            seeds = [torch.Generator().manual_seed(batches) for _ in range(2)]
            pair = (
                one.decode(some, limit, None, sampling, seed) for one, seed in zip((plain, engine), seeds, strict=True)
            )
            for own, other in zip(*pair, strict=True):
                found["texts"] += 1
                found["texts_that_differ"] += own.tokens != other.tokens
                bar.update(len(own.tokens))
            found |= {"batches": batches + 1, "tokens": bar.n}
            bar.set_postfix(texts=found["texts"], differ=found["texts_that_differ"])
            with atomic(file) as path:
                path.write_text(json.dumps(found))
    return found


# --- the command ---


def measured(
    target: Target, draft: Specialists, questions: list[Question], limit: int, rounds: int
) -> dict[str, Callable[[], Mapping[str, object]]]:
    """What gives the figures of each part."""

    def of_kinds() -> dict[str, object]:
        kept = list(range(min(VOCABULARY, target.spec.vocab_size)))
        return costs(target, {n: random_draft(target, vocabulary=kept, **kind) for n, kind in KINDS.items()}, rounds)

    return {
        "costs": of_kinds,
        "heads": lambda: heads(target, rounds),
        "draws": lambda: draws(target, draft, rounds),
        "suites": lambda: suites(target, draft, questions, limit),
        "batch": lambda: {str(n): batch(target, draft, questions, n, limit) for n in BATCHES[target.device.type]},
        "exact": lambda: exact(questions, limit),
    }


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
    parser.add_argument("--parts", nargs="+", choices=PARTS, help="by default all but exact")
    parser.add_argument("--device", default="cpu", choices=list(BATCHES))
    parser.add_argument("--draft", default="embedded-hass", help="of draws, suites and batch")
    parser.add_argument("--suites", nargs="+", help="files, folders or names of the project's own suites")
    parser.add_argument("--limit", type=int, help="questions of each suite")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=24, help="that are timed")
    parser.add_argument("--out", default="runs/bench/decode.json")
    options = parser.parse_args(arguments)
    questions, target = read_suites(options.suites, options.limit), Target.load("embedded", device=options.device)
    draft = Specialists.from_pretrained(options.draft)
    results: dict[str, object] = {
        **provenance(target.device),
        **{name: getattr(options, name) for name in ("draft", "max_new_tokens", "rounds")},
        "dtype": target.dtype_name,
        "questions": len(questions),
    }
    parts = measured(target, draft, questions, options.max_new_tokens, options.rounds)
    for part in options.parts or PARTS[:-1]:
        results[part] = found = parts[part]()
        print(f"\n{part}")
        show(found)
        with atomic(options.out) as path:  # part by part: a killed run keeps what it has
            path.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
