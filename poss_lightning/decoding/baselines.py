"""The baselines, with the engine's interface: our own plain loop and transformers' `generate`."""

from collections.abc import Iterator

import torch

from poss_lightning.clock import Clock
from poss_lightning.decoding.decoder import Decoder, Progress, Request, new_token_limits
from poss_lightning.target_model.generation import OutputTracker, PlainDecoder, pad_right
from poss_lightning.target_model.model import Target


class Autoregressive(Decoder):
    """One token a forward, on the engine's own cache.

    Args:
        target: the frozen model.
        graphs: run steps as CUDA graphs, as the engine's rounds; None does so where the target can.
    """

    def __init__(self, target: Target, graphs: bool | None = None):
        self.target, self.loop, self.exact = target, PlainDecoder(target, graphs), True

    @torch.inference_mode()
    def rounds(self, request: Request, clock: Clock) -> Iterator[Progress]:
        """See `Decoder`. With the same generator, these are the tokens of `Speculative`."""
        prompts, limit, stops, sampling, generator = request
        limits = new_token_limits(self.target, prompts, limit)
        for step in self.loop.steps(prompts, limits, stops, sampling, generator, clock):
            yield Progress({prompt: [token] for prompt, token in step.items()})


class Generate(Decoder):
    """transformers' `generate` with its own default cache.

    Args:
        target: the frozen model.
        lookup: tokens of its prompt lookup (`prompt_lookup_num_tokens`), which takes one text at a time; 0 for none.
    """

    def __init__(self, target: Target, lookup: int = 0):
        self.target, self.lookup = target, lookup

    @torch.inference_mode()
    def rounds(self, request: Request, clock: Clock) -> Iterator[Progress]:
        """See `Decoder`: all in one step, padded on the left, with draws that the request's generator seeds."""
        prompts, limit, stops, sampling, generator = request
        limits = new_token_limits(self.target, prompts, limit)
        outputs = OutputTracker(limits, stops)
        flipped = pad_right([prompt[::-1] for prompt in prompts], self.target.device)
        slots = torch.arange(flipped.shape[1], device=flipped.device)
        lengths = torch.tensor([len(prompt) for prompt in prompts], device=flipped.device)
        names = ("temperature", "top_k", "top_p", "min_p") if sampling.temperature else ()
        drawing = {"do_sample": bool(names)} | {name: getattr(sampling, name) for name in names}
        cuda = [self.target.device] if self.target.device.type == "cuda" else []
        with torch.random.fork_rng(cuda, enabled=generator is not None), self.target.without_defaults() as model:
            if generator is not None:
                torch.manual_seed(int(torch.randint(2**63 - 1, (), generator=generator)))
            output = model.generate(
                flipped.flip(1),
                attention_mask=(slots < lengths[:, None]).flip(1),
                max_new_tokens=max(limits),
                eos_token_id=sorted(stops) or None,
                pad_token_id=min(stops, default=0),
                repetition_penalty=sampling.repetition_penalty,
                prompt_lookup_num_tokens=self.lookup or None,
                **drawing,
            )
        new = output[:, flipped.shape[1] :].tolist()
        yield Progress({prompt: outputs.append(prompt, row)[0] for prompt, row in enumerate(new)})
