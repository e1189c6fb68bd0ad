"""Results of methods: which prompts and seeds count, and what cannot be compared."""

import math

import pandas as pd
import pytest
import torch

from poss_lightning import results
from poss_lightning.evaluation.rounds import read_rounds, write_rounds
from poss_lightning.reports.comparable import label_trainings
from poss_lightning.reports.results import Result, find, measure
from tests.support.lab import write_run
from tests.support.synthetic import frame, make_cells, make_rows, over_seeds, rows_of
from tests.support.tolerance import close

RECORDS = make_rows(prompts=2)


def test_results_are_one_table_of_values_and_comparisons(run):
    found = results(run, reference="eagle")
    assert tuple(found.columns) == Result._fields and {*found["suite"]} == {"all", "chat", "code"}
    values, gains = found[found["against"] == ""], found[found["against"] == "eagle"]
    for rows in (values, gains):
        assert not rows.duplicated(["suite", "method", "measure", "position"]).any()
    assert {*gains["method"]} == {"poss-1"} and gains["p"].notna().any() and values["p"].isna().all()
    assert {"tokens_per_second", "tau_macro"} < {*gains["measure"]} and "speed_up" not in {*gains["measure"]}
    taus = values.query("suite == 'all' and measure == 'tau_macro'").set_index("method")
    (gain,) = gains.query("suite == 'all' and measure == 'tau_macro'")["value"]
    assert close(gain, taus["value"]["poss-1"] - taus["value"]["eagle"], of=taus["value"]["eagle"])
    assert (taus["low"] < taus["value"]).all() and (taus["value"] < taus["high"]).all()


def test_few_prompts_have_values_but_no_intervals():
    for prompts in (1, 2):
        found = rows_of(make_rows(suites=("chat",), prompts=prompts), reference="eagle")
        values, gains = found.values["poss-1"], found.gains["poss-1"]
        assert values["tau_micro"].value > 1 and not math.isnan(gains["tau_macro"].value)
        assert all(math.isnan(one.low) for one in (*values.values(), *gains.values()))


def test_identical_counts_prompts_not_answers():
    records = make_rows(methods=("plain", "generate"), suites=("chat",), prompts=4)
    other = {"id": "2", "turn": 1, "repeat": 0, "method": "generate"}
    found = rows_of([r | {"tokens": r["tokens"][::-1]} if other.items() <= r.items() else r for r in records])
    assert found.values["generate"]["identical"].value == 0.75
    assert not {"identical", "speed_up", "tau_macro"} & found.values["plain"].keys()


@pytest.mark.parametrize("seeds", [1, 3])
def test_prompts_without_rounds_add_no_certainty(seeds):
    """As if they had not been asked; at a position, those that never reach it."""
    cells, idle = make_cells(seeds=range(seeds)), {"new_tokens": 1, "tokens": [0], "accepted": []}
    asked = {cell: [record for record in records if record["id"] != "1"] for cell, records in cells.items()}
    for cell, records in cells.items():
        cells[cell] = [r | idle if r["id"] == "1" and r["method"] != "plain" else r for r in records]
    for found, expected in zip(over_seeds(cells), over_seeds(asked), strict=True):
        for name in ("tau_macro", "tau_micro", "pos_acc_2"):
            own, other = found["poss-1"][name], expected["poss-1"][name]
            bounds = [own.low, own.high], [other.low, other.high]
            assert close(*bounds, dtype=torch.float32)  # half the digits: of means that are alike


def test_only_shared_seeds_are_paired():
    cells = make_cells()
    del cells["poss-1", 0]
    found = over_seeds(cells)
    both = over_seeds({cell: records for cell, records in cells.items() if cell[1]})
    assert found.values["poss-1"]["trainings"].value == 2
    assert found.gains["poss-1"]["tau_macro"][1:] == both.gains["poss-1"]["tau_macro"][1:]
    del cells["eagle", 1], cells["poss-1", 2]
    assert "tau_macro" not in over_seeds(cells).gains["poss-1"]


def test_records_that_cannot_be_compared_are_refused(tmp_path):
    cells = make_cells(seeds=(0, 1))
    own = cells["eagle", 1]
    refused = [
        ([(RECORDS[:-1],)], r"'poss-1' and 'plain' differ in 1 answers, such as code/1 turn 1"),
        ([([*RECORDS, RECORDS[2]],)], "'eagle' answers chat/0 turn 0 repeat 0 twice"),
        ([([RECORDS[0] | {"prompt_tokens": 9}, *RECORDS[1:]],)], "prompts of different lengths at chat/0 turn 0"),
        ([(own, "eagle", 1), (own, "hass", 1)], "choice 'hass', seed 1: no record has this method; there are"),
        ([(own, "eagle", 0), (own[:-8], "eagle", 1)], r"seed 1 and .* differ in 4 answers, such"),
        ([(own,), (own, "eagle", 1)], "is not a folder choice=NAME/seed=N"),
    ]
    for frames, words in refused:
        with pytest.raises(ValueError, match=words):
            label_trainings(pd.concat([frame(*each) for each in frames]))
    answers = label_trainings(frame(make_rows(methods=("vllm", "eagle"), prompts=1)))
    for options, words in (
        ({"reference": "hass"}, "reference is 'hass'; these records have the methods vllm, eagle"),
        ({"baseline": "plain"}, "baseline is 'plain'; these records have vllm"),
    ):
        with pytest.raises(ValueError, match=words):
            measure(answers, **options)

    def write(name: str, fingerprint: str | None, **draft: str) -> None:
        config = {"temperature": float(name == "warm"), "fingerprint": fingerprint}
        write_run(tmp_path / name, RECORDS, {"methods": {"eagle": {"depth": 6} | draft}, "config": config})

    write("cut", None)
    write("warm", "12", tree="fixed")  # older runs say neither
    find(tmp_path)
    write("warm", "12", tree="auto", weights="37")
    with pytest.raises(ValueError, match=r"'eagle' of .*cut differs .*warm \(weights None and 37, tree fixed and auto"):
        find(tmp_path)
    write("cut", "13")
    with pytest.raises(ValueError, match=r"cut was measured on another target than .*warm \("):
        find(tmp_path)


def test_replays_must_share_their_tokens(tmp_path):
    """Decoded answers may differ by ties, and prompts of later turns contain answers."""
    records = [row | {"seconds": {}} for row in make_rows(methods=("eagle", "poss-1"), prompts=1)]
    later = [row | {"prompt_tokens": 12} if (row["turn"], row["method"]) == (1, "eagle") else row for row in records]
    other = [*range(3), 99, *range(4, 100)]

    def check(name: str, rows: list[dict], **change) -> None:
        write_rounds(tmp_path / name, [row | (change if row["method"] == "poss-1" else {}) for row in rows])
        label_trainings(read_rounds(tmp_path / name))

    check("timed", [row | {"seconds": {"total": 1.0}} for row in records], tokens=other)
    check("longer", records, tokens=[*range(100)])
    check("later", later)
    with pytest.raises(ValueError, match="replays of different answers at chat/0 turn 0"):
        check("other", records, tokens=other)
