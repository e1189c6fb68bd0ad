"""Plain generation: one token per forward, for a batch of texts side by side; and where texts end."""

from collections.abc import Iterator

import torch
from torch import Tensor
from tqdm import tqdm

from poss_lightning.clock import Clock, Timer
from poss_lightning.sampling import GREEDY, Sampling, TokenSampler
from poss_lightning.target_model.cache import TreeCache, step_of
from poss_lightning.target_model.graphs import Graphs
from poss_lightning.target_model.masks import causal_ancestors
from poss_lightning.target_model.model import Target

PREFILL_BLOCK, TOKENS = 2048, 8192  # slots of a prompt that one forward reads, and of all prompts together
FREE = 0.25  # of the rows of a batch: so many are refilled together, or dropped


class OutputTracker:
    """Which of B texts are unfinished, and how many tokens each may still get.

    The one place that knows the rule of stop tokens: a text ends with its first one, and nothing after it counts.

    Args:
        limits: new tokens of each text, at most.
        stops: tokens that end a text.
    """

    def __init__(self, limits: list[int], stops: frozenset[int]):
        self.remaining, self.stops = list(limits), stops

    @property
    def active(self) -> list[int]:
        """Numbers of the unfinished texts."""
        return [text for text, remaining in enumerate(self.remaining) if remaining]

    def append(self, text: int, emitted: list[int]) -> tuple[list[int], int]:
        """Count emitted tokens: those that are kept, and how many were accepted, the limit aside."""
        until = until_stop(emitted, self.stops)
        fitting = until[: self.remaining[text]]
        self.remaining[text] = 0 if until[-1] in self.stops else self.remaining[text] - len(fitting)
        return fitting, len(until) - 1


def until_stop(tokens: list[int], stops: frozenset[int]) -> list[int]:
    """Return the tokens up to and including the first stop token."""
    end = next((i + 1 for i, token in enumerate(tokens) if token in stops), len(tokens))
    return tokens[:end]


def pad_right(prompts: list[list[int]], device: torch.device) -> Tensor:
    """Pad token lists on the right with token 0: (B, T).

    Raises:
        ValueError: there is no prompt, or an empty one.
    """
    if not prompts or not all(prompts):
        raise ValueError("a prompt is empty: every prompt needs at least one token")
    longest = max(map(len, prompts))
    return torch.tensor([prompt + [0] * (longest - len(prompt)) for prompt in prompts], device=device)


