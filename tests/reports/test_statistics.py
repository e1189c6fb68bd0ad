"""Measures and intervals: against loops from the definitions, and against truths that are known."""

import math
from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

from poss_lightning.reports import statistics
from poss_lightning.reports.statistics import (
    Sums,
    detectable,
    difference,
    draw_counts,
    estimate,
    estimate_share,
    holm,
    quotient,
    standard_error,
)
from poss_lightning.reports.summary import ALL, check_same, group, sum_by_prompt, summarise
from poss_lightning.reports.tables import Cell, make_cell
from tests.support.synthetic import draw_reach, make_records, true_tau

# --- naive twins: a resample is a list of prompts, some of them several times ---


def naive_bags(records, method, order, times):
    """The method's records of each drawn prompt, a list a draw of it."""
    return [
        [record for record in records if record.method == method and (record.suite, record.id) == prompt]
        for prompt, count in zip(order, times, strict=True)
        for _ in range(int(count))
    ]


def naive_rounds(bag):
    return [accepted for record in bag for accepted in record.accepted]


def naive_tau_micro(bags):
    rounds = [accepted for bag in bags for accepted in naive_rounds(bag)]
    return sum(accepted + 1 for accepted in rounds) / len(rounds)


def naive_tau_macro(bags):
    return np.mean([np.mean([accepted + 1 for accepted in rounds]) for rounds in map(naive_rounds, bags) if rounds])


def naive_pos_acc(bags, k):
    rounds = [accepted for bag in bags for accepted in naive_rounds(bag)]
    return sum(a >= k for a in rounds) / sum(a >= k - 1 for a in rounds)


def naive_speed(bags):
    records = [record for bag in bags for record in bag]
    return sum(record.new_tokens for record in records) / sum(record.seconds["total"] for record in records)


@pytest.mark.parametrize("rounds", [20, 2])
def test_one_bootstrap_draw_equals_a_loop_over_drawn_prompts(rounds):
    records = make_records(prompts=4, rounds=rounds)
    methods = group(records)
    order = list(dict.fromkeys(key[:2] for key in methods["eagle"]))
    sums = {name: sum_by_prompt(answers, 3) for name, answers in methods.items()}
    counts = draw_counts(len(order), 20, seed=1)
    speed = {name: statistics.tokens_per_second(counts, own) for name, own in sums.items()}
    for row, times in enumerate(counts):
        bags = naive_bags(records, "poss-1", order, times)
        assert statistics.tau_micro(counts, sums["poss-1"])[row] == pytest.approx(naive_tau_micro(bags))
        assert statistics.tau_macro(counts, sums["poss-1"])[row] == pytest.approx(naive_tau_macro(bags))
        for k in (1, 2, 3):
            assert statistics.pos_acc(counts, sums["poss-1"])[row, k - 1] == pytest.approx(naive_pos_acc(bags, k))
        plain = naive_bags(records, "autoregressive", order, times)
        ratio = naive_speed(bags) / naive_speed(plain)
        assert speed["poss-1"][row] / speed["autoregressive"][row] == pytest.approx(ratio)


def test_summaries_are_the_values_and_spread_of_those_draws():
    records = make_records(prompts=4)
    (row,) = [row for row in summarise(records, resamples=50, seed=3) if (row.suite, row.method) == (ALL, "eagle")]
    order = sorted({(record.suite, record.id) for record in records})
    draws = [naive_tau_micro(naive_bags(records, "eagle", order, times)) for times in draw_counts(8, 50, 3)]
    half = stats.t.ppf(0.975, 7) * np.std(draws[1:], ddof=1) * math.sqrt(8 / 7)
    assert row.tau_micro.value == pytest.approx(draws[0])
    assert (row.tau_micro.low, row.tau_micro.high) == pytest.approx((draws[0] - half, draws[0] + half))


# --- laws ---


@pytest.mark.parametrize("depth", [3, 4, 8])  # 3: the most accepted; beyond it positions are never reached
@pytest.mark.parametrize("seed", range(5))
def test_tau_is_one_plus_the_products_of_pos_acc(depth, seed):
    for row in summarise(make_records(seed=seed), depths={"eagle": depth, "poss-1": depth}, resamples=1):
        if row.rounds:
            shares = np.nan_to_num([share.value for share in row.pos_acc])
            assert len(shares) == depth
            assert row.tau_micro.value == pytest.approx(1 + np.cumprod(shares).sum())


def test_every_draw_has_as_many_prompts_as_the_sample_and_seeds_repeat():
    counts = draw_counts(7, 100, seed=0)
    assert counts.shape == (101, 7)
    assert (counts.sum(1) == 7).all() and (counts[0] == 1).all()
    assert (counts == draw_counts(7, 100, seed=0)).all() and (counts != draw_counts(7, 100, seed=1)).any()


