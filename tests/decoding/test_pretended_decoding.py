"""Decoding on a pretended device: nothing is mixed, rounds do not wait, graphs replay what rounds do.

Every result is the host's: the same answers, and values of a round within rounding.
"""

from dataclasses import replace
from functools import cache, partial
from itertools import islice

import pytest
import torch

from poss_lightning.decoding.baselines import Autoregressive
from poss_lightning.decoding.budget import WARMUP_ROUNDS
from poss_lightning.decoding.decoder import Clock, Request
from poss_lightning.decoding.engine import Speculative
from poss_lightning.decoding.plans import TreePlan
from poss_lightning.evaluation.stored_rounds import replay_rounds
from poss_lightning.sampling import GREEDY, Draw, Sampling
from poss_lightning.target_model.generation import PlainDecoder
from poss_lightning.target_model.model import Target
from tests.evaluation.test_replay import read
from tests.support.decoders import PROMPTS, drawn, speculate
from tests.support.pretended import PretendedDevice
from tests.support.pretended_calls import DEVICE
from tests.support.pretended_graphs import replace_cuda
from tests.support.tiny import tiny_draft, tiny_model, tiny_tokenizer

DRAWN = Sampling(0.8, top_k=50, top_p=0.9)
PENALISED = Sampling(0.5, top_p=0.9, min_p=0.01, repetition_penalty=1.3)
LAYERS = {"eagle2": 2, "eagle3": 4, "block": 4}

# Laws by counts, at most.
WAITS_A_ROUND = 1  # the copy to the host
WAITS_A_TEXT = 8  # what prefill and the first draw need
CAPTURES = 3  # for 512 tokens: one, or one for each part of a round


@pytest.fixture
def device(monkeypatch):
    with PretendedDevice() as device:
        replace_cuda(monkeypatch, device)
        yield device


@cache
def load(where: torch.device | str, kind: str = "eagle2") -> Target:
    model = tiny_model(0, num_hidden_layers=LAYERS[kind], max_position_embeddings=1024)
    return Target(model.to(where).requires_grad_(False), tiny_tokenizer(), "tiny")


def engine_of(target: Target, kind: str = "eagle2", **options) -> Speculative:
    draft = tiny_draft(target, [2] if kind == "block" else [1, 1], kind=kind)
    return speculate(target, draft, 2, 5, 2, **options)


looked_up = partial(speculate, draft=None, lookup=3)


def with_graphs(decoder):
    """As it is on CUDA."""
    (decoder.loop if isinstance(decoder, Autoregressive) else decoder).graphs.enabled = True
    return decoder


def tokens_of(decoder, sampling=GREEDY, prompts=PROMPTS, limit=5, seed=3, stops=(1,), watch=None):
    return drawn(decoder, sampling, seed, prompts, limit, frozenset(stops), watch)


def answers(kind: str, *arguments, **options) -> list[list[int]]:
    """What the host says, plainly."""
    return tokens_of(Autoregressive(load("cpu", kind)), *arguments, **options)


@pytest.mark.parametrize(("kind", "graphs"), [("eagle2", False), *((kind, True) for kind in LAYERS)])
def test_answers_are_the_hosts(device, kind, graphs):
    """One decoder, other laws, seeds, batches and lengths in turn: no graph may speak of what is gone.

    Rows end at different times. Without graphs they are dropped; with them they stay, as nothing is captured anew.
    """
    target, stops = load(DEVICE, kind), {answers(kind)[0][2]}
    texts = [(GREEDY, PROMPTS, 6, 3, stops), (DRAWN, PROMPTS[:1]), (DRAWN, PROMPTS[1:2], 5, 4)]
    texts += [(PENALISED, PROMPTS), (GREEDY, [[7] * 90, [8] * 3, [9] * 5]), (GREEDY, PROMPTS[:1])] if graphs else []
    others = [looked_up(target), Autoregressive(target)] if kind == "eagle2" else []
    for decoder in (engine_of(target, kind, lookup=3 * (kind == "eagle2")), *others):
        decoder = with_graphs(decoder) if graphs else decoder
        for number, text in enumerate(texts):
            assert tokens_of(decoder, *text) == answers(kind, *text)
            assert number or not graphs or device.captures <= CAPTURES  # of a batch that ends unevenly
        assert bool(device.captures) == graphs
        device.captures = 0


@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "graphs"])
@pytest.mark.parametrize("decoder", [engine_of, Autoregressive, looked_up], ids=["drafting", "plain", "lookup"])
def test_a_round_waits_for_one_copy(device, decoder, graphs):
    decoder = with_graphs(decoder(load(DEVICE))) if graphs else decoder(load(DEVICE))
    for sampling in (GREEDY, DRAWN):
        first, *rounds = count_waits(device, decoder, sampling, PROMPTS[:1], 10)
        assert first <= WAITS_A_TEXT and max(rounds) <= WAITS_A_ROUND


