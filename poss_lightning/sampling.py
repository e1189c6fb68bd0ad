"""How the next token is chosen: one noise and one draw, for everything that samples.

With logits l, temperature T and Gumbel noise g, the token at place i of a text is `argmax_v (l_v + T g(i, v))`: an
exact draw from softmax(l / T) (Gumbel, 1954), and at T = 0 the most likely token. The noise depends only on the text's
seed, the place and the token id. So the batch and the drafts change no token: speculative decoding writes the tokens of
plain sampling. A draft that sees this noise proposes the tokens that the target is about to draw (arXiv 2408.07978).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from poss_lightning.ranges import Fraction, PositiveFloat, Temperature, TopK, TopP, refuse_numbers

BLOCK = 128  # numbers whose maximum is taken first: two short searches are faster than one long one
LOGIT_ROWS = 4, 64  # places whose logits are in float32 at once, on a CPU, in whose cache they stay, and elsewhere
NEAR = 1e-4  # the nucleus's border, by more than sums of floats are rounded
DIGITS = ((21, 10), (10, 11), (0, 10))  # of the 31 bits of a nonnegative float: lowest bit, number of bits


@dataclass(frozen=True)
class Sampling:
    """How a token is chosen; the order is that of transformers.

    Args:
        temperature: divides the logits; 0 takes the most likely token.
        top_k: keep the k most likely tokens; 0 keeps all.
        top_p: keep the smallest set of most likely tokens whose probabilities reach top_p; 1 keeps all.
        min_p: keep tokens whose probability is at least this fraction of the largest; 0 keeps all.
        repetition_penalty: first of all, logits of tokens that the text has are divided by it if positive, else
            multiplied (CTRL, arXiv 1909.05858); 1 changes nothing.

    Raises:
        ValueError: a number outside its range.
    """

    temperature: Temperature = 0.0
    top_k: TopK = 0
    top_p: TopP = 1.0
    min_p: Fraction = 0.0
    repetition_penalty: PositiveFloat = 1.0

    def __post_init__(self):
        refuse_numbers(Sampling, vars(self))

    @property
    def kind(self) -> "Sampling":
        """The same with 1 for any temperature but 0."""
        return replace(self, temperature=float(self.temperature > 0))

    @property
    def steps(self) -> tuple[bool, ...]:
        """Whether tokens are drawn, and which filters and penalties there are: what choosing one costs."""
        return bool(self.temperature), bool(self.top_k), self.top_p < 1, bool(self.min_p), self.repetition_penalty != 1

    def filter(self, logits: Tensor, temperature: Tensor | float) -> Tensor:
        """Logits (..., V) in float32, with -inf for tokens that are cut; of equal logits all are kept, or none."""
        floors = []  # least logits that are kept
        if self.top_k:
            best = logits.topk(min(self.top_k, logits.shape[-1])).values  # (..., k), in order
            floors.append(best[..., -1:])
            if self.top_p < 1:
                p = _exact((best / temperature).softmax(-1))
                count = (p.cumsum(-1) - p < _exact(torch.tensor(self.top_p)).item()).sum(-1, keepdim=True)
                floors.append(best.gather(-1, (count - 1).clamp(min=0)))
        elif self.top_p < 1:
            p = (logits / temperature).softmax(-1)
            floors.append(logits.masked_fill(p < _nucleus_floor(p, self.top_p), torch.inf).amin(-1, keepdim=True))
        if self.min_p:
            floors.append(logits.amax(-1, keepdim=True) + temperature * torch.tensor(self.min_p).log().item())
        for floor in floors:
            logits = logits.masked_fill(logits < floor, -torch.inf)
        return logits


GREEDY = Sampling()


class TokenSampler:
    """Chooses the tokens of B texts, by numbers in tensors that stay where they are.

    Attributes:
        kind: of the sampling; the temperature is in a tensor.
        in_text: (B, V) which tokens the texts have; maintained if `kind` penalises them.
        sampling, seeds: of the texts that were begun; no seeds where they are greedy.
    """

    def __init__(self, batch: int, vocabulary: int, device: torch.device):
        self.sampling = self.kind = GREEDY
        self.in_text = torch.zeros(0, dtype=torch.bool, device=device)
        self.keys = torch.zeros(batch, 2, dtype=torch.int32, device=device)
        self.temperature, self.seeds = torch.zeros((), device=device), list[int]()
        self.ids = _mix(torch.arange(vocabulary, dtype=torch.int32, device=device))

    def begin(
        self,
        sampling: Sampling,
        prompts: Sequence[Sequence[int]],
        generator: torch.Generator | None = None,
        seeds: list[int] | None = None,
    ) -> None:
        """Sample these texts from now on; if drawn, with these seeds or those of the generator.

        Texts beyond the B of the sampler wait for `put`.
        """
        self.kind = sampling.kind
        self.temperature.fill_(sampling.temperature)
        self.sampling, self.seeds = sampling, []
        if sampling.temperature:
            drawn = text_seeds(len(prompts), generator) if seeds is None else torch.tensor(seeds)
            self.keys.copy_(text_keys(drawn[: len(self.keys)]))
            self.seeds = drawn.tolist()
        if self.kind.repetition_penalty != 1:
            if len(self.in_text) != len(self.keys):
                self.in_text = self.in_text.new_zeros(len(self.keys), len(self.ids))
            self._read(enumerate(prompts[: len(self.keys)]))

    def put(self, rows: list[int], prompts: Sequence[Sequence[int]], seeds: list[int]) -> None:
        """Let these rows be other texts; with seeds, if they are drawn."""
        if seeds:
            self.keys[rows] = text_keys(torch.tensor(seeds)).to(self.keys.device)
        if self.kind.repetition_penalty != 1:
            self._read(zip(rows, prompts, strict=True))

    def _read(self, prompts: Iterable[tuple[int, Sequence[int]]]) -> None:
        """Set which tokens the text of each of these rows has."""
        for row, prompt in prompts:
            self.in_text[row].zero_()[torch.tensor(prompt, device=self.in_text.device)] = True

    def noise(self, places: Tensor) -> Tensor | None:
        """Return the noise T g at `places` (B, n) of the texts, prompts included: (B, n, V); None at temperature 0."""
        if not self.kind.temperature:
            return None
        keys = _mix(self.keys[:, :, None] + places[:, None].to(torch.int32))[..., None]  # (B, 2, n, 1)
        return minus_gumbel(_mix((self.ids ^ keys[:, 0]).add_(keys[:, 1]))).mul_(-self.temperature)

    def choose(self, logits: Tensor, noise: Tensor | None, index: Tensor, in_text: Tensor | None = None) -> Tensor:
        """Choose the token after each of n places of each text: (B, n).

        Args:
            logits: (B, n, V)
            noise: (B, m, V), of `noise`.
            index: (B, n) which of the m is a place's.
            in_text: (B, n, V) what the text has up to each place, of `in_text_after`.
        """
        if in_text is not None:
            logits, penalty = logits.float(), self.kind.repetition_penalty
            logits = torch.where(logits < 0, logits * penalty, logits / penalty).where(in_text, logits)
        if noise is None:
            return argmax(logits)
        begins = torch.arange(len(noise), device=noise.device)[:, None] * noise.shape[1]
        rows, noise, chosen = (begins + index).flatten(), noise.flatten(0, 1), []
        size = LOGIT_ROWS[logits.device.type != "cpu"]
        for part, row in zip(logits.flatten(0, 1).split(size), rows.split(size), strict=True):
            chosen.append(self._draw(part.float(), noise.index_select(0, row)))
        return torch.cat(chosen).view(index.shape)

    def _draw(self, logits: Tensor, noise: Tensor) -> Tensor:
        """Return the largest of `logits + noise`, both (n, V), among the tokens that are kept: (n,)."""
        kind = self.kind
        if kind.top_p == 1 or kind.top_k or kind.min_p or logits.device.type != "cpu":
            return argmax(noise.add_(kind.filter(logits, self.temperature)))
        # Whether one token is in the nucleus is told sooner than which ones are; the host asks, as it may on a CPU.
        drawn, p = argmax(noise + logits), (logits / self.temperature).softmax(-1)
        above = p.masked_fill(p <= p.gather(-1, drawn[:, None]), 0).sum(-1)  # mass of more likely tokens
        if len(cut := (above >= kind.top_p - NEAR).nonzero()[:, 0]):
            drawn[cut] = argmax(noise[cut].add_(kind.filter(logits[cut], self.temperature)))
        return drawn

    def next(self, logits: Tensor, places: Tensor) -> Tensor:
        """Choose the next token of each text, which is at `places` (B,): logits (B, V) -> (B,), and into the texts."""
        in_text = None if self.kind.repetition_penalty == 1 else self.in_text[:, None]
        noise, index = self.noise(places[:, None]), torch.zeros_like(places)[:, None]
        tokens = self.choose(logits[:, None], noise, index, in_text)
        self.append(tokens)
        return tokens[:, 0]

    def in_text_after(self, tokens: Tensor, ancestors: Tensor) -> Tensor | None:
        """Which tokens each text has up to each node (B, N) of a tree: (B, N, V); None where none is penalised."""
        if self.kind.repetition_penalty == 1:
            return None
        path = tokens[:, None].where(ancestors, tokens[:, None, :1])  # the root is on every path
        return self.in_text[:, None].repeat(1, tokens.shape[1], 1).scatter_(2, path, True)

    def append(self, tokens: Tensor) -> None:
        """Take new tokens (B, n) into the texts."""
        if self.kind.repetition_penalty != 1:
            self.in_text.scatter_(1, tokens, True)

    def select(self, rows: list[int]) -> None:
        """Keep only these rows of the batch."""
        self.keys, self.in_text = self.keys[rows], self.in_text[rows] if len(self.in_text) else self.in_text


class Noise:
    """T g at some places of the texts: a place's costs as much as a small product, so it is made when it is needed."""

    def __init__(self, sampler: TokenSampler, places: Tensor):
        self.sampler, self.places = sampler, places
        self.made: Tensor | None = None  # (B, as many places as were asked for, V)

    def first(self, count: int) -> Tensor | None:
        """Return the noise at the first `count` of n places: (B, count, V); None at temperature 0."""
        done = 0 if self.made is None else self.made.shape[1]
        if count > done and (more := self.sampler.noise(self.places[:, done:count])) is not None:
            self.made = more if self.made is None else torch.cat([self.made, more], dim=1)
        return None if self.made is None else self.made[:, :count]


