"""Replay ≡ decoding: what is accepted of a known answer is what the engine accepts when the target writes it."""

from collections import Counter
from functools import partial

import pytest
import torch

from poss_lightning.corpus.draws import Draw, last_draws
from poss_lightning.decoding.autoregressive import Autoregressive
from poss_lightning.decoding.blocks import BlockDrafter
from poss_lightning.decoding.drafting import Drafter
from poss_lightning.decoding.engine import Speculative
from poss_lightning.draft.specialists import DraftConfig, Specialists
from poss_lightning.evaluation import replay
from poss_lightning.evaluation.replay import replay_rounds
from poss_lightning.evaluation.stored import describe_mismatch, find_answers, sampling_settings
from poss_lightning.features.store import Sample
from poss_lightning.sampling import GREEDY, Sampling
from tests.support.tiny import tiny_target

PROMPTS = [[5, 6, 7, 8], [9] * 11, [3, 4], [40, 41, 42], [250, 3, 17, 11, 12]]
LIMIT = 50
DRAFTS = [((6,), {}), ((2, 2, 2), {}), ((1, 3, 2), {"kind": "eagle3"})]  # allocation, more of config
DRAFTS += [((1, 3, 2), {}), ((3, 3), {"kind": "eagle3", "kv": "shared"}), ((6,), {"kind": "block", "block_layers": 2})]
TREES = [(6, 60, 10), (6, 7, 1), (3, 12, 3)]  # depth, nodes, tree_width; every draft meets two of them
DRAWN = Sampling(1.0, top_p=0.95)


@pytest.fixture(scope="module")
def target():
    return tiny_target(3, num_hidden_layers=4)


@pytest.fixture(scope="module")
def plain(target) -> list[list[int]]:
    return [answer.tokens for answer in Autoregressive(target).decode(PROMPTS, LIMIT)]


def drawn(target, sampling: Sampling) -> tuple[list[list[int]], list[Draw | None]]:
    """Answers, and how each was drawn."""
    decoder = Autoregressive(target)
    answers = decoder.decode(PROMPTS, LIMIT, sampling=sampling, generator=torch.Generator().manual_seed(3))
    return [answer.tokens for answer in answers], last_draws(decoder.loop.sampler, len(PROMPTS))


def read(target, prompt: list[int], answer: list[int], more: int = 1, layers: tuple[int, ...] = ()) -> Sample:
    """A stored sample of one answer, and `more` tokens of the template's after it."""
    tokens = torch.tensor(prompt + answer + [7] * more)
    with torch.inference_mode():
        features, inner = target.text_layers(tokens[None], layers or (1,))
        greedy = target.embed_head.logits(features[0]).argmax(-1)
    spans = [(len(prompt), len(prompt) + len(answer))]
    return Sample("one", tokens, greedy, spans, features[0], inner[0, :, : len(layers)])


def ended(target, prompt: list[int], answer: list[int], layers: tuple[int, ...]) -> Sample:
    """A cut answer, which the template has ended with a token that the target chooses at no temperature."""
    features = target.text_features(torch.tensor([prompt + answer]))[0, -1]
    return read(target, prompt, answer + [int(target.embed_head.logits(features).argmin())], layers=layers)


def lucky(target, answers: list[list[int]], allocation: tuple[int, ...], seed: int, **options) -> Specialists:
    """A random draft of the target's eight most common tokens, so that some of what it drafts is accepted."""
    common = Counter(token for answer in answers for token in answer).most_common(8)
    words = torch.tensor(sorted({token for token, _ in common}))
    torch.manual_seed(seed)
    config = DraftConfig(
        target=target.spec, allocation=allocation, depth=sum(allocation), vocabulary_size=len(words), **options
    )
    return Specialists(config, words).eval()


def _without_noise(draft_tree, drafter, budget, noise=None):
    return draft_tree(drafter, budget)


@pytest.mark.parametrize(
    ("allocation", "options", "tree", "sampling"),
    [(*draft, TREES[(at + i) % 3], (GREEDY, DRAWN)[i]) for at, draft in enumerate(DRAFTS) for i in range(2)],
    ids=str,
)
@pytest.mark.parametrize("sees", [True, False])
def test_replayed_rounds_are_the_engines(target, allocation, options, tree, sampling, sees, monkeypatch):
    """For greedy and drawn answers, and for drawn ones where drafts do not see the draw."""
    depth, nodes, width = tree
    plain, draws = drawn(target, sampling)
    draft = lucky(target, plain, allocation, sum(tree), **options)
    with monkeypatch.context() as patch:
        if not sees:
            for drafter in (Drafter, BlockDrafter):
                blind = partial(_without_noise, drafter.draft_tree)
                patch.setattr(drafter, "draft_tree", lambda *given, blind=blind: blind(*given))
        generator = torch.Generator().manual_seed(3)
        decoded = Speculative(target, draft, *tree).decode(PROMPTS, LIMIT, sampling=sampling, generator=generator)
    assert [one.tokens for one in decoded] == plain
    cut = [answer[-1] not in target.chat.stops for answer in plain]
    given = zip(cut, PROMPTS, plain, strict=True)
    layers = draft.config.layers
    samples = [(ended if own else read)(target, prompt, answer, layers=layers) for own, prompt, answer in given]
    if sees:
        samples = [sample._replace(draws=[draw]) for sample, draw in zip(samples, draws, strict=True)]
    for rows in (2, 16):  # the fifth alone, all side by side
        monkeypatch.setattr(replay, "ROWS", rows)
        replayed = replay_rounds(draft, target.embed_head, samples, depth=depth, nodes=nodes, tree_width=width)
        for (rounds,), own, answer, was_cut in zip(replayed, decoded, plain, cut, strict=True):
            if not was_cut:
                assert rounds == own.accepted
            else:  # only rounds that the answer shows to their full depth
                assert rounds == own.accepted[: len(rounds)]
                left = len(answer) - 1 - sum(a + 1 for a in rounds)
                assert 0 <= left <= depth
    assert sum(sum(own.accepted) for own in decoded) > (5 if sees else 0)  # something was accepted at all


