"""What a round costs beside its parts and beside a naive one: each pair timed in turn, in one process.

Drafts are random: what they say changes how many rounds a text takes, not how long a round does.
"""

from collections.abc import Iterator
from statistics import median
from typing import Any
from unittest.mock import Mock, patch

import torch

from benchmarks.measure import once
from benchmarks.naive_round import NaiveRounds
from benchmarks.random_target import random_draft
from poss_lightning.clock import Clock
from poss_lightning.decoding.decoder import Progress, Request
from poss_lightning.decoding.engine import Speculative
from poss_lightning.decoding.trees import ancestor_mask, rerank
from poss_lightning.draft.specialists import DraftConfig, Specialists
from poss_lightning.target.graphs import Graphs
from poss_lightning.target.model import Target

QUESTION = "Why is the sky blue, and why is the evening sky red? Explain it to a child of ten."
UNCOUNTED = 2  # rounds at the start


class Parts:
    """The heavy work of a round, piece by piece, to be done again and again on the caches as the last round left them.

    Its inputs are those of one real tree. What it writes lies behind the verified slots, and the next round overwrites
    it. On CUDA each piece is a graph, as a round is.
    """

    @torch.inference_mode()
    def __init__(self, engine: Speculative):
        self.target, self.cache, self.drafter = engine.target, engine.cache, engine.drafter
        drafter = self.drafter
        step, advance = Mock(wraps=drafter.step), Mock(wraps=drafter._next_frontier)
        with patch.multiple(drafter, step=step, _next_frontier=advance):
            self.tree = rerank(drafter.draft_tree(engine.fixed), engine.nodes)
        self.step_calls = [call.args for call in step.call_args_list]  # position and frontier
        self.frontier_calls = advance.call_args_list
        self.above = ancestor_mask(self.tree.parents, drafter.depth)  # (1, N, N)
        self.graphs = Graphs(self.target.device)

    @torch.inference_mode()
    def seconds(self, name: str) -> float:
        """Of one run of `steps`, `joined` or `verify`, alone."""
        slots = self.cache.slots
        self.drafter.slots.open(0)
        slots.open(self.tree.tokens.shape[1])
        self.positions = slots.lengths[:, None] + self.above.sum(-1) - 1
        self.mask = self.target.masks(slots.tree_mask(self.above), self.positions, slots.lengths, self.target.dtype)
        work = getattr(self, name)
        key = (name, slots.extent, self.drafter.slots.extent)
        if self.graphs.enabled and key not in self.graphs.captured:
            self.graphs.run_alone(key, work)
        return once(lambda: self.graphs.run_alone(key, work), self.target.device.type)

    def steps(self) -> None:
        """The K draft steps, from z on: attention, layer and head."""
        for arguments in self.step_calls:
            self.drafter.step(*arguments)

    def joined(self) -> None:
        """The K draft steps as in docs/METHOD.md, section 2: z is joined, and projected for its readers, first."""
        for arguments, call in zip(self.step_calls, [None, *self.frontier_calls], strict=True):
            if call:
                self.drafter._next_frontier(*call.args, **call.kwargs)
            self.drafter.step(*arguments)

    def verify(self) -> None:
        """The target's forward over the tree, its mask ready, and its head."""
        features = self.target.model.base_model(
            input_ids=self.tree.tokens,
            attention_mask=self.mask,
            position_ids=self.positions,
            past_key_values=self.cache,
            use_cache=True,
        ).last_hidden_state
        self.target.embed_head.logits(features)


def overhead(
    target: Target, allocation: tuple[int, ...], rounds: int = 24, depth: int = 6, nodes: int = 60, tree_width: int = 10
) -> dict[str, object]:
    """Seconds of a whole round over those of its draft steps and its verify forward, each alone; one round, then its
    parts in their order, again and again.

    `round_over_parts_from_z` leaves joining and projecting new slots out of the draft steps. Choosing children,
    building the tree and its masks, judging and committing are in neither.
    """
    engine = Speculative(
        target, random_draft(target, allocation, depth), depth=depth, nodes=nodes, tree_width=tree_width
    )
    text = _rounds(engine, rounds)
    for _ in range(1 + UNCOUNTED):
        next(text)
    parts, seen = Parts(engine), []
    for number in range(rounds + UNCOUNTED):
        names = ("steps", "verify", "joined", "verify")  # a draft follows a verification, as in a text
        seconds = [once(lambda: next(text), target.device.type), *(parts.seconds(name) for name in names)]
        if number >= UNCOUNTED:
            seen.append(seconds)
    whole, steps, verify, joined, again = zip(*seen, strict=True)
    return {
        "round_ms": 1000 * median(whole),
        "draft_steps_ms": 1000 * median(joined),
        "draft_steps_from_z_ms": 1000 * median(steps),
        "verify_ms": 1000 * median(verify + again),
        "round_over_parts": spread([w / (j + v) for w, j, v in zip(whole, joined, again, strict=True)]),
        "round_over_parts_from_z": spread([w / (s + v) for w, s, v in zip(whole, steps, verify, strict=True)]),
    }


