"""Processed probabilities against a loop, and against transformers' own warpers."""

import math

import pytest
import torch
from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from poss_lightning.sampling import draw, process

LAWS = [
    {},
    {"temperature": 0.5},
    {"temperature": 1.7, "top_k": 5},
    {"top_p": 0.6},
    {"temperature": 0.8, "top_k": 7, "top_p": 0.9},
    {"temperature": 2.0, "top_k": 100, "top_p": 0.05},
]


def naive(logits: list[float], temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0) -> list[float]:
    weights = [math.exp(logit / temperature) for logit in logits]
    order = sorted(range(len(weights)), key=lambda i: -weights[i])
    order = order[:top_k] if top_k else order
    whole = sum(weights[i] for i in order)
    kept, mass = [], 0.0
    for i in order:
        if mass >= top_p:
            break
        kept.append(i)
        mass += weights[i] / whole
    total = sum(weights[i] for i in kept)
    return [weights[i] / total if i in kept else 0.0 for i in range(len(weights))]


@pytest.mark.parametrize("law", LAWS)
def test_process_is_the_loop(law):
    torch.manual_seed(0)
    logits = 3 * torch.randn(4, 5, 23, dtype=torch.float64)
    found = process(logits, **law)
    expected = [[naive(row, **law) for row in rows] for rows in logits.tolist()]
    torch.testing.assert_close(found, torch.tensor(expected), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(found.sum(-1), torch.ones(4, 5))


@pytest.mark.parametrize("law", LAWS)
def test_process_is_transformers_warpers_in_their_order(law):
    torch.manual_seed(1)
    logits = 3 * torch.randn(8, 23)
    k, p = law.get("top_k"), law.get("top_p")
    warpers = [TemperatureLogitsWarper(law.get("temperature", 1.0))]
    warpers += ([TopKLogitsWarper(k)] if k else []) + ([TopPLogitsWarper(p)] if p else [])
    torch.testing.assert_close(process(logits, **law), LogitsProcessorList(warpers)(None, logits).softmax(-1))


def test_order_matters_and_temperature_comes_first():
    logits = torch.tensor([0.5, 0.3, 0.2]).log()
    assert process(logits, top_p=0.6).count_nonzero() == 2
    assert process(logits, temperature=0.1, top_p=0.6).count_nonzero() == 1


def test_the_likeliest_token_always_stays():
    assert process(torch.tensor([[1.0, 2.0, 0.0]]), top_p=1e-9).tolist() == [[0.0, 1.0, 0.0]]


def test_half_precision_is_computed_in_float32():
    assert process(torch.zeros(3, 7, dtype=torch.bfloat16)).dtype == torch.float32


@pytest.mark.parametrize(
    ("law", "words"),
    [
        ({"temperature": 0}, "temperature is 0"),
        ({"top_k": -1}, "top_k is -1"),
        ({"top_p": 0}, "top_p is 0"),
        ({"top_p": 1.1}, r"top_p is 1\.1"),
    ],
)
def test_ranges(law, words):
    with pytest.raises(ValueError, match=words):
        process(torch.zeros(3), **law)


def test_draws_follow_the_distribution_and_the_seed():
    rows = torch.tensor([0.0, 0.7, 0.3]).expand(4000, 3)
    first, again, other = (draw(rows, torch.Generator().manual_seed(seed)) for seed in (0, 0, 1))
    assert torch.equal(first, again) and not torch.equal(first, other)
    assert first.shape == (4000,) and first.min() == 1
    assert (first == 1).float().mean().item() == pytest.approx(0.7, abs=0.03)
