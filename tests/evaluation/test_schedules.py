"""Schedules in a replay: what a round drafts and verifies, and how long it takes."""

import json

import pytest
import torch

from poss_lightning.decoding.costs import Costs
from poss_lightning.decoding.drafting import Drafter
from poss_lightning.decoding.engine import Speculative
from poss_lightning.decoding.trees import Tree, ancestor_mask
from poss_lightning.evaluation.replay import Replayed, _replay_all
from poss_lightning.evaluation.schedules import (
    LEFT_OUT,
    SCHEDULES,
    Equal,
    Pearl,
    RoundSchedule,
    SizedTetris,
    read_costs,
)
from poss_lightning.evaluation.stored import find_answers
from poss_lightning.sampling import GREEDY
from tests.evaluation.test_replay import LIMIT, PROMPTS, ended, lucky
from tests.support.tiny import tiny_target
from tests.support.trees import random_tree

COSTS = Costs(0.5, {1: 2.0, 2: 2.25, 4: 2.5, 8: 3.0, 12: 3.5, 16: 4.0})
DEPTH, NODES, WIDTH = 4, 12, 3


@pytest.fixture(scope="module")
def played():
    """An engine with `tree: auto` and these costs, its target's answers, and the same as a store has them."""
    target = tiny_target(3, num_hidden_layers=4)
    plain = [one.tokens for one in Speculative(target, None, lookup=2).decode(PROMPTS, LIMIT)]
    draft = lucky(target, plain, (2, 2), 0)
    engine = Speculative(target, draft, DEPTH, NODES, WIDTH, tree="auto")
    engine.measured = {(1, 0, GREEDY): COSTS._replace(verify={n: s for n, s in COSTS.verify.items() if n <= NODES})}
    samples = [ended(target, *texts, layers=()) for texts in zip(PROMPTS, plain, strict=True)]
    return engine, plain, [answer for sample in samples for answer in find_answers(sample, target.embed_head)]


def replayed(played, schedule: RoundSchedule) -> list[Replayed]:
    engine, _, answers = played
    drafter = Drafter(engine.drafter.draft, engine.target.embed_head, DEPTH, WIDTH)
    return _replay_all(drafter, answers, schedule)


def test_depth_and_time_leave_the_rounds_as_they_are(played):
    plain = replayed(played, RoundSchedule(DEPTH, NODES))
    fixed, oracle = (replayed(played, SCHEDULES[name](DEPTH, NODES, COSTS)) for name in ("", "oracle"))
    assert [own.accepted for own in plain] == [own.accepted for own in fixed] == [own.accepted for own in oracle]
    assert any(count for own in plain for count in own.accepted)
    for one, other in zip(fixed, oracle, strict=True):
        assert one.seconds == [DEPTH * 0.5 + 3.5] * len(one.accepted)
        assert other.seconds == [count * 0.5 + 3.5 for count in other.accepted]


def test_auto_is_the_engines(played):
    """Answer by answer, in the order in which they are replayed, since it keeps what it learnt."""
    engine, plain, answers = played
    schedule = SCHEDULES["auto"](DEPTH, NODES, COSTS)
    rounds = replayed(played, schedule)
    for i in sorted(range(len(answers)), key=lambda i: len(answers[i].tokens) - answers[i].start):
        (decoded,) = engine.decode([PROMPTS[i]], LIMIT)
        assert decoded.tokens == plain[i]
        assert rounds[i].accepted == decoded.accepted[: len(rounds[i].accepted)]
        assert len(rounds[i].accepted) >= len(decoded.accepted) - DEPTH - 1


@pytest.mark.parametrize("name", ["pearl", "pearl-adaptive"])
def test_pearl_hides_the_drafting_of_what_came_true(played, name):
    """After a round in which the assumption came true, only verification is left: it takes longer than drafting."""
    deep = [DEPTH] if name == "pearl" else range(1, DEPTH + 1)
    rounds = replayed(played, SCHEDULES[name](DEPTH, NODES, COSTS))
    assert name == "pearl" or any(any(own.came_true) for own in rounds)
    for own in rounds:
        for took, hidden in zip(own.seconds, [False, *own.came_true], strict=False):
            assert took - 3.5 in ([0] if hidden else [0.5 * depth for depth in deep])
        if name == "pearl":
            assert all(count == DEPTH - 1 for count, true in zip(own.accepted, own.came_true, strict=True) if true)


