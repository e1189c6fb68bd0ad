"""Trees by tokens a second: chances against counts, a choice against trying all, the whole against fixed trees."""

import random
import re
from itertools import product

import pytest
import torch

from poss_lightning.decoding.budget import NEW_TRIALS, SETTLED_ROUNDS, TRIALS, Fixed, PerRound, Settled, Trial
from poss_lightning.decoding.costs import TREE_SIZES, Costs
from poss_lightning.decoding.lookup import join
from poss_lightning.decoding.rounds import Calibration, Round
from poss_lightning.decoding.trees import Tree, ancestor_mask
from poss_lightning.decoding.verification import Verdict, judge

CPU, DEPTH, NODES = torch.device("cpu"), 6, 12


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


def test_break_even_is_a_round_in_plain_steps():
    found = Costs.interpolate(2.0, {1: 10.0, 2: 15.0, 4: 20.0, 8: 30.0})
    assert found.break_even(0, 1) == 1
    assert found.break_even(3, 4) == (3 * 2 + 20) / 10
    assert found.break_even(3, 5) == found.break_even(3, 6) == (3 * 2 + 25) / 10
    assert found.break_even(6, 60) == (6 * 2 + 30) / 10  # no tree may have so many


def costs(draft: float, slope: float) -> Costs:
    return Costs(draft, {n: 10 + slope * n for n in (1, 2, 3, 4, 6, 8, 12)})


def auto(draft=1.0, slope=0.2) -> PerRound:
    return PerRound(DEPTH, NODES, costs(draft, slope), Calibration(CPU))


@pytest.mark.parametrize("seed", range(8))
def test_the_size_is_the_best_of_all(seed):
    """Tokens less what their seconds would bring elsewhere, tried for every size, for a batch of three."""
    torch.manual_seed(seed)
    budget = auto(slope=0.5)
    budget.begin([0, 1, 2])
    scores = torch.cat([torch.zeros(3, 1), -3 * torch.rand(3, 20)], dim=1)
    chances = budget.calibration.chance(scores[:, 1:])

    def worth(n: int) -> float:
        gained = sum(sum(sorted(row, reverse=True)[: n - 1]) for row in chances.tolist())
        return gained - budget.rate * budget.costs.verify[n]

    assert budget.node_count(scores) == max(budget.costs.verify, key=worth)
    assert budget.node_count(scores[:, :5]) <= 5


def test_drafting_goes_on_while_a_step_is_worth_its_time():
    likely, unlikely = torch.log(torch.tensor([[0.6, 0.3]])), torch.log(torch.tensor([[0.01, 0.01]]))
    assert auto().go_deeper(1, likely) and not auto().go_deeper(1, unlikely)
    assert not auto(draft=20).go_deeper(1, likely)


class Language:
    """Places easy and hard, drafted as chains: a token is taken with a chance that the draft overstates."""

    def __init__(self, seed: int, depth: int):
        self.chance, self.depth = random.Random(seed), depth

    def place(self) -> tuple[torch.Tensor, int]:
        """Scores of a chain (1, K+1), and how many of it the target takes."""
        claim, accepted = self.chance.choice([0.95, 0.95, 0.6, 0.3, 0.05]), 0
        while accepted < self.depth and self.chance.random() < claim**1.5:
            accepted += 1
        return torch.arange(self.depth + 1)[None] * torch.tensor(claim).log(), accepted


def play(
    budget: PerRound | Settled | None, fixed: tuple[int, int], machine: Costs, rounds: int, seed: int = 0
) -> float:
    """Tokens a second, by the costs, of many rounds with a budget, or with a fixed depth and size."""
    language, tokens, seconds = Language(seed, DEPTH), 0, 0.0
    for _ in range(rounds):
        scores, accepted = language.place()
        depth, nodes = fixed
        if budget:
            depth = 0
            while depth < DEPTH and budget.go_deeper(depth, scores[:, depth : depth + 1]):
                depth += 1
            nodes = budget.node_count(scores[:, : depth + 1])
        nodes = min(nodes, depth + 1)
        accepted = min(accepted, nodes - 1)
        tokens += accepted + 1
        seconds += depth * machine.draft_step + machine.verify_seconds(nodes)
        if budget:
            parents = (torch.arange(nodes) - 1).clamp(0)[None]
            tree = Tree(torch.zeros_like(parents), parents, scores[:, :nodes])
            path = torch.arange(DEPTH + 1).clamp(max=accepted)[None]
            verdict = Verdict(path, torch.zeros_like(path), torch.tensor([accepted]))
            budget.learn(Round(tree, ancestor_mask(tree.parents, DEPTH), verdict))
    return tokens / seconds