def test_order_of_records_does_not_matter():
    records = make_records()
    shuffled = [records[place] for place in np.random.default_rng(0).permutation(len(records))]
    ordered = {(row.suite, row.method): row for row in summarise(records, resamples=20)}
    for row in summarise(shuffled, resamples=20):
        twin = ordered[row.suite, row.method]
        assert row.tau_macro.low == pytest.approx(twin.tau_macro.low, nan_ok=True)
        assert row.tokens_per_second.high == pytest.approx(twin.tokens_per_second.high)


def test_pairing_makes_a_constant_ratio_exact():
    """Twice as fast on every prompt: the speeds vary between draws, their ratio does not."""
    plain = make_records(methods=("autoregressive",), prompts=6)
    halved = [
        replace(r, method="poss-1", accepted=[r.new_tokens - 2], seconds={"total": r.seconds["total"] / 2})
        for r in plain
    ]
    fast = next(row for row in summarise(plain + halved) if row.method == "poss-1")
    gain = fast.speed_up["autoregressive"]
    assert (gain.low, gain.value, gain.high) == pytest.approx((2, 2, 2))
    assert fast.tokens_per_second.high > 1.01 * fast.tokens_per_second.low


def test_a_drafter_that_is_never_wrong_has_tau_of_one_more_than_its_depth():
    """Depth 6, 48 new tokens: the prefill's, 6 rounds of 7, and 5 of a round that the limit cut."""
    plain = make_records(methods=("autoregressive",), prompts=3, rounds=47)
    never_wrong = [replace(r, method="poss-6", accepted=[6] * 7) for r in plain]
    row = next(row for row in summarise(plain + never_wrong) if row.method == "poss-6")
    assert row.rounds == 7 * len(plain)
    assert (row.tau_micro.value, row.tau_macro.value) == (7, 7)
    assert [share.value for share in row.pos_acc] == [1] * 6


def test_speed_against_the_reference_is_paired():
    records = make_records()
    rows = {(row.suite, row.method): row for row in summarise(records, reference="eagle", resamples=50)}
    held = {row.method: row for row in summarise(records, baseline="eagle", resamples=50) if row.suite == ALL}
    assert rows[ALL, "eagle"].speed_gain is None
    one, other = rows[ALL, "poss-1"].speed_gain, held["poss-1"].speed_up["eagle"]
    assert one and (one.value, one.low, one.high, one.p) == (other.value, other.low, other.high, other.p)
    for method in ("autoregressive", "generate"):  # in the table of speeds; no other comparison is corrected for them
        assert rows[ALL, method].speed_gain is None
    assert one.holm == one.p and one.detectable < other.detectable


def test_gains_are_corrected_for_the_methods_held_against_the_reference():
    rows = [row for row in summarise(make_records(), reference="generate", resamples=50) if row.suite == ALL]
    gains = [row.speed_gain for row in rows if row.speed_gain]
    assert [gain.holm for gain in gains] == pytest.approx(holm([gain.p for gain in gains])) and len(gains) == 3


def test_gains_by_position_are_differences_of_positions():
    rows = {row.method: row for row in summarise(make_records(), reference="eagle", depths={"poss-1": 6}, resamples=9)}
    eagle, poss = rows["eagle"], rows["poss-1"]
    differences = [one.value - other.value for one, other in zip(poss.pos_acc[:3], eagle.pos_acc, strict=True)]
    assert [gain.value for gain in poss.pos_acc_gain] == pytest.approx(differences)
    assert eagle.pos_acc_gain == rows["generate"].pos_acc_gain == ()


def test_shares_stay_shares():
    for row in summarise(make_records(), resamples=50):
        assert all(0 <= share.low <= share.high <= 1 for share in (*row.pos_acc, row.identical))


# --- what is known about drawn experiments ---


def experiments(count, prompts, methods, seed=0):
    """Two methods on the same prompts of unlike ease, 300 draws of the bootstrap each: (τ macro, τ micro) by method."""
    draw, counts = np.random.default_rng(seed), draw_counts(prompts, 300, seed)
    for _ in range(count):
        ease = draw.normal(0, 0.6, prompts)  # shared, and a little of it each method's own
        reach = [draw_reach(draw, method, ease + draw.normal(0, 0.2, prompts)) for method in methods]
        sums = [Sums(own, np.ones(prompts), np.ones(prompts)) for own in reach]
        yield [[measure(counts, own) for own in sums] for measure in (statistics.tau_macro, statistics.tau_micro)]