def prefill(
    target: Target,
    prompts: list[list[int]],
    room: int,
    cache: TreeCache | None = None,
    layers: tuple[int, ...] = (),
) -> tuple[TreeCache, Tensor, Tensor]:
    """Read the prompts into a cache with `room` more slots: `cache` where it fits, else a new one, somewhat larger.

    Long ones are read block by block, as a mask has a number for each pair of a block's slots and the slots so far.

    Returns:
        The cache, the input of a draft that reads `layers` (B, T, R), and the last real feature of each row (B, D).

    Raises:
        ValueError: a prompt is empty, or has a token that the target does not have.
    """
    for prompt in prompts:
        target.check_tokens(prompt, "a prompt")
    tokens = pad_right(prompts, target.device)
    capacity = tokens.shape[1] + room
    if cache is not None and cache.slots.fits(len(prompts), capacity):
        cache.clear()
    else:
        if cache is not None:
            cache.free()  # before the next takes more
        ahead = 2 * step_of(target.device)  # a text that is a little longer finds it large enough
        cache = target.new_cache(len(prompts), -(-capacity // ahead) * ahead)
    lengths, draft_inputs = torch.tensor([len(prompt) for prompt in prompts]), []
    last = torch.zeros(len(prompts), target.spec.hidden_size, dtype=target.dtype, device=target.device)  # (B, D)
    size = max(1, min(PREFILL_BLOCK, TOKENS // len(prompts)))
    for begin in range(0, tokens.shape[1], size):
        block = tokens[:, begin : begin + size]
        ancestors = causal_ancestors(block.shape[1], target.device)
        features, draft_input = target.forward_tree(block, ancestors, cache, layers=layers)
        draft_inputs.append(draft_input)
        counts = (lengths - begin).clamp(0, block.shape[1])
        cache.append(counts.tolist())
        rows = (counts > 0).nonzero()[:, 0]  # with tokens in this block
        last[rows] = features[rows, counts[rows] - 1]
    return cache, torch.cat(draft_inputs, dim=1), last


class PlainDecoder:
    """Decodes a batch by one token per forward; the next batch takes over its cache where it fits.

    On CUDA a step runs as a graph, as the engine's rounds do. Otherwise part of a speed-up over this loop would come
    from starting kernels faster.

    Args:
        target: the frozen model.
        graphs: whether steps run as CUDA graphs; None where the target can.
    """

    def __init__(self, target: Target, graphs: bool | None = None):
        self.target, self.cache = target, target.new_cache(0, 0)  # none, until texts are read
        self.sampler = TokenSampler(0, target.spec.vocab_size, target.device)
        self.graphs = Graphs(target.device, graphs, target.has_graphs)
        self.alone = causal_ancestors(1, target.device)
        self.request_id = 0  # of the batch in hand

    @torch.inference_mode()
    def generate(
        self,
        prompts: list[list[int]],
        limit: int | list[int],
        stops: frozenset[int],
        sampling: Sampling = GREEDY,
        generator: torch.Generator | None = None,
        rows: int | None = None,
    ) -> list[list[int]]:
        """Write each prompt's new tokens, up to and including a stop token; at most `limit`, of all or of each.

        Args:
            rows: texts side by side, at most; all by default. The others begin where a quarter of the rows is free.
        """
        texts: list[list[int]] = [[] for _ in prompts]
        limits = [limit] * len(prompts) if isinstance(limit, int) else limit
        with tqdm(desc="tokens", unit="token", total=sum(limits), leave=False, delay=2) as bar:
            for tokens in self.steps(prompts, limits, stops, sampling, generator, rows=rows):
                bar.update(len(tokens))
                for prompt, token in tokens.items():
                    texts[prompt].append(token)
        return texts

    def steps(
        self,
        prompts: list[list[int]],
        limits: list[int],
        stops: frozenset[int],
        sampling: Sampling = GREEDY,
        generator: torch.Generator | None = None,
        clock: Clock | None = None,
        rows: int | None = None,
    ) -> Iterator[dict[int, int]]:
        """Yield the next token of every unfinished prompt that has a row, by its number.

        The clock's parts are `prefill`, when prompts are read, and `verify` for every other step, a forward of the
        target.
        """
        clock, rows = clock or Clock(self.target.device), rows or len(prompts)
        idle = max(0, rows - len(prompts)) if self.graphs.enabled else 0  # a smaller batch would need other graphs
        prompts, outputs = [*prompts, *[[0]] * idle], OutputTracker([*limits, *[0] * idle], stops)
        texts, waiting = list(range(len(prompts)))[:rows], list(range(len(prompts)))[rows:]  # with a row, and without
        with clock.part("prefill"):
            self._prefill(prompts, rows, max(limits), sampling, generator)
        self.request_id = request_id = self.request_id + 1
        while True:
            emitted = dict(zip(texts, self.tokens.tolist(), strict=True))  # the one synchronisation
            step = {text: emitted[text] for text in texts if outputs.remaining[text]}
            for text, token in step.items():
                outputs.append(text, [token])
            yield step
            free = [row for row, text in enumerate(texts) if not outputs.remaining[text]]
            if len(free) == len(texts) and not waiting:
                return
            if self.request_id != request_id:
                raise RuntimeError("this loop has begun with other prompts: it decodes one batch at a time")
            if waiting and len(free) >= FREE * len(texts):
                begun, waiting = waiting[: len(free)], waiting[len(free) :]
                with clock.part("prefill"):
                    self._refill(refilled := free[: len(begun)], [prompts[text] for text in begun], begun)
                for row, text in zip(refilled, begun, strict=True):
                    texts[row] = text
                free = free[len(begun) :]
            if not waiting and not self.graphs.enabled and len(free) >= FREE * len(texts):  # they cost time: drop them
                busy = sorted(set(range(len(texts))).difference(free))
                self.cache.select(busy)
                self.sampler.select(busy)
                self.tokens, texts, free = self.tokens[busy], [texts[row] for row in busy], []
            if free:  # idle: else they would outgrow the cache
                self.cache.slots.put(free, [0] * len(free))
            self._step(clock)

    def _prefill(
        self, prompts: list[list[int]], rows: int, room: int, sampling: Sampling, generator: torch.Generator | None
    ) -> None:
        """Read the first `rows` prompts; their first tokens are `self.tokens` (B,)."""
        first = prompts[:rows]
        room += max(map(len, prompts), default=0) - max(map(len, first), default=0)
        cache, _, last = prefill(self.target, first, room, self.cache)
        if cache is not self.cache:  # what was captured reads other tensors
            self.graphs.clear()
            self.cache, self.tokens = cache, torch.zeros_like(cache.slots.lengths)  # (B,)
            self.sampler = TokenSampler(len(first), self.target.spec.vocab_size, self.target.device)
        self.sampler.begin(sampling, prompts, generator)
        self.tokens.copy_(self.sampler.next(self.target.logits(last), cache.slots.lengths))

    def _refill(self, rows: list[int], prompts: list[list[int]], texts: list[int]) -> None:
        """Give rows to other prompts, of these texts: the next step reads the last token of each once more."""
        cache, *_ = prefill(self.target, prompts, room=0)
        self.cache.put(rows, cache)
        self.cache.slots.put(rows, [len(prompt) - 1 for prompt in prompts])
        self.tokens[rows] = torch.tensor([prompt[-1] for prompt in prompts], device=self.tokens.device)
        self.sampler.put(rows, prompts, [self.sampler.seeds[text] for text in texts if self.sampler.seeds])

    def _step(self, clock: Clock) -> None:
        """Read `self.tokens`, and put the next ones in their place."""
        target, slots, tokens = self.target, self.cache.slots, self.tokens

        def forward(part: Timer) -> None:
            with part("verify"):
                _, logits = target.verify(tokens[:, None], self.alone, self.cache)
                slots.advance_device(1)
                tokens.copy_(self.sampler.next(logits[:, 0], slots.lengths))

        key = (slots.extent_for(1), self.sampler.kind)
        self.graphs.run(key, forward, [slots.lengths, tokens, self.sampler.in_text], clock)
        slots.advance_host([1] * len(tokens))
