"""How the target drew an answer: whoever knows it can draw its tokens again."""

from typing import Any, NamedTuple, Self

from poss_lightning.sampling import Sampling, TokenSampler

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
