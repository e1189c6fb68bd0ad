"""Measures and intervals: compared with loops from the definitions, with scipy, and with known truths."""

import math
from functools import partial

import numpy as np
import pytest
import torch
from scipy import stats

from benchmarks import coverage
from poss_lightning.reports.statistics import Jackknife, Mean, compare_means, crossed_error, detectable, holm, mean_over
from tests.support.synthetic import make_cells, make_rows, over_seeds, rows_of
from tests.support.tolerance import close

near = partial(close, dtype=torch.float32)  # half the digits: of means that are alike, and quantiles found by iteration


def naive_measures(records, method):
    own = [record for record in records if record["method"] == method]
    rounds = [accepted for record in own for accepted in record["accepted"]]
    prompts = dict.fromkeys((record["suite"], record["id"]) for record in own)
    by_prompt = [[a for r in own if (r["suite"], r["id"]) == prompt for a in r["accepted"]] for prompt in prompts]
    seconds = sum(record["seconds"]["total"] for record in own)
    return {
        "tau_macro": np.mean([np.mean(own) + 1 for own in by_prompt if own]),
        "pos_acc_2": sum(a >= 2 for a in rounds) / sum(a >= 1 for a in rounds),
        "tokens_per_second": math.log(sum(record["new_tokens"] for record in own) / seconds),
    }


@pytest.mark.parametrize("measure", ["tau_macro", "pos_acc_2", "tokens_per_second"])
def test_an_interval_is_the_jackknife_prompt_by_prompt(measure):
    records = make_rows(prompts=3)
    prompts = sorted({(record["suite"], record["id"]) for record in records})
    others = [[r for r in records if (r["suite"], r["id"]) != prompt] for prompt in prompts]
    value, *without = (naive_measures(each, "eagle")[measure] for each in (records, *others))
    own = len(prompts) * value - (len(prompts) - 1) * np.array(without)
    half = stats.t.ppf(0.975, len(own) - 1) * stats.sem(own)
    change = np.exp if measure == "tokens_per_second" else float
    found = rows_of(records).values["eagle"][measure]
    expected = [change(x) for x in (value, value - half, value + half)]
    assert near((found.value, found.low, found.high), expected)


def naive_crossed(effects):
    """The textbook's mean squares of a crossed design with one value per cell."""
    seeds, prompts = effects.shape
    mean, by_seed, by_prompt = effects.mean(), effects.mean(1), effects.mean(0)
    cells = [(row, column) for row in range(seeds) for column in range(prompts)]
    s = prompts * sum((own - mean) ** 2 for own in by_seed) / (seeds - 1)
    q = seeds * sum((own - mean) ** 2 for own in by_prompt) / (prompts - 1)
    i = sum((effects[row, column] - by_seed[row] - by_prompt[column] + mean) ** 2 for row, column in cells)
    i /= (seeds - 1) * (prompts - 1)
    variance = i + max(0, s - i) + max(0, q - i)
    below = s**2 / (seeds - 1) + q**2 / (prompts - 1) + i**2 / ((seeds - 1) * (prompts - 1))
    return math.sqrt(variance / (seeds * prompts)), max(variance**2 / below, min(seeds, prompts) - 1)


def test_the_crossed_error_is_the_textbooks():
    draw = np.random.default_rng(0)
    for shape in 20 * [(2, 2), (5, 3), (4, 30)]:
        effects = draw.normal(size=shape) + draw.normal(size=shape[0])[:, None] + draw.normal(size=shape[1])
        assert near(crossed_error(effects), naive_crossed(effects))


def prompt_means(records, method):
    """Tokens per round of each prompt."""
    rounds = {}
    for record in sorted(records, key=lambda each: (each["suite"], each["id"])):
        if record["method"] == method:
            rounds.setdefault((record["suite"], record["id"]), []).extend(record["accepted"])
    return np.array([1 + np.mean(own) for own in rounds.values()])


def test_one_training_of_each_is_scipys_paired_t_test_over_prompts():
    records = make_rows()
    gains = rows_of(records, reference="eagle").gains
    test = stats.ttest_rel(*(prompt_means(records, method) for method in ("poss-1", "eagle")))
    gain, ends = gains["poss-1"]["tau_macro"], test.confidence_interval()
    assert near((gain.p, gain.low, gain.high), (test.pvalue, ends.low, ends.high))
    assert not gains["generate"]  # so nothing is corrected for it
    assert rows_of(records, reference="generate").gains["poss-1"]["tokens_per_second"].p < 0.05


def test_several_trainings_are_compared_seed_by_seed_and_prompt_by_prompt():
    cells = make_cells()
    found = over_seeds(cells)
    gains = found.gains["poss-1"]
    means = {cell: prompt_means(records, cell[0]) for cell, records in cells.items()}
    effects = np.array([means["poss-1", seed] - means["eagle", seed] for seed in range(3)])
    error, freedom = naive_crossed(effects)
    assert near(gains["tau_macro"].value, effects.mean())
    assert near(gains["tau_macro"].p, 2 * stats.t.sf(effects.mean() / error, freedom))
    assert near(gains["tau_macro"].detectable, detectable(error, freedom))
    speeds = {cell: rows_of(records).values[cell[0]]["speed_up"].value for cell, records in cells.items()}
    geometric = [stats.gmean([speeds[method, seed] for seed in range(3)]) for method in ("poss-1", "eagle")]
    assert near(found.values["poss-1"]["speed_up"].value, geometric[0])
    assert near(gains["speed_up"].value, geometric[0] / geometric[1])


