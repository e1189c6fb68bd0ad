"""`poss compare` in the terminal: short table, verdict, all tables; temperatures, lengths, costs and warnings."""

import json
from dataclasses import replace
from itertools import product
from statistics import fmean

import pytest

from poss_lightning.decoding.costs import Costs
from poss_lightning.evaluation.cells import pack
from poss_lightning.evaluation.records import Record
from poss_lightning.reports.compare import compare, print_findings
from poss_lightning.reports.findings import find
from poss_lightning.reports.lengths import length_tables, list_rounds
from poss_lightning.reports.statistics import Estimate
from poss_lightning.reports.summary import group
from poss_lightning.reports.tables import all_tables, gain_text, overview, verdict
from tests.support.lab import write_records
from tests.support.synthetic import make_cells, make_records


@pytest.fixture
def run(tmp_path):
    folder = tmp_path / "run"
    write_records(folder, make_records(), {"methods": {"poss-1": {"depth": 6}}})
    return folder


@pytest.fixture
def sweep(tmp_path):
    for (choice, seed), records in make_cells(seeds=(0, 2, 10)).items():
        write_records(tmp_path / "sweep" / choice / f"seed-{seed}", records, {})
    return tmp_path / "sweep"


@pytest.mark.parametrize(("name", "reference"), [*product(("run", "sweep"), (None, "eagle")), ("run", "plain")])
def test_the_short_table_and_its_verdict_fit_a_terminal(name, reference, request, capsys):
    folder = request.getfixturevalue(name)
    compare(str(folder), reference=reference)
    out = capsys.readouterr().out
    found = find(folder, reference=reference)
    assert len(out.splitlines()) <= 25 and max(map(len, out.splitlines())) <= 80
    for row in found.overall:
        assert row.method in out
        for value in ("tau_macro", "speed_up"):
            assert value not in row.values or row.values[value].with_interval() in out
    assert verdict(found) in out.replace("\n", " ") and ("Holm" in out) == bool(reference)


def test_many_methods_and_long_names_fit_too(tmp_path, capsys):
    records = make_records(methods=("plain", "eagle"), prompts=3)
    drafts = [record for record in records if record.method == "eagle"]
    for place in range(20):
        records += [replace(record, method=f"a very long name that differs at its end {place}") for record in drafts]
    write_records(tmp_path, records, {})
    compare(str(tmp_path), reference="eagle")
    out = capsys.readouterr().out
    assert "… 7 more" in out and len(out.splitlines()) <= 25 and max(map(len, out.splitlines())) <= 80
    compare(str(tmp_path), reference="eagle", all=True)
    assert "differs at its end 19" in capsys.readouterr().out


def test_all_prints_every_table(sweep, capsys):
    compare(str(sweep), reference="eagle", all=True)
    out = capsys.readouterr().out
    found = find(sweep, reference="eagle")
    gain = next(row for row in found.overall if row.method == "poss-1").gains["tau_macro"]
    for words in ("Methods", "Against eagle", "By suite", "pos-acc by position, %", "3 trainings of each", "sd of a"):
        assert words in out
    assert f"{gain.with_interval('+z.3f')} {gain.significance()} ±{gain.detectable:.3f}" in out


def test_names_cannot_steer_the_terminal(tmp_path, capsys):
    evil = "[red]\x1b[2J\n<b>"
    records = [replace(record, method=evil) if record.method == "eagle" else record for record in make_records()]
    write_records(tmp_path / "\x1bevil", records, {})
    compare(str(tmp_path / "\x1bevil"), reference=evil, all=True)
    shown = capsys.readouterr().out
    assert "\x1b" not in shown and r"[red]\x1b[2J <b>" in shown


def test_a_verdict_says_which_differences_are_shown(run):
    found = find(run, reference="eagle")
    assert verdict(found).endswith(" τ against eagle: larger (poss-1).")
    last = found.overall[-1]
    gain, rows = last.gains["tau_macro"], []
    for name, p, sign in (("a", 0.01, -1), ("b", 0.9, 1), ("c", 0.04, 1)):
        rows.append(replace(last, method=name, gains={"tau_macro": replace(gain, p=p, value=sign * gain.value)}))
    assert verdict(found._replace(rows=rows)).endswith("larger (c); smaller (a); no difference shown (b).")
    same = replace(gain, value=0.0, detectable=0.0, p=1.0)
    assert gain_text(same) == "identical" and gain_text(None) == ""


def test_a_verdict_says_which_drafts_are_faster(run):
    found = find(run)
    assert verdict(found).startswith("Drafting is faster than plain. Largest τ: poss-1, ")
    rows = [replace(r, values=r.values | {"speed_up": Estimate(1.2, 0.9, 1.5)}) for r in found.overall]
    assert verdict(found._replace(rows=rows)).startswith("No draft is shown to be faster than plain.")
    (fast,) = (row for row in found.overall if row.method == "poss-1")
    rows = [fast if row.method == "poss-1" else row for row in rows]
    assert verdict(found._replace(rows=rows)).startswith("Drafting is faster than plain: poss-1.")


