"""One noise and one draw, against their twins, transformers' own warpers, and the laws of chance (seeds are fixed)."""

from fractions import Fraction
from functools import partial
from itertools import accumulate, pairwise

import pytest
import scipy.stats
import torch
from transformers.generation import logits_process as theirs

from poss_lightning.decoding.trees import ancestor_mask
from poss_lightning.sampling import Sampling, TokenSampler, _nucleus_floor, argmax
from tests.support import naive
from tests.support.tolerance import close

LAWS = [
    {},
    {"temperature": 0.5},
    {"temperature": 1.7, "top_k": 5},
    {"top_p": 0.6},
    {"top_p": 1e-9},
    {"temperature": 0.8, "top_k": 7, "top_p": 0.9},
    {"temperature": 2.0, "top_k": 100, "top_p": 0.05},
    {"temperature": 1.3, "top_p": 0.95, "min_p": 0.2},
    {"min_p": 1.0},
]


def process(logits: torch.Tensor, **law) -> torch.Tensor:
    sampling = Sampling(**({"temperature": 1.0} | law))
    return (sampling.filter(logits.float(), sampling.temperature) / sampling.temperature).softmax(-1)


@pytest.mark.parametrize("size", [23, 1024])
def test_what_is_drawn_from_is_what_transformers_warpers_leave_in_their_order(size):
    torch.manual_seed(1)
    logits = 3 * torch.randn(8, size)
    for law in LAWS:
        k, p, least = law.get("top_k"), law.get("top_p"), law.get("min_p")
        warpers = [theirs.TemperatureLogitsWarper(law.get("temperature", 1.0))]
        warpers += ([theirs.TopKLogitsWarper(k)] if k else []) + ([theirs.TopPLogitsWarper(p)] if p else [])
        warpers += [theirs.MinPLogitsWarper(least)] if least else []
        ours = process(logits.view(2, 4, size), **law).view(8, size)
        assert close(ours, theirs.LogitsProcessorList(warpers)(None, logits).softmax(-1), size), law


def test_of_equal_tokens_all_or_none_are_kept():
    logits = torch.tensor([2.0, 1.0, 1.0, 1.0, 0.0])
    for law in ({"top_k": 2}, {"top_p": 0.6}, {"top_k": 3, "top_p": 0.6}, {"min_p": 0.3}):
        assert (process(logits, **law) > 0).tolist() == [True] * 4 + [False], law


def test_a_nucleus_is_that_of_exact_sums_in_any_order():
    """At its border, too: a sum of floats would depend on their order, which on CUDA is not fixed."""
    weights = torch.rand(3000, generator=torch.Generator().manual_seed(0)) ** 8
    p = (weights / weights.sum()).sort(descending=True).values
    sums = [0, *accumulate(map(Fraction, p.tolist()))]
    for share in map(float, torch.tensor(list(map(float, sums[5:2500:83])))):
        count = next(n for n, total in enumerate(sums) if total >= share)
        for order in (torch.arange(3000), torch.arange(3000).flip(0), torch.randperm(3000)):
            assert _nucleus_floor(p[order][None], share) == p[count - 1]


@pytest.mark.parametrize("size", [7, 1280])
def test_the_largest_is_found_and_the_first_of_equal_ones(size):
    x = torch.randint(0, 40, (5, 6, size), generator=torch.Generator().manual_seed(0)).bfloat16()
    assert torch.equal(argmax(x), x.max(-1).indices)


# --- the noise ---


def sampler(law: dict, seed: int = 0, prompts=((0,),), size: int = 40) -> TokenSampler:
    texts = TokenSampler(len(prompts), size, torch.device("cpu"))
    texts.begin(Sampling(**({"temperature": 1.0} | law)), prompts, torch.Generator().manual_seed(seed))
    return texts


def test_the_noise_is_its_twin_s():
    """Of a seed, a place and a token: whole numbers of 32 bits, and the double logarithm."""
    texts = sampler({"temperature": 0.7}, prompts=[[0]] * 3)
    seeds = torch.randint(2**63 - 1, (3,), generator=torch.Generator().manual_seed(0)).tolist()
    places = torch.tensor([[0, 1, 70_000], [5, 6, 7], [1, 2**31 - 1, 3]])
    expected = [
        [[0.7 * naive.noise(seed, place, token) for token in range(40)] for place in row]
        for seed, row in zip(seeds, places.tolist(), strict=True)
    ]
    assert close(texts.noise(places), torch.tensor(expected), terms=1, sums=3)


