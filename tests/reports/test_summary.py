"""Summaries of methods: which prompts and seeds count, and what cannot be compared."""

import pytest
import torch

from poss_lightning.evaluation.rounds import read_rounds, write_rounds
from poss_lightning.reports.summary import split_methods, split_trainings, summarise
from tests.support.synthetic import frame, make_cells, make_rows, over_seeds, rows_of
from tests.support.tolerance import close

RECORDS = make_rows()


def test_few_prompts_have_values_but_no_intervals():
    for prompts in (1, 2):
        row = rows_of(make_rows(suites=("chat",), prompts=prompts), reference="eagle")["poss-1"]
        assert row.values["tau_micro"].value > 1 and row.gains["tau_macro"].text() != "–"
        assert not any(one.interval() for one in (*row.values.values(), *row.gains.values()))


def test_identical_counts_prompts_not_answers():
    records = make_rows(methods=("plain", "generate"), suites=("chat",), prompts=4)
    other = {"id": "2", "turn": 1, "repeat": 0, "method": "generate"}
    rows = rows_of([r | {"tokens": r["tokens"][::-1]} if other.items() <= r.items() else r for r in records])
    assert rows["generate"].values["identical"].value == 0.75
    assert not {"identical", "speed_up", "tau_macro"} & rows["plain"].values.keys()


@pytest.mark.parametrize("seeds", [1, 3])
def test_prompts_without_rounds_add_no_certainty(seeds):
    """As if they had not been asked; at a position, those that never reach it."""
    cells, idle = make_cells(seeds=range(seeds)), {"new_tokens": 1, "tokens": [0], "accepted": []}
    asked = {cell: [record for record in records if record["id"] != "1"] for cell, records in cells.items()}
    for cell, records in cells.items():
        cells[cell] = [r | idle if r["id"] == "1" and r["method"] != "plain" else r for r in records]
    found, expected = over_seeds(cells)["poss-1"], over_seeds(asked)["poss-1"]
    for measure in ("tau_macro", "tau_micro", "pos_acc_2"):
        for own, other in ((found.values, expected.values), (found.gains, expected.gains)):
            bounds = ((one[measure].low, one[measure].high) for one in (own, other))
            assert close(*map(list, bounds), dtype=torch.float32)  # half the digits: of means that are alike


def test_only_shared_seeds_are_paired():
    cells = make_cells()
    del cells["poss-1", 0]
    row = over_seeds(cells)["poss-1"]
    assert row.seeds == (1, 2) and list(row.trainings["tau_macro"]) == [1, 2]
    both = over_seeds({cell: records for cell, records in cells.items() if cell[1]})["poss-1"]
    assert row.gains["tau_macro"] == both.gains["tau_macro"]
    del cells["eagle", 1], cells["poss-1", 2]
    assert "tau_macro" not in over_seeds(cells)["poss-1"].gains


@pytest.mark.parametrize(
    ("records", "reference", "said"),
    [
        (RECORDS[:-1], None, r"'poss-1' and 'plain' differ in 1 answers, such as code/4 turn 1"),
        ([*RECORDS, RECORDS[2]], None, "'eagle' answers chat/0 turn 0 repeat 0 twice"),
        ([RECORDS[0] | {"prompt_tokens": 9}, *RECORDS[1:]], None, "prompts of different lengths at chat/0 turn 0"),
        (RECORDS, "hass", "reference is 'hass'; these records have the methods plain, gen"),
    ],
)
def test_records_that_cannot_be_compared_are_refused(records, reference, said):
    with pytest.raises(ValueError, match=said):
        summarise(split_trainings(frame(records)), reference=reference)


def test_trainings_that_cannot_be_compared_are_refused():
    cells = make_cells()
    own = cells["eagle", 1]
    with pytest.raises(ValueError, match="choice 'hass', seed 1: no record has this method; there are"):
        over_seeds(cells | {("hass", 1): own})
    with pytest.raises(ValueError, match=r"seed 1 and .* differ in 4 answers, such"):
        over_seeds(cells | {("eagle", 1): own[:-8]})


def test_replays_must_share_their_tokens(tmp_path):
    """Decoded answers may differ by ties, and prompts of later turns contain answers."""
    records = [row | {"seconds": {}} for row in make_rows(methods=("eagle", "poss-1"), prompts=1)]

    def check(name: str, change: dict, **timed) -> None:
        changed = [row | timed | (change if row["method"] == "poss-1" else {}) for row in records]
        write_rounds(tmp_path / name, changed)
        split_methods(read_rounds(tmp_path / name))

    other = [*range(3), 99, *range(4, 100)]
    with pytest.raises(ValueError, match="replays of different answers at chat/0 turn 0"):
        check("other", {"tokens": other})
    check("timed", {"tokens": other}, seconds={"total": 1.0})
    check("longer", {"tokens": [*range(100)]})
    later = [row | {"prompt_tokens": 12} if (row["turn"], row["method"]) == (1, "eagle") else row for row in records]
    records = later
    check("later", {})
