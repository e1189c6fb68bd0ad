"""Whether drafting pays here, and why: from the costs that `tree: auto` measured."""

import json

import pytest

from poss_lightning.decoding.costs import Costs
from poss_lightning.evaluation.records import to_line
from poss_lightning.reports.compare import print_tables
from poss_lightning.reports.costs import cost_table, read_costs, say_if_faster
from poss_lightning.reports.findings import find
from poss_lightning.reports.statistics import Comparison
from tests.support.synthetic import make_records

COSTS = Costs.interpolate(0.006, {1: 0.06, 8: 0.08, 16: 0.09, 60: 0.17})


def run_folder(folder, costs):
    folder.mkdir()
    records = make_records(methods=("autoregressive", "eagle"))
    (folder / "records.jsonl").write_text("".join(to_line(record) + "\n" for record in records))
    (folder / "run.json").write_text(json.dumps({"methods": {"eagle": {"depth": 3}}, **costs}))
    return str(folder)


def test_costs_are_read_as_they_were_written():
    assert read_costs({"a": json.loads(json.dumps({"costs": {"eagle": COSTS._asdict()}})), "b": {}}) == {"eagle": COSTS}


def test_the_table_gives_milliseconds_and_the_tau_that_pays():
    (((name,), cells),) = cost_table({"eagle": COSTS}, {}).rows
    texts = [cell.text for cell in cells]
    assert name == "eagle" and texts[:5] == ["60.0", "6.0", "80.0", "90.0", "170.0"]
    assert texts[5:8] == ["1.53", "1.90", "3.43"]  # (2 * 6 + 80) / 60, ...
    assert texts[8] == "not timed"


def test_of_trees_larger_than_any_that_was_measured_nothing_is_said():
    (((_, cells),),) = [cost_table({"eagle": Costs.interpolate(0.002, {1: 0.02, 12: 0.036})}, {}).rows]
    assert [cell.text for cell in cells[2:8]] == ["30.2", "", "", "1.71", "", ""]


@pytest.mark.parametrize(("low", "high", "words"), [(1.1, 1.3, "yes"), (0.7, 0.9, "no"), (0.9, 1.1, "not shown")])
def test_drafting_pays_where_the_interval_says_so(low, high, words):
    assert say_if_faster(Comparison((low + high) / 2, low, high, 0.1, 0.1, 0.1, 0.1, 9)) == words


def test_compare_shows_them_where_they_were_measured(tmp_path, capsys):
    titles = [table.title for table in find(run_folder(tmp_path / "fixed", {}), resamples=20).tables]
    assert not any("costs" in title for title in titles)
    print_tables(find(run_folder(tmp_path / "auto", {"costs": {"eagle": COSTS._asdict()}}), resamples=20).tables)
    said = capsys.readouterr().out
    assert "What drafting costs on this machine" in said and "170.0" in said and "3.43" in said