def test_the_noise_has_gumbel_s_law_and_nothing_goes_together():
    """Neighbouring places, tokens and seeds, and those apart by powers of two; correlations in standard errors."""
    texts = sampler({}, 1, [[0]] * 4, 512)
    noise = texts.noise(torch.arange(512).expand(4, -1)).double()  # (4, 512, 512)
    assert scipy.stats.kstest(noise.flatten()[:300_000].numpy(), "gumbel_r").pvalue > 1e-3
    unit = (-(-noise).exp()).exp()
    z = (unit - 0.5) * 12**0.5
    pairs = [(z[:, :-k], z[:, k:]) for k in (1, 2, 16, 256)] + [(z[..., :-k], z[..., k:]) for k in (1, 2, 16, 256)]
    pairs += [(a, b) for a, b in pairwise(z)] + [(z[:, :-1, 1:], z[:, 1:, :-1]), (z[:, :-1, :-1], z[:, 1:, 1:])]
    errors = [float((a * b).mean()) * a.numel() ** 0.5 for a, b in pairs]
    assert max(map(abs, errors)) < 4 and sum(error**2 for error in errors) < 2.5 * len(errors), errors


def test_a_million_draws_have_the_law():
    """Chi-square, of draws, of pairs of neighbouring places, and of pairs of neighbouring texts."""
    p = torch.tensor([0.6, 0.2, 0.1, 0.05, 0.03, 0.015, 0.005], dtype=torch.float64)
    texts, index = sampler({}, prompts=[[0]] * 1000, size=7), torch.arange(1000).expand(1000, -1)
    drawn = texts.choose(p.log().float().expand(1000, 1000, 7), texts.noise(index), index)
    assert scipy.stats.chisquare(drawn.flatten().bincount(minlength=7), 1e6 * p).pvalue > 1e-3
    both = torch.outer(p, p).flatten()
    for first, second in ((drawn[:, ::2], drawn[:, 1::2]), (drawn[::2], drawn[1::2])):
        counts = (7 * first + second).flatten().bincount(minlength=49)
        assert scipy.stats.chisquare(counts, both * counts.sum()).pvalue > 1e-3


# --- the draw ---


@pytest.mark.parametrize("law", [*LAWS, {"temperature": 0.9, "top_k": 4, "repetition_penalty": 1.4}], ids=str)
def test_a_draw_is_the_largest_of_what_is_kept_with_its_noise(law):
    prompts = [[1, 2, 2], [3, 39, 3]]
    texts, penalty = sampler(law, prompts=prompts), law.get("repetition_penalty", 1.0)
    logits = 3 * torch.randn(2, 5, 40, generator=torch.Generator().manual_seed(2))
    noise = texts.noise(torch.tensor([[4], [9]]))
    alike = partial(theirs.RepetitionPenaltyLogitsProcessor(penalty), torch.tensor(prompts))
    penalised = torch.stack([alike(place) for place in logits.unbind(1)], dim=1)
    expected = process(penalised, **law).log() + noise / law.get("temperature", 1.0)
    seen = None if penalty == 1 else texts.in_text[:, None].expand(2, 5, 40)
    assert torch.equal(texts.choose(logits, noise, torch.zeros(2, 5, dtype=torch.long), seen), expected.argmax(-1))


def test_greedy_is_the_limit_and_needs_no_noise():
    texts, logits = sampler({"temperature": 0}), torch.randn(1, 3, 40)
    assert texts.noise(torch.tensor([[1, 2, 3]])) is None
    for each in (texts, sampler({"temperature": 1e-6})):
        found = each.choose(logits, each.noise(torch.tensor([[1, 2, 3]])), torch.arange(3)[None])
        assert torch.equal(found, logits.argmax(-1))


def test_what_is_no_number_still_draws_a_token():
    for law in ({}, {"top_p": 0.9}, {"top_k": 5, "top_p": 0.9}, {"min_p": 0.1}, {"temperature": 0}):
        token = sampler(law, size=256).next(torch.full((1, 256), torch.nan), torch.tensor([3]))
        assert 0 <= int(token) < 256, law


def test_a_penalty_knows_what_stands_above_each_node():
    """A tree 3(1(2), 4) behind the text 5 5 3; after it, what was accepted is in the text."""
    texts = sampler({"temperature": 0, "repetition_penalty": 2.0}, prompts=[[5, 5, 3]], size=8)
    tokens, ancestors = torch.tensor([[3, 1, 2, 4]]), ancestor_mask(torch.tensor([[0, 0, 1, 0]]), 2)
    seen = texts.in_text_after(tokens, ancestors)
    assert [row.nonzero().flatten().tolist() for row in seen[0]] == [[3, 5], [1, 3, 5], [1, 2, 3, 5], [3, 4, 5]]
    texts.append(torch.tensor([[1, 7, 7]]))
    assert texts.in_text[0].nonzero().flatten().tolist() == [1, 3, 5, 7]
    texts.begin(Sampling(0.0, repetition_penalty=2.0), [[6]], None)
    assert texts.in_text[0].nonzero().flatten().tolist() == [6]
    assert sampler({}).in_text_after(tokens, ancestors) is None