def count_waits(device, decoder, *arguments) -> list[int]:
    """How often the host waits in each step."""
    waits = []

    def watch(step):
        waits.append(len(device.waits))
        device.waits.clear()

    device.waits.clear()
    assert tokens_of(decoder, *arguments, stops=(), watch=watch) == answers("eagle2", *arguments, stops=())
    return waits


@pytest.mark.parametrize("prompts", [PROMPTS, PROMPTS[:1]], ids=["batch", "alone"])
def test_trees_made_for_speed_give_the_hosts_tokens(device, monkeypatch, prompts):
    """A plan is settled on after the first rounds, for which the host waits once more, and then all are one graph."""
    monkeypatch.setattr("poss_lightning.decoding.costs.TIME_BUDGET_S", 0)
    waits = count_waits(device, with_graphs(engine_of(load(DEVICE), tree="auto", lookup=3)), DRAWN, prompts, 16)
    assert len(waits) > WARMUP_ROUNDS + 4
    if len(prompts) == 1:  # the host says which rows of a batch are finished
        assert (
            max([*waits[1 : WARMUP_ROUNDS + 1], waits[WARMUP_ROUNDS + 1] - 1, *waits[WARMUP_ROUNDS + 2 :]])
            <= WAITS_A_ROUND
        )


@pytest.mark.parametrize("decoder", [engine_of, Autoregressive], ids=["drafting", "plain"])
def test_few_captures_serve_a_long_text_and_the_next(device, monkeypatch, decoder, stride=16):
    """The text grows by some tokens a round, so that a few rounds come to all of its lengths."""
    monkeypatch.setattr("poss_lightning.target_model.cache.STEP", 512)  # by which views should grow on CUDA
    decoder = with_graphs(decoder(load(DEVICE)))
    request = Request(PROMPTS[:1], 512, frozenset(), DRAWN, torch.Generator().manual_seed(3))
    for _ in islice(decoder.rounds(request, Clock(DEVICE)), 512 // stride):
        slots = (decoder.loop if isinstance(decoder, Autoregressive) else decoder).cache.slots
        with torch.inference_mode():
            slots.advance_device(stride - 1)
        slots.advance_host([stride - 1])
    assert device.captures <= CAPTURES
    colder = replace(DRAWN, temperature=0.3)
    for law, most in ((DRAWN, 0), (colder, 0), (GREEDY, CAPTURES), (DRAWN, 0), (GREEDY, 0)):
        device.captures = 0
        tokens_of(decoder, law, PROMPTS[:1], seed=4, stops=())
        assert device.captures <= most


def test_a_batch_that_lacks_a_text_and_one_that_is_refilled_run_as_the_same_graphs(device):
    loop, alone = PlainDecoder(load(DEVICE)), PlainDecoder(load("cpu"))
    for count, seed in ((3, 0), (2, 1), (9, 2)):
        texts = [[7 + i] * (1 + i) for i in range(count)], [4 + 3 * i % 7 for i in range(count)], frozenset(), DRAWN
        ours, expected = (
            decoder.generate(*texts, torch.Generator().manual_seed(seed), rows)
            for decoder, rows in ((loop, 3), (alone, 1))
        )
        assert ours == expected and device.captures <= (0 if seed else CAPTURES)
        device.captures = 0


def test_both_caches_take_the_next_slots_at_the_same_time(device, monkeypatch):
    """Else a text that grows token by token has a third capture between two extents."""
    monkeypatch.setattr("poss_lightning.target_model.cache.STEP", 64)
    for length in (46, 52, 55):
        device.captures = 0
        tokens_of(with_graphs(engine_of(load(DEVICE), lookup=6)), GREEDY, [[7] * length], 20, stops=())
        assert device.captures <= 2 * CAPTURES


@pytest.mark.parametrize("kind", LAYERS)
@torch.inference_mode()
def test_replayed_acceptance_is_the_hosts(device, kind):
    """`poss replay`: samples come from the host, and drafting is done on the device."""
    pairs = [
        (engine_of(target, kind).drafter.specialists, target) for target in (load("cpu", kind), load(DEVICE, kind))
    ]
    draft, target = pairs[0]
    answer = answers(kind, GREEDY, PROMPTS[:1], 12, stops=())[0]
    sample = read(target, PROMPTS[0], answer, more=0, layers=draft.config.aux_layers)
    drawn, rounds = sample._replace(draws=[Draw(Sampling(0.8), 3)]), []
    for draft, target in pairs:
        rounds.append(replay_rounds(draft, target.embed_head, [sample, drawn], TreePlan(2, 5)))
    assert rounds[0] == rounds[1] and rounds[0][0][0]