def text_seeds(count: int, generator: torch.Generator | None) -> Tensor:
    """Return a seed of 63 bits for each of `count` texts; the generator is on the CPU, None for torch's own."""
    return torch.randint(2**63 - 1, (count,), generator=generator)


def argmax(x: Tensor) -> Tensor:
    """Return the index of the maximum, the first of equal ones: (..., V) -> (...,)."""
    if x.shape[-1] % BLOCK:
        return x.max(-1).indices  # `argmax` is several times slower in bfloat16 on a CPU
    blocks = x.unflatten(-1, (-1, BLOCK))
    best = blocks.amax(-1).max(-1).indices  # (...,)
    within = blocks.gather(-2, best[..., None, None].expand(*best.shape, 1, BLOCK))[..., 0, :]
    return best * BLOCK + within.max(-1).indices


# --- the noise ---


def text_keys(seeds: Tensor) -> Tensor:
    """Return keys of the texts' noise from their seeds: (B,) int64 -> (B, 2) int32."""
    low, high = seeds.clone().view(torch.int32).view(-1, 2).unbind(1)  # all supported machines are little-endian
    first = _mix(low)
    return torch.stack([first, _mix(high ^ first)], dim=1)


def minus_gumbel(bits: Tensor) -> Tensor:
    """32 random bits -> log(-log(1 - u)), u uniform, with fine steps where u is small; from -22.2 to 2.9."""
    negative = bits.bitwise_and_(0x7FFFFFFF).float().mul_(-(2**-31)).clamp_(2**-24 - 1, -(2**-32))  # -u
    return negative.log1p_().neg_().log_()


