"""Methods over training seeds: against loops and scipy, and against truths that are known."""

import gzip
import math
from dataclasses import astuple, replace

import numpy as np
import pytest
from scipy import stats

from poss_lightning.evaluation.records import to_line
from poss_lightning.reports import statistics
from poss_lightning.reports.compare import compare
from poss_lightning.reports.findings import write_seed_headline
from poss_lightning.reports.seeds import crossed_error, leave_one_out, pseudo_values, summarise_seeds
from poss_lightning.reports.statistics import Sums, correct, detectable, difference, holm
from poss_lightning.reports.tables import group_by_choice
from tests.support.synthetic import draw_reach, make_records, true_tau


def make_cells(choices=("eagle", "poss-1"), seeds=(0, 1, 2), **options):
    return {
        (choice, seed): make_records(("autoregressive", choice), seed=10 * seed + place, prompts=4, **options)
        for place, choice in enumerate(choices)
        for seed in seeds
    }


def rows_of(summaries, suite="all"):
    return {(row.choice, row.measure): row for row in summaries if row.suite == suite}


# --- naive twins ---


def naive_crossed(effects):
    """The textbook's mean squares of a crossed design with one value a cell."""
    seeds, prompts = effects.shape
    mean = effects.mean()
    s = prompts * sum((effects[i].mean() - mean) ** 2 for i in range(seeds)) / (seeds - 1)
    q = seeds * sum((effects[:, j].mean() - mean) ** 2 for j in range(prompts)) / (prompts - 1)
    i = 0.0
    for row in range(seeds):
        for column in range(prompts):
            i += (effects[row, column] - effects[row].mean() - effects[:, column].mean() + mean) ** 2
    i /= (seeds - 1) * (prompts - 1)
    parts = i / (seeds * prompts), max(0, s - i) / (seeds * prompts), max(0, q - i) / (seeds * prompts)
    below = s**2 / (seeds - 1) + q**2 / (prompts - 1) + i**2 / ((seeds - 1) * (prompts - 1))
    freedom = (sum(parts) * seeds * prompts) ** 2 / below
    return math.sqrt(sum(parts)), max(freedom, min(seeds, prompts) - 1)


def naive_means(records, choice):
    """Each prompt's mean of accepted + 1."""
    prompts = list(dict.fromkeys((record.suite, record.id) for record in records))
    return [
        np.mean([a + 1 for r in records if r.method == choice and (r.suite, r.id) == prompt for a in r.accepted])
        for prompt in prompts
    ]


@pytest.mark.parametrize("shape", [(2, 2), (2, 5), (5, 3), (4, 30)])
def test_the_crossed_error_is_the_textbooks(shape):
    for seed in range(20):
        draw = np.random.default_rng(seed)
        effects = draw.normal(size=shape) + draw.normal(size=shape[0])[:, None] + draw.normal(size=shape[1])
        assert crossed_error(effects) == pytest.approx(naive_crossed(effects))


def test_gains_are_scipys_paired_t_test_and_the_crossed_error_of_prompt_means():
    cells = make_cells()
    rows = rows_of(summarise_seeds(cells, reference="eagle"))
    own, other = rows["poss-1", "tau_macro"], rows["eagle", "tau_macro"]
    test = stats.ttest_rel(list(own.values.values()), list(other.values.values()))
    bounds = test.confidence_interval()
    paired = own.gain_these_prompts
    assert (paired.p, paired.low, paired.high) == pytest.approx((test.pvalue, bounds.low, bounds.high))
    effects = np.array(
        [
            np.subtract(naive_means(cells["poss-1", seed], "poss-1"), naive_means(cells["eagle", seed], "eagle"))
            for seed in range(3)
        ]
    )
    error, freedom = naive_crossed(effects)
    assert own.gain.value == pytest.approx(effects.mean())
    assert own.gain.p == pytest.approx(2 * stats.t.sf(effects.mean() / error, freedom))
    assert own.gain.detectable == pytest.approx(detectable(error, freedom))
    assert own.deviation == pytest.approx(np.std(list(own.values.values()), ddof=1))
    assert (other.gain, other.gain_these_prompts, other.pairs, own.pairs) == (None, None, (), (0, 1, 2))


