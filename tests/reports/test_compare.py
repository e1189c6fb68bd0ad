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
from poss_lightning.reports.statistics import Estimate
from poss_lightning.reports.tables import LENGTHS, all_tables, gain_text, list_rounds, overview, verdict
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


@pytest.mark.parametrize(("name", "reference"), [*product(("run", "sweep"), (None, "eagle"))])
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
    assert verdict(found) == "Drafting is faster than plain. τ against eagle: larger (poss-1)."
    last = found.overall[-1]
    gain, rows = last.gains["tau_macro"], []
    for name, p, sign in (("a", 0.01, -1), ("b", 0.9, 1), ("c", 0.04, 1)):
        rows.append(replace(last, method=name, gains={"tau_macro": replace(gain, p=p, value=sign * gain.value)}))
    assert verdict(found._replace(rows=rows)).endswith("larger (c); smaller (a); no difference shown (b).")
    same = replace(last, gains={"tau_macro": replace(gain, value=0.0, detectable=0.0, p=1.0)})
    assert gain_text(same, "tau_macro") == "identical" and gain_text(same, "tau_micro") == ""


def test_a_verdict_says_which_drafts_are_faster(run):
    found = find(run)
    slow = [replace(r, values=r.values | {"speed_up": Estimate(1.2, 0.9, 1.5)}) for r in found.overall]
    assert verdict(found._replace(rows=slow)) == "No draft is shown to be faster than plain."
    rows = [*slow[:-1], found.overall[-1]]
    assert verdict(found._replace(rows=rows)) == "Drafting is faster than plain: poss-1."


def test_replayed_rounds_have_no_speeds(tmp_path):
    records = [replace(r, seconds={}, text="", pieces=None) for r in make_records(methods=("eagle", "poss-1"))]
    write_records(tmp_path, records, {})
    found = find(tmp_path)
    assert list(overview(found).columns) == ["method", "τ"] and not verdict(found)


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


def test_ways_of_sampling_share_a_table_and_each_is_as_alone(tmp_path):
    configs = {
        "T = 0": {"temperature": 0.0},
        "T = 1, top_p 0.5": {"temperature": 1.0, "top_p": 0.5},
        "T = 1": {"temperature": 1.0, "tree": "auto"},
    }
    costs = {"costs": {"eagle": Costs.interpolate(0.006, {1: 0.06, 8: 0.08})._asdict()}}
    for seed, (name, config) in enumerate(configs.items()):
        records = make_records(seed=seed)
        if name == "T = 0":  # greedy answers were replayed, which takes no time
            records = [replace(record, seconds={}) for record in records if record.method in ("eagle", "poss-1")]
        write_records(tmp_path / name, records, {"config": config} | costs)
    both = find(tmp_path, reference="eagle")
    for name in configs:
        alone = find(tmp_path / name, reference="eagle")
        rows = [replace(row, method=f"{row.method}, {name}") for row in alone.rows]
        assert repr([row for row in both.rows if row.method.endswith(f", {name}")]) == repr(rows)  # nan is not itself
        assert {method: both.answers[f"{method}, {name}"] for method in alone.answers} == alone.answers
        assert both.costs[f"eagle, {name}"] == alone.costs["eagle"]
        assert set(alone.notes) < set(both.notes)
    assert (both.baseline, both.speed) == ("plain", "tokens_per_second")
    tables = all_tables(both)
    assert "speed-up over plain" in tables["Methods"]
    assert list(tables["pos-acc by position, %"]["method"]) == [
        f"{method}, {name}" for name in configs for method in ("eagle", "poss-1")
    ]
    lines = (tmp_path / "T = 1" / "records.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "T = 1" / "records.jsonl").write_text("".join(line for line in lines if '"eagle"' not in line))
    with pytest.raises(ValueError, match="at T = 1: reference is 'eagle'; these records have the methods"):
        find(tmp_path, reference="eagle")


def test_a_draft_may_be_the_baseline(run):
    compared = {row.method for row in find(run, baseline="eagle").overall if "speed_up" in row.values}
    assert compared == {"plain", "generate", "poss-1"}


def test_a_different_tree_or_target_is_refused(tmp_path):
    for name, tree in (("cut", {}), ("warm", {"tree": "auto"})):
        run = {"methods": {"eagle": {"depth": 6} | tree}, "config": {"temperature": float(name == "warm")}}
        write_records(tmp_path / name, make_records(), run)
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


def length_tables(folder, records):
    write_records(folder, records, {})
    tables = all_tables(find(folder))
    return {by: tables.get(title) for by, title in LENGTHS.items()}


def test_tables_of_lengths_are_what_counting_gives(tmp_path):
    records = make_records(methods=("eagle", "poss-1"))
    records = [replace(each, seconds={}, prompt_tokens=100 * (each.turn + 1), category=each.suite) for each in records]
    tables = length_tables(tmp_path, records)
    names = {"position": ["0–31", "32–"], "input": ["0–127", "128–"], "category": ["chat", "code"]}
    for by, named in names.items():
        assert list(tables[by].columns) == ["method", *named]
        for method, *texts in tables[by].itertuples(index=False):
            rounds = [each for record in records if record.method == method for each in list_rounds(record)]
            columns = sorted({each[by] for each in rounds})
            means = [fmean(each["accepted"] + 1 for each in rounds if each[by] == column) for column in columns]
            assert [text.partition(" (")[0] for text in texts] == [f"{mean:.2f}" for mean in means]
            assert all("…" in text for text in texts)


def test_a_column_of_few_prompts_is_as_uncertain_as_few_prompts(tmp_path):
    """Three long answers among 57 short ones have the interval of three; two have none."""
    long = [answer([1] * 14 + [level] * 30, id=place) for place, level in enumerate((1, 2, 4))]
    short = [answer([place % 3, 1], id=place) for place in range(3, 60)]
    groups = {"long": long, "all": long + short, "two": long[:2] + short}
    texts = [length_tables(tmp_path / name, records)["position"]["32–63"][0] for name, records in groups.items()]
    assert texts[0] == texts[1] and "…" in texts[0] and "…" not in texts[2]


def test_measured_costs_are_shown(tmp_path):
    costs = Costs.interpolate(0.006, {1: 0.06, 8: 0.08, 16: 0.09, 32: 0.17})
    write_records(tmp_path, make_records(), {"costs": {"eagle": costs._asdict()}})
    found = find(tmp_path)
    assert found.costs == {"eagle": costs}
    tables = all_tables(found)
    (row,) = tables["What drafting costs on this machine"].to_dict("records")
    assert [*row.values()] == ["eagle", "60.0", "6.0", "80.0", "1.53", "90.0", "1.90"]  # (2 * 6 + 80) / 60, ...
    parts = tables["Milliseconds per new token"].set_index("method").astype(float)
    records = [record for record in make_records() if record.method == "eagle"]
    total = 1000 * sum(r.seconds["total"] for r in records) / sum(r.new_tokens for r in records)
    assert list(parts.columns) == ["verify", "rest"]  # the others took no time
    assert parts.loc["eagle"].to_list() == pytest.approx([0.8 * total, 0.2 * total], abs=0.05)
