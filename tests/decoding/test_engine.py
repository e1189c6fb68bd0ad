"""Lossless: the engine's tokens are those of plain decoding, whatever the draft, the tree or the batch."""

import time
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import pytest
import torch

from poss_lightning.clock import Clock
from poss_lightning.decoding import engine
from poss_lightning.decoding.autoregressive import Autoregressive, Generate
from poss_lightning.decoding.budget import Fixed
from poss_lightning.decoding.costs import Costs
from poss_lightning.decoding.decoder import Request
from poss_lightning.decoding.drafting import Drafter, top_log_probs
from poss_lightning.decoding.engine import Speculative
from poss_lightning.draft.specialists import DraftConfig, Specialists
from poss_lightning.sampling import Noise, Sampling, TokenSampler
from poss_lightning.target.model import Target
from tests.support.decoders import PROMPTS, STOPS, drawn, plant, tokens_of
from tests.support.tiny import tiny_draft, tiny_target

TREES = [(6, 60, 10), (6, 7, 1), (1, 2, 1), (1, 5, 4), (3, 20, 5), (8, 40, 4)]  # depth, nodes, tree_width
DRAFTS = [([6], {}), ([1] * 6, {}), ([2, 2, 2], {})]  # allocation, more of the config
DRAFTS += [([1, 3, 2], {}), ([2, 2, 2], {"kv": "shared"})]


@cache
def greedy(seed: int) -> tuple[Target, list[list[int]]]:
    """A target and what it says, by transformers' own loop and by ours."""
    target = tiny_target(seed)
    expected = tokens_of(Generate(target), limit=30)
    assert tokens_of(Autoregressive(target), limit=30) == expected
    return target, expected


@pytest.mark.parametrize("tree", TREES, ids=str)
@pytest.mark.parametrize("seed", range(4))
def test_greedy_is_lossless(seed, tree):
    """Over the seeds every draft meets every tree; in a batch, and a prompt alone."""
    target, expected = greedy(seed)
    turn = TREES.index(tree) + seed
    for allocation, config in (DRAFTS[turn % len(DRAFTS)], DRAFTS[(turn + 1) % len(DRAFTS)]):
        speculative = Speculative(target, tiny_draft(target, allocation, seed, **config), *tree)
        assert tokens_of(speculative, limit=30) == expected
    prompt = turn % len(PROMPTS)
    assert tokens_of(speculative, PROMPTS[prompt : prompt + 1], 30) == expected[prompt : prompt + 1]


@pytest.mark.parametrize("limit", range(1, 17))
def test_limits_are_exact_and_accounted_for(target, limit):
    future = tokens_of(Autoregressive(target), PROMPTS[:1], 60, frozenset())[0]
    speculative = Speculative(target, tiny_draft(target, [6]), 6, 7, 1)
    plant(speculative, [future])
    decoded = speculative.decode(PROMPTS[:1], limit, frozenset())[0]
    assert decoded.tokens == future[:limit]
    assert set(decoded.accepted) <= {6}  # a limit says nothing against a drafter that is never wrong
    assert 1 + 7 * (len(decoded.accepted) - 1) < limit <= 1 + 7 * len(decoded.accepted)


@pytest.mark.parametrize("place", range(12))
def test_nothing_after_a_stop_token(target, place):
    """The stop token may be the prefill's, drafted, in the middle of an accepted path, or the bonus."""
    future = tokens_of(Autoregressive(target), PROMPTS[:1], 60, frozenset())[0]
    stop = future[place]
    speculative = Speculative(target, tiny_draft(target, [6]), 6, 7, 1)
    plant(speculative, [future])
    decoded = speculative.decode(PROMPTS[:1], 40, frozenset({stop}))[0]
    end = future.index(stop)
    assert decoded.tokens == future[: end + 1]
    whole, rest = divmod(end - 1, 7)  # after the prefill's token: rounds of six drafted tokens and a bonus
    assert decoded.accepted == ([6] * whole + [rest] if end else [])
    assert len(decoded.tokens) == 1 + sum(count + 1 for count in decoded.accepted)  # τ counts what is emitted


LAWS = [
    Sampling(1.0),
    Sampling(0.7, top_k=20, top_p=0.9),
    Sampling(1.3, top_p=0.6, repetition_penalty=1.3),
    Sampling(0.3, min_p=0.05),
    Sampling(0.0, repetition_penalty=1.5),
]


