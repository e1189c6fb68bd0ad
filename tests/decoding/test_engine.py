"""Lossless: the engine's tokens are those of plain decoding, whatever the draft, the tree or the batch."""

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from time import perf_counter
from unittest.mock import Mock
from weakref import WeakKeyDictionary

import pytest
import torch

from poss_lightning.clock import Clock
from poss_lightning.decoding import engine
from poss_lightning.decoding.baselines import Autoregressive, Generate
from poss_lightning.decoding.budget import WARMUP_ROUNDS
from poss_lightning.decoding.costs import Costs
from poss_lightning.decoding.decoder import Request
from poss_lightning.decoding.drafting import top_log_probs
from poss_lightning.sampling import GREEDY, Sampling, TokenSampler
from tests.support.decoders import PROMPTS, STOPS, drawn, plant, speculate, tokens_of
from tests.support.tiny import tiny_draft, tiny_target
from tests.support.tolerance import close

TREES = [  # depth, nodes, tree_width; and what else changes no token
    ((6, 60, 10), {}),
    ((6, 7, 1), {"lookup": 6}),
    ((1, 2, 1), {}),
    ((1, 5, 4), {"tree": "auto", "lookup": 6}),
    ((3, 20, 5), {}),
    ((8, 40, 4), {"tree": "auto", "lookup": 4}),
]
EAGLE3 = {"kind": "eagle3", "vocabulary": torch.arange(0, 320, 3), "detach": False}
BLOCK = {"kind": "block", "block_layers": 2}
DRAFTS = {  # layers of the target: allocation, more of the config
    2: [([6], {}), ([1] * 6, {}), ([2, 2, 2], {"kv": "shared"}), ([1, 3, 2], {"vocabulary": torch.arange(0, 320, 5)})],
    7: [([8], EAGLE3), ([3, 3, 2], EAGLE3 | {"kv": "shared"}), ([1, 3, 4], EAGLE3), ([8], BLOCK)],
}
FLAT = Costs(0.001, dict.fromkeys((1, 2, 4, 8, 12), 1.0))  # trees pay
LAWS = [
    GREEDY,
    Sampling(0.0, repetition_penalty=1.5),
    Sampling(1.0),
    Sampling(0.7, top_k=20, top_p=0.9),
    Sampling(1.3, top_p=0.6, repetition_penalty=1.3),
    Sampling(0.3, min_p=0.05),
]


@pytest.fixture(autouse=True)
def no_costs_of_other_tests(monkeypatch):
    """Else drafts of one target share what verification takes."""
    monkeypatch.setattr(engine, "_VERIFY", WeakKeyDictionary())