@pytest.mark.parametrize(("draft", "slope"), [(0.5, 0.1), (3.0, 0.1), (0.5, 2.0), (8.0, 4.0), (20.0, 20.0)], ids=str)
def test_choosing_anew_beats_every_fixed_tree(draft, slope):
    """In five machines: cheap and dear steps, flat and steep verification; in the last, plain decoding is best."""
    machine = costs(draft, slope)
    fixed = max(play(None, plan, machine, 800) for plan in [(0, 1), *product(range(1, 7), machine.verify)])
    assert play(auto(draft, slope), (0, 0), machine, 800) > 0.97 * fixed


@pytest.mark.parametrize(("draft", "slope"), [(0.5, 0.1), (8.0, 4.0)], ids=str)
def test_what_it_settles_on_is_near_the_best_fixed_tree(draft, slope):
    machine = costs(draft, slope)
    budget = Settled(DEPTH, NODES, machine, Calibration(CPU))
    play(budget, (0, 0), machine, 40)
    assert budget.plan is not None
    fixed = {plan: play(None, plan, machine, 800) for plan in [(0, 1), *product(range(1, 7), machine.verify)]}
    assert play(None, budget.plan[:2], machine, 800) > 0.9 * max(fixed.values())


@pytest.mark.parametrize("first, then", [((20.0, 20.0), (0.5, 0.1)), ((0.5, 0.1), (20.0, 20.0))], ids=str)
def test_it_settles_anew_where_drafting_begins_to_pay_or_no_longer_does(first, then):
    budget = Settled(DEPTH, NODES, costs(*first), Calibration(CPU))
    play(budget, (0, 0), budget.costs, 40)
    before = budget.plan
    play(budget, (0, 0), budget.costs, TRIALS + SETTLED_ROUNDS - 40 + NEW_TRIALS if before[0] else 4 * SETTLED_ROUNDS)
    assert budget.plan in (before, None)  # the same, as nothing has changed
    budget.costs = costs(*then)
    play(budget, (0, 0), budget.costs, 8 * SETTLED_ROUNDS)
    while budget.plan is None:
        play(budget, (0, 0), budget.costs, 1)
    assert (before[0] == 0) == (budget.plan[0] > 0)


@pytest.mark.parametrize("rows", [[8] + [1] * 15, [1] * 15 + [8], [2] * 16], ids=str)
@pytest.mark.parametrize("draft", [1.0, 3.0])
def test_what_it_settles_on_counts_each_trials_own_rows(rows, draft):
    """Tokens over seconds of all trials, for every depth and size; rows of a batch end while it looks."""
    budget = Settled(2, NODES, costs(draft, 0.2), Calibration(CPU))
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
    short, long = costs(1.0, 0.2), Costs(1.0, {n: 3 * seconds for n, seconds in costs(1.0, 0.2).verify.items()})
    budget = PerRound(DEPTH, NODES, short, Calibration(CPU))
    play(budget, (0, 0), short, 60)
    believed = budget.statistics.tokens / budget.statistics.plain_steps
    budget.costs = long
    play(budget, (0, 0), long, 200)
    budget.costs = short
    assert budget.statistics.worthwhile and budget.statistics.tokens / budget.statistics.plain_steps > 0.95 * believed


@pytest.mark.parametrize(("matched", "brings"), [(3, True), (3, False), (0, False)], ids=str)
def test_it_settles_on_looked_up_tokens_where_they_pay(matched, brings):
    """The draft is always wrong; the looked-up path after its chain is always right, or always wrong."""
    budget, depth = Settled(1, NODES, costs(1.0, 4.0), Calibration(CPU), lookup=4), 4
    found, parents = torch.tensor([matched]), torch.tensor([[0, 0, 0, 2, 3, 4]])
    tree = Tree(torch.zeros_like(parents), parents, torch.tensor([[0.0, -4, 0, 0, 0, 0]]))
    path = torch.tensor([[0, 2, 3, 4, 5] if brings else [0] * 5])
    verdict = Verdict(path, torch.zeros_like(path), torch.tensor([depth * brings]))
    for _ in range(TRIALS):
        assert budget.lookup_count(found, 4) == 4
        continuation = torch.zeros(1, 4, dtype=torch.long) if brings else torch.ones(1, 4, dtype=torch.long)
        budget.learn(Round(tree, ancestor_mask(parents, depth), verdict, found, continuation, 4))
    assert budget.plan[:2] == (0, 1) and (budget.plan[2] > 1) == (budget.lookup_count(found, 4) > 0) == brings