def _mix(x: Tensor) -> Tensor:
    """Permute all int32 so that each bit depends on all (lowbias32 of Wellons' hash-prospector), in place.

    Products are modulo 2^32, and shifts fill with zeros, on every device.
    """
    for shift, factor in ((16, 0x21F0AAAD), (15, 0x735A2D97), (15, 1)):
        x.bitwise_xor_((x >> shift).bitwise_and_((1 << (32 - shift)) - 1)).mul_(factor)
    return x


def _exact(p: Tensor) -> Tensor:
    """Probabilities as multiples of 2^-62, whose sums do not depend on their order, which on CUDA is not fixed."""
    return (p * 2.0**62).long()


def _nucleus_floor(p: Tensor, share: float) -> Tensor:
    """Return the smallest of the largest p (..., V) that sum to `share`, found digit by digit: (..., 1)."""
    bits = p.view(torch.int32)  # as which floats sort, too
    amounts, needed = _exact(p), _exact(torch.tensor(share)).item()
    floor, above = torch.zeros_like(bits[..., :1]), torch.zeros_like(amounts[..., :1])  # sum above the digits so far
    for shift, width in DIGITS:
        digit = (bits >> shift) - (floor >> shift)
        inside = (digit >= 0) & (digit < 1 << width)
        mass = amounts.new_zeros(*p.shape[:-1], 1 << width)
        mass.scatter_add_(-1, digit.clamp(0, (1 << width) - 1).long(), amounts * inside)
        total = mass.flip(-1).cumsum(-1).flip(-1)  # of this digit and larger ones
        chosen = ((above + total >= needed).sum(-1, keepdim=True) - 1).clamp(min=0)
        above = above + (total - mass).gather(-1, chosen)
        floor = floor + (chosen << shift).to(torch.int32)
    return floor.view(torch.float32)


# --- how a text was drawn: whoever knows it can draw its tokens again ---

NUMBERS = ("temperature", "top_k", "top_p", "min_p")  # of `Sampling`, kept beside the seed


class Draw(NamedTuple):
    """The sampling of an answer, and the seed of its noise."""

    sampling: Sampling
    seed: int

    @classmethod
    def of(cls, values: Any) -> Self:
        """Parse what `values` returned.

        Raises:
            ValueError: not a dict of a seed and some of NUMBERS.
        """
        numbers = dict(values) if isinstance(values, dict) else {}
        seed = numbers.pop("seed", None)
        if type(seed) is not int or not 0 <= seed < 2**63 or not numbers.keys() <= set(NUMBERS):
            raise ValueError(f"it is {values!r}; it must hold seed, and may hold {', '.join(NUMBERS)}")
        return cls(Sampling(**numbers), seed)

    def values(self) -> dict[str, Any]:
        """Return the fields that `of` parses."""
        return {"seed": self.seed} | {name: getattr(self.sampling, name) for name in NUMBERS}


def last_draws(sampler: TokenSampler, count: int) -> list[Draw | None]:
    """Return how a sampler drew its last `count` texts; None for greedy ones."""
    return [Draw(sampler.sampling, seed) for seed in sampler.seeds[:count]] or [None] * count
