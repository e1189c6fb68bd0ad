"""From logits to the processed distribution, and draws from it."""

import torch
from torch import Tensor


def process(logits: Tensor, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0) -> Tensor:
    """Probabilities after temperature, then top-k, then top-p (the order of transformers).

    Args:
        logits: (..., V)
        temperature: > 0; divides the logits.
        top_k: keep the k likeliest tokens; 0 keeps all.
        top_p: keep the smallest set of likeliest tokens whose mass reaches top_p; 1 keeps all.

    Returns:
        (..., V), float32, each row sums to 1.

    Raises:
        ValueError: a parameter outside its range.
    """
    if temperature <= 0:
        raise ValueError(f"temperature is {temperature}; it must be above 0 (greedy decoding is a method of its own)")
    if top_k < 0:
        raise ValueError(f"top_k is {top_k}; it must be 0 (off) or a positive number of tokens")
    if not 0 < top_p <= 1:
        raise ValueError(f"top_p is {top_p}; it must lie in (0, 1]")
    logits = logits.float() / temperature
    if top_k:
        least = logits.topk(min(top_k, logits.shape[-1])).values[..., -1:]
        logits = logits.masked_fill(logits < least, -torch.inf)
    probabilities = logits.softmax(-1)
    if top_p < 1:
        ordered, order = probabilities.sort(dim=-1, descending=True)
        before = ordered.cumsum(-1) - ordered  # mass of all likelier tokens
        kept = ordered.masked_fill(before >= top_p, 0.0)
        probabilities = torch.zeros_like(probabilities).scatter_(-1, order, kept)
        probabilities = probabilities / probabilities.sum(-1, keepdim=True)
    return probabilities


def draw(probabilities: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """One token a row: (B, V) -> (B,)."""
    return torch.multinomial(probabilities, 1, generator=generator)[:, 0]