def test_replayed_rounds_have_no_speeds(tmp_path):
    records = [replace(r, seconds={}, text="", pieces=None) for r in make_records(methods=("eagle", "poss-1"))]
    write_records(tmp_path, records, {})
    found = find(tmp_path)
    assert list(overview(found).columns) == ["method", "τ"] and verdict(found).startswith("Largest τ: poss-1, ")


def test_an_absent_baseline_is_refused(tmp_path):
    write_records(tmp_path, make_records(methods=("vllm", "eagle"), prompts=3), {})
    with pytest.raises(ValueError, match="baseline is 'plain'; these records have vllm"):
        find(tmp_path)
    assert "speed_up" in find(tmp_path, baseline="vllm").overall[-1].values


@pytest.mark.parametrize("tree", ["auto", "fixed"])
def test_sized_trees_are_noted(tmp_path, tree):
    write_records(tmp_path, make_records(), {"config": {"tree": tree}})
    assert any("sized by their cost" in note for note in find(tmp_path).notes) == (tree == "auto")


def test_trainings_of_different_inputs_or_circumstances_are_not_comparable(tmp_path, capsys):
    for seed, digest in ((0, "aa"), (1, "bb")):
        rows = [vars(record) for record in make_records(methods=("eagle",), seed=seed)]
        run = {"config": {"dtype": ("float32", "bfloat16")[seed], "max_new_tokens": 8}, "machine": f"machine {seed}"}
        pack(tmp_path, "eagle", seed, {"inputs": {"/home/me/store": digest, "base.yaml": "cc"}, "run": run}, rows)
    print_findings(find(tmp_path))
    said = " ".join(capsys.readouterr().out.split())
    assert [f"these records had 2 different {name}" in said for name in ("store", "dtype", "machine")] == [True] * 3
    assert "base.yaml" not in said and "max_new_tokens" not in said


def test_a_choice_that_shares_one_training_with_the_reference_is_named(tmp_path):
    for choice, seeds in {"eagle": (0, 1), "poss-1": (0, 1), "poss-3": (1,)}.items():
        for seed in seeds:
            records = make_records(methods=("poss-1",), seed=seed)
            pack(tmp_path, choice, seed, {}, [vars(replace(record, method=choice)) for record in records])
    found = find(tmp_path, reference="eagle")
    assert [note for note in found.notes if "One seed alone" in note] == [
        "One seed alone is shared with eagle, so the interval is for other prompts: poss-3."
    ]
    titles = all_tables(found)
    assert any("output position" in title and "(one training)" in title for title in titles)


# --- temperatures ---


