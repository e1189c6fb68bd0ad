"""How the next token is chosen: the processed distribution, and the draw from it. All that samples comes here.

A draw inverts the distribution's CDF at one uniform number, and the i-th new token of a text takes the i-th number of
that text's own stream. So what is drawn depends on prompt, seed and distribution alone: not on the batch the text is
in, nor on whether a token was drafted. Speculative decoding must therefore give the very tokens of plain sampling.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from poss_lightning.machine import float64_device
from poss_lightning.ranges import Temperature, TopK, TopP, refuse_numbers

Processor = Callable[[Tensor, Tensor], Tensor]  # token ids (1, T) and logits (1, V) -> logits, as in transformers

# Those of transformers' processors that are functions of the text so far, and keep nothing from one call to the next.
PURE = {
    "EpsilonLogitsWarper",
    "EtaLogitsWarper",
    "ExponentialDecayLengthPenalty",
    "ForcedBOSTokenLogitsProcessor",
    "ForcedEOSTokenLogitsProcessor",
    "InfNanRemoveLogitsProcessor",
    "MinLengthLogitsProcessor",
    "MinNewTokensLengthLogitsProcessor",
    "MinPLogitsWarper",
    "NoBadWordsLogitsProcessor",
    "NoRepeatNGramLogitsProcessor",
    "RepetitionPenaltyLogitsProcessor",
    "SequenceBiasLogitsProcessor",
    "SuppressTokensAtBeginLogitsProcessor",
    "SuppressTokensLogitsProcessor",
    "TemperatureLogitsWarper",
    "TopHLogitsWarper",
    "TopKLogitsWarper",
    "TopPLogitsWarper",
    "TypicalLogitsWarper",
}


@dataclass(frozen=True)
class Sampling:
    """How a token is chosen.

    Args:
        temperature: divides the logits; 0 takes the likeliest token.
        top_k: keep the k likeliest tokens; 0 keeps all.
        top_p: keep the smallest set of likeliest tokens whose probabilities reach top_p; 1 keeps all.
        processors: of transformers (or functions like them), applied to the logits before all that, in this order.
            They are called about tokens that may never be emitted, so they must be functions of the text alone.

    Raises:
        ValueError: a number outside its range, or a processor that keeps state.
    """

    temperature: Temperature = 0.0
    top_k: TopK = 0
    top_p: TopP = 1.0
    processors: tuple[Processor, ...] = ()

    def __post_init__(self):
        object.__setattr__(self, "processors", tuple(self.processors))
        refuse_numbers(Sampling, vars(self))
        for processor in self.processors:
            kind = type(processor)
            if kind.__module__.startswith("transformers.") and kind.__name__ not in PURE:
                raise ValueError(
                    f"{kind.__name__} cannot be honoured: it keeps state from call to call, or needs more than the "
                    "text, and a tree asks about tokens that are never emitted"
                )

    def check_vocabulary(self, size: int) -> None:
        """Raise ValueError where top_k is more than the tokens there are."""
        if self.top_k > size:
            raise ValueError(f"top_k is {self.top_k}; the target has {size} tokens, and 0 takes all of them")

    def probabilities(self, logits: Tensor) -> Tensor:
        """Temperature, then top-k, then top-p (the order of transformers): (..., V) -> (..., V) float32, sums 1.

        At temperature 0 the likeliest token has probability 1.
        """
        if self.temperature == 0:
            return torch.nn.functional.one_hot(_argmax(logits), logits.shape[-1]).float()
        logits = logits.float() / self.temperature
        if self.top_k:
            least = logits.topk(min(self.top_k, logits.shape[-1])).values[..., -1:]
            logits = logits.masked_fill(logits < least, -torch.inf)
        probabilities = logits.softmax(-1)
        if self.top_p < 1:
            ordered, order = probabilities.sort(dim=-1, descending=True, stable=True)
            before = ordered.cumsum(-1) - ordered  # of all likelier tokens together
            kept = ordered.masked_fill(before >= self.top_p, 0.0)
            probabilities = torch.zeros_like(probabilities).scatter_(-1, order, kept)
            probabilities = probabilities / probabilities.sum(-1, keepdim=True)
        return probabilities


GREEDY = Sampling()


def penalize_repetition(penalty: float) -> Processor:
    """A processor as CTRL's (arXiv 1909.05858), transformers' `repetition_penalty`.

    The logits of tokens that the text has are divided by the penalty where they are above 0, and else multiplied.
    """

    def process(tokens: Tensor, logits: Tensor) -> Tensor:
        there = logits.gather(1, tokens)
        return logits.scatter(1, tokens, torch.where(there < 0, there * penalty, there / penalty))

    return process


def draw_tokens(probabilities: Tensor, uniform: Tensor) -> Tensor:
    """The first token at which the CDF exceeds `uniform` (...,) in [0, 1): (..., V) -> (...,)."""
    cdf = probabilities.double().cumsum(-1)
    # A token of probability 0 adds nothing to the CDF, so it is never the first to exceed anything.
    first = torch.searchsorted(cdf, (uniform * cdf[..., -1])[..., None], right=True)[..., 0]
    return first.clamp(max=probabilities.shape[-1] - 1)  # NaN is never exceeded: still a token, not an index beyond


class TokenSampler:
    """Chooses the tokens of B texts, one of each row of a batch, each at its position in the text.

    Args:
        sampling: how.
        prompts: the texts so far.
        capacity: new tokens that may be asked about, at most.
        device: where logits come from.
        generator: of the CPU, gives each text the seed of its stream; None for torch's own.
    """

    def __init__(
        self,
        sampling: Sampling,
        prompts: list[list[int]],
        capacity: int,
        device: torch.device,
        generator: torch.Generator | None = None,
    ):
        self.sampling, self.capacity, self.device = sampling, capacity, device
        self.prompt_lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)  # (B,)
        self.uniform = self.texts = None
        if sampling.temperature > 0:
            self.uniform = _uniform_numbers(len(prompts), capacity, generator).to(float64_device(device))
        if sampling.processors:
            longest = max(map(len, prompts)) + capacity
            self.texts = torch.tensor([[*prompt, *[0] * (longest - len(prompt))] for prompt in prompts], device=device)

    def __call__(self, logits: Tensor, position: Tensor) -> Tensor:
        """The tokens at `position` (B,) of the texts, prompts included: logits (B, V) -> (B,).

        The same question always has the same answer. With processors, what stands before `position` is what was chosen
        there last, and the host synchronises to read it.
        """
        if self.texts is not None:
            rows = zip(logits, self.texts, position.tolist(), strict=True)
            logits = torch.cat([self._processed(*row) for row in rows])
        if self.uniform is None:
            chosen = _argmax(logits)
        else:
            device = self.uniform.device
            uniform = self.uniform.gather(1, (position - self.prompt_lengths).to(device)[:, None])[:, 0]
            chosen = draw_tokens(self.sampling.probabilities(logits).to(device), uniform).to(logits.device)
        if self.texts is not None:
            self.texts.scatter_(1, position[:, None], chosen[:, None])
        return chosen

    def renewed(
        self, sampling: Sampling, prompts: list[list[int]], capacity: int, generator: torch.Generator | None
    ) -> "TokenSampler":
        """A sampler of other texts: this one, with other numbers in the same tensors, where it fits; else a new one."""
        fits = (self.sampling, len(self.prompt_lengths)) == (sampling, len(prompts)) and self.capacity >= capacity
        if self.needs_sync or not fits:
            return TokenSampler(sampling, prompts, capacity, self.device, generator)
        self.prompt_lengths.copy_(torch.tensor([len(prompt) for prompt in prompts]))
        if self.uniform is not None:
            self.uniform.copy_(_uniform_numbers(len(prompts), self.capacity, generator))
        return self

    @property
    def needs_sync(self) -> bool:
        """Whether it synchronises with the device, to show its processors what has been chosen."""
        return self.texts is not None

    def select(self, rows: list[int]) -> None:
        """Keep only these rows of the batch."""
        self.prompt_lengths = self.prompt_lengths[rows]
        self.uniform = None if self.uniform is None else self.uniform[rows]
        self.texts = None if self.texts is None else self.texts[rows]

    def _processed(self, logits: Tensor, text: Tensor, position: int) -> Tensor:
        scores = logits[None].float()  # (1, V)
        for processor in self.sampling.processors:
            scores = processor(text[None, :position], scores)
        return scores


def _uniform_numbers(texts: int, count: int, generator: torch.Generator | None) -> Tensor:
    """Of each text's own stream, (texts, count) float64; from the CPU, so that a seed means the same everywhere."""
    seeds = torch.randint(2**32, (texts,), generator=generator).tolist()
    return torch.stack([torch.rand(count, dtype=torch.float64, generator=_seeded(seed)) for seed in seeds])


def _argmax(logits: Tensor) -> Tensor:
    return logits.max(-1).indices  # argmax is several times slower in bfloat16 on a CPU


def _seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)
