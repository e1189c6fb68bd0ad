"""Records of several temperatures stand in one table, each compared with its own."""

import json
from pathlib import Path

import pytest

from poss_lightning.evaluation.records import to_line
from poss_lightning.reports.findings import find
from poss_lightning.reports.tables import Cell, Table, stack_tables
from tests.support.synthetic import make_records


def run_folder(folder: Path, temperature: float | None, seed: int) -> Path:
    folder.mkdir()
    (folder / "records.jsonl").write_text("".join(to_line(record) + "\n" for record in make_records(seed=seed)))
    if temperature is not None:
        (folder / "run.json").write_text(json.dumps({"methods": {}, "config": {"temperature": temperature}}))
    return folder


def test_one_table_holds_all_temperatures_and_each_is_as_alone(tmp_path):
    folders = [run_folder(tmp_path / "warm", 1.0, 1), run_folder(tmp_path / "greedy", None, 0)]
    both = find(tmp_path, reference="eagle", resamples=20)
    warm, greedy = (find(folder, reference="eagle", resamples=20) for folder in folders)
    first, *rest = both.tables
    assert first.title == "By temperature" and first.names == ["method", "T"]
    assert {names[1] for names, _ in first.rows} == {"0", "1"}
    for findings, name in ((greedy, "0"), (warm, "1")):
        alone = findings.tables[0]
        rows = {names[0]: cells for names, cells in first.rows if names[1] == name}
        assert rows == {names[0]: cells for names, cells in alone.rows}
        titles = [f"{table.title}, T = {name}" for table in findings.tables[1:]]
        assert [table.title for table in rest if table.title.endswith(f"T = {name}")] == titles
    assert both.headline == f"T = 0: {greedy.headline} T = 1: {warm.headline}"
    assert len(both.effects) == len(greedy.effects) + len(warm.effects)
    assert both.shares == {f"{name}, T = 0": own for name, own in greedy.shares.items()} | {
        f"{name}, T = 1": own for name, own in warm.shares.items()
    }
    assert both.answers == greedy.answers and both.folders == greedy.folders


def test_other_prompts_or_several_trainings_do_not_stand_side_by_side(tmp_path):
    run_folder(tmp_path / "greedy", 0.0, 0)
    warm = run_folder(tmp_path / "warm", 0.5, 1)
    lines = (warm / "records.jsonl").read_text().splitlines(keepends=True)
    (warm / "records.jsonl").write_text("".join(line for line in lines if json.loads(line)["id"] != 0))
    with pytest.raises(ValueError, match=r"T = 0 has answers to 20 prompts and T = 0\.5 to 16, 16 of them the same"):
        find(tmp_path)
    warm.rename(tmp_path / "seed-1")
    with pytest.raises(ValueError, match=r"the records of T = 0\.5 are of several trainings"):
        find([tmp_path / "greedy", tmp_path / "seed-1"])


def test_another_top_p_or_tree_under_one_name_is_refused(tmp_path):
    warm, cut = (run_folder(tmp_path / name, 1.0, seed) for seed, name in enumerate(("warm", "cut")))
    (cut / "run.json").write_text(json.dumps({"methods": {}, "config": {"temperature": 1.0, "top_p": 0.5}}))
    says = r"warm was sampled with top_k 0 and top_p 1\.0, .*cut with top_k 0 and top_p 0\.5; records of one"
    with pytest.raises(ValueError, match=says):
        find([warm, cut])
    for folder, tree in ((warm, {}), (cut, {"tree": "auto"})):
        (folder / "run.json").write_text(json.dumps({"methods": {"eagle": {"depth": 6} | tree}}))
    says = r"'eagle' of .*warm is another than that of .*cut \(tree fixed and auto\)"
    with pytest.raises(ValueError, match=says):
        find([warm, cut])
    greedy = {"methods": {"eagle": {"depth": 6, "tree": "auto"}}, "config": {"temperature": 0.5}}
    (cut / "run.json").write_text(json.dumps(greedy))
    with pytest.raises(ValueError, match=says):  # at two temperatures too
        find([warm, cut])


def test_a_replay_in_a_folder_of_a_seed_names_the_choice_that_it_lacks(tmp_path):
    run_folder(tmp_path / "foo", 0.0, 0)
    (tmp_path / "foo").rename(tmp_path / "seed-1")
    says = f"choice '{tmp_path.name}', seed 1: no record has this method; there are "
    with pytest.raises(ValueError, match=says):
        find(tmp_path / "seed-1")


def test_a_reference_that_one_temperature_lacks_is_told_with_it(tmp_path):
    run_folder(tmp_path / "greedy", 0.0, 0)
    warm = run_folder(tmp_path / "warm", 1.0, 1)
    lines = (warm / "records.jsonl").read_text().splitlines(keepends=True)
    (warm / "records.jsonl").write_text("".join(line for line in lines if json.loads(line)["method"] != "eagle"))
    with pytest.raises(ValueError, match="at T = 1: reference is 'eagle'; these records have the methods"):
        find(tmp_path, reference="eagle")


def test_stacked_tables_may_have_other_columns_and_rows():
    one = Table("", ["method"], [["a"], ["b"]], [(["x"], [Cell("1"), Cell("2")]), (["y"], [Cell("3")])])
    two = Table("", ["method"], [["b"], ["c"]], [(["x"], [Cell("4"), Cell("5")])])
    stacked = stack_tables("both", "of", {"one": one, "two": two})
    assert stacked.columns == [("a",), ("b",), ("c",)] and stacked.names == ["method", "of"]
    assert [(names, [cell.text for cell in cells]) for names, cells in stacked.rows] == [
        (["x", "one"], ["1", "2", ""]),
        (["x", "two"], ["", "4", "5"]),
        (["y", "one"], ["3", "", ""]),
    ]
