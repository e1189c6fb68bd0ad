"""Allocations from drift: what lies close is served together."""

import json

import pytest
from torch.utils.tensorboard import SummaryWriter

from poss_lightning.reports.allocate import allocate, propose, read_drift, variance_within


def test_what_has_drifted_alike_is_served_together():
    assert propose([0.1, 0.11, 0.5, 0.52, 0.9, 0.91], 3) == [2, 2, 2]
    assert propose([0.1, 0.5, 0.52, 0.53, 0.9, 0.91], 3) == [1, 3, 2]
    assert propose([0.5, 0.7, 0.78, 0.8, 0.81, 0.81], 2) == [1, 5]
    assert propose([0.3] * 4, 1) == [4] and propose([0.1, 0.3, 0.2], 3) == [1, 1, 1]


def test_more_specialists_leave_less():
    drift = [0.2, 0.45, 0.5, 0.7, 0.72, 0.9]
    left = [variance_within(drift, propose(drift, count)) for count in range(1, 7)]
    assert left == sorted(left, reverse=True) and left[0] == pytest.approx(1) and left[-1] == 0


def log(folder, scalars):
    with SummaryWriter(str(folder)) as writer:
        for tag, (step, value) in scalars.items():
            writer.add_scalar(tag, value, step)


def test_the_drift_of_a_run_is_read_and_shown(tmp_path, capsys):
    scalars = {f"val_drift_l2/depth_{k}": [9, 0.1 * k] for k in range(1, 5)} | {"val/loss": [9, 3.0]}
    log(tmp_path, scalars)
    assert read_drift(str(tmp_path)) == pytest.approx([0.1, 0.2, 0.3, 0.4])
    allocate(str(tmp_path), 4)
    assert "[2, 2]" in capsys.readouterr().out
    with pytest.raises(ValueError, match=r"depth is 5; .* logged the drift of 4 positions"):
        read_drift(str(tmp_path), 5)
    with pytest.raises(ValueError, match="specialists is 5; it must lie between 1 and 4"):
        propose([1, 2, 3, 4], 5)


@pytest.mark.parametrize(("drift", "warned"), [((1.04, 1.02), True), ((0.6, 0.5), True), ((0.5, 0.7), False)])
def test_an_untrained_layer_is_warned_of(tmp_path, caplog, drift, warned):
    log(tmp_path, {f"val_drift_l2/depth_{k}": [9, value] for k, value in enumerate(drift, 1)})
    allocate(str(tmp_path))
    assert ("looks untrained" in caplog.text) is warned


def test_a_training_of_specialists_is_refused(tmp_path):
    log(tmp_path, {f"val_drift_l2/depth_{k}": [9, 0.1] for k in (1, 2)})
    (tmp_path / "draft-last").mkdir()
    (tmp_path / "draft-last" / "config.json").write_text(json.dumps({"allocation": [2]}))
    assert read_drift(str(tmp_path)) == pytest.approx([0.1, 0.1])
    (tmp_path / "draft-last" / "config.json").write_text(json.dumps({"allocation": [1, 1]}))
    with pytest.raises(ValueError, match=r"draft-last/config.json is of specialists, \[1, 1\]"):
        read_drift(str(tmp_path))
    (tmp_path / "draft-last" / "config.json").write_text("[]")
    with pytest.raises(ValueError, match=r"draft-last/config.json is a list; it must be a JSON object"):
        read_drift(str(tmp_path))


@pytest.mark.parametrize(
    ("line", "words"),
    [({}, "are not values by step and tag"), ({"run": []}, "line 1 is not a cell .*its run is a list")],
)
def test_a_cell_without_what_is_read_is_named(tmp_path, line, words):
    (tmp_path / "cells.jsonl").write_text(json.dumps({"choice": "a", "seed": 0, **line}) + "\n")
    with pytest.raises(ValueError, match=words):
        read_drift(str(tmp_path))
