"""Plans by tokens per second: chances against counts, choices against trying all, the whole against fixed plans."""

import itertools
import random
import re

import pytest
import torch

from poss_lightning.decoding.acceptance import Calibration, Round
from poss_lightning.decoding.budget import AVERAGING_WINDOW, MIN_SPEEDUP, RETRY_EVERY, WARMUP_ROUNDS, Planner
from poss_lightning.decoding.costs import Costs
from poss_lightning.decoding.lookup import join
from poss_lightning.decoding.plans import TreePlan
from poss_lightning.decoding.trees import Tree, ancestor_mask, node_depths, rerank, root_tree
from poss_lightning.decoding.verification import judge
from tests.support.tolerance import close

CPU, DEPTH, NODES, ONE = torch.device("cpu"), 6, 12, torch.ones(1)
CLAIMS = 0.95, 0.95, 0.6, 0.3, 0.05  # of a draft, at places easy and hard
OVERSTATED = 1.5  # a token that it claims at c is right with the chance c to this power
ROUNDS = 20  # of a text


def test_chances_begin_with_the_draft_s_word_and_end_with_the_counts():
    calibration = Calibration(CPU)
    scores = -torch.tensor([[0.0, 0.3, 1.2, 3.5, 7.0]])
    assert ((calibration.chance(scores) - scores.exp()).abs() < 0.12).all()
    chance = random.Random(0)
    for _ in range(600):  # of those claimed at 0.30 every second, at 0.03 none; a finished row says something else
        taken = torch.tensor([[chance.random() < 0.5, False], [True, True]])
        calibration.learn(-torch.tensor([[1.2, 3.5]] * 2), taken, torch.tensor([1.0, 0.0]))
    found = calibration.chance(scores)[0]
    assert abs(found[2] - 0.5) < 0.1 and found[3] < 0.02
    assert found[4] == Calibration(CPU).chance(scores)[0, 4]  # never seen


def test_costs_between_those_measured_lie_on_a_line_and_never_fall():
    found = Costs(2.0, {1: 10.0, 2: 15.0, 4: 13.0, 8: 17.0, 16: 40.0, 20: 39.0})
    sizes = [1, 2, 3, 4, 6, 8, 12, 16, 20, 60]  # no tree may have 60
    assert found.round_seconds(0, sizes).tolist() == [10, 13, 13, 13, 15, 17, 28, 39, 39, 39]
    assert found.round_seconds(3, 6) == 3 * 2 + 15
    assert found._replace(steps=1).round_seconds(3, 6) == 2 + 15  # a block is one step


def costs(draft: float, slope: float) -> Costs:
    return Costs(draft, {n: 10 + slope * n for n in (1, 2, 3, 4, 6, 8, 12, 24)})


def random_tree(rows: int, seed: int) -> Tree:
    """Three levels, each node likelier than its children."""
    torch.manual_seed(seed)
    parents = torch.tensor([0, 0, 0, 0, 1, 1, 2, 3, 4, 4, 6]).expand(rows, -1)
    scores = torch.zeros(rows, 11)
    for node in range(1, 11):
        scores[:, node] = scores[:, parents[0, node]] - 2 * torch.rand(rows)
    return Tree(torch.arange(11).expand(rows, -1), parents, scores)


@pytest.mark.parametrize(("seed", "slope"), [(0, 0.3), (1, 0.3), (2, 3.0)])
def test_the_plan_is_the_best_of_all(seed, slope):
    """Expected tokens over seconds, tried for every depth, size and number of looked-up tokens; one row is finished."""
    candidates, planner = random_tree(4, seed), Planner(TreePlan(3, 8, lookup=4), CPU)
    mask, matches = torch.tensor([1, 1, 0, 1]), [0, 3, 2]
    root = root_tree(candidates.tokens[:, :1])
    verdict = judge(root, ancestor_mask(root.parents, 4), candidates.tokens[:, :1], 4)
    planner.learn(Round(root, ancestor_mask(root.parents, 4), verdict, candidates), mask, whole=True)
    for acceptance in (planner.alone, planner.with_tree):
        acceptance.learn(torch.tensor([3, 3]), torch.ones(2, 4) > 0, torch.rand(2, 4) > 0.5, torch.ones(2))
    machine, depths = costs(0.4, slope), node_depths(candidates.parents, 3)
    chances = planner.calibration.chance(candidates.scores)

    def rate(plan: tuple[int, int, int]) -> float:
        depth, nodes, count = plan
        drafted = [sorted(chances[i, 1:][depths[i, 1:] <= depth].tolist(), reverse=True) for i in (0, 1, 3)]
        looked_up = (planner.with_tree if depth else planner.alone).expected_tokens()
        tokens = 3 + sum(sum(row[: nodes - 1]) for row in drafted) + sum(float(looked_up[n, count]) for n in matches)
        return tokens / 3 / (depth * 0.4 + machine.round_seconds(0, nodes + count))

    plans = itertools.product(range(4), (1, 2, 3, 4, 6, 8), (0, 1, 2, 3, 4))
    best = max(rate(plan) for plan in plans if plan[1] > plan[0] and (plan[0] or plan[1] == 1))
    chosen = planner.choose(machine, matches)
    assert close(rate((chosen.depth, chosen.nodes, chosen.lookup)), best, dtype=torch.float32)
    assert planner.choose(machine, matches, whole=True).depth == 3
    for depth, nodes, count in itertools.product(range(1, 4), (4, 6, 8), (0, 4)):  # a new plan takes new graphs
        current = TreePlan(depth, nodes, lookup=count)
        stays = planner.choose(machine, matches, current=current) == current
        assert stays == (rate((depth, nodes, count)) * MIN_SPEEDUP > best)