@pytest.mark.parametrize("drafted", [True, False])
def test_an_answer_that_the_target_ends_counts_to_its_end(target, drafted):
    """To the stop token, be it drafted or the bonus, with no bonus after it. A tree of all tokens is right once."""
    plain = Autoregressive(target).decode(PROMPTS[:1], LIMIT, frozenset())[0].tokens
    end = next(i for i, token in enumerate(plain) if i > 10 and token not in plain[:i] and i % 2 == drafted)
    whole = target.spec.vocab_size
    draft = Specialists(DraftConfig(target=target.spec, allocation=(1,), depth=1)).eval()
    own = Speculative(target, draft, 1, whole + 1, whole).decode(PROMPTS[:1], LIMIT, frozenset({plain[end]}))[0]
    assert own.tokens == plain[: end + 1] and own.accepted == [1] * ((end - 1) // 2) + [int(not drafted)]
    sample = read(target, PROMPTS[0], own.tokens, more=5)
    assert replay_rounds(draft, target.embed_head, [sample], depth=1, nodes=whole + 1, tree_width=whole) == [
        [own.accepted]
    ]


def test_several_answers_of_a_conversation_stay_apart(target):
    sample = read(target, PROMPTS[1], list(range(100, 140)))
    draft = lucky(target, [list(range(100, 140))], (2, 2, 2), 2)
    (whole,) = replay_rounds(draft, target.embed_head, [sample._replace(spans=[(5, 20), (25, 45)])], depth=4)
    for span, rounds in zip([(5, 20), (25, 45)], whole, strict=True):
        assert replay_rounds(draft, target.embed_head, [sample._replace(spans=[span])], depth=4) == [[rounds]]


def test_nothing_to_replay(target):
    sample = read(target, PROMPTS[0], [5, 6, 7])
    draft = lucky(target, [[5, 6, 7]], (6,), 0)
    without = [sample._replace(spans=[]), sample._replace(spans=[(0, 3)])]
    assert replay_rounds(draft, target.embed_head, without, depth=6) == [[], []]


def mismatch(target, samples: list[Sample]) -> str | None:
    return describe_mismatch([answer for sample in samples for answer in find_answers(sample, target.embed_head)])


def test_answers_that_the_target_would_not_write_are_reported(target, plain):
    """Its own are not, nor a tie here and there; texts of others are, and its own after a beginning that is not."""
    own = [read(target, prompt, answer) for prompt, answer in zip(PROMPTS, plain, strict=True)]
    assert mismatch(target, own) is None and mismatch(target, []) is None
    (long,) = (sample for sample, answer in zip(own, plain, strict=True) if answer is max(plain, key=len))
    tied = long._replace(greedy=long.greedy.clone())
    tied.greedy[-10] += 1
    assert mismatch(target, [tied] * 2 + own * 2) is None
    begun = long._replace(greedy=long.greedy.clone())
    begun.greedy[long.spans[0][0]] += 1  # the second token of the answer
    assert "differ within 8 tokens" in mismatch(target, [begun])
    others = [read(target, prompt, answer[::-1]) for prompt, answer in zip(PROMPTS, plain, strict=True)]
    assert "not the target's own greedy ones" in mismatch(target, others)


def test_drawn_answers_are_the_targets_own_where_they_say_how(target):
    texts, draws = drawn(target, DRAWN)
    given = zip(PROMPTS, texts, draws, strict=True)
    own = [read(target, prompt, answer)._replace(draws=[draw]) for prompt, answer, draw in given]
    assert mismatch(target, own) is None
    other = [draw._replace(seed=draw.seed ^ 1) for draw in draws]
    changed = [sample._replace(draws=[draw]) for sample, draw in zip(own, other, strict=True)]
    assert "not the target's own ones" in mismatch(target, changed)
    assert "own greedy ones" in mismatch(target, [sample._replace(draws=()) for sample in own])
    answers = [answer for sample in own for answer in find_answers(sample, target.embed_head)]
    assert sampling_settings(answers) == {"temperature": 1.0, "top_k": 0, "top_p": 0.95}
    with pytest.raises(ValueError, match="were chosen in 2 ways"):
        sampling_settings([*answers, answers[0]._replace(draw=None)])
