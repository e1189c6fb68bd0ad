"""Plain autoregressive generation: one token a forward, a batch side by side."""

from collections.abc import Iterator

import torch
from torch import Tensor

from poss_lightning.sampling import GREEDY, Chooser, Sampling
from poss_lightning.target.cache import TreeCache
from poss_lightning.target.model import Target, causal


def pad(prompts: list[list[int]], device: torch.device) -> Tensor:
    """Right-pad token lists with token 0: (B, T).

    Raises:
        ValueError: no prompt, or an empty one.
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
    """Read the prompts into a cache with `room` more slots: the one given, where it fits, else a new one.

    Returns:
        The cache, what a draft that reads `layers` reads (B, T, R), and of each row the last real feature (B, D).
    """
    tokens = pad(prompts, target.device)
    capacity = tokens.shape[1] + room
    if cache is None or not cache.slots.fits(len(prompts), capacity):
        cache = target.cache(len(prompts), capacity)
    else:
        cache.clear()
    features, read = target.seen(tokens, causal(tokens.shape[1], target.device), cache, layers=layers)
    lengths = [len(prompt) for prompt in prompts]
    cache.append(lengths)
    return cache, read, features[range(len(prompts)), [length - 1 for length in lengths]]


def until_stop(tokens: list[int], stops: frozenset[int]) -> list[int]:
    """The tokens up to and with the first stop token."""
    end = next((i + 1 for i, token in enumerate(tokens) if token in stops), len(tokens))
    return tokens[:end]


@torch.inference_mode()
def generate(
    target: Target,
    prompts: list[list[int]],
    limit: int,
    stops: frozenset[int],
    sampling: Sampling = GREEDY,
    generator: torch.Generator | None = None,
) -> list[list[int]]:
    """Each prompt's new tokens, up to and with a stop token, `limit` at most."""
    texts: list[list[int]] = [[] for _ in prompts]
    for tokens in steps(target, prompts, limit, stops, sampling, generator):
        for text, token in zip(texts, tokens, strict=True):
            text.append(token)
    return [until_stop(text, stops) for text in texts]


def steps(
    target: Target,
    prompts: list[list[int]],
    limit: int,
    stops: frozenset[int],
    sampling: Sampling = GREEDY,
    generator: torch.Generator | None = None,
) -> Iterator[list[int]]:
    """Yield the next token of every prompt, one forward at a time; a finished prompt repeats its stop token."""
    cache, _, last = prefill(target, prompts, limit)
    choose = Chooser(sampling, prompts, limit, target.device, generator)
    alone = causal(1, target.device)
    now, rows = [0] * len(prompts), list(range(len(prompts)))  # rows: the prompts still in the batch
    for step in range(limit):
        tokens = choose(target.ends.logits(last), cache.slots.length)  # (B,)
        for row, token in zip(rows, tokens.tolist(), strict=True):
            now[row] = now[row] if step and now[row] in stops else token
        yield list(now)
        going = [i for i, row in enumerate(rows) if now[row] not in stops]
        if not going or step == limit - 1:
            return
        if len(going) <= 0.75 * len(rows):  # finished rows cost time: forget them now and then
            cache.select(going)
            choose.select(going)
            tokens, rows = tokens[going], [rows[i] for i in going]
        last = target.features(tokens[:, None], alone, cache)[:, 0]
        cache.append([1] * len(rows))
