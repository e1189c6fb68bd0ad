"""`make bench-decode`: how fast answers are, and what rounds cost. Prints figures, writes runs/bench/decode.json.

speed       tokens per second of answers one at a time: transformers' `generate`, its prompt lookup, our plain loop, and
            the draft with and without lookup, over `generate` and plain
costs       a round's time and a draft's memory, by allocation, width and kind of cache
context     a draft step and verification beside a plain step, by tokens of the text
exactness   a step over one that is not exact, by new tokens: of the target, and of two layers of an 8B target's width
batch       tokens per second of batches of prompts, by plain decoding and by the draft

Drafts of costs are random: what they say changes how many rounds a text takes, not how long a round takes.
"""

import argparse
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import product
from statistics import mean, median
from typing import Any

import numpy as np
import torch

from benchmarks.measure import in_turn, ratios, show, spread, write
from benchmarks.random_target import llama, random_draft, random_target
from poss_lightning.clock import Clock
from poss_lightning.decoding.baselines import Autoregressive, Generate
from poss_lightning.decoding.decoder import Decoder, Progress, Request
from poss_lightning.decoding.engine import Speculative
from poss_lightning.decoding.lookup import DEFAULT_LOOKUP
from poss_lightning.decoding.plans import TreePlan
from poss_lightning.draft.config import DraftConfig
from poss_lightning.draft.kinds import load_draft
from poss_lightning.draft.specialists import DraftModel
from poss_lightning.evaluation.suites import Question, read_suites
from poss_lightning.reports.statistics import Jackknife, interval, leave_one_out, mean_over
from poss_lightning.target_model.masks import causal_ancestors
from poss_lightning.target_model.model import Target
from tests.support import naive
from tests.support.trees import random_tree

QUESTION = "Why is the sky blue, and why is the evening sky red? Explain it to a child of ten."
WARMUP = 3  # steps that are not counted: the prefill and two rounds
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
LENGTHS = (100, 1000, 4000)  # of texts
TEXTS, TREES = (100, 250, 450), (1, 8, 60)  # tokens before a step, and new tokens, for `exactness`
BATCHES = {"cpu": (8,), "cuda": (1, 4, 16)}
FIXED = TreePlan(tree="fixed")
PARTS = ("speed", "costs", "context", "exactness", "batch")
WIDE = llama(4096, 14336, 32, 8, 128, 32000, layers=2)  # as Llama-3.1-8B, with a smaller vocabulary


def speed(target: Target, draft: DraftModel, questions: list[Question], limit: int) -> dict[str, Any]:
    """Tokens per second of each method, and how many times faster than `generate` and plain; with 95 % intervals."""
    both = TreePlan(lookup=DEFAULT_LOOKUP)
    methods = {
        "generate": Generate(target),
        "generate, prompt lookup": Generate(target, DEFAULT_LOOKUP),
        "plain": Autoregressive(target),
        "lookup": Speculative.from_draft(target, None, replace(both, tree="fixed")),
        "draft": Speculative.from_draft(target, draft),
        "draft and lookup": Speculative.from_draft(target, draft, both),
    }
    prompts, answers = [question.first_prompt(target.chat) for question in questions], {name: [] for name in methods}
    for prompt in [prompts[0], *prompts]:  # the first one once more, as a warm-up
        for name, method in methods.items():
            answers[name] += method.decode([prompt], limit)
    every = leave_one_out(len(prompts))
    rates, found = {}, {}
    for name, own in answers.items():
        tokens, seconds = np.array([(len(one.tokens), one.seconds["total"]) for one in own[1:]]).T  # (Q,) each
        rates[name] = Jackknife((every @ tokens) / (every @ seconds), tokens > 0)
    for name, rate in rates.items():
        found[name] = {"tokens_per_second": rate.values[0]} | {
            f"over {base}": interval(mean_over([rate], [rates[base]], logs=True), logs=True).with_interval()
            for base in ("generate", "plain")
            if name != base
        }
    return found


def costs(target: Target, drafts: dict[str, DraftModel], rounds: int, plan: TreePlan = FIXED) -> dict[str, Any]:
    """What each draft costs beside the first one: time of a round, all drafts' rounds in turn, and memory.

    A draft whose round takes `round_ratio` times as long needs that many times the tokens per round to break even.
    """
    engines = {name: Speculative.from_draft(target, draft, plan) for name, draft in drafts.items()}
    texts = {name: partial(next, rounds_of(engine, rounds)) for name, engine in engines.items()}
    times = in_turn(texts, rounds, target.device.type, WARMUP)
    first = next(iter(drafts))
    return {
        name: {
            "weights_MB": sum(weight.nbytes for weight in draft.parameters()) / 1e6,
            "cache_bytes_a_token": cache_bytes(draft.config, target.dtype),
            "round_ms": 1000 * median(times[name]),
            "round_ratio": spread(ratios(times, name, first)),
        }
        for name, draft in drafts.items()
    }


