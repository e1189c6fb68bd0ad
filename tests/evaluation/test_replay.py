"""Replay ≡ decoding: what is accepted of a known answer is what the engine accepts when the target writes it."""

from collections import Counter
from dataclasses import replace

import pytest
import torch

from poss_lightning.decoding.baselines import Autoregressive
from poss_lightning.decoding.drafting import TreeDrafter
from poss_lightning.decoding.engine import Speculative
from poss_lightning.decoding.plans import TreePlan
from poss_lightning.draft.config import DraftConfig
from poss_lightning.draft.kinds import make_draft
from poss_lightning.draft.specialists import DraftModel
from poss_lightning.evaluation import stored_rounds
from poss_lightning.evaluation.stored import Answer, describe_mismatch, find_answers, sampling_settings
from poss_lightning.evaluation.stored_rounds import replay_rounds
from poss_lightning.features.store import Sample
from poss_lightning.sampling import GREEDY, Draw, Sampling, last_draws
from tests.support.decoders import speculate
from tests.support.tiny import tiny_target

PROMPTS = [[5, 6, 7, 8], [9] * 11, [3, 4], [40, 41, 42], [250, 3, 17, 11, 12]]
LIMIT = 40
TREE, CHAIN, LOOKUP = TreePlan(6, 60, 10), TreePlan(6, 7, 1), TreePlan(3, 12, 3, lookup=5)
DRAWN = Sampling(1.0, top_p=0.95)
CASES = [  # allocation, more of config; plan; how answers are chosen, and whether drafts see the draw
    ((6,), {}, CHAIN, GREEDY, True),
    ((2, 2, 2), {}, LOOKUP, DRAWN, True),
    ((1, 3, 2), {}, TREE, DRAWN, False),
    ((1, 3, 2), {"kind": "eagle3"}, TREE, GREEDY, True),
    ((3, 3), {"kind": "eagle3", "kv": "shared"}, LOOKUP, DRAWN, False),
    ((3, 3), {"kind": "eagle3", "kv": "shared"}, CHAIN, DRAWN, True),
    ((6,), {"kind": "block", "block_layers": 2}, TREE, DRAWN, True),
    ((6,), {"kind": "block", "block_layers": 2}, LOOKUP, GREEDY, True),
]


@pytest.fixture(scope="module")
def target():
    return tiny_target(3, num_hidden_layers=4)


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


def stored(target, texts: list[list[int]], draws: list[Draw | None]) -> list[Sample]:
    """Samples of the answers to all prompts."""
    given = zip(PROMPTS, texts, draws, strict=True)
    return [read(target, prompt, answer)._replace(draws=[draw]) for prompt, answer, draw in given]


def answers_in(target, samples: list[Sample]) -> list[Answer]:
    return [answer for sample in samples for answer in find_answers(sample, target.embed_head)]


def lucky(target, answers: list[list[int]], allocation: tuple[int, ...], seed: int, **options) -> DraftModel:
    """A random draft of the target's eight most common tokens, so that some of what it drafts is accepted."""
    common = Counter(token for answer in answers for token in answer).most_common(8)
    words = torch.tensor(sorted(token for token, _ in common))
    torch.manual_seed(seed)
    sizes = {"allocation": allocation, "depth": sum(allocation), "vocabulary_size": len(words)}
    return make_draft(DraftConfig(target=target.spec, **sizes, **options), words).eval()


@pytest.mark.parametrize(("allocation", "options", "plan", "sampling", "sees"), CASES, ids=str)
def test_replayed_rounds_are_the_engines(target, allocation, options, plan, sampling, sees, monkeypatch):
    plain, draws = drawn(target, sampling)
    draft = lucky(target, plain, allocation, plan.depth + plan.nodes + plan.tree_width, **options)
    with monkeypatch.context() as patch:
        if not sees:
            patch.setattr(TreeDrafter, "_noise", lambda *given: None)
        generator = torch.Generator().manual_seed(3)
        engine = Speculative.from_draft(target, draft, replace(plan, tree="fixed"))
        decoded = engine.decode(PROMPTS, LIMIT, sampling=sampling, generator=generator)
    assert [one.tokens for one in decoded] == plain
    cut = [answer[-1] not in target.chat.stops for answer in plain]
    samples = [
        (ended if was_cut else read)(target, prompt, answer, layers=draft.config.aux_layers)
        for was_cut, prompt, answer in zip(cut, PROMPTS, plain, strict=True)
    ]
    if sees:
        samples = [sample._replace(draws=[draw]) for sample, draw in zip(samples, draws, strict=True)]
    for rows in (2, 16):  # the fifth alone, all side by side
        monkeypatch.setattr(stored_rounds, "MAX_ROWS", rows)
        replayed = replay_rounds(draft, target.embed_head, samples, plan)
        for (rounds,), own, answer, was_cut in zip(replayed, decoded, plain, cut, strict=True):
            left = len(answer) - 1 - sum(a + 1 for a in rounds)
            assert rounds == own.accepted[: len(rounds)]
            assert (
                0 <= left <= plan.reach if was_cut else rounds == own.accepted
            )  # rounds that it shows to their full depth
    assert sum(sum(own.accepted) for own in decoded) > (5 if sees else 0)  # something was accepted at all


