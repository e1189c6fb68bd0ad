"""Lossless decoding on a device, with graphs and without: the tokens of our plain loop and of `generate`."""

from itertools import product

import pytest
import torch

from poss_lightning.decoding.baselines import Autoregressive, Generate
from poss_lightning.draft.folder import shipped
from poss_lightning.draft.kinds import load_draft
from poss_lightning.evaluation.suites import read_suites
from poss_lightning.sampling import Sampling
from poss_lightning.target_model.cache import CUDA_STEP
from poss_lightning.target_model.graphs import Graphs
from poss_lightning.target_model.model import Target
from tests.support.decoders import PROMPTS, drawn, speculate
from tests.support.tiny import tiny_draft

pytestmark = pytest.mark.gpu
GREEDY, DRAWN = Sampling(), Sampling(1.0, top_k=40, top_p=0.9)
LAWS = [pytest.param(GREEDY, id="greedy"), pytest.param(DRAWN, id="drawn", marks=pytest.mark.nightly)]
LONGER = [[7] * 90, [8] * 3, [9] * 5]
WAYS = [*product(("eagle2", "eagle3", "block"), ("fixed", "auto"), (GREEDY, DRAWN))]
WAYS += [("plain", "fixed", DRAWN), ("plain", "fixed", GREEDY)]
FEW = (3, len(WAYS) - 1)
WAYS = [pytest.param(*way, marks=() if number in FEW else pytest.mark.nightly) for number, way in enumerate(WAYS)]


@pytest.fixture(autouse=True)
def as_on_cuda(monkeypatch):
    """On the CPU, too, views of the caches grow as on CUDA."""
    monkeypatch.setattr("poss_lightning.target_model.cache.STEP", CUDA_STEP)


@pytest.fixture(scope="module")
def limit(device):
    """New tokens of a short text."""
    return 20 if device.type == "cpu" else 80


def graphs_of(decoder) -> Graphs:
    """The graphs of an engine or a plain loop; on a CPU they do the work without a capture."""
    return decoder.loop.graphs if isinstance(decoder, Autoregressive) else decoder.graphs


def count_captures(decoder) -> list[None]:
    """A list that grows with every capture from now on."""
    graphs, counted = graphs_of(decoder), []
    capture = graphs._capture
    graphs._capture = lambda *given: counted.append(None) or capture(*given)
    return counted


def texts(decoder, law, prompts, limit, seed=3):
    return drawn(decoder, law, seed, prompts, limit, frozenset())


def decoder_of(target, kind, tree="fixed", graphs=None):
    if kind == "plain":
        return Autoregressive(target, graphs=graphs)
    draft = tiny_draft(target, [2] if kind == "block" else [1, 1], kind=kind)
    engine = speculate(target, draft, 2, 8, 4, tree=tree, graphs=graphs)
    if engine.auto:
        engine.auto.each_round = False
    return engine


@pytest.mark.parametrize("kind, tree, law", WAYS)
def test_decoding_is_lossless_with_graphs_and_without(target, limit, kind, tree, law):
    """In a batch, in later batches that reuse its graphs, and alone."""
    plain, cases = Autoregressive(target, graphs=False), [(PROMPTS, 3), (PROMPTS, 4), (LONGER, 3)]
    batch, *others = [texts(plain, law, prompts, limit, seed) for prompts, seed in cases]
    assert (kind, law) != ("plain", GREEDY) or texts(Generate(target), law, PROMPTS, limit) == batch
    for graphs in (False, None):
        decoder = decoder_of(target, kind, tree, graphs)
        assert texts(decoder, law, PROMPTS, limit) == batch
        assert tree == "fixed" or decoder.auto.fixed_plan
        captures = count_captures(decoder)
        assert [texts(decoder, law, prompts, limit, seed) for prompts, seed in cases[1:]] == others
        assert tree == "auto" or not captures
        generator = torch.Generator().manual_seed(3)
        alone = [decoder.decode([prompt], limit, frozenset(), law, generator)[0].tokens for prompt in PROMPTS]
        assert alone == batch
    graphs = graphs_of(decoder)
    assert graphs.enabled == bool(graphs.captured) == (target.device.type == "cuda")  # no capture has failed


@pytest.mark.slow
@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("drafts", [True, False], ids=["drafting", "plain"])
def test_a_long_text_is_captured_once_in_512_slots_and_the_next_one_never(target, drafts, law):
    decoder = speculate(target, tiny_draft(target, [2, 2]), 4, 12, 5) if drafts else Autoregressive(target)
    captures, limit, cuda = count_captures(decoder), 1100, target.device.type == "cuda"
    first = texts(decoder, law, PROMPTS[:1], limit)
    assert not cuda or 1 < len(captures) <= 1 + limit / 512
    assert first == texts(Autoregressive(target, graphs=False), law, PROMPTS[:1], limit)
    captures.clear()
    assert len(texts(decoder, law, PROMPTS[:1], limit, seed=4)[0]) == limit
    assert not captures and graphs_of(decoder).enabled == cuda


def test_the_last_gpu_decodes_as_the_first(folder, target, limit):
    """With several GPUs it is not the current device: graphs and streams are made on the target's own."""
    device = target.device
    if device.type == "cuda":
        device = torch.device("cuda", torch.cuda.device_count() - 1)
    last = Target.load(folder, "float32", str(device))
    engine, plain = speculate(last, tiny_draft(last, [1, 1]), 2, 8, 4), Autoregressive(target, graphs=False)
    assert texts(engine, GREEDY, PROMPTS, limit) == texts(plain, GREEDY, PROMPTS, limit)
    assert engine.graphs.enabled == (device.type == "cuda")
    assert device.type == "cpu" or not torch.backends.cuda.cudnn_sdp_enabled()  # it would plan anew for each length


# --- the embedded target with the shipped drafts ---


@pytest.mark.slow
@pytest.mark.parametrize("law", LAWS)
def test_shipped_drafts_on_the_embedded_target_are_lossless_in_float32(device, law):
    target = Target.load("embedded", "float32", str(device))
    count, limit = (4, 64) if device.type == "cpu" else (12, 128)
    drafts = [load_draft(name) for name in shipped()]
    decoders = [Autoregressive(target), *(speculate(target, draft, nodes=20, tree_width=5) for draft in drafts)]
    plain = Autoregressive(target, graphs=False)
    for question in read_suites(limit=2)[:count]:
        prompt = target.chat.prompt([{"role": "user", "content": question.turns[0]}])
        expected = texts(plain, law, [prompt], limit)
        assert all(texts(decoder, law, [prompt], limit) == expected for decoder in decoders)
