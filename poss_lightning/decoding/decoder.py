"""What the engine and its baselines share: prompts in, tokens out step by step, seconds by part."""

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from threading import RLock
from types import MappingProxyType
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import nn

from poss_lightning.clock import Clock
from poss_lightning.decoding.trees import Tree
from poss_lightning.decoding.verification import Verdict
from poss_lightning.sampling import GREEDY, Sampling
from poss_lightning.target_model.model import Target

MODEL_LOCKS = WeakKeyDictionary[nn.Module, RLock]()


@dataclass(frozen=True)
class Decoded:
    """One prompt's new tokens.

    Prefill gives one token and a round accepted + 1, so `len(tokens) == 1 + sum(a + 1 for a in accepted)`, or less
    where the limit cut the last round: tokens accepted beyond the limit count, as they say how good the draft is. After
    a stop token nothing counts; a drafted stop token takes the place of its round's bonus token.
    """

    tokens: list[int]  # up to and with the stop token
    accepted: list[int] = field(default_factory=list)  # drafted tokens that the target accepted in each round
    seconds: dict[str, float] = field(default_factory=dict)  # by part; of the whole batch


class Request(NamedTuple):
    """What to decode."""

    prompts: list[list[int]]  # token ids, of any lengths
    limit: int  # new tokens of each, at most
    stops: frozenset[int]  # tokens that end a text
    sampling: Sampling = GREEDY  # how tokens are chosen
    generator: torch.Generator | None = None  # on the CPU, for drawing; None for torch's own


class Progress(NamedTuple):
    """What one step adds to each unfinished prompt, by number, and its tree if it had one.

    Tree and verdict may be overwritten by the next step.
    """

    tokens: dict[int, list[int]]
    accepted: Mapping[int, int] = MappingProxyType({})  # drafted tokens
    tree: Tree | None = None
    verdict: Verdict | None = None


class Decoder(ABC):
    """Continues prompts.

    Attributes:
        exact: whether its texts are those of our plain loop, bit for bit.
    """

    target: Target
    exact = False

    @abstractmethod
    def rounds(self, request: Request, clock: Clock) -> Iterator[Progress]:
        """Yield the new tokens of every prompt, step by step.

        Raises:
            ValueError: a limit below 1; a prompt that is empty, fills the target's context or has an unknown token.
        """

    def decode(
        self,
        prompts: list[list[int]],
        limit: int,
        stops: frozenset[int] | None = None,
        sampling: Sampling = GREEDY,
        generator: torch.Generator | None = None,
        watch: Callable[[Progress], None] | None = None,
    ) -> list[Decoded]:
        """Decode a `Request`, whose arguments and errors these are; `stops` are the target's by default.

        `watch` is called after each step; its seconds do not count. Threads with one model wait for each other.
        """
        stops = self.target.chat.stops if stops is None else stops
        texts: list[list[int]] = [[] for _ in prompts]
        accepted: list[list[int]] = [[] for _ in prompts]
        with MODEL_LOCKS.setdefault(self.target.model, RLock()):  # decoders have one set of caches, models one config
            clock = Clock(self.target.device)
            for step in self.rounds(Request(prompts, limit, stops, sampling, generator), clock):
                for prompt, tokens in step.tokens.items():
                    texts[prompt] += tokens
                for prompt, count in step.accepted.items():
                    accepted[prompt].append(count)
                if watch is not None:
                    with clock.excluded():
                        watch(step)
            seconds = clock.total()
        return [Decoded(text, counts, seconds) for text, counts in zip(texts, accepted, strict=True)]


def new_token_limits(target: Target, prompts: list[list[int]], limit: int) -> list[int]:
    """Return how many new tokens each prompt may have: `limit`, or what the context leaves. Raises as `rounds`."""
    if limit < 1:
        raise ValueError(f"the limit of new tokens is {limit}; it must be at least 1")
    if not prompts:
        raise ValueError("there are no prompts: give at least one")
    spec = target.spec
    for prompt in prompts:
        target.check_tokens(prompt, "a prompt")
    longest = max(map(len, prompts))
    if longest >= spec.context:
        raise ValueError(f"a prompt has {longest} tokens; {spec.name} reads {spec.context}, the answer included")
    if longest + limit > spec.context:
        warnings.warn(f"answers end after {spec.context} tokens in all, as {spec.name} reads no more", stacklevel=2)
    return [min(limit, spec.context - len(prompt)) for prompt in prompts]
