"""Trees by tokens a second: chances against counts, a choice against trying all, the whole against fixed trees."""

import random
import re

import pytest
import torch

from poss_lightning.decoding.budget import (
    NEW_TRIALS,
    SETTLED_ROUNDS,
    TRIALS,
    AutoBudget,
    Fixed,
    PerRound,
    Settled,
    Trial,
)
from poss_lightning.decoding.costs import TREE_SIZES, Costs
from poss_lightning.decoding.lookup import join
from poss_lightning.decoding.plans import Plan
from poss_lightning.decoding.rounds import Calibration, Round
from poss_lightning.decoding.trees import Tree, ancestor_mask
from poss_lightning.decoding.verification import judge

CPU, DEPTH, NODES = torch.device("cpu"), 6, 12
CLAIMS = 0.95, 0.95, 0.6, 0.3, 0.05  # of a draft, at places easy and hard
OVERSTATED = 1.5  # a token that it claims at c is right with the chance c to this power


def test_chances_begin_with_the_draft_s_word_and_end_with_the_counts():
    calibration = Calibration(CPU)
    scores = -torch.tensor([0.0, 0.3, 1.2, 3.5, 7.0])
    assert ((calibration.chance(scores) - scores.exp()).abs() < 0.12).all()
    chance = random.Random(0)
    for _ in range(600):  # every second of those claimed at 0.30, none of those claimed at 0.03
        taken = torch.tensor([chance.random() < 0.5, False])
        calibration.learn(-torch.tensor([1.2, 3.5]), taken)
    found = calibration.chance(scores)
    assert found[2] == pytest.approx(0.5, abs=0.1) and found[3] < 0.02
    assert found[4] == Calibration(CPU).chance(scores)[4]  # never seen


def test_costs_between_those_measured_lie_on_a_line_and_never_fall():
    found = Costs.interpolate(2.0, {1: 10.0, 2: 15.0, 4: 13.0, 8: 17.0, 16: 40.0, 20: 39.0})
    assert list(found.verify) == [n for n in TREE_SIZES if n <= 20]
    assert [found.verify[n] for n in (1, 2, 3, 4, 6, 8, 12, 16, 20)] == [10, 13, 13, 13, 15, 17, 28, 39, 39]
    assert found.break_even(0, 1) == 1  # in plain steps
    assert found.break_even(3, 5) == found.break_even(3, 6) == (3 * 2 + 15) / 10
    assert found.break_even(6, 60) == (6 * 2 + 39) / 10  # no tree may have so many


def costs(draft: float, slope: float) -> Costs:
    return Costs(draft, {n: 10 + slope * n for n in (1, 2, 3, 4, 6, 8, 12)})


def budget_of(kind: type[AutoBudget], draft=1.0, slope=0.2, **options) -> AutoBudget:
    return kind(**{"depth": DEPTH, "nodes": NODES} | options, costs=costs(draft, slope), calibration=Calibration(CPU))


@pytest.mark.parametrize("seed", range(4))
def test_the_size_is_the_best_of_all(seed):
    """Tokens less what their seconds would bring elsewhere, tried for every size, for three rows; one is finished."""
    torch.manual_seed(seed)
    budget = budget_of(PerRound, slope=0.5)
    budget.begin([0, 1, 3])
    scores = torch.cat([torch.zeros(4, 1), -3 * torch.rand(4, 20)], dim=1)
    chances = budget.calibration.chance(scores[budget.active, 1:])

    def worth(n: int) -> float:
        gained = sum(sum(sorted(row, reverse=True)[: n - 1]) for row in chances.tolist())
        return gained - budget.rate * budget.costs.verify[n]

    assert budget.node_count(scores) == max(budget.costs.verify, key=worth)
    assert budget.node_count(scores[:, :5]) <= 5


