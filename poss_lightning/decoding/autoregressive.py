"""The baselines: our own plain loop, and transformers' `generate`, behind the engine's interface."""

import torch

from poss_lightning.decoding.engine import Clock, Decoded, check_room
from poss_lightning.target.generation import pad, steps, until_stop
from poss_lightning.target.model import Target


class Autoregressive:
    """One token a forward, on the engine's own cache."""

    def __init__(self, target: Target):
        self.target = target

    @torch.inference_mode()
    def decode(self, prompts: list[list[int]], limit: int, stops: frozenset[int] | None = None) -> list[Decoded]:
        """See `Decoder`."""
        stops = self.target.chat.stops if stops is None else stops
        clock = Clock(self.target.device)
        limits = check_room(self.target, prompts, limit)
        stream = steps(self.target, prompts, max(limits), stops)
        with clock.part("prefill"):
            columns = [next(stream)]
        with clock.part("verify"):  # every step is the target's
            columns += stream
        seconds = clock.total()
        rows = zip(zip(*columns, strict=True), limits, strict=True)
        return [Decoded(until_stop(list(row[:most]), stops), seconds=seconds) for row, most in rows]


class Generate:
    """transformers' `generate`, greedy, with its own default cache."""

    def __init__(self, target: Target):
        self.target = target

    @torch.inference_mode()
    def decode(self, prompts: list[list[int]], limit: int, stops: frozenset[int] | None = None) -> list[Decoded]:
        """See `Decoder`. Batches are padded on the left, as `generate` wants it."""
        stops = self.target.chat.stops if stops is None else stops
        limits = check_room(self.target, prompts, limit)
        clock = Clock(self.target.device)
        flipped = pad([prompt[::-1] for prompt in prompts], self.target.device)
        slots = torch.arange(flipped.shape[1], device=flipped.device)
        lengths = torch.tensor([len(prompt) for prompt in prompts], device=flipped.device)
        output = self.target.model.generate(
            flipped.flip(1),
            attention_mask=(slots < lengths[:, None]).flip(1),
            max_new_tokens=max(limits),
            do_sample=False,
            eos_token_id=sorted(stops) or None,
            pad_token_id=min(stops, default=0),
        )
        seconds, new = clock.total(), output[:, flipped.shape[1] :].tolist()
        rows = zip(new, limits, strict=True)
        return [Decoded(until_stop(row[:most], stops), seconds=seconds) for row, most in rows]