def test_choices_that_are_written_alike_are_all_first():
    (name, measured), *_ = group_by_choice(summarise_seeds(make_cells())).items()
    alone = write_seed_headline({name: measured}, "autoregressive")
    tied = write_seed_headline({name: measured, "six": measured, "two": measured}, "autoregressive")
    assert alone.startswith(f"{name} has the largest τ") and tied.startswith(f"{name}, six and two have the largest τ")


def test_speeds_are_compared_by_the_mean_of_logarithms():
    rows = rows_of(summarise_seeds(make_cells(), reference="eagle"))
    for measure in ("tokens_per_second", "speed_up"):
        own, other = (list(rows[choice, measure].values.values()) for choice in ("poss-1", "eagle"))
        gain = rows["poss-1", measure].gain_these_prompts
        assert gain.value == pytest.approx(stats.gmean(own) / stats.gmean(other))
        assert gain.p == pytest.approx(stats.ttest_rel(np.log(own), np.log(other)).pvalue)


def test_values_are_those_of_one_training_alone():
    cells = make_cells()
    rows = rows_of(summarise_seeds(cells))
    for (choice, seed), records in cells.items():
        rounds = np.array([a for record in records if record.method == choice for a in record.accepted])
        assert rows[choice, "tau_micro"].values[seed] == pytest.approx(1 + rounds.mean())
        assert rows[choice, "pos_acc_2"].values[seed] == pytest.approx((rounds >= 2).sum() / (rounds >= 1).sum())


def test_jackknife_and_bootstrap_know_the_same_spread():
    draw = np.random.default_rng(0)
    sums = Sums(draw_reach(draw, "eagle", draw.normal(0, 0.6, 80)), draw.uniform(1, 9, 80), draw.uniform(1, 2, 80))
    counts = statistics.draw_counts(80, 4000, 0)
    for measure in (statistics.tau_macro, statistics.tau_micro, statistics.tokens_per_second):
        said = pseudo_values(measure(leave_one_out(80), sums))
        bootstrap = statistics.standard_error(measure(counts, sums), 80)
        assert said.std(ddof=1) / math.sqrt(80) == pytest.approx(bootstrap, rel=0.05)


# --- what is known about drawn experiments ---

SPREADS = {  # standard deviations of ease: by seed and by prompt of a method alone
    "seeds and prompts": (0.15, 0.2),
    "seeds alone": (0.15, 0.0),
    "prompts alone": (0.0, 0.4),
    "neither": (0.0, 0.0),
}


def draw_effects(methods, by_seed, by_prompt, count=1000, seeds=5, prompts=40):
    """Differences of macro τ (count, S, Q) between two methods, for prompts of unlike ease, and the true one."""
    draw = np.random.default_rng(0)
    ease = draw.normal(0, 0.5, (count, 1, prompts))
    means = []
    for method in methods:
        own = draw.normal(0, by_seed, (count, seeds, 1)) + draw.normal(0, by_prompt, (count, 1, prompts))
        reach = draw_reach(draw, method, ease + own)
        means.append(reach.sum(-1) / reach[..., 0])
    taus = [true_tau(method, math.hypot(0.5, by_seed, by_prompt)) for method in methods]
    return means[1] - means[0], taus[1] - taus[0]


def covered(effects, truth, error, freedom):
    return np.mean(abs(effects.mean((-2, -1)) - truth) <= error * stats.t.ppf(0.975, freedom))


@pytest.mark.parametrize("spread", SPREADS)
def test_intervals_hold_the_truth_for_other_seeds_and_prompts(spread):
    """Where nothing varies but the rounds themselves, more often than they say: the seeds' share is never below 0."""
    effects, truth = draw_effects(("eagle", "poss-1"), *SPREADS[spread])
    assert 0.935 <= covered(effects, truth, *crossed_error(effects)) <= (0.995 if spread == "neither" else 0.98)