def play(budget: AutoBudget, rounds: int, claims=CLAIMS, looked_up=0.0, matching=1.0) -> tuple[float, float]:
    """Tokens a second, by the costs, of chains with lookups; and the share of rounds that drafted.

    Args:
        claims: the draft's chances of a token, at one place or another.
        looked_up: the chance that a looked-up token is right, where something matches.
        matching: the chance that it does.
    """
    chance, tokens, seconds, drafts = random.Random(0), 0, 0.0, 0
    most = budget.beyond.claimed.shape[1]
    for _ in range(rounds):
        claim, found = chance.choice(claims), torch.tensor([3 * (chance.random() < matching)])
        said = torch.arange(1, DEPTH + 2)[None]  # what the target says: another token at each place
        drafted, continued = (
            torch.where(torch.tensor([[chance.random() < share for _ in range(DEPTH)]]), said[:, :-1], 0)
            for share in (claim**OVERSTATED, looked_up if found else 0.0)
        )
        scores, depth = torch.arange(DEPTH + 1)[None] * torch.tensor(claim).log(), 0
        while depth < budget.depth and budget.go_deeper(depth, scores[:, depth : depth + 1]):
            depth += 1
        nodes = min(budget.node_count(scores[:, : depth + 1]), depth + 1)
        chain = torch.cat([torch.zeros(1, 1, dtype=torch.long), drafted], dim=1)[:, :nodes]
        tree = Tree(chain, (torch.arange(nodes) - 1).clamp(0)[None], scores[:, :nodes])
        count = budget.lookup_count(found, most) if most else 0
        tree = join(tree, continued[:, :count])
        ancestors = ancestor_mask(tree.parents, DEPTH)
        verdict = judge(tree, ancestors, said[0, (ancestors.sum(-1) - 1).clamp(max=DEPTH)], DEPTH)
        lookup = (found, continued[:, :most], count) if most else ()
        budget.learn(Round(tree, ancestors, verdict, *lookup))
        tokens += int(verdict.accepted) + 1
        seconds += depth * budget.costs.draft_step + budget.costs.verify_seconds(nodes + count)
        drafts += depth > 0
    return tokens / seconds, drafts / rounds


def fixed_rate(machine: Costs, depth: int, claims=CLAIMS, looked_up=0.0, matching=0.0) -> float:
    """Tokens a second of chains that all have this depth, with as many looked-up tokens as `play` if any."""
    beside = DEPTH if matching else 0
    chances = [
        1 - (1 - claim ** (OVERSTATED * place) * (place <= depth)) * (1 - matching * looked_up**place)
        for claim in claims
        for place in range(1, max(depth, beside) + 1)
    ]
    seconds = depth * machine.draft_step + machine.verify_seconds(depth + 1 + beside)
    return (1 + sum(chances) / len(claims)) / seconds


@pytest.mark.parametrize(("draft", "slope"), [(0.5, 0.1), (3.0, 0.1), (0.5, 2.0), (8.0, 4.0), (20.0, 20.0)], ids=str)
def test_what_is_chosen_anew_or_settled_on_is_near_the_best_fixed_tree(draft, slope):
    """In five machines: cheap and dear steps, flat and steep verification; in the last, plain decoding is best."""
    best = max(fixed_rate(costs(draft, slope), depth) for depth in range(DEPTH + 1))
    assert play(budget_of(PerRound, draft, slope), 800)[0] > 0.97 * best
    settled = budget_of(Settled, draft, slope)
    play(settled, TRIALS)
    depth, nodes, _ = settled.plan
    assert nodes <= depth + 1 and fixed_rate(settled.costs, depth) > 0.9 * best


@pytest.mark.parametrize(("draft", "claim", "looked_up"), [(3.0, 0.2, 0.9), (2.0, 0.95, 1.0), (0.5, 0.85, 0.9)])
@pytest.mark.parametrize("matching", [1.0, 0.3])
@pytest.mark.parametrize(("kind", "least"), [(PerRound, 0.94), (Settled, 0.88)])
def test_it_is_near_the_better_of_lookups_alone_and_whole_trees(kind, least, matching, draft, claim, looked_up):
    """A draft that is wrong, or slow, may seem to pay because of what is looked up beside it."""
    budget, rounds = budget_of(kind, draft, lookup=DEPTH), ((claim,), looked_up, matching)
    play(budget, 200, *rounds)
    rate, drafts = play(budget, 600, *rounds)
    assert rate > least * max(fixed_rate(budget.costs, depth, *rounds) for depth in (0, DEPTH))
    if claim == 0.2:
        assert drafts < 0.15