@pytest.mark.parametrize("drafted", [True, False])
def test_an_answer_that_the_target_ends_counts_to_its_end(target, drafted):
    """To the stop token, be it drafted or the bonus, with no bonus after it. A tree of all tokens is right once."""
    plain = Autoregressive(target).decode(PROMPTS[:1], LIMIT, frozenset())[0].tokens
    end = next(i for i, token in enumerate(plain) if i > 10 and token not in plain[:i] and i % 2 == drafted)
    whole = target.spec.vocab_size
    draft = make_draft(DraftConfig(target=target.spec, allocation=(1,), depth=1)).eval()
    own = speculate(target, draft, 1, whole + 1, whole).decode(PROMPTS[:1], LIMIT, frozenset({plain[end]}))[0]
    assert own.tokens == plain[: end + 1] and own.accepted == [1] * ((end - 1) // 2) + [int(not drafted)]
    sample = read(target, PROMPTS[0], own.tokens, more=5)
    rounds = replay_rounds(draft, target.embed_head, [sample], TreePlan(1, whole + 1, whole))
    assert rounds == [[own.accepted]]


def test_several_answers_of_a_conversation_stay_apart(target):
    """Those without a root, or with nothing after it, have no rounds."""
    spans, short = [(5, 20), (25, 45)], [(0, 3), (22, 23)]
    sample = read(target, PROMPTS[1], list(range(100, 140)))
    draft = lucky(target, [list(range(100, 140))], (2, 2, 2), 2)
    samples = [sample._replace(spans=own) for own in (sorted(spans + short), spans[:1], spans[1:], short, [])]
    whole, *apart = replay_rounds(draft, target.embed_head, samples, TreePlan(4))
    assert apart == [whole[:1], whole[1:], [], []] and len(whole) == 2


def test_answers_that_the_target_would_not_write_are_reported(target):
    """Its own are not, nor a tie here and there; texts of others are, and its own after a beginning that is not."""

    def mismatch(*samples: Sample) -> str | None:
        return describe_mismatch(answers_in(target, [*samples]))

    def changed(sample: Sample, place: int) -> Sample:
        greedy = sample.greedy.clone()
        greedy[place] += 1
        return sample._replace(greedy=greedy)

    texts, draws = drawn(target, GREEDY)
    own = stored(target, texts, draws)
    long = max(own, key=lambda sample: len(sample.tokens) - sample.spans[0][0])
    assert mismatch(*own) is None and mismatch() is None
    assert mismatch(*[changed(long, -10)] * 2, *own * 2) is None
    assert "differ within 8 tokens" in mismatch(changed(long, long.spans[0][0]))  # the second token of the answer
    others = stored(target, [text[::-1] for text in texts], draws)
    assert "not the target's own greedy ones" in mismatch(*others)
    texts, draws = drawn(target, DRAWN)
    own = stored(target, texts, draws)
    assert mismatch(*own) is None
    assert "not the target's own ones" in mismatch(*stored(target, texts, [draw._replace(seed=4) for draw in draws]))
    assert "own greedy ones" in mismatch(*(sample._replace(draws=()) for sample in own))  # which do not say how


def test_all_answers_of_a_store_are_chosen_alike(target):
    answers = answers_in(target, stored(target, *drawn(target, DRAWN)))
    assert sampling_settings(answers) == {"temperature": 1.0, "top_k": 0, "top_p": 0.95}
    with pytest.raises(ValueError, match="were chosen in 2 ways"):
        sampling_settings([*answers, answers[0]._replace(draw=None)])
