"""The loop: draft, verify, judge, commit. The one object that holds caches while sequences are decoded."""

import copy
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

import torch

from poss_lightning.decoding.drafting import Drafter
from poss_lightning.decoding.trees import ancestors
from poss_lightning.decoding.verification import judge_greedy
from poss_lightning.draft.specialists import Specialists
from poss_lightning.target.generation import pad, prefill, until_stop
from poss_lightning.target.model import Target


@dataclass(frozen=True)
class Decoded:
    """One prompt's new tokens.

    Prefill gives one token and a round accepted + 1, so `len(tokens) == 1 + sum(a + 1 for a in accepted)`, or less
    where a stop token or the limit cut the last round: what the target took there beyond the limit tells of the draft
    all the same and is counted, what it took beyond a stop token is not.
    """

    tokens: list[int]  # up to and with the stop token
    accepted: list[int] = field(default_factory=list)  # drafted tokens that the target took, round by round
    seconds: dict[str, float] = field(default_factory=dict)  # by part; of the whole batch


class Decoder(Protocol):
    """Anything that continues prompts: the engine and its baselines."""

    def decode(self, prompts: list[list[int]], limit: int, stops: frozenset[int] | None = None) -> list[Decoded]:
        """New tokens of every prompt: up to and with the first of `stops` (None: the target's), `limit` at most."""
        ...


class Clock:
    """Seconds by part; waits for the device, so that each part pays for its own."""

    def __init__(self, device: torch.device):
        self.device, self.began = device, time.perf_counter()
        self.seconds: dict[str, float] = defaultdict(float)

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.seconds[name] += time.perf_counter() - start

    def total(self) -> dict[str, float]:
        return {**self.seconds, "total": time.perf_counter() - self.began}


def check_room(target: Target, prompts: list[list[int]], limit: int) -> list[int]:
    """How many new tokens each prompt may have: `limit`, or what the target's context leaves.

    Raises:
        ValueError: limit below 1, or a prompt that fills the context.
    """
    if limit < 1:
        raise ValueError(f"the limit of new tokens is {limit}; it must be at least 1")
    context, longest = target.spec.context, max(map(len, prompts), default=0)
    if longest >= context:
        raise ValueError(f"a prompt has {longest} tokens; {target.spec.name} reads {context}, the answer included")
    return [min(limit, context - len(prompt)) for prompt in prompts]


class Speculative:
    """Lossless speculative decoding: in exact arithmetic its tokens are those of greedy decoding.

    Args:
        target: the frozen model.
        draft: the specialists that propose; a copy of them is turned to the target's dtype and device.
        depth: draft positions K; None for the depth of the draft's allocation.
        nodes: nodes of a tree, root included.
        top_k: children tried a node; 1 drafts a chain.

    Raises:
        ValueError: the draft was trained for another target, or the tree cannot be.
    """

    def __init__(self, target: Target, draft: Specialists, depth: int | None = None, nodes: int = 60, top_k: int = 10):
        if difference := draft.config.target.difference(target.spec):
            raise ValueError(f"the draft was trained for another target: {difference}")
        draft = copy.deepcopy(draft).to(target.device, target.dtype).eval()
        self.target = target
        self.drafter = Drafter(
            draft, target.ends, sum(draft.config.allocation) if depth is None else depth, nodes, top_k
        )

    @torch.inference_mode()
    def decode(self, prompts: list[list[int]], limit: int, stops: frozenset[int] | None = None) -> list[Decoded]:
        """See `Decoder`."""
        stops = self.target.chat.stops if stops is None else stops
        limits = check_room(self.target, prompts, limit)
        clock = Clock(self.target.device)
        first = self._prefill(prompts, max(limits), clock)
        texts: list[list[int]] = [[token] for token in first]
        accepted: list[list[int]] = [[] for _ in prompts]
        while any(
            going := [len(text) < most and text[-1] not in stops for text, most in zip(texts, limits, strict=True)]
        ):
            emitted = self._round(going, clock)
            for row in (row for row, goes in enumerate(going) if goes):
                until = until_stop(emitted[row], stops)
                accepted[row].append(min(len(until), len(emitted[row]) - 1))
                texts[row] += until[: limits[row] - len(texts[row])]
        seconds = clock.total()
        return [Decoded(text, row, seconds) for text, row in zip(texts, accepted, strict=True)]

    def _prefill(self, prompts: list[list[int]], limit: int, clock: Clock) -> list[int]:
        """Read the prompts into both caches; the first token of each."""
        drafter, target = self.drafter, self.target
        reach = limit + 2 * (drafter.depth + 1)  # the last round may verify, and write, a path beyond the limit
        with clock.part("prefill"):
            self.cache, features, last = prefill(target, prompts, reach + drafter.tree_nodes)
            first = target.ends.logits(last).argmax(-1).tolist()
            joined = pad([[*prompt[1:], token] for prompt, token in zip(prompts, first, strict=True)], target.device)
            drafter.start(len(prompts), features.shape[1] + reach)
            drafter.read(joined, features, [len(prompt) for prompt in prompts])
        return first

    def _round(self, going: list[bool], clock: Clock) -> list[list[int]]:
        """One round: what every row emits. Rows not `going` stay where they are, and what they emit means nothing."""
        drafter, target = self.drafter, self.target
        with clock.part("draft"):
            tree = drafter.grow()
        with clock.part("verify"):
            above = ancestors(tree.parents, drafter.depth)
            features = target.features(tree.tokens, above, self.cache)  # (B, N, D)
            choice = target.ends.logits(features).max(-1).indices  # argmax, which is several times slower here
        with clock.part("commit"):
            verdict = judge_greedy(tree, above, choice, drafter.depth)
            rows = torch.cat([verdict.accepted[:, None], verdict.tokens], dim=1).tolist()  # the one synchronisation
            counts = [row[0] + 1 if goes else 0 for row, goes in zip(rows, going, strict=True)]
            self.cache.keep(verdict.path, counts)
            taken = features.gather(1, verdict.path[..., None].expand(-1, -1, features.shape[-1]))
            drafter.read(verdict.tokens, taken, counts)
        return [row[1 : row[0] + 2] for row in rows]