@pytest.mark.parametrize("first, then", [((20.0, 20.0), (0.5, 0.1)), ((0.5, 0.1), (20.0, 20.0))], ids=str)
def test_it_settles_anew_where_drafting_begins_to_pay_or_no_longer_does(first, then):
    budget = budget_of(Settled, *first)
    play(budget, 40)
    before = budget.plan
    play(budget, TRIALS + SETTLED_ROUNDS - 40 + NEW_TRIALS if before[0] else 4 * SETTLED_ROUNDS)
    assert budget.plan in (before, None)  # the same, as nothing has changed
    budget.costs = costs(*then)
    play(budget, 8 * SETTLED_ROUNDS)
    while budget.plan is None:
        play(budget, 1)
    assert (before[0] == 0) == (budget.plan[0] > 0)


@pytest.mark.parametrize("rows", [[8] + [1] * 15, [1] * 15 + [8], [2] * 16], ids=str)
@pytest.mark.parametrize("draft", [1.0, 3.0])
def test_what_it_settles_on_counts_each_trials_own_rows(rows, draft):
    """Tokens over seconds of all trials, for every depth and size; rows of a batch end while it looks."""
    budget = budget_of(Settled, draft, depth=2)
    scores, levels = torch.tensor([0.0, -0.4, -0.9, -1.1]), torch.tensor([0, 1, 1, 2])
    budget.trials = [Trial(scores.repeat(n, 1), levels.repeat(n, 1), levels[:n] * 0) for n in rows]

    def rate(depth: int, nodes: int) -> float:
        chances = budget.calibration.chance(scores)[(levels > 0) & (levels <= depth)].tolist()
        tokens = sum(n * (1 + sum(sorted(chances, reverse=True)[: nodes - 1])) for n in rows)
        return tokens / (len(rows) * (depth * draft + budget.costs.verify[nodes]))

    plans = [(0, 1), *((depth, nodes) for depth in (1, 2) for nodes in (1, 2, 3, 4))]
    depth, nodes, _ = budget._best()
    assert rate(depth, nodes) == pytest.approx(max(rate(*plan) for plan in plans), rel=1e-6)
    assert depth > 0


def test_a_short_text_after_a_long_one_is_drafted_as_before():
    """Seconds of a long text say nothing of a short one's; what a round costs in plain steps does."""
    budget = budget_of(PerRound)
    short, statistics = budget.costs, budget.statistics
    play(budget, 60)
    believed = statistics.tokens / statistics.plain_steps
    budget.costs = short._replace(verify={n: 3 * seconds for n, seconds in short.verify.items()})
    play(budget, 200)
    budget.costs = short
    assert statistics.worthwhile and statistics.tokens / statistics.plain_steps > 0.95 * believed


@pytest.mark.parametrize(("matching", "looked_up"), [(1.0, 1.0), (1.0, 0.0), (0.0, 0.0)])
def test_it_settles_on_looked_up_tokens_where_they_pay(matching, looked_up):
    """The draft is hardly ever right; the looked-up path is always right, or always wrong."""
    budget = budget_of(Settled, slope=4.0, depth=1, lookup=4)
    play(budget, TRIALS, (0.02,), looked_up, matching)
    assert budget.plan[:2] == (0, 1) and (budget.plan[2] > 1) == bool(looked_up)


@pytest.mark.parametrize("kind", [PerRound, Settled])
def test_it_says_why_it_gave_up_drafting(kind):
    """Plain decoding is faster; or lookups alone are, though a round with this draft beats plain decoding."""
    cheap, dear, wrong = budget_of(kind, 0.5, 0.1), budget_of(kind, 20.0, 20.0), budget_of(kind, 3.0, lookup=DEPTH)
    play(cheap, 40)
    assert cheap.why_plain() is None and Fixed(Plan(DEPTH, 12)).why_plain() is None
    play(dear, 40)
    needed, brought = map(float, re.findall(r"\d+\.\d+", dear.why_plain()))
    assert needed > brought >= 1
    play(wrong, 40, (0.2,), 0.9)
    needed, brought, alone = map(float, re.findall(r"\d+\.\d+", wrong.why_plain()))
    assert alone > brought > needed


def test_rows_that_are_finished_do_not_count():
    budget, scores = budget_of(PerRound, draft=5.0), torch.tensor([-0.1, -5.0])[:, None].expand(2, 3)
    for active in (0, 1):
        budget.begin([active])
        assert budget.go_deeper(1, scores) == (budget.node_count(scores) > 1) == (active == 0)
