"""Records of several temperatures stand in one table, each compared with its own."""

import json
from pathlib import Path

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