def play_with_lookups(
    budget: PerRound | Settled, machine: Costs, rounds: int, right: tuple[float, float], matching: float = 1.0
) -> tuple[float, float]:
    """Tokens a second of chains with lookups, and the share of rounds that drafted.

    Args:
        right: the chances that the draft is right about a token, and that a lookup is, where it matches.
        matching: the chance that it does.
    """
    chance, tokens, seconds, drafts = random.Random(0), 0, 0.0, 0
    for _ in range(rounds):
        found = torch.tensor([3 if chance.random() < matching else 0])
        said = torch.arange(1, DEPTH + 2)[None]  # what the target says: another token at each place
        drafted, continued = (
            torch.where(torch.tensor([[chance.random() < share for _ in range(DEPTH)]]), said[:, :-1], 0)
            for share in (right[0], right[1] if found else 0.0)
        )
        scores, depth = torch.arange(DEPTH + 1)[None] * torch.tensor(right[0]).log(), 0
        while depth < DEPTH and budget.go_deeper(depth, scores[:, depth : depth + 1]):
            depth += 1
        nodes = min(budget.node_count(scores[:, : depth + 1]), depth + 1)
        chain = torch.cat([torch.zeros(1, 1, dtype=torch.long), drafted], dim=1)[:, :nodes]
        tree = Tree(chain, (torch.arange(nodes) - 1).clamp(0)[None], scores[:, :nodes])
        count = budget.lookup_count(found, DEPTH)
        tree = join(tree, continued[:, :count])
        ancestors = ancestor_mask(tree.parents, DEPTH)
        choice = said[0, (ancestors.sum(-1) - 1).clamp(max=DEPTH)]
        verdict = judge(tree, ancestors, choice, DEPTH)
        budget.learn(Round(tree, ancestors, verdict, found, continued, count))
        tokens += int(verdict.accepted) + 1
        seconds += depth * machine.draft_step + machine.verify_seconds(nodes + count)
        drafts += depth > 0
    return tokens / seconds, drafts / rounds


class LookupsAlone(Fixed):
    """Never drafts, and verifies all that is looked up."""

    def go_deeper(self, depth, scores):
        return False


@pytest.mark.parametrize(("draft", "right"), [(3.0, (0.1, 0.9)), (2.0, (0.9, 1.0)), (0.5, (0.8, 0.9))], ids=str)
@pytest.mark.parametrize("matching", [1.0, 0.3])
@pytest.mark.parametrize(("kind", "least"), [(PerRound, 0.94), (Settled, 0.88)])
def test_it_is_near_the_better_of_lookups_alone_and_whole_trees(kind, least, matching, draft, right):
    """A draft that is wrong, or slow, may seem to pay because of what is looked up beside it."""
    machine = costs(draft, 0.2)
    budget = kind(DEPTH, NODES, machine, Calibration(CPU), lookup=DEPTH)
    play_with_lookups(budget, machine, 200, right, matching)
    rate, drafts = play_with_lookups(budget, machine, 400, right, matching)
    others = [
        play_with_lookups(other(DEPTH, NODES), machine, 400, right, matching)[0] for other in (LookupsAlone, Fixed)
    ]
    assert rate > least * max(others)
    if right[0] == 0.1:
        assert drafts < 0.1


@pytest.mark.parametrize("kind", [PerRound, Settled])
def test_it_says_why_it_gave_up_drafting(kind):
    cheap, dear = (kind(DEPTH, NODES, costs(*machine), Calibration(CPU)) for machine in [(0.5, 0.1), (20.0, 20.0)])
    play(cheap, (0, 0), cheap.costs, 40)
    assert cheap.why_plain() is None and Fixed(DEPTH, 12).why_plain() is None
    play(dear, (0, 0), dear.costs, 40)
    said = re.fullmatch(
        r"tree: auto gave up drafting: on this machine a round with drafting takes as long as (.+) tokens of plain "
        r"decoding, and gave (.+) tokens",
        dear.why_plain(),
    )
    needed, brought = map(float, said.groups())
    assert needed > brought >= 1
    if kind is Settled:  # its trials have all of the tree
        assert needed == round((DEPTH * 20 + dear.costs.verify[6]) / dear.costs.verify[1], 2)


def test_it_says_where_lookups_alone_are_faster():
    """Compared with plain decoding, rounds with this draft pay."""
    budget = PerRound(DEPTH, NODES, costs(3.0, 0.2), Calibration(CPU), lookup=DEPTH)
    play_with_lookups(budget, budget.costs, 200, (0.1, 0.9))
    needed, brought, alone = map(float, re.findall(r"\d+\.\d+", budget.statistics.why_plain()))
    assert alone > brought > needed


def test_rows_that_are_finished_do_not_count():
    unlikely, likely = torch.full((1, 3), -5.0), torch.full((1, 3), -0.1)
    for other in (unlikely, likely):
        budget = auto(draft=5.0)
        budget.begin([1])
        assert not budget.go_deeper(1, torch.cat([other, unlikely]))
        assert budget.node_count(torch.cat([other, unlikely])) == 1
