"""Processed probabilities against a loop, and against transformers' own warpers."""

import math

import pytest
import scipy.stats
import torch
from transformers import (
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    WatermarkLogitsProcessor,
)
from transformers.generation import logits_process

from poss_lightning.sampling import PURE, Sampling, TokenSampler, draw_tokens

LAWS = [
    {},
    {"temperature": 0.5},
    {"temperature": 1.7, "top_k": 5},
    {"top_p": 0.6},
    {"temperature": 0.8, "top_k": 7, "top_p": 0.9},
    {"temperature": 2.0, "top_k": 100, "top_p": 0.05},
]


def process(logits: torch.Tensor, **law) -> torch.Tensor:
    return Sampling(**({"temperature": 1.0} | law)).probabilities(logits)


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
        ({"temperature": -1}, "temperature is -1"),
        ({"top_k": -1}, "top_k is -1"),
        ({"top_p": 0}, "top_p is 0"),
        ({"top_p": 1.1}, r"top_p is 1\.1"),
        ({"processors": (WatermarkLogitsProcessor(320, "cpu"),)}, "Watermark.* cannot be honoured"),
    ],
)
def test_what_cannot_be_is_refused(law, words):
    with pytest.raises(ValueError, match=words):
        Sampling(**law)


def test_temperature_0_has_all_mass_on_the_likeliest():
    assert Sampling().probabilities(torch.tensor([0.0, 3.0, 1.0])).tolist() == [0, 1, 0]


def test_the_processors_named_pure_exist():
    assert all(hasattr(logits_process, name) for name in PURE)


def test_a_draw_inverts_the_cdf():
    """The numbers that give a token fill an interval as long as its probability; what has none is never drawn."""
    probabilities = torch.tensor([0.0, 0.25, 0.0, 0.5, 0.25, 0.0])
    uniform = (torch.arange(1000, dtype=torch.float64) + 0.5) / 1000
    counts = draw_tokens(probabilities.expand(1000, -1), uniform).bincount(minlength=6)
    assert counts.tolist() == [0, 250, 0, 500, 250, 0]
    edges = torch.tensor([0.0, 0.25, 0.75, 1 - 2**-53], dtype=torch.float64)
    assert draw_tokens(probabilities.expand(4, -1), edges).tolist() == [1, 3, 4, 4]


def test_what_is_no_number_still_draws_a_token():
    drawn = draw_tokens(torch.full((1, 5), torch.nan), torch.tensor([0.5], dtype=torch.float64))
    assert drawn.tolist() == [4]  # and no index beyond them


def sampler(law: dict, prompts: list[list[int]], room: int = 8, seed: int = 0) -> TokenSampler:
    return TokenSampler(Sampling(**law), prompts, room, torch.device("cpu"), torch.Generator().manual_seed(seed))


def test_a_text_has_its_own_numbers_whatever_the_batch_the_room_and_the_order_of_questions():
    logits, prompts = torch.randn(5, 3, 40), [[1], [2, 3], [4, 5, 6]]
    lengths = torch.tensor([1, 2, 3])
    together = sampler({"temperature": 1.0}, prompts)
    expected = [together(logits[i], lengths + i) for i in range(5)]
    for i in (3, 0, 4, 4, 1):
        assert torch.equal(together(logits[i], lengths + i), expected[i])
    generator = torch.Generator().manual_seed(0)
    for row, prompt in enumerate(prompts):
        alone = TokenSampler(Sampling(1.0), [prompt], 100, torch.device("cpu"), generator)
        assert [int(alone(logits[i, row : row + 1], lengths[row : row + 1] + i)) for i in range(5)] == [
            int(tokens[row]) for tokens in expected
        ]
    together.select([2, 0])
    assert torch.equal(together(logits[1][[2, 0]], torch.tensor([4, 2])), expected[1][[2, 0]])
    assert not torch.equal(sampler({"temperature": 1.0}, prompts, seed=1)(logits[0], lengths), expected[0])


def test_draws_of_many_texts_follow_the_distribution():
    """Chi-square over texts: first tokens, and pairs of the first and the second, which must be independent."""
    probabilities = torch.tensor([0.5, 0.3, 0.15, 0.05])
    texts = sampler({"temperature": 1.0}, [[0]] * 4000)
    logits = probabilities.log().expand(4000, -1)
    first, second = texts(logits, torch.full((4000,), 1)), texts(logits, torch.full((4000,), 2))
    for found, expected in (
        (first.bincount(minlength=4), probabilities),
        ((4 * first + second).bincount(minlength=16), torch.outer(probabilities, probabilities).flatten()),
    ):
        assert scipy.stats.chisquare(found, 4000 * expected.double() / expected.double().sum()).pvalue > 1e-3


def test_processors_see_each_text_up_to_its_place():
    seen = []

    def spy(ids, scores):
        seen.append(ids[0].tolist())
        return scores

    texts = sampler({"processors": (spy, RepetitionPenaltyLogitsProcessor(5.0))}, [[3], [1, 2]])
    logits = torch.tensor([[0.0, 1, 2, 4, 3], [0.0, 1, 2, 4, 3]])
    assert texts(logits, torch.tensor([1, 2])).tolist() == [4, 3]  # 3 stands in the first text
    assert texts(logits, torch.tensor([2, 3])).tolist() == [2, 4]
    assert texts(logits, torch.tensor([1, 3])).tolist() == [4, 4]  # asked again
    assert seen == [[3], [1, 2], [3, 4], [1, 2, 3], [3], [1, 2, 3]]