def play(planner: Planner, machine: Costs, texts: int, claims=CLAIMS, looked_up=0.0, matching=1.0):
    """Tokens per second, by the costs, of chains with lookups; and the share of rounds that drafted.

    Args:
        claims: the draft's chances of a token, at one place or another.
        looked_up: the chance that a looked-up token is right, where something matches.
        matching: the chance that it does.
    """
    chance, tokens, seconds, drafts, trials = random.Random(0), 0, 0.0, 0, 0
    for turn in range(texts * ROUNDS):
        trials = planner.begin(machine) if turn % ROUNDS == 0 else trials - 1
        claim, found = chance.choice(claims), torch.tensor([3 * (chance.random() < matching)])
        said = torch.arange(1, DEPTH + 2)[None]  # what the target says: another token at each place
        drafted, continued = (
            torch.where(torch.tensor([[chance.random() < share for _ in range(DEPTH)]]), said[:, :-1], 0)
            for share in (claim**OVERSTATED, looked_up if found else 0.0)
        )
        plan = planner.choose(machine, found.tolist(), whole=trials > 0)
        chain = torch.cat([torch.zeros(1, 1, dtype=torch.long), drafted], dim=1)[:, : plan.depth + 1]
        places = torch.arange(plan.depth + 1)[None]
        candidates = Tree(chain, (places - 1).clamp(0), places * torch.tensor(claim).log())
        tree = join(rerank(candidates, plan.nodes), continued[:, : plan.lookup])
        ancestors = ancestor_mask(tree.parents, DEPTH)
        verdict = judge(tree, ancestors, said[0, (ancestors.sum(-1) - 1).clamp(max=DEPTH)], DEPTH)
        lookup = (plan.lookup, found, continued[:, : planner.plan.lookup]) if planner.plan.lookup else ()
        planner.learn(Round(tree, ancestors, verdict, candidates, *lookup), ONE, whole=trials > 0)
        tokens += int(verdict.accepted) + 1
        seconds += float(machine.round_seconds(plan.depth, plan.nodes + plan.lookup))
        drafts += plan.depth > 0
    return tokens / seconds, drafts / (texts * ROUNDS)


def fixed_rate(machine: Costs, depth: int, claims=CLAIMS, looked_up=0.0, matching=0.0) -> float:
    """Tokens per second of chains that all have this depth, with as many looked-up tokens as `play` if any."""
    beside = DEPTH if matching else 0
    chances = [
        1 - (1 - claim ** (OVERSTATED * place) * (place <= depth)) * (1 - matching * looked_up**place)
        for claim in claims
        for place in range(1, max(depth, beside) + 1)
    ]
    return float((1 + sum(chances) / len(claims)) / machine.round_seconds(depth, depth + 1 + beside))


