"""Rules of multi-draft decoding: each against its enumeration, the optimum against the transport problem it solves."""

import itertools

import pytest
import torch
from scipy.optimize import linprog

from poss_lightning.evaluation import multidraft
from poss_lightning.evaluation.multidraft import RULES, distinct, greedy, optimum, replaced, unseeing
from poss_lightning.sampling import Sampling
from tests.evaluation.test_replay import answers_in, drawn, lucky, stored

CASES = [(size, n, seed) for size, n in ((2, 1), (4, 2), (5, 3), (6, 2)) for seed in range(3)]


@pytest.fixture(params=CASES, ids=str)
def case(request) -> tuple[torch.Tensor, torch.Tensor, int]:
    """p, in which one token is impossible, q, and n."""
    size, n, seed = request.param
    logits = 2 * torch.randn(2, size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    logits[0, 0] = -torch.inf
    return *logits.softmax(-1), n


def recursive(p: list[float], q: list[float], n: int, replace: bool) -> float:
    """How often one of n children is accepted, child by child, from the definition."""
    if n == 0 or not sum(q):
        return 0.0
    rest = [max(a - b, 0) for a, b in zip(p, q, strict=True)]
    left = [a / sum(rest) if sum(rest) else 0.0 for a in rest]
    total = 0.0
    for x, chance in enumerate(q):
        if not chance:
            continue
        kept = min(1.0, p[x] / chance)
        others = q if replace else [0.0 if y == x else b / (1 - chance or 1) for y, b in enumerate(q)]
        total += chance * (kept + (1 - kept) * recursive(left, others, n - 1, replace))
    return total


def test_rejection_is_its_enumeration(case):
    p, q, n = case
    assert float(replaced(p, q, n)) == pytest.approx(recursive(p.tolist(), q.tolist(), n, True), abs=1e-12)
    total = 0.0
    for children in itertools.permutations(range(len(q)), n):
        left, chance = 1.0, 1.0
        for child in children:
            chance, left = chance * float(q[child]) / left, left - float(q[child])
        total += chance * float(distinct(p, q, torch.tensor(children)))
    assert total == pytest.approx(recursive(p.tolist(), q.tolist(), n, False), abs=1e-12)


def transport(p, chances: dict[tuple[int, ...], float]) -> float:
    """The most mass that a joint distribution of token and children gives to tokens among the children."""
    lists, size = list(chances), len(p)
    pairs = [(x, i) for x in range(size) for i, children in enumerate(lists) if x in children]
    rows = torch.zeros(size + len(lists), len(pairs))
    for column, (x, i) in enumerate(pairs):
        rows[x, column] = rows[size + i, column] = 1
    most = [*p.tolist(), *chances.values()]
    return -linprog([-1.0] * len(pairs), A_ub=rows.numpy(), b_ub=most, method="highs").fun


def test_optima_are_those_of_the_transport(case):
    """For n independent draws, for n certain children, and for one drawn from all but n - 1 certain ones."""
    p, q, n = case
    *certain, last = q.topk(n).indices.tolist()
    independent = {children: float(q[[*children]].prod()) for children in itertools.product(range(len(q)), repeat=n)}
    rest = {x: float(q[x]) for x in range(len(q)) if x not in certain}
    one_drawn = {(*certain, x): chance / sum(rest.values()) for x, chance in rest.items()}
    for rate, chances in (
        (optimum(p, q, n), independent),
        (unseeing(p, q, n), {(*certain, last): 1.0}),
        (greedy(p, q, n), one_drawn),
    ):
        assert float(rate) == pytest.approx(transport(p, chances), abs=1e-9)
    assert float(replaced(p, q, n)) <= float(optimum(p, q, n)) + 1e-12


def test_the_table_of_drawn_answers(target):
    """Rates are probabilities, and more children are accepted more often."""
    texts, draws = drawn(target, Sampling(1.0))
    answers = answers_in(target, stored(target, texts, draws))
    rates = multidraft.acceptance_rates(lucky(target, texts, (2, 2), 0), target.embed_head, answers, 2, (1, 3))
    assert rates.shape == (2, 2, len(RULES)) and bool(((rates >= 0) & (rates <= 1 + 1e-9)).all())
    assert bool((rates[:, 1] >= rates[:, 0] - 1e-9).all())
    lines = multidraft.table(rates, (1, 3)).splitlines()
    assert len(lines) == 1 + 2 * 2 and lines[0].split() == ["position", "n", *RULES]