@pytest.mark.parametrize("prompts", [4, 12, 60])
def test_intervals_hold_the_truth_about_as_often_as_they_say(prompts):
    truth = [true_tau(method, math.hypot(0.6, 0.2)) for method in ("eagle", "poss-1")]
    hits = []
    for measures in experiments(500, prompts, ("eagle", "poss-1")):
        found = [estimate(own, prompts) for own, _ in measures] + [estimate(b - a, prompts) for a, b in measures]
        found += [quotient(math.log(b[0] / a[0]), standard_error(np.log(b / a), prompts), prompts - 1)
                  for a, b in measures]  # fmt: skip
        true = [truth[0]] * 2 + [truth[1] - truth[0]] * 2 + [truth[1] / truth[0]] * 2
        hits.append([own.low <= value <= own.high for own, value in zip(found, true, strict=True)])
    assert all(0.92 <= share <= 0.98 for share in np.mean(hits, 0)), np.mean(hits, 0)


def test_without_an_effect_few_are_found_and_at_the_detectable_effect_four_in_five():
    prompts = 20
    drawn = [b - a for (a, b), _ in experiments(1000, prompts, ("eagle", "eagle"))]
    effect = detectable(np.std([gain[0] for gain in drawn]), prompts - 1)
    held = [difference(gain[0], standard_error(gain, prompts), prompts - 1) for gain in drawn]
    assert np.mean([gain.p < 0.05 for gain in held]) <= 0.05 + 2 * math.sqrt(0.05 * 0.95 / 1000)
    shifted = [difference(gain[0] + effect, standard_error(gain, prompts), prompts - 1) for gain in drawn]
    assert np.mean([gain.p < 0.05 for gain in shifted]) == pytest.approx(0.8, abs=0.04)


def test_p_is_below_5_percent_exactly_where_the_interval_leaves_no_effect_out():
    draw = np.random.default_rng(0)
    for value, error in zip(draw.normal(0, 2, 200), draw.uniform(0.5, 1.5, 200), strict=True):
        apart, times = difference(value, error, 7), quotient(value, error, 7)
        assert (apart.p < 0.05) == (not apart.low <= 0 <= apart.high) == (not times.low <= 1 <= times.high)
        assert times.p == apart.p


def test_the_detectable_effect_of_many_prompts_is_2_80_standard_errors():
    assert detectable(1.0, 1e6) == pytest.approx(stats.norm.ppf(0.975) + stats.norm.ppf(0.8), abs=1e-4)
    assert detectable(2.0, 4) == 2 * detectable(1.0, 4) > 2 * detectable(1.0, 5)


def test_without_any_spread_equal_is_equal_and_nothing_else_is_sure():
    same, apart = difference(0.0, 0.0, 1), difference(0.5, 0.0, 1)
    assert same.p == 1 and apart.value == 0.5
    for found in (apart, quotient(0.5, 0.0, 1)):
        assert math.isnan(found.p) and found.interval() == found.detectable_text() == found.significance() == ""


def test_a_comparison_has_a_direction_or_is_identical():
    better, worse = difference(0.5, 0.01, 30), difference(-0.5, 0.01, 30)
    assert (better.direction, worse.direction, difference(0.01, 0.5, 30).direction) == ("larger", "smaller", "")
    assert quotient(math.log(0.5), 0.01, 30).direction == "smaller"
    assert make_cell(worse, "+.2f").direction == "smaller"
    for same in (difference(0.0, 0.0, 5), quotient(0.0, 0.0, 5)):
        assert same.identical and make_cell(same) == Cell("identical")
    assert not better.identical and not difference(0.5, 0.0, 5).identical


def naive_holm(p):
    """Reject the smallest while it is below level / left; the corrected p is the least level that rejects it."""
    levels = np.linspace(0, 1, 10001)
    corrected = np.ones(len(p))
    for level in levels[::-1]:
        for passed, place in enumerate(np.argsort(p)):
            if p[place] > level / (len(p) - passed):
                break
            corrected[place] = level
    return corrected


@pytest.mark.parametrize("p", [[0.01, 0.04, 0.03], [0.5, 0.5], [0.2], [0.001, 0.9, 0.012, 0.013, 0.3]])
def test_holm_equals_its_definition(p):
    assert holm(p) == pytest.approx(naive_holm(p), abs=2e-4)
    assert holm([*p, math.nan])[:-1] == holm(p) and math.isnan(holm([*p, math.nan])[-1])


# --- edges ---


def test_identical_counts_prompts_not_answers():
    records = make_records(methods=("autoregressive", "generate"), suites=("chat",), prompts=4)
    place = next(i for i, record in enumerate(records) if (record.id, record.turn, record.method) == (2, 1, "generate"))
    records[place] = replace(records[place], tokens=records[place].tokens[::-1])
    rows = {row.method: row for row in summarise(records)}
    assert rows["generate"].identical.value == 0.75 and rows["autoregressive"].identical.value == 1


def test_nothing_over_nothing_is_a_dash():
    rows = {row.method: row for row in summarise(make_records(), depths={"eagle": 6})}
    assert rows["autoregressive"].tau_micro.text() == rows["eagle"].pos_acc[5].text() == "–"
    assert rows["autoregressive"].tau_micro.interval() == ""