@pytest.mark.parametrize(
    ("draft", "slope", "claims", "looked_up", "matching"),
    [
        (3.0, 0.1, CLAIMS, 0.0, 0.0),  # dear drafting
        (0.5, 2.0, CLAIMS, 0.0, 0.0),  # dear verification
        (20.0, 20.0, CLAIMS, 0.0, 0.0),  # plain decoding is best
        (3.0, 0.2, (0.2,), 0.9, 1.0),  # a draft that seems to pay because of the tokens looked up with its tree
        (2.0, 0.2, (0.95,), 1.0, 0.3),
    ],
    ids=str,
)
def test_it_is_near_the_best_fixed_plan(draft, slope, claims, looked_up, matching):
    machine, rounds = costs(draft, slope), (claims, looked_up, matching)
    planner = Planner(TreePlan(DEPTH, NODES, lookup=DEPTH if matching else 0), CPU)
    play(planner, machine, 4, *rounds)
    rate, drafts = play(planner, machine, 16, *rounds)
    depths = (0, DEPTH) if matching else range(DEPTH + 1)
    assert rate > 0.92 * max(fixed_rate(machine, depth, *rounds) for depth in depths)
    assert claims != (0.2,) or drafts < 0.15


def test_drafting_that_does_not_pay_is_tried_in_one_of_so_many_texts_and_comes_back_where_it_does():
    planner, dear, cheap = Planner(TreePlan(DEPTH, NODES), CPU), costs(20.0, 20.0), costs(0.5, 0.1)
    assert planner.why_plain(dear) is None and planner.begin(dear) == WARMUP_ROUNDS  # nothing is known of the draft
    play(planner, dear, 1)
    costs_steps, tokens = map(float, re.findall(r"\d+\.\d+", planner.why_plain(dear)))
    assert costs_steps > tokens >= 1
    assert [planner.begin(dear) for _ in range(2 * RETRY_EVERY)].count(WARMUP_ROUNDS) == 2
    # As fewer texts wait, or it is cooler:
    assert planner.begin(cheap) == WARMUP_ROUNDS and planner.choose(cheap, None).depth > 0
    planner.drafted.zero_()  # a draft that is never right
    assert planner.why_plain(cheap)
    for _ in range(AVERAGING_WINDOW // WARMUP_ROUNDS):  # but is again
        play(planner, cheap, RETRY_EVERY)
    assert planner.why_plain(cheap) is None


def test_it_says_where_lookups_alone_are_faster_though_drafting_beats_plain_decoding():
    planner, machine = Planner(TreePlan(DEPTH, NODES, lookup=DEPTH), CPU), costs(3.0, 0.2)
    play(planner, machine, 2, (0.2,), 0.9)
    steps, tokens, alone = map(float, re.findall(r"\d+\.\d+", planner.why_plain(machine)))
    assert alone > tokens > steps


def test_a_looked_up_token_that_the_draft_had_too_is_not_one_that_the_lookup_brought():
    drafted = Tree(torch.tensor([[0, 1, 2]]), torch.tensor([[0, 0, 1]]), -torch.tensor([[0.0, 0.1, 0.2]]))
    brought = []
    for said in ([5, 6], [1, 2], [3, 4]):  # neither drafted nor looked up; both; looked up alone
        planner, continuation = Planner(TreePlan(2, 3, lookup=2), CPU), torch.tensor([said if said[0] < 5 else [3, 4]])
        tree = join(drafted, continuation)
        ancestors = ancestor_mask(tree.parents, 2)
        verdict = judge(tree, ancestors, torch.tensor([*said, 9])[ancestors.sum(-1) - 1], 2)
        planner.learn(Round(tree, ancestors, verdict, drafted, 2, torch.tensor([3]), continuation), ONE)
        brought.append(float(planner.with_tree.expected_tokens()[3, 2]))
    assert brought[0] == brought[1] < brought[2]


def test_rows_that_are_finished_teach_nothing():
    """Of two rows, only the first is active: what is learnt is what it alone would have taught."""
    taught = []
    for rows in (2, 1):
        planner = Planner(TreePlan(3, 8, lookup=2), CPU)
        candidates = Tree(*(part[:rows] for part in random_tree(2, seed=0)))
        matched, continuation = torch.tensor([2, 3])[:rows], torch.tensor([[1, 5], [2, 6]])[:rows]
        tree = join(rerank(candidates, 8), continuation)
        ancestors = ancestor_mask(tree.parents, 3)
        choice = torch.tensor([1, 4])[:rows, None].expand(-1, tree.tokens.shape[1])
        done = Round(tree, ancestors, judge(tree, ancestors, choice, 3), candidates, 2, matched, continuation)
        planner.learn(done, torch.tensor([1, 0])[:rows], whole=True)
        tables = (planner.calibration, planner.with_tree, planner.alone, planner)
        taught.append([value for table in tables for value in vars(table).values() if isinstance(value, torch.Tensor)])
    assert close(*taught)
    assert float(planner.calibration.accepted.sum()) == 1