def test_a_view_that_leaves_a_source_of_chance_out_is_too_sure():
    effects, truth = draw_effects(("eagle", "poss-1"), *SPREADS["prompts alone"])
    over_seeds_only = effects.mean(-1).std(-1, ddof=1) / math.sqrt(5)
    assert covered(effects, truth, over_seeds_only, 4) < 0.85
    effects, truth = draw_effects(("eagle", "poss-1"), *SPREADS["seeds alone"])
    over_prompts_only = effects.mean(-2).std(-1, ddof=1) / math.sqrt(40)
    assert covered(effects, truth, over_prompts_only, 39) < 0.85


def test_without_an_effect_few_are_found_and_at_the_detectable_effect_four_in_five():
    effects, _ = draw_effects(("eagle", "eagle"), *SPREADS["seeds and prompts"], count=6000)
    error, freedom = crossed_error(effects)
    gains = effects.mean((-2, -1))

    def found(shift):
        return np.mean(2 * stats.t.sf(abs(gains + shift) / error, freedom) < 0.05)

    assert found(0) <= 0.05 + 2 * math.sqrt(0.05 * 0.95 / 6000)
    assert found(detectable(gains.std(), float(np.median(freedom)))) == pytest.approx(0.8, abs=0.05)


def test_the_paired_t_test_finds_its_detectable_effect_four_times_in_five():
    draw, found = np.random.default_rng(0), []
    for _ in range(2000):
        gains = draw.normal(detectable(math.sqrt(2 / 5), 4), math.sqrt(2), 5)
        found.append(difference(gains.mean(), gains.std(ddof=1) / math.sqrt(5), 4).p < 0.05)
    assert np.mean(found) == pytest.approx(0.8, abs=0.03)


def test_one_real_effect_among_five_comparisons_is_found_at_the_detectable_effect_of_five():
    draw, found = np.random.default_rng(0), []
    true = np.array([detectable(math.sqrt(2 / 5), 4, tests=5), 0, 0, 0, 0])
    for _ in range(2000):
        gains = draw.normal(true, math.sqrt(2), (5, 5))  # (seeds, choices)
        errors = gains.std(0, ddof=1) / math.sqrt(5)
        held = {k: difference(gains[:, k].mean(), errors[k], 4) for k in range(5)}
        found.append(correct(held)[0].holm < 0.05)
    assert np.mean(found) == pytest.approx(0.8, abs=0.03)


# --- edges ---


def test_gains_are_corrected_over_choices_and_so_is_what_they_could_find():
    cells = make_cells()
    for seed in range(3):
        cells["third", seed] = [
            replace(record, method="third") if record.method == "poss-1" else record for record in cells["poss-1", seed]
        ]
    rows = rows_of(summarise_seeds(cells, "eagle"))
    gains = [rows[choice, "tau_macro"].gain for choice in ("poss-1", "third")]
    assert [gain.holm for gain in gains] == holm([gain.p for gain in gains])
    assert all(gain.detectable == detectable(gain.error, gain.freedom, tests=2) for gain in gains)
    ratio = rows["third", "speed_up"].gain
    assert ratio.detectable == math.expm1(detectable(ratio.error, ratio.freedom, tests=2))


def test_only_seeds_that_both_have_are_paired_and_one_gives_no_interval():
    cells = make_cells()
    del cells["poss-1", 0]
    row = rows_of(summarise_seeds(cells, "eagle"))["poss-1", "tau_macro"]
    assert row.pairs == (1, 2) and row.gain.interval() and list(row.values) == [1, 2]
    del cells["poss-1", 2]
    row = rows_of(summarise_seeds(cells, "eagle"))["poss-1", "tau_macro"]
    assert row.gain.text() != "–" and not row.gain.interval() and not row.mean.interval() and math.isnan(row.deviation)
    del cells["eagle", 1]
    row = rows_of(summarise_seeds(cells, "eagle"))["poss-1", "tau_macro"]
    assert (row.pairs, row.gain, row.gain_these_prompts) == ((), None, None)