@pytest.mark.parametrize("law", LAWS, ids=str)
@pytest.mark.parametrize("seed", range(2))
def test_a_seed_draws_the_tokens_of_plain_sampling_whatever_the_tree_and_the_batch(seed, law):
    """Every tree; and one by one, where the same generator goes on."""
    target = tiny_target(seed)
    expected = drawn(Autoregressive(target), law, seed, limit=30)
    for tree in TREES[:4]:
        engine = Speculative(target, tiny_draft(target, [1, 3, 2], seed), *tree)
        assert drawn(engine, law, seed, limit=30) == expected
    assert law != LAWS[-1] or drawn(Generate(target), law, seed, PROMPTS[:1], 30) == expected[:1]
    generator = torch.Generator().manual_seed(seed)
    alone = [engine.decode([prompt], 30, STOPS, law, generator)[0].tokens for prompt in PROMPTS]
    assert alone == expected
    assert law.temperature == 0 or drawn(engine, law, seed + 1, limit=30) != expected


@pytest.mark.parametrize("tree, law", [((8, 40, 4), Sampling()), ((6, 7, 1), LAWS[1])], ids=str)
def test_the_eagle_3_family_is_lossless(tree, law):
    """EAGLE-3 and SPEED, whose features are the target's inner layers; in a batch, and alone."""
    target = tiny_target(1, num_hidden_layers=7)
    expected = drawn(Autoregressive(target), law, 0, limit=24)
    words = torch.arange(0, 320, 3)
    for allocation, kv in (([8], "separate"), ([3, 3, 2], "shared"), ([1, 3, 4], "separate")):
        config = DraftConfig(
            target=target.spec,
            allocation=tuple(allocation),
            depth=8,
            detach=False,
            vocabulary_size=len(words),
            kv=kv,
            kind="eagle3",
        )
        engine = Speculative(target, Specialists(config, words), *tree)
        assert drawn(engine, law, 0, limit=24) == expected
        assert drawn(engine, law, 0, PROMPTS[:1], 24) == expected[:1]


def test_generate_draws_by_the_seed_it_is_given(target):
    """And leaves torch's own draws where they were."""

    def once(seed):
        generator = torch.Generator().manual_seed(seed)
        return Generate(target).decode(PROMPTS[:1], 20, STOPS, Sampling(temperature=1.0), generator)[0].tokens

    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    first = once(0)
    assert torch.equal(torch.rand(3), expected)
    assert once(0) == first != once(1)


def test_a_text_goes_on_as_it_would_have_where_it_is_resumed(target):
    """The noise is of the place in the text, whichever part of it was the prompt; padded in a batch, and alone."""
    law, whole = Sampling(1.0), drawn(Autoregressive(target), Sampling(1.0), 0, limit=30, stops=frozenset())
    begun = [[*prompt, *text[:n]] for prompt, text, n in zip(PROMPTS, whole, (11, 3, 20), strict=True)]
    for decoder in (Autoregressive(target), Speculative(target, tiny_draft(target, [2, 2]))):
        rest = drawn(decoder, law, 0, begun, 10, frozenset())
        assert rest == [text[n : n + 10] for text, n in zip(whole, (11, 3, 20), strict=True)]


@pytest.mark.parametrize("words", [None, torch.arange(0, 320, 3)], ids=["all tokens", "a third"])
def test_a_chain_is_what_the_target_would_draw_from_the_drafts_logits(target, words):
    """Of both texts, at each place, by the token's own noise: whichever row of the draft's head it has."""
    drafter = Drafter(tiny_draft(target, [4], vocabulary=words), target.embed_head, 4, 1)
    drafter.start(2, 64)
    drafter.append_context(torch.tensor([[5, 6, 7]] * 2), torch.randn(2, 3, 32), torch.tensor([3, 1]))
    rows = torch.arange(320) if words is None else words
    kept = torch.randn(2, 4, len(rows))
    full = torch.full((2, 4, 320), -torch.inf).index_copy(2, rows, kept)
    drafter.step = lambda k, frontier: (torch.zeros(2, 1, 32), kept[:, k - 1, None])
    sampler = TokenSampler(2, 320, target.device)
    sampler.begin(Sampling(0.7), [[0]] * 2, torch.Generator().manual_seed(0))
    noise = Noise(sampler, torch.tensor([[4, 5, 6, 7, 8], [2, 3, 4, 5, 6]]))
    tree = drafter.draft_tree(Fixed(4, 5), noise)
    assert torch.equal(tree.tokens[:, 1:], sampler.choose(full, noise.first(4), torch.arange(4).expand(2, -1)))
    assert not torch.equal(tree.tokens[:, 1:], full.argmax(-1))