def test_temperatures_share_a_table_and_each_is_as_alone(tmp_path):
    write_records(tmp_path / "warm", make_records(seed=1), {"config": {"temperature": 1.0, "tree": "auto"}})
    write_records(tmp_path / "greedy", make_records(), {})
    both = find(tmp_path, reference="eagle")
    for name, folder in (("0", "greedy"), ("1", "warm")):
        alone = find(tmp_path / folder, reference="eagle")
        rows = [replace(row, method=f"{row.method}, T = {name}") for row in alone.rows]
        assert repr([row for row in both.rows if row.method.endswith(f"T = {name}")]) == repr(rows)  # nan is not itself
        assert {method: both.answers[f"{method}, T = {name}"] for method in alone.answers} == alone.answers
        table, lengths = (
            next(t for title, t in all_tables(each).items() if "position (" in title) for each in (both, alone)
        )
        assert list(table["method"]) == [f"{method}, T = {t}" for t in (0, 1) for method in lengths["method"]]
    assert both.shown == find(tmp_path / "greedy").answers
    assert set(find(tmp_path / "greedy").notes) < set(find(tmp_path / "warm").notes) < set(both.notes)
    lines = (tmp_path / "warm" / "records.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "warm" / "records.jsonl").write_text("".join(line for line in lines if '"eagle"' not in line))
    with pytest.raises(ValueError, match="at T = 1: reference is 'eagle'; these records have the methods"):
        find(tmp_path, reference="eagle")


def test_the_baseline_is_that_of_the_temperature_that_has_one(tmp_path):
    """Greedy answers were replayed, which takes no time."""
    replayed = [replace(each, seconds={}) for each in make_records(methods=("eagle", "poss-1"))]
    write_records(tmp_path / "greedy", replayed, {})
    write_records(tmp_path / "warm", make_records(seed=1), {"config": {"temperature": 1.0}})
    found = find(tmp_path, reference="eagle")
    assert (found.baseline, found.speed) == ("plain", "tokens_per_second")
    assert "speed-up over plain" in all_tables(found)["Methods"]


def test_a_draft_may_be_the_baseline(run):
    compared = {row.method for row in find(run, baseline="eagle").overall if "speed_up" in row.values}
    assert compared == {"plain", "generate", "poss-1"}


def test_a_top_p_of_1_is_one_of_1_0(tmp_path):
    for seed, (name, top_p) in enumerate((("a", 1), ("b", 1.0))):
        records = [replace(record, method=name) for record in make_records(seed=seed, methods=("eagle",))]
        write_records(tmp_path / name, records, {"config": {"temperature": 1.0, "top_p": top_p}})
    assert find([tmp_path / "a", tmp_path / "b"]).rows


def test_a_different_top_p_tree_or_target_is_refused(tmp_path):
    for seed, (name, top_p) in enumerate((("cut", 0.5), ("warm", 1.0))):
        write_records(tmp_path / name, make_records(seed=seed), {"config": {"temperature": 1.0, "top_p": top_p}})
    with pytest.raises(ValueError, match=r"cut was sampled with top_k 0 and top_p 0\.5, .*warm with top_k 0"):
        find(tmp_path)
    for name, tree in (("cut", {}), ("warm", {"tree": "auto"})):
        run = {"methods": {"eagle": {"depth": 6} | tree}, "config": {"temperature": float(name == "warm")}}
        (tmp_path / name / "run.json").write_text(json.dumps(run))
    with pytest.raises(ValueError, match=r"'eagle' of .*cut differs from that of .*warm \(tree fixed and auto\)"):
        find(tmp_path)
    for name in ("cut", "warm"):
        (tmp_path / name / "run.json").write_text(json.dumps({"config": {"fingerprint": name}}))
    with pytest.raises(ValueError, match=r"cut was measured on another target than .*warm \("):
        find(tmp_path)


# --- lengths and costs ---


def answer(accepted: list[int], prompt_tokens: int = 10, **fields) -> Record:
    tokens = [1] * (1 + sum(accepted) + len(accepted))
    lengths = {"tokens": tokens, "new_tokens": len(tokens), "pieces": None, "prompt_tokens": prompt_tokens}
    return replace(make_records(methods=("eagle",))[0], accepted=accepted, **lengths, **fields)


def test_a_round_counts_where_it_began_and_by_the_length_of_its_input():
    rounds = list_rounds(answer([3] * 40))  # they begin at 1, 5, 9, … 157
    assert [each["position"] for each in rounds] == [0] * 8 + [32] * 8 + [64] * 16 + [128] * 8
    columns = {length: list_rounds(answer([1], length))[0]["input"] for length in (1, 127, 128, 255, 256, 512, 33000)}
    assert columns == {1: 0, 127: 0, 128: 128, 255: 128, 256: 256, 512: 512, 33000: 32768}


def test_tables_of_lengths_are_what_counting_gives():
    records = make_records(methods=("eagle", "poss-1"))
    records = [replace(each, prompt_tokens=100 * (each.turn + 1), category=each.suite) for each in records]
    tables = length_tables(group(records)).values()
    names = {"position": ["0–31", "32–"], "input": ["0–127", "128–"], "category": ["chat", "code"]}
    for table, (by, named) in zip(tables, names.items(), strict=True):
        assert list(table.columns) == ["method", *named]
        for method, *texts in table.itertuples(index=False):
            rounds = [each for record in records if record.method == method for each in list_rounds(record)]
            columns = sorted({each[by] for each in rounds})
            means = [fmean(each["accepted"] + 1 for each in rounds if each[by] == column) for column in columns]
            assert [text.partition(" (")[0] for text in texts] == [f"{mean:.2f}" for mean in means]
            assert all("…" in text for text in texts)


def test_a_column_of_few_prompts_is_as_uncertain_as_few_prompts():
    """Three long answers among 57 short ones have the interval of three; two have none."""
    long = {("chat", place, 0, 0): answer([1] * 14 + [level] * 30) for place, level in enumerate((1, 2, 4))}
    short = {("chat", place, 0, 0): answer([place % 3, 1]) for place in range(3, 60)}
    two = dict([*long.items()][:2]) | short
    tables = [length_tables({"eagle": answers}).values() for answers in (long, long | short, two)]
    texts = [next(iter(found))["32–63"][0] for found in tables]
    assert texts[0] == texts[1] and "…" in texts[0] and "…" not in texts[2]


def test_measured_costs_are_shown(tmp_path):
    costs = Costs.interpolate(0.006, {1: 0.06, 8: 0.08, 16: 0.09, 32: 0.17})
    write_records(tmp_path, make_records(), {"costs": {"eagle": costs._asdict()}})
    found = find(tmp_path)
    assert found.costs == {"eagle": costs}
    (row,) = all_tables(found)["What drafting costs on this machine"].to_dict("records")
    assert [*row.values()] == ["eagle", "60.0", "6.0", "80.0", "1.53", "90.0", "1.90"]  # (2 * 6 + 80) / 60, ...