def against_naive(
    target: Target,
    allocation: tuple[int, ...] = (1,) * 6,
    rounds: int = 24,
    depth: int = 6,
    nodes: int = 60,
    tree_width: int = 10,
) -> dict[str, object]:
    """Seconds of a naive round over those of ours: same draft, trees and text."""
    draft = random_draft(target, allocation, depth)
    sizes: dict[str, Any] = {"depth": depth, "nodes": nodes, "tree_width": tree_width}
    ours, naive = Speculative(target, draft, **sizes), NaiveRounds(target, draft, **sizes)
    clock = Clock(target.device)
    text, said, pairs = _rounds(ours, rounds, clock), [], []
    said += next(text).tokens[0]
    naive.start(_prompt(target))
    work = {"ours": lambda: said.extend(next(text).tokens[0]), "naive": naive.round}
    for number in range(rounds + UNCOUNTED):
        order = ("ours", "naive") if number % 2 else ("naive", "ours")
        seconds = {name: once(work[name], target.device.type) for name in order}
        if number >= UNCOUNTED:
            pairs.append(seconds)
    return {
        "round_ms": 1000 * median(pair["ours"] for pair in pairs),
        "naive_round_ms": 1000 * median(pair["naive"] for pair in pairs),
        "mean_ms_by_part": _by_part(clock, rounds + UNCOUNTED),
        "naive_mean_ms_by_part": _by_part(naive.clock, rounds + UNCOUNTED),
        "layer_rows_of_a_naive_round": naive.rows,
        "same_text": naive.text[-len(said) :] == said,  # in bfloat16 it may part where two tokens tie
        "round_ratio_vs_naive": spread([pair["naive"] / pair["ours"] for pair in pairs]),
    }


def costs(
    target: Target,
    drafts: dict[str, Specialists],
    rounds: int = 24,
    depth: int = 6,
    nodes: int = 60,
    tree_width: int = 10,
) -> dict[str, object]:
    """What each draft costs beside the first one: seconds a round, all drafts' rounds in turn, and memory.

    A draft whose round takes `round_ratio` times as long must bring that many times the tokens a round to break even.
    """
    texts = {}
    for name, draft in drafts.items():
        texts[name] = _rounds(Speculative(target, draft, depth=depth, nodes=nodes, tree_width=tree_width), rounds)
        for _ in range(1 + UNCOUNTED):
            next(texts[name])
    seen: list[dict[str, float]] = []
    for number in range(rounds):
        order = [*drafts][number % len(drafts) :] + [*drafts][: number % len(drafts)]
        seconds = {name: once(lambda text=texts[name]: next(text), target.device.type) for name in order}
        seen.append(seconds)
    first = next(iter(drafts))
    return {
        name: {
            "weights_MB": sum(weight.nbytes for weight in draft.parameters()) / 1e6,
            "cache_bytes_a_token": cache_bytes(draft.config, target.dtype),
            "round_ms": 1000 * median(seconds[name] for seconds in seen),
            "round_ratio": spread([seconds[name] / seconds[first] for seconds in seen]),
        }
        for name, draft in drafts.items()
    }


def cache_bytes(config: DraftConfig, dtype: torch.dtype) -> int:
    """Keys and values that a draft keeps of a token."""
    caches = 1 if config.kv == "shared" else len(config.allocation)
    return 2 * caches * config.target.kv_heads * config.target.head_dim * dtype.itemsize


def _by_part(clock: Clock, rounds: int) -> dict[str, float]:
    parts = {name: seconds for name, seconds in clock.total().items() if name not in ("prefill", "total")}
    return {name: 1000 * seconds / rounds for name, seconds in parts.items()}


def spread(values: list[float]) -> dict[str, float]:
    """Median, and the 10th and 90th percentile."""
    shares = torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64)
    low, middle, high = torch.tensor(values, dtype=torch.float64).quantile(shares).tolist()
    return {"median": middle, "low": low, "high": high}


def _prompt(target: Target) -> list[int]:
    return target.chat.prompt([{"role": "user", "content": QUESTION}])


def _rounds(engine: Speculative, count: int, clock: Clock | None = None) -> Iterator[Progress]:
    """The engine's own loop on a text with room for so many rounds and the uncounted ones."""
    limit = 1 + (count + 2 * UNCOUNTED) * (engine.drafter.depth + 1)
    prompt, clock = _prompt(engine.target), clock or Clock(engine.target.device)
    return engine.rounds(Request([prompt], limit, frozenset()), clock)