def test_costs_reach_the_largest_tree_with_all_looked_up_tokens(target, monkeypatch):
    """Else looked-up nodes beyond a chain would seem free."""
    monkeypatch.setattr("poss_lightning.decoding.costs.ENOUGH", 0)
    engine = Speculative(target, tiny_draft(target, [4]), tree_width=1, tree="auto", lookup=6)
    list(engine.decode([[5, 9, 20]], 3, frozenset()))
    assert engine.nodes == 5 and {5, 11} <= set(engine.costs.verify) and max(engine.costs.verify) == 11
    assert max(engine.budget.sizes) == 5


@pytest.mark.parametrize("lookup, most", [(0, 3), (8, 3)])
def test_noise_is_made_only_for_places_that_a_round_needs(target, monkeypatch, lookup, most):
    """Where the host sees the tree, that is to its deepest node and the place after."""
    engine, made = Speculative(target, tiny_draft(target, [6]), tree="auto", lookup=lookup), []
    engine.measured[1, 0, Sampling(1.0).steps] = Costs(5.0, {1: 1.0, 2: 1.1, 4: 9.0, 60: 9.0, 70: 9.0})
    noise = TokenSampler.noise
    monkeypatch.setattr(TokenSampler, "noise", lambda self, places: made.append(places.shape[1]) or noise(self, places))
    draws = torch.Generator().manual_seed(3)
    list(engine.decode([[5, 9, 20]], 12, frozenset(), Sampling(1.0), draws, lambda step: made.append(0)))
    rounds = " ".join(map(str, made)).split("0")[1:-1]
    assert rounds and all(sum(map(int, each.split())) <= most for each in rounds)


def test_a_draft_that_is_the_target_is_accepted_whole_at_any_temperature(target):
    """It drafts with the noise of the very places where the target then draws."""
    engine = Speculative(target, tiny_draft(target, [4]), 4, 5, 1)
    text: list[int] = []  # up to the root
    drafted: list[int] = []

    def step(k, frontier):
        """The target's logits after the text and what was drafted."""
        so_far = [*text, *drafted[: k - 1]]
        logits = target.embed_head.logits(target.text_features(torch.tensor([so_far])))[:, -1:]
        drafted.append(int(engine.sampler.next(logits[:, 0], torch.tensor([len(so_far)]))))
        return torch.zeros(1, 1, 32), logits

    engine.drafter.step = step
    for law in (Sampling(1.0), Sampling(0.5), Sampling(1.5)):
        request = Request(PROMPTS[:1], 26, frozenset(), law, torch.Generator().manual_seed(0))
        text[:], accepted = PROMPTS[0], []
        for progress in engine.rounds(request, Clock(target.device)):
            text += progress.tokens[0]
            accepted += progress.accepted.values()
            drafted.clear()
        assert text[4:] == drawn(Autoregressive(target), law, 0, PROMPTS[:1], 26, frozenset())[0]
        assert accepted == [4] * 5


@pytest.mark.parametrize("law", [Sampling(), Sampling(1.0), *LAWS[1:3]], ids=str)
def test_long_paths_in_a_batch_are_lossless_at_any_temperature(target, law):
    """Whole chains are accepted, cut and refused; rows advance by numbers of their own."""
    expected = drawn(Autoregressive(target), law, 0, limit=60, stops=frozenset())
    engine = Speculative(target, tiny_draft(target, [2, 2, 2]), 6, 7, 1)
    plant(engine, expected, wrong_every=3)
    decoded = engine.decode(PROMPTS, 50, frozenset(), law, torch.Generator().manual_seed(0))
    assert [one.tokens for one in decoded] == [text[:50] for text in expected]
    assert {6, 0} <= {number for one in decoded for number in one.accepted} and max(decoded[0].accepted) > 3


@pytest.mark.parametrize("broken", [float("nan"), float("inf"), 1e30])
@pytest.mark.parametrize("tree", ["fixed", "auto"])
def test_a_broken_draft_is_slow_but_lossless(target, broken, tree):
    draft = tiny_draft(target, [2, 2])
    with torch.no_grad():
        draft.layers[0].down_proj.weight.fill_(broken)
    assert tokens_of(Speculative(target, draft, 4, 12, 5, tree)) == tokens_of(Autoregressive(target))


def test_an_engine_is_whole_after_a_failure(target):
    def fails(*_):
        raise OSError("no")

    engine, expected = Speculative(target, tiny_draft(target, [2, 2])), tokens_of(Autoregressive(target))
    with pytest.MonkeyPatch.context() as patch, pytest.raises(OSError, match="no"):
        patch.setattr(engine.drafter, "step", fails)
        engine.decode(PROMPTS, 5, STOPS)
    assert tokens_of(engine) == expected
    first = engine.rounds(Request(PROMPTS[:1], 30, frozenset()), Clock(target.device))
    next(first)
    assert tokens_of(engine) == expected
    with pytest.raises(RuntimeError, match="decodes one batch at a time"):
        next(first)


