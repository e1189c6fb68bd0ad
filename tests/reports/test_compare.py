"""`poss compare` in the terminal: short table, verdict, all tables; ways of sampling and warnings."""

import shutil

import pandas as pd
import pytest

from poss_lightning.reports.compare import compare, print_findings, show
from poss_lightning.reports.results import find
from poss_lightning.reports.tables import all_tables, overview, verdict
from tests.support.lab import write_run
from tests.support.synthetic import by_method, make_rows


@pytest.mark.parametrize("reference", [None, "eagle"])
def test_the_short_table_and_its_verdict_fit_a_terminal_and_all_prints_every_table(lab, capsys, reference):
    found = find(lab, reference=reference)
    compare(str(lab), reference=reference)
    out = capsys.readouterr().out
    assert out.count("\n") <= 25 and max(map(len, out.splitlines())) <= 80 and "3 trainings of each" in out
    assert show(overview(found.results)) in out and ("Holm" in out) == bool(reference)
    assert verdict(found.results, "plain") in out.replace("\n", " ")
    print_findings(found, all=True)
    out, tables = capsys.readouterr().out, all_tables(found.results, "plain")
    assert {"Methods", "By suite", *(["Against eagle"] * bool(reference))} < tables.keys()
    assert all(f"\n{title}\n{show(table)}\n" in out for title, table in tables.items())
    if reference:  # a comparison has its interval, p and detectable effect
        gain = by_method(found.results).gains["poss-1"]["tau_macro"]
        (text,) = tables["Against eagle"]["τ macro −"]
        p = "p < 0.001" if gain.p < 0.001 else f"p {gain.p:.3f}"
        assert text == f"{gain.value:+.3f} ({gain.low:+.3f}…{gain.high:+.3f}) {p} ±{gain.detectable:.3f}"


def test_names_cannot_steer_the_terminal(tmp_path, capsys):
    evil = "[red]\x1b[2J\n<b>"
    records = [row | {"method": evil} if row["method"] == "eagle" else row for row in make_rows(prompts=3)]
    write_run(tmp_path / "\x1bevil", records, {})
    compare(str(tmp_path / "\x1bevil"), reference=evil, all=True)
    shown = capsys.readouterr().out
    assert "\x1b" not in shown and r"[red]\x1b[2J <b>" in shown


def test_a_verdict_lists_the_drafts_that_are_faster_and_the_differences_that_are_shown(run):
    results = find(run, reference="eagle").results
    assert verdict(results, "plain") == "Drafting is faster than plain. τ against eagle: larger (poss-1)."
    gain = results.query("suite == 'all' and measure == 'tau_macro' and against == 'eagle'")
    effects = ("smaller", "", "larger", "identical", "larger")
    rows = pd.concat([gain.assign(method=f"m{place}", direction=each) for place, each in enumerate(effects)])
    words = "larger (m2, m4); smaller (m0); identical (m3); no difference shown (m1)"
    assert verdict(rows, "plain") == f"τ against eagle: {words}."
    speeds = results.query("measure == 'speed_up' and against == ''").index
    slow = results.assign(low=results["low"].where(~results.index.isin(speeds), 0.9))
    assert verdict(slow, "plain").startswith("No draft is shown to be faster than plain.")
    slow.loc[speeds[slow.loc[speeds, "method"] == "poss-1"], "low"] = 1.1
    assert verdict(slow, "plain").startswith("Drafting is faster than plain: poss-1.")


def test_trainings_of_different_inputs_or_circumstances_are_not_comparable(tmp_path, capsys):
    for seed, digest in ((0, "aa"), (1, "bb")):
        rows = make_rows(methods=("eagle",), seed=seed)
        run = {"config": {"dtype": ("float32", "bfloat16")[seed], "max_new_tokens": 8}, "machine": f"machine {seed}"}
        cell = {"inputs": {"/home/me/store": digest, "base.yaml": "cc"}}
        write_run(tmp_path / "choice=eagle" / f"seed={seed}", rows, run | {"cell": cell})
    print_findings(find(tmp_path))
    said = " ".join(capsys.readouterr().out.split())
    assert [f"these records had 2 different {name}" in said for name in ("store", "dtype", "machine")] == [True] * 3
    assert "base.yaml" not in said and "max_new_tokens" not in said


def test_a_choice_that_shares_one_training_with_the_reference_is_named(lab, tmp_path):
    words = "One seed alone is shared with eagle, so the interval is for other prompts: poss-1."
    assert words not in find(lab, reference="eagle").notes
    shutil.copytree(lab, tmp_path / "lab")
    for seed in (0, 2):
        shutil.rmtree(tmp_path / "lab" / "choice=poss-1" / f"seed={seed}")
    assert words in find(tmp_path / "lab", reference="eagle").notes


def test_ways_of_sampling_share_a_table_and_each_is_as_alone(tmp_path):
    sized = {"methods": {"eagle": {"tree": "auto"}}}
    runs = {
        "T=0": {"config": {"temperature": 0.0, "tree": "auto"}},  # of baselines alone, as run.json has it
        "T=1 top_p=0.5": {"config": {"temperature": 1.0, "top_p": 0.5}},
        "T=1": {"config": {"temperature": 1.0, "tree": "auto"}} | sized,
    }
    for seed, (name, run) in enumerate(runs.items()):
        records = make_rows(prompts=3, seed=seed)
        if name == "T=0":  # greedy answers were replayed, which takes no time
            records = [row | {"seconds": {}} for row in records if row["method"] in ("eagle", "poss-1")]
        write_run(tmp_path / name, records, run)
    both = find(tmp_path, reference="eagle")
    for name in runs:
        alone = find(tmp_path / name, reference="eagle")
        for one, every in ((alone.results, both.results), (alone.answers, both.answers)):
            own = every[every["method"].isin(one["method"] + f" {name}")].reset_index(drop=True)
            pd.testing.assert_frame_equal(own, one.assign(method=one["method"] + f" {name}"))
        assert set(alone.notes) < set(both.notes)
        assert any("sized by their cost" in note for note in alone.notes) == (name == "T=1")
    assert "speed-up over plain" in all_tables(both.results, "plain")["Methods"]


def test_milliseconds_of_the_parts_are_those_of_a_token_and_any_method_may_be_the_baseline(run):
    parts = all_tables(find(run).results, "plain")["Milliseconds per new token"].set_index("method")
    records = [row for row in make_rows() if row["method"] == "eagle"]
    total = 1000 * sum(row["seconds"]["total"] for row in records) / sum(row["new_tokens"] for row in records)
    assert list(parts.columns) == ["verify", "rest"]  # the others took no time
    assert parts.loc["eagle"].to_list() == [f"{share * total:.1f}" for share in (0.8, 0.2)]
    speed_ups = find(run, baseline="eagle").overall.query("measure == 'speed_up'")
    assert {*speed_ups["method"]} == {"plain", "generate", "poss-1"}