def test_pearl_assumes_the_most_likely_path_and_its_next_token():
    """Root 5 has children 6, then 7 and 8, and 9. Two positions are verified, the third is assumed."""
    schedule = Pearl(3, 4, COSTS)
    schedule.begin(1)
    tree = Tree(*(torch.tensor([row]) for row in ([5, 6, 9, 7, 8], [0, 0, 0, 1, 3], [0.0, -0.1, -2.0, -0.2, -0.3])))
    chosen = schedule.choose(tree, torch.tensor([True]))
    assert schedule.path.tolist() == [[6, 7, 8]]
    assert sorted(chosen.tokens[0].tolist()) == [5, 6, 7, 9]


@pytest.mark.parametrize("name", ["equal", "tetris", "tetris-calibrated"])
@pytest.mark.parametrize("seed", range(4))
def test_a_batch_shares_its_nodes(name, seed, monkeypatch):
    """As from the definition; the parent of every verified node is verified."""
    drafted = [random_tree(10 * seed + row) for row in range(3)]
    generator = torch.Generator().manual_seed(seed)
    tokens, parents = (torch.tensor([tree[i] for tree in drafted]) for i in range(2))
    steps = -torch.rand(tokens.shape, generator=generator) * (torch.arange(14) > 0)
    scores = torch.where(ancestor_mask(parents, 14), steps[:, None], 0.0).sum(-1)
    monkeypatch.setattr(Equal, "rows", 3)
    schedule, active = SCHEDULES[name](6, 14, COSTS), torch.tensor([True, seed % 2 == 0, True])
    chosen = schedule.choose(Tree(tokens, parents, scores), active)
    kept = chosen.tokens != LEFT_OUT
    rows = [row for row in range(3) if active[row]]
    assert int(kept[rows].sum()) == schedule.verified == (14 if seed % 2 == 0 else 9)  # the share of two rows
    assert kept.gather(1, chosen.parents)[kept].all()
    if name == "equal":
        counts = [int(kept[row].sum()) for row in rows]
        assert max(counts) - min(counts) <= 1
    else:  # no node left out is better; chances are monotonic in the scores
        worth = schedule.worth(chosen)
        assert worth[rows][kept[rows]].min() >= worth[rows][~kept[rows]].max()


def test_a_batch_takes_as_many_nodes_as_promise_most(monkeypatch):
    """Two rows of four get their share of what the full batch verifies, at the full batch's costs."""
    monkeypatch.setattr(Equal, "rows", 4)
    worth = torch.tensor([0.9, 0.8, 0.7, 0.2, 0.1, 0.01])
    rates = {n // 2: (2 + float(worth[: n // 2 - 2].sum())) / (2 + COSTS.verify_seconds(n)) for n in (4, 8, 12, 16)}
    assert SizedTetris(4, 16, COSTS).count(worth, 2) == max(rates, key=rates.__getitem__)
    assert Equal(4, 16, COSTS).count(worth, 2) == 8
    assert SizedTetris(4, 16, COSTS._replace(verify={1: 2.0, 2: 2.5})).count(worth, 2) == 2  # a root each


def test_costs_of_something_else_are_refused(tmp_path):
    asked, methods = {"dtype": "bfloat16", "fingerprint": "ab"}, {"hass": {"nodes": 16}}

    def read(costs, **config):
        path = tmp_path / "run.json"
        path.write_text(json.dumps({"costs": costs, "config": asked | config}))
        return read_costs(path, asked, methods)

    measured = {"hass": {"draft_step": 0.5, "verify": {"1": 2.0, "16": 4.0}}}
    assert read(measured) == {"hass": Costs(0.5, {1: 2.0, 16: 4.0})}
    for given, config, message in [
        ({}, {}, "has no costs of hass"),
        ({"hass": {"draft_step": 0.5, "verify": {"8": 2.0}}}, {}, "costs of hass to 8 nodes, and its trees have 16"),
        (measured, {"dtype": "float32"}, "is of dtype float32, and here it is bfloat16"),
        (measured, {"fingerprint": "cd"}, "is of fingerprint cd, and here it is ab"),
    ]:
        with pytest.raises(ValueError, match=message):
            read(given, **config)


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_takes_time(played, name):
    rounds = replayed(played, SCHEDULES[name](DEPTH, NODES, COSTS))
    assert all(min(own.seconds) > 0 for own in rounds)