def test_threads_take_turns(target):
    """An engine has one set of caches."""
    speculative, plain = Speculative(target, tiny_draft(target, [2, 2]), 4, 12, 3), Autoregressive(target)
    with ThreadPoolExecutor(3) as pool:
        texts = list(pool.map(lambda prompt: tokens_of(speculative, [prompt], 30), PROMPTS))
    assert texts == [tokens_of(plain, [prompt], 30) for prompt in PROMPTS]


@pytest.mark.parametrize("tree", ["fixed", "auto"])
@pytest.mark.parametrize("law", [Sampling(), Sampling(1.0)], ids=str)
def test_a_batch_shrinks_as_its_texts_end(target, law, tree, monkeypatch):
    """Ten texts that stop at ten different places: each as it is alone, and fewer rows go through the target.

    Nobody waits for costs in the middle of a text.
    """
    timed = Costs(0.1, dict.fromkeys((1, 2, 4, 8, 12), 1.0))
    monkeypatch.setattr(engine.costs, "measure", lambda *_: measured.append(len(speculative.drafter.root)) or timed)
    prompts = [[5 + i] * (1 + i % 4) for i in range(10)]
    plain = drawn(Autoregressive(target), law, 0, prompts, 40, frozenset())
    stops = frozenset(row[3 * i + 5] for i, row in enumerate(plain[:9]))
    speculative, rows, measured = Speculative(target, tiny_draft(target, [2, 2]), 4, 12, 3, tree), [], []
    one_round = speculative._draft_verify_commit
    speculative._draft_verify_commit = lambda *arguments: (
        rows.append(len(speculative.drafter.root)) or one_round(*arguments)
    )
    assert drawn(speculative, law, 0, prompts, 40, stops) == drawn(Autoregressive(target), law, 0, prompts, 40, stops)
    assert rows == sorted(rows, reverse=True) and rows[0] > rows[-1] and measured == [10] * (tree == "auto")


def test_costs_are_measured_where_a_text_begins_once_per_doubling(target, monkeypatch):
    """They grow with the text, whose keys and values every node reads; nobody waits in the middle of an answer."""
    seen = {}

    def measure(*_):
        length = speculative.cache.slots.longest
        seen[length] = Costs(1.0, dict.fromkeys((1, 2, 4, 8, 12), 10.0 + length))
        return seen[length]

    monkeypatch.setattr(engine, "COSTS_LENGTH", 16)
    monkeypatch.setattr(engine.costs, "measure", measure)
    speculative, plain = Speculative(target, tiny_draft(target, [2, 2]), 4, 12, 3, tree="auto"), Autoregressive(target)
    for prompt, measured, last in ((10, [10], 10), (40, [10, 40], 40), (10, [10, 40], 40), (20, [10, 40, 20], 40)):
        text = [[5] * prompt]
        assert tokens_of(speculative, text, 40, frozenset()) == tokens_of(plain, text, 40, frozenset())
        assert list(seen) == measured and speculative.budget.costs is seen[last]
    assert speculative.costs is seen[10]


@pytest.mark.parametrize("machine", ["busy", "slow"])
def test_costs_are_measured_once_more_where_drafting_did_not_pay(target, monkeypatch, machine):
    """Else a machine that was busy just then would go without a draft; a slow one does so, and asks no third time."""
    dear, cheap = (Costs(step, dict.fromkeys((1, 2, 4, 8, 12), 1.0)) for step in (50.0, 0.001))
    timed = [dear, cheap if machine == "busy" else dear]
    monkeypatch.setattr(engine.costs, "measure", lambda *_: timed.pop(0))
    speculative, sizes = Speculative(target, tiny_draft(target, [2, 2]), 4, 12, 3, tree="auto"), []
    for _ in range(3):
        last: list = []
        speculative.decode([[5, 9, 20]], 40, frozenset(), watch=lambda step, last=last: last.append(step.tree))
        sizes.append(last[-1].tokens.shape[1])
    assert not timed and sizes[0] == 1 and all((size > 1) == (machine == "busy") for size in sizes[1:])