def test_all_suites_come_first_and_a_choice_that_drafts_less_deep_has_fewer_positions():
    summaries = summarise_seeds(make_cells(), "eagle", depths={"poss-1": 5})
    assert list(dict.fromkeys(row.suite for row in summaries)) == ["all", "chat", "code"]
    rows = rows_of(summaries, "chat")
    assert ("poss-1", "pos_acc_5") in rows and ("eagle", "pos_acc_5") not in rows
    assert rows["poss-1", "pos_acc_5"].gain is None and rows["poss-1", "pos_acc_5"].mean.text() == "–"


def test_prompts_without_rounds_add_no_certainty():
    """The same to the last digits as if they had not been asked; of shares, those that never come so far."""
    short = {"new_tokens": 1, "tokens": [0], "accepted": [], "pieces": None}
    cells = make_cells()
    idle = {
        cell: [replace(record, **short) if record.id == 1 and record.suite == "chat" else record for record in records]
        for cell, records in cells.items()
    }
    asked = {
        cell: [record for record in records if not (record.id == 1 and record.suite == "chat")]
        for cell, records in cells.items()
    }
    with_idle, without = (rows_of(summarise_seeds(those, "eagle")) for those in (idle, asked))
    for measure in ("tau_macro", "tau_micro", "pos_acc_1", "pos_acc_2"):
        gains = [rows["poss-1", measure].gain for rows in (with_idle, without)]
        assert astuple(gains[0]) == pytest.approx(astuple(gains[1]))


def test_positions_that_few_prompts_reach_have_the_certainty_of_few():
    cells = make_cells(rounds=3)
    for records in cells.values():
        for place, record in enumerate(records):
            if record.accepted and record.id:  # all but two of eight prompts never accept
                short = {"new_tokens": 4, "tokens": record.tokens[:4], "text": "", "pieces": None}
                records[place] = replace(record, accepted=[0] * 3, **short)
    rows = rows_of(summarise_seeds(cells, "eagle"))
    gain = rows["poss-1", "pos_acc_2"].gain
    assert gain.text() != "–" and not gain.interval()
    mean = rows["poss-1", "pos_acc_2"].mean
    assert 0 <= mean.low <= mean.value <= mean.high <= 1


def test_without_a_baseline_everywhere_there_is_no_speed_up():
    cells = make_cells()
    cells["eagle", 0] = [record for record in cells["eagle", 0] if record.method == "eagle"]
    assert not any(row.measure == "speed_up" for row in summarise_seeds(cells))
    with pytest.raises(
        ValueError, match="baseline is 'autoregresive'; these records have the baselines autoregressive"
    ):
        summarise_seeds(cells, baseline="autoregresive")


@pytest.mark.parametrize(
    "change, reference, said",
    [
        (lambda cells: cells, "hass", "reference is 'hass'; these records have the choices eagle, poss-1"),
        (lambda cells: cells | {("hass", 1): cells["eagle", 1]}, None, "choice 'hass', seed 1: no record has this"),
        (lambda cells: cells | {("eagle", 1): cells["eagle", 1][:-8]}, None, "seed 1 and .* differ in 4 answers, such"),
        (
            lambda cells: cells | {("eagle", 1): [replace(record, prompt_tokens=9) for record in cells["eagle", 1]]},
            None,
            "'eagle', seed 0, and 'eagle', seed 1, have prompts of 10 and 9 tokens at chat/0 turn 0 repeat 0",
        ),
    ],
)
def test_what_cannot_be_compared_is_said(change, reference, said):
    with pytest.raises(ValueError, match=said):
        summarise_seeds(change(make_cells()), reference)


@pytest.mark.parametrize("reference", [None, "eagle"])
def test_compare_tells_of_seeds_from_their_folders(tmp_path, capsys, monkeypatch, reference):
    monkeypatch.setenv("COLUMNS", "100")
    for (choice, seed), records in make_cells(seeds=(0, 2, 10)).items():
        folder = tmp_path / choice / f"seed-{seed}"
        folder.mkdir(parents=True)
        lines = "".join(to_line(record) + "\n" for record in records)
        (folder / "records.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    compare(str(tmp_path), reference=reference)
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 100
    for words in ("Over training seeds", "speed-up", "pos-acc by position", "By suite", "poss-1"):
        assert words in out
    assert ("these prompts" in out and "p < 0.001" in out) == (reference is not None)