def test_one_prompt_has_values_and_no_intervals():
    row = summarise(make_records(suites=("chat",), prompts=1))[-1]
    assert row.prompts == 1 and row.tau_micro.value > 1 and row.tau_micro.interval() == ""


def test_two_prompts_have_values_and_neither_intervals_nor_a_verdict():
    rows = summarise(make_records(suites=("chat",), prompts=2), reference="eagle")
    poss = next(row for row in rows if row.method == "poss-1")
    gain = poss.tau_macro_gain
    assert gain and gain.text() != "–" and not gain.interval() and not gain.significance() and not gain.direction
    assert not any(one.interval() for one in (poss.tau_micro, poss.tau_macro, *poss.pos_acc, poss.tokens_per_second))


def test_where_nothing_varies_only_a_share_has_an_interval():
    same = np.ones(201)
    assert (estimate(same, 3).interval(), estimate_share(same, 3).interval()) == ("", "1.00…1.00")


def emptied(record):
    return replace(record, new_tokens=1, tokens=[0], accepted=[], pieces=None)


def test_prompts_without_rounds_add_no_certainty():
    """Intervals and tests of three prompts among sixty are nearly those of the three by themselves."""
    records = make_records(("autoregressive", "eagle", "poss-1"), ("chat",), prompts=60, rounds=5)
    few = [record for record in records if record.id < 3]
    among = [record if record.id < 3 else emptied(record) for record in records]
    (_, hass, poss), (_, hass_alone, poss_alone) = (
        [row for row in summarise(those, reference="eagle") if row.suite == ALL] for those in (among, few)
    )
    for name in ("tau_micro", "tau_macro"):
        for one, alone in ((hass, hass_alone), (poss, poss_alone)):
            wide, by_itself = getattr(one, name), getattr(alone, name)
            assert wide.value == pytest.approx(by_itself.value)
            assert wide.high - wide.low == pytest.approx(by_itself.high - by_itself.low, rel=0.5)
        gain, alone = getattr(poss, f"{name}_gain"), getattr(poss_alone, f"{name}_gain")
        assert gain.freedom == alone.freedom == 2


def test_a_prompt_without_rounds_is_left_out_of_the_macro_mean():
    records = make_records(methods=("autoregressive", "eagle"), suites=("chat",), prompts=3)
    full = {row.method: row for row in summarise([record for record in records if record.id != 1])}
    short = {"new_tokens": 1, "tokens": [0], "accepted": [], "pieces": None}
    rows = {row.method: row for row in summarise([replace(r, **short) if r.id == 1 else r for r in records])}
    assert rows["eagle"].tau_macro.value == pytest.approx(full["eagle"].tau_macro.value)


@pytest.mark.parametrize(
    "change, options, said",
    [
        (lambda records: records[:-1], {}, r"'poss-1' lacks 1 of 40 answers .*: code/4 turn 1 repeat 1. "),
        (lambda records: [*records, records[2]], {}, "'eagle' answers chat/0 turn 0 repeat 0 twice"),
        (
            lambda records: [replace(r, prompt_tokens=11) if r.method == "poss-1" else r for r in records],
            {},
            "'autoregressive' and 'poss-1' have prompts of 10 and 11 tokens at chat/0 turn 0 repeat 0",
        ),
        (list, {"baseline": "plain"}, "baseline is 'plain'; these records have the methods autoregressive, gen"),
        (list, {"reference": "hass"}, "reference is 'hass'"),
        (list, {"resamples": 0}, "resamples is 0"),
        (list, {"depths": {"eagle": 2}}, "'eagle' accepted 3 tokens in a round; its run.json gives it the depth 2"),
    ],
)
def test_what_cannot_be_compared_is_said(change, options, said):
    with pytest.raises(ValueError, match=said):
        summarise(change(make_records()), **options)


def test_replayed_rounds_are_of_one_answer_as_far_as_both_go():
    eagle, other = (replace(r, seconds={}) for r in make_records(methods=("eagle", "poss-1"), prompts=1)[:2])
    check_same(("eagle", eagle), ("poss-1", other))
    changed = replace(other, tokens=[*other.tokens[:3], 99, *other.tokens[4:]])
    with pytest.raises(ValueError, match="replays of different answers at chat/0 turn 0"):
        check_same(("eagle", eagle), ("poss-1", changed))
    timed = [replace(record, seconds={"total": 1.0}) for record in (eagle, changed)]
    check_same(*zip("ab", timed, strict=True))  # what was decoded may differ by ties


def test_later_turns_may_follow_other_answers():
    eagle, other = (replace(r, turn=1) for r in make_records(methods=("eagle", "poss-1"), prompts=1)[:2])
    check_same(("eagle", eagle), ("poss-1", replace(other, prompt_tokens=12)))