@pytest.mark.parametrize("allocation", [[6], [1] * 6, [2, 2, 2]], ids=str)
def test_rows_through_a_layer_are_those_of_a_single_layer_drafter(target, allocation):
    """Depth 6, top-k 10: the root, then ten nodes at each of five positions; the published PosS-1 takes 168."""
    draft, rows = tiny_draft(target, allocation), []
    for layer in draft.layers:
        layer.after_attention = lambda z, attended, plain=layer.after_attention: (
            rows.append(z.shape[1]) or plain(z, attended)
        )
    drafter = Drafter(draft, target.embed_head, 6, 10)
    drafter.start(1, 64)
    drafter.append_context(torch.tensor([[5, 6, 7]]), torch.randn(1, 3, 32), torch.tensor([3]))
    drafter.draft_tree(Fixed(6, 60))
    assert sum(rows) == 51


@pytest.mark.parametrize("vocabulary", [40, 320, 2560, 2561])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_likeliest_are_those_of_log_softmax(vocabulary, dtype):
    logits = (3 * torch.randn(2, 7, vocabulary, generator=torch.Generator().manual_seed(0))).to(dtype)
    found, rows = top_log_probs(logits, 10)
    torch.testing.assert_close(top_log_probs(logits.mT.contiguous().mT, 10)[0], found)  # as some products lay them out
    every = logits.float().log_softmax(-1)
    torch.testing.assert_close(found, every.topk(10, dim=-1).values)
    torch.testing.assert_close(every.gather(-1, rows), found)
    assert all(len(set(row)) == 10 for row in rows.flatten(0, 1).tolist())


def test_a_smaller_draft_vocabulary_is_lossless(target):
    vocabulary = torch.arange(0, 320, 5)
    config = DraftConfig(target=target.spec, allocation=(2, 2), depth=4, vocabulary_size=len(vocabulary))
    small = Specialists(config, vocabulary)
    speculative = Speculative(target, small, 4, 20, 5)
    assert tokens_of(speculative) == tokens_of(Autoregressive(target))
    speculative.drafter.start(1, 64)
    speculative.drafter.append_context(torch.tensor([[5]]), torch.randn(1, 1, 32), torch.tensor([1]))
    assert (speculative.drafter.draft_tree(Fixed(4, 20)).tokens[:, 1:] % 5 == 0).all()


def test_the_context_is_kept(target):
    long = [[7] * 500]
    speculative = Speculative(target, tiny_draft(target, [2, 2, 2]))
    assert tokens_of(speculative, long, 100, frozenset()) == tokens_of(Autoregressive(target), long, 100, frozenset())
    assert len(tokens_of(speculative, long, 100, frozenset())[0]) == 12
    for decoder in (speculative, Autoregressive(target), Generate(target)):  # a row's room is its own, also in a batch
        assert [len(row) for row in tokens_of(decoder, [*long, [5, 6]], 30, frozenset())] == [12, 30]
    with pytest.raises(ValueError, match="a prompt has 512 tokens; tiny reads 512"):
        speculative.decode([[7] * 512], 10)


def test_what_cannot_be_is_refused(target):
    draft = tiny_draft(target, [2, 2, 2])
    with pytest.raises(ValueError, match="nodes is 6, which cannot hold a path of depth 6"):
        Speculative(target, draft, 6, 6)
    with pytest.raises(ValueError, match="a different target: fingerprint"):
        Speculative(tiny_target(5), draft)
    with pytest.raises(ValueError, match="limit of new tokens is 0"):
        Speculative(target, draft).decode([[1]], 0)
    for prompts, words in (([[]], "a prompt is empty"), ([], "there are no prompts"), ([[5, 320]], "token 320 of a")):
        with pytest.raises(ValueError, match=words):
            Speculative(target, draft).decode(prompts, 5)
    assert (
        Speculative(target, draft, 9).decode([[5]], 5, frozenset())[0].tokens
    )  # deeper than the allocation is allowed


def test_seconds_by_part_make_the_total(target):
    seconds = Speculative(target, tiny_draft(target, [6])).decode([[5, 6]], 20, frozenset())[0].seconds
    parts = {"prefill", "draft", "verify", "commit", "total"}
    assert set(seconds) == parts
    speculative, times = Speculative(target, tiny_draft(target, [6]), tree="auto"), []
    for _ in range(2):
        start = time.perf_counter()
        seconds = speculative.decode([[5, 6]], 20, frozenset())[0].seconds
        times.append((seconds, time.perf_counter() - start))
    (first, whole), (second, _) = times
    assert set(first) == {*parts, "measure"} and set(second) == parts  # measured once, and told
    assert first["total"] + first["measure"] <= whole
    assert 0 < sum(value for part, value in seconds.items() if part != "total") <= seconds["total"]