def naive_holm(p):
    """Each times the number of those not smaller, but at least what a smaller one gets, and at most 1."""
    return [max(min(1, q * sum(r >= q for r in p)) for q in p if q <= own) for own in p]


def test_holm_equals_its_definition():
    draw = np.random.default_rng(0)
    for count in 20 * [1, 2, 3, 6]:
        p = [float(each) for each in draw.integers(0, 12, count) / 20]  # some are equal
        assert near(holm(p), naive_holm(p))
        assert holm([*p, math.nan])[:-1] == holm(p) and math.isnan(holm([*p, math.nan])[-1])


def test_tau_is_one_plus_the_products_of_pos_acc_whose_intervals_stay_between_0_and_1():
    for depth in (3, 8):  # 3: the most accepted; positions beyond it are never reached
        for values in rows_of(make_rows(prompts=2, rounds=4), depths={"eagle": depth, "poss-1": depth}).values.values():
            shares = [share for name, share in values.items() if name == "identical" or name.startswith("pos_acc")]
            assert all(0 <= share.low <= share.high <= 1 for share in shares if not math.isnan(share.low))
            if "rounds" in values:
                shares = np.nan_to_num([share.value for name, share in values.items() if name.startswith("pos_acc")])
                assert len(shares) == depth
                assert near(values["tau_micro"].value, 1 + np.cumprod(shares).sum())


def test_p_is_below_5_percent_exactly_where_the_interval_excludes_no_effect():
    draw = np.random.default_rng(0)
    for value, error in zip(draw.normal(0, 2, 200), draw.uniform(0.5, 1.5, 200), strict=True):
        apart, times = (compare_means({"a": Mean(value, error, 7)}, logs)["a"] for logs in (False, True))
        assert (apart.p < 0.05) == (not apart.low <= 0 <= apart.high) == (not times.low <= 1 <= times.high)
        assert times.p == apart.p and bool(apart.direction) == (apart.p < 0.05)


def test_p_and_detectable_effect_are_corrected_over_methods():
    means = {name: Mean(value, 0.1, 9) for name, value in (("a", 0.25), ("b", 0.3), ("c", math.nan))}
    alone = {name: compare_means({name: mean})[name].p for name, mean in means.items()}
    for logs, change in ((False, float), (True, math.expm1)):
        found = compare_means(means, logs)
        assert [found[name].p for name in "ab"] == holm([alone["a"], alone["b"]])
        assert found["a"].detectable == change(detectable(0.1, 9, tests=2)) > change(detectable(0.1, 9))
    assert alone["a"] < 0.05 and compare_means(means)["a"].direction == "larger"
    eight = compare_means(means | {str(i): Mean(0.0, 0.1, 9) for i in range(8)})["a"]
    assert eight.p > 0.05 and not eight.direction  # the best of nine is judged as one of nine


def test_intervals_contain_the_truth_as_often_as_they_claim():
    """Of one training for other prompts, of several for other trainings too."""
    shares = coverage.over_prompts(8)
    assert len(shares) == 5 and all(0.92 <= share <= 0.98 for share in shares.values()), shares
    assert 0.935 <= coverage.over_seeds((0.1, 0.1, 0.3), 40) <= 0.98
    # Where neither varies, more often than they claim: the share of seeds is never negative.
    assert 0.935 <= coverage.over_seeds((0.0, 0.0, 0.3), 40) <= 0.995


def test_the_detectable_effect_is_found_in_four_of_five_cases_and_no_effect_rarely():
    draw = np.random.default_rng(0)
    true = np.array([detectable(math.sqrt(2 / 5), 4, tests=5), 0, 0, 0, 0])
    found = []
    for _ in range(2000):
        gains = draw.normal(true, math.sqrt(2), (5, 5))  # (seeds, choices)
        errors = gains.std(0, ddof=1) / math.sqrt(5)
        held = compare_means({str(k): Mean(gains[:, k].mean(), errors[k], 4) for k in range(5)})
        found.append([one.p < 0.05 for one in held.values()])
    assert abs(np.mean(found, 0)[0] - 0.8) < 4 * (0.8 * 0.2 / 2000) ** 0.5
    assert np.any(found, 1).mean() <= 0.86 and np.mean(np.array(found)[:, 1:].any(1)) < 0.06
    assert near(detectable(1.0, 1e6), stats.norm.ppf(0.975) + stats.norm.ppf(0.8))


def test_without_any_spread_only_equality_is_certain():
    """Few prompts may agree by chance, so a difference without any spread proves nothing."""
    for logs in (False, True):
        same, apart = (compare_means({"a": Mean(value, 0.0, 9)}, logs)["a"] for value in (0.0, 0.5))
        assert same.identical and same.p == 1 and not apart.identical
        assert math.isnan(apart.p) and apart.interval() == apart.direction == ""


def test_a_position_that_few_prompts_reach_has_the_certainty_of_few():
    values, few, many = np.random.default_rng(0).normal(size=61), np.arange(60) < 4, np.arange(60) < 60
    assert mean_over([Jackknife(values, many)]).freedom == 59
    assert mean_over([Jackknife(values, few)], [Jackknife(values[::-1], many)]).freedom == 3
    assert math.isnan(mean_over([Jackknife(values, np.arange(60) < 2)]).error)