@pytest.mark.parametrize(
    ("layers", "law"),
    [(2, law) for law in LAWS]
    + [pytest.param(7, law, marks=[pytest.mark.nightly] * (i > 2)) for i, law in enumerate(LAWS)],
    ids=str,
)
def test_tokens_are_those_of_plain_decoding_whatever_the_draft_the_tree_and_the_batch(layers, law, monkeypatch):
    """Over the laws drafts meet trees; in a batch, and one by one, where the same generator continues."""
    monkeypatch.setattr("poss_lightning.decoding.costs.measure", lambda *_: FLAT)
    target, drafts, first = tiny_target(layers, num_hidden_layers=layers), DRAFTS[layers], LAWS.index(law)
    expected = drawn(Autoregressive(target), law, 0, limit=30)
    for turn, (tree, options) in [*enumerate(TREES, first)][first % 2 :: 2]:
        allocation, config = drafts[turn // 2 % len(drafts)]
        speculative = speculate(target, tiny_draft(target, allocation, **config), *tree, **options)
        assert drawn(speculative, law, 0, limit=30) == expected
    generator = torch.Generator().manual_seed(0)
    assert [speculative.decode([prompt], 30, STOPS, law, generator)[0].tokens for prompt in PROMPTS] == expected
    if law.temperature:
        assert drawn(speculative, law, 1, limit=30) != expected
    else:  # of a padded row, transformers would penalise the padding
        prompts = PROMPTS if law == GREEDY else PROMPTS[:1]
        assert drawn(Generate(target), law, 0, prompts, 30) == expected[: len(prompts)]


def test_limits_and_stop_tokens_are_exact_and_accounted_for(target):
    """Drafts are never wrong. The stop token may be the prefill's, drafted, in the middle of a path, or the bonus."""
    (future,) = tokens_of(Autoregressive(target), PROMPTS[:1], 60, frozenset())
    speculative = speculate(target, tiny_draft(target, [6]), 6, 7, 1)
    plant(speculative, [future])
    for limit, stop in (*((limit, None) for limit in (1, 2, 8, 9, 16)), *((40, stop) for stop in range(9))):
        stops, end = (frozenset(), 59) if stop is None else ({future[stop]}, future.index(future[stop]))
        (decoded,) = speculative.decode(PROMPTS[:1], limit, stops)
        assert decoded.tokens == future[: min(limit, end + 1)]
        begins = range(1, len(decoded.tokens), 7)  # of rounds, after the prefill's token: six drafted ones and a bonus
        assert decoded.accepted == [min(6, end - begin) for begin in begins]  # a limit says nothing against the drafter


def test_generate_draws_by_the_seed_it_is_given(target):
    """And leaves torch's own draws where they were."""
    state = torch.get_rng_state()
    first, again, other = (drawn(Generate(target), Sampling(1.0), seed, PROMPTS[:1], 20) for seed in (0, 0, 1))
    assert torch.equal(torch.get_rng_state(), state)
    assert first == again != other


def test_a_text_continues_as_it_would_have_where_it_is_resumed(target):
    """The noise is of the position in the text, whichever part of it was the prompt; padded in a batch, and alone."""
    law, cuts = Sampling(1.0), (11, 3, 20)
    texts = drawn(Autoregressive(target), law, 0, limit=30, stops=frozenset())
    prompts = [[*prompt, *text[:n]] for prompt, text, n in zip(PROMPTS, texts, cuts, strict=True)]
    for decoder in (Autoregressive(target), speculate(target, tiny_draft(target, [2, 2]))):
        rest = drawn(decoder, law, 0, prompts, 10, frozenset())
        assert rest == [text[n : n + 10] for text, n in zip(texts, cuts, strict=True)]


@pytest.mark.parametrize("lookup", [0, 8])
def test_noise_is_made_only_for_places_that_a_round_needs(target, monkeypatch, lookup):
    """To the deepest node that its plan allows, and the place after; the first rounds of a text draft whole trees."""
    speculative, made = speculate(target, tiny_draft(target, [6]), tree="auto", lookup=lookup), [0]
    speculative.auto.measured[1, 0, Sampling(1.0).steps] = Costs(5.0, {1: 1.0, 2: 1.1, 4: 9.0, 60: 9.0, 70: 9.0})
    noise = TokenSampler.noise

    def counted(self, places):
        made[-1] += places.shape[1]
        return noise(self, places)

    monkeypatch.setattr(TokenSampler, "noise", counted)
    drawn(speculative, Sampling(1.0), 3, [[5, 9, 20]], 12, frozenset(), lambda step: made.append(0))
    warm, rest = made[1 : WARMUP_ROUNDS + 1], made[WARMUP_ROUNDS + 1 :]
    assert warm == [7] * WARMUP_ROUNDS and len(rest) > 2 and max(rest) <= 3


def test_a_draft_that_is_the_target_is_accepted_whole_when_tokens_are_drawn(target):
    """It drafts with the noise of the very places where the target then draws."""
    speculative, law = speculate(target, tiny_draft(target, [4]), 4, 5, 1), Sampling(1.5)
    text, drafted = [*PROMPTS[0]], []  # up to the root, and after it

    def step(k, frontier):
        """The target's logits after the text and what was drafted."""
        so_far = [*text, *drafted]
        logits = target.embed_head.logits(target.text_features(torch.tensor([so_far])))[:, -1:]
        drafted.append(int(speculative.sampler.next(logits[:, 0], torch.tensor([len(so_far)]))))
        return torch.zeros(1, 1, 32), logits

    def watch(progress):
        text.extend(progress.tokens[0])
        drafted.clear()

    speculative.drafter.step = step
    (decoded,) = speculative.decode(PROMPTS[:1], 26, frozenset(), law, torch.Generator().manual_seed(0), watch)
    assert [decoded.tokens] == drawn(Autoregressive(target), law, 0, PROMPTS[:1], 26, frozenset())
    assert decoded.accepted == [4] * 5


def test_long_paths_in_a_batch_are_lossless_when_tokens_are_drawn(target):
    """Whole chains are accepted, cut and refused; rows advance by numbers of their own."""
    law = LAWS[4]
    expected = drawn(Autoregressive(target), law, 0, limit=60, stops=frozenset())
    speculative = speculate(target, tiny_draft(target, [2, 2, 2]), 6, 7, 1)
    plant(speculative, expected, wrong_every=3)
    decoded = speculative.decode(PROMPTS, 50, frozenset(), law, torch.Generator().manual_seed(0))
    assert [one.tokens for one in decoded] == [text[:50] for text in expected]
    assert {6, 0} <= {number for one in decoded for number in one.accepted} and max(decoded[0].accepted) > 3


@pytest.mark.parametrize(("broken", "tree"), [(float("nan"), "auto"), (1e30, "fixed")])
def test_a_broken_draft_is_slow_but_lossless(target, broken, tree):
    draft = tiny_draft(target, [2, 2])
    with torch.no_grad():
        draft.layers[0].down_proj.weight.fill_(broken)
    assert tokens_of(speculate(target, draft, 4, 12, 5, tree=tree)) == tokens_of(Autoregressive(target))


def test_an_engine_is_whole_after_a_failure_and_threads_take_turns(target):
    """It has one set of caches."""
    speculative, expected = speculate(target, tiny_draft(target, [2, 2]), 4, 12, 3), tokens_of(Autoregressive(target))
    with pytest.MonkeyPatch.context() as patch, pytest.raises(OSError, match="no"):
        patch.setattr(speculative.drafter, "step", Mock(side_effect=OSError("no")))
        speculative.decode(PROMPTS, 5, STOPS)
    with ThreadPoolExecutor(3) as pool:
        assert [*pool.map(lambda prompt: tokens_of(speculative, [prompt])[0], PROMPTS)] == expected
    first = speculative.rounds(Request(PROMPTS[:1], 30, frozenset()), Clock(target.device))
    next(first)
    assert tokens_of(speculative) == expected
    with pytest.raises(RuntimeError, match="decodes one batch at a time"):
        next(first)


@pytest.mark.parametrize(("tree", "law"), [("fixed", GREEDY), ("auto", Sampling(1.0))], ids=str)
def test_a_batch_shrinks_as_its_texts_end(target, law, tree, monkeypatch):
    """Ten texts that stop at ten different places: each as it is alone, and fewer rows go through the target.

    Nobody waits for costs in the middle of a text.
    """
    monkeypatch.setattr(engine.costs, "measure", lambda *_: measured.append(len(speculative.root)) or FLAT)
    prompts, plain = [[5 + i] * (1 + i % 4) for i in range(10)], Autoregressive(target)
    stops = frozenset(row[3 * i + 5] for i, row in enumerate(drawn(plain, law, 0, prompts, 40, frozenset())[:9]))
    speculative, rows, measured = speculate(target, tiny_draft(target, [2, 2]), 4, 12, 3, tree=tree), [], []
    texts = drawn(speculative, law, 0, prompts, 40, stops, lambda step: rows.append(len(speculative.root)))
    assert texts == drawn(plain, law, 0, prompts, 40, stops)
    assert rows == sorted(rows, reverse=True) and rows[0] > rows[-1] and measured == [10] * (tree == "auto")


# --- costs ---


def test_costs_reach_the_largest_tree_with_all_looked_up_tokens_and_are_no_part_of_the_total(target, monkeypatch):
    """Else looked-up nodes beyond a chain would seem free."""
    monkeypatch.setattr("poss_lightning.decoding.costs.TIME_BUDGET_S", 0)
    speculative = speculate(target, tiny_draft(target, [4]), tree_width=1, tree="auto", lookup=6)
    start = perf_counter()
    seconds = speculative.decode([[5, 9, 20]], 20, frozenset())[0].seconds
    assert speculative.plan.nodes == 5 and max(speculative.auto.costs.verify) == 11
    assert speculative.auto.planner.sizes.max() == 5
    assert seconds["total"] + seconds["measure"] <= perf_counter() - start
    assert seconds.keys() - {"measure"} == {"prefill", "draft", "verify", "commit", "total"}
    assert 0 < sum(seconds.values()) - seconds["total"] - seconds["measure"] <= seconds["total"]


def test_costs_are_measured_where_a_text_begins_once_per_doubling(target, monkeypatch):
    """They grow with the text, whose keys and values every node reads; nobody waits in the middle of an answer."""
    seen = {}

    def measure(*_):
        length = speculative.cache.slots.longest
        return seen.setdefault(length, Costs(1.0, dict.fromkeys((1, 2, 4, 8, 12), 10.0 + length)))

    monkeypatch.setattr(engine, "COSTS_LENGTH", 16)
    monkeypatch.setattr(engine.costs, "measure", measure)
    speculative, plain = speculate(target, tiny_draft(target, [2, 2]), 4, 12, 3, tree="auto"), Autoregressive(target)
    for prompt, measured, last in ((10, [10], 10), (40, [10, 40], 40), (10, [10, 40], 40), (20, [10, 40, 20], 40)):
        text = [[5] * prompt]
        assert tokens_of(speculative, text, 40, frozenset()) == tokens_of(plain, text, 40, frozenset())
        assert list(seen) == measured and speculative.auto.costs == seen[last]


def test_verification_is_timed_once_for_all_drafts_of_a_target(target, monkeypatch):
    """Else each would plan by a noise of its own."""
    timed = []
    monkeypatch.setattr(engine.costs, "measure", lambda *arguments: timed.append({**arguments[-1]}) or FLAT)
    for draft in (tiny_draft(target, [2, 2]), tiny_draft(target, [4])):
        tokens_of(speculate(target, draft, 4, 12, 3, tree="auto"), limit=3)
    assert timed == [{}, FLAT.verify]


@pytest.mark.parametrize("machine", ["busy", "slow"])
def test_costs_are_measured_once_more_where_drafting_did_not_pay(target, monkeypatch, machine):
    """Else a machine that was busy just then would go without a draft; a slow one does so, and asks no third time."""
    dear = FLAT._replace(draft_step=50.0)
    timed = [dear, FLAT if machine == "busy" else dear]
    monkeypatch.setattr(engine.costs, "measure", lambda *_: timed.pop(0))
    speculative, sizes = speculate(target, tiny_draft(target, [2, 2]), 4, 12, 3, tree="auto"), []
    for _ in range(3):
        last: list = []
        speculative.decode([[5, 9, 20]], 40, frozenset(), watch=lambda step, last=last: last.append(step.tree))
        sizes.append(last[-1].tokens.shape[1])
    assert not timed and sizes[0] == 1 and all((size > 1) == (machine == "busy") for size in sizes[1:])


# --- drafting, and what cannot be ---


@pytest.mark.parametrize("allocation", [[6], [2, 2, 2]], ids=str)
def test_rows_through_a_layer_are_those_of_a_single_layer_drafter(target, allocation):
    """Depth 6, top-k 10: the root, then ten nodes at each of five positions; the published PosS-1 takes 168."""
    draft, rows = tiny_draft(target, allocation), []
    for layer in draft.layers:
        layer.after_attention = lambda z, attended, plain=layer.after_attention: (
            rows.append(z.shape[1]) or plain(z, attended)
        )
    speculate(target, draft).decode([[5, 6, 7]], 2)
    assert sum(rows) == 51


@pytest.mark.parametrize(
    ("vocabulary", "dtype"), [(320, torch.float32), (2560, torch.float32), (2560, torch.bfloat16)], ids=str
)
def test_the_most_likely_are_those_of_log_softmax(vocabulary, dtype):
    logits = (3 * torch.randn(2, 7, vocabulary, generator=torch.Generator().manual_seed(0))).to(dtype)
    best, rows = top_log_probs(logits, 10)
    near = partial(close, terms=vocabulary)
    assert near(top_log_probs(logits.mT.contiguous().mT, 10)[0], best)  # as some products lay them out
    every = logits.float().log_softmax(-1)
    assert near(best, every.topk(10, dim=-1).values) and near(every.gather(-1, rows), best)
    assert all(len(set(row)) == 10 for row in rows.flatten(0, 1).tolist())


def test_the_context_is_kept(target):
    """A row's room is its own, also in a batch; a prompt that leaves none is refused."""
    decoders = speculate(target, tiny_draft(target, [2, 2, 2])), Autoregressive(target), Generate(target)
    texts, *others = (tokens_of(decoder, [[7] * 500, [5, 6]], 30, frozenset()) for decoder in decoders)
    assert [len(text) for text in texts] == [12, 30] and others == [texts, texts]