def context(target: Target, draft: DraftModel) -> dict[str, Any]:
    """What `tree: auto` measures on texts of several lengths; all but the plain step in plain steps."""
    found = {}
    for length in LENGTHS:
        engine = Speculative.from_draft(target, draft)
        engine.decode([(torch.arange(length) % target.spec.vocab_size).tolist()], 2, frozenset())
        (costs,) = engine.auto.measured.values()
        verify = {f"{n}_nodes": float(costs.round_seconds(0, n)) / costs.verify[1] for n in (4, 16, 60)}
        plain = {"plain_ms": 1000 * costs.verify[1], "draft_step": costs.draft_step / costs.verify[1]}
        found[f"{length} tokens"] = plain | verify
    return found


@torch.inference_mode()
def exactness(target: Target, repeats: int) -> dict[str, Any]:
    """Times of verifying trees of several sizes, 1 for a plain step, over those of the same target if not exact."""
    wide, found = random_target(WIDE, target.dtype, str(target.device)), {}
    for name, model in {"target": target.model, "layers of 8B": wide.model}.items():
        both = {exact: Target(model, target.tokenizer, name, exact=exact) for exact in (None, False)}
        for length, nodes in product(TEXTS, TREES):
            tokens = torch.arange(max(length, nodes), device=target.device)[None] % wide.spec.vocab_size
            works = {}
            for exact, each in both.items():
                cache = each.new_cache(1, length + nodes)
                each.forward_tree(tokens[:, :length], causal_ancestors(length, each.device), cache)
                cache.append([length])
                ancestors = torch.tensor([naive.ancestor_mask(random_tree(0, nodes)[1])], device=each.device)
                works[str(exact)] = partial(each.verify, tokens[:, :nodes], ancestors, cache)
            times = in_turn(works, repeats, target.device.type, WARMUP)
            ratio = spread(ratios(times, "None", "False"))
            found[f"{name}, {length} tokens, {nodes} new"] = {"ms": 1000 * median(times["None"])} | ratio
    return found


def rounds_of(engine: Speculative, count: int) -> Iterator[Progress]:
    """The engine's own loop on a text with room for `count` rounds and the warm-up."""
    limit = 1 + (count + WARMUP + 1) * (engine.drafter.depth + 1)
    prompt = engine.target.chat.prompt([{"role": "user", "content": QUESTION}])
    return engine.rounds(Request([prompt], limit, frozenset()), Clock(engine.target.device))


def cache_bytes(config: DraftConfig, dtype: torch.dtype) -> int:
    """Bytes of the keys and values of one token in a draft's caches."""
    caches = 1 if config.kv == "shared" else config.layer_count
    return 2 * caches * config.target.kv_heads * config.target.head_dim * dtype.itemsize


def batch(target: Target, draft: DraftModel, questions: list[Question], limit: int) -> dict[str, Any]:
    """By size of batch: rate and τ of prompts side by side, and how many times faster than batched plain decoding."""
    methods: dict[str, Decoder] = {"plain": Autoregressive(target)}
    methods |= {tree: Speculative.from_draft(target, draft, TreePlan(tree=tree)) for tree in ("auto", "fixed")}
    found: dict[str, Any] = {}
    for size in BATCHES[target.device.type]:
        chosen = questions[:: max(1, len(questions) // size)][:size]  # of different suites
        prompts, own = [question.first_prompt(target.chat) for question in chosen], {}
        texts = {name: decoder.decode(prompts, limit) for name, decoder in methods.items()}
        works = {name: partial(decoder.decode, prompts, limit) for name, decoder in methods.items()}
        times = in_turn(works, 3, target.device.type)
        rates = {name: sum(len(one.tokens) for one in texts[name]) / median(times[name]) for name in methods}
        for name, rate in rates.items():
            own[name] = {"tokens_per_second": rate, "speed_up": rate / rates["plain"]}
            if accepted := [count for one in texts[name] for count in one.accepted]:
                own[name]["tau"] = 1 + mean(accepted)
        found[str(size)] = own
    return found


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, help="all by default")
    parser.add_argument("--device", default="cpu", choices=list(BATCHES))
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--draft", default="embedded-hass", help="for speed, context and batch")
    parser.add_argument("--suites", nargs="+", help="files, folders or names of the project's own suites")
    parser.add_argument("--limit", type=int, help="questions of each suite")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=24, help="timed rounds")
    parser.add_argument("--out", default="runs/bench/decode.json")
    options = parser.parse_args(arguments)
    questions, target = (
        read_suites(options.suites, options.limit),
        Target.load("embedded", options.dtype, options.device),
    )
    draft, rounds = load_draft(options.draft), options.rounds
    kept = list(range(min(VOCABULARY, target.spec.vocab_size)))
    kinds = {name: random_draft(target, vocabulary=kept, **kind) for name, kind in KINDS.items()}
    works = (
        partial(speed, target, draft, questions, options.max_new_tokens),
        partial(costs, target, kinds, rounds),
        partial(context, target, draft),
        partial(exactness, target, rounds),
        partial(batch, target, draft, questions, options.max_new_tokens),
    )
    parts = dict(zip(PARTS, works, strict=True))
    results: dict[str, Any] = {name: getattr(options, name) for name in ("draft", "max_new_tokens", "rounds")}
    results |= {"dtype": target.dtype_name, "questions": len(questions)}
    for part in options.parts or parts:
        results[part] = parts[part]()
        print(f"\n{part}")
        show(results[part])
        write(options.out, results, target.device)  # part by part: a killed run keeps what it has


if __name__ == "__main__":
    main()
