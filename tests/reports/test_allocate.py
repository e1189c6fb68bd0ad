"""Allocations from drift: positions with about the same drift share a specialist."""

import json

import pytest
from torch.utils.tensorboard import SummaryWriter

from poss_lightning.reports.allocate import allocate, propose, read_drift, variance_within


@pytest.mark.parametrize(
    ("drift", "proposed"),
    [
        ([0.1, 0.11, 0.5, 0.52, 0.9, 0.91], [2, 2, 2]),
        ([0.1, 0.5, 0.52, 0.53, 0.9, 0.91], [1, 3, 2]),
        ([0.5, 0.7, 0.78, 0.8, 0.81, 0.81], [1, 5]),
        ([0.3] * 4, [4]),
        ([0.1, 0.3, 0.2], [1, 1, 1]),
    ],
)
def test_positions_with_similar_drift_share_a_specialist(drift, proposed):
    assert propose(drift, len(proposed)) == proposed


def test_more_specialists_leave_less():
    drift = [0.2, 0.45, 0.5, 0.7, 0.72, 0.9]
    left = [variance_within(drift, propose(drift, count)) for count in range(1, 7)]
    assert left == sorted(left, reverse=True) and left[0] == pytest.approx(1) and left[-1] == 0


@pytest.fixture
def log(tmp_path):
    def write(drift):
        with SummaryWriter(str(tmp_path)) as writer:
            writer.add_scalar("val/loss", 3.0, 9)
            for k, value in enumerate(drift, 1):
                writer.add_scalar(f"val_drift_l2/depth_{k}", value, 9)
        return str(tmp_path)

    return write


def test_the_drift_of_a_run_is_read_and_shown(log, capsys):
    folder = log([0.1, 0.2, 0.3, 0.4])
    assert read_drift(folder) == pytest.approx([0.1, 0.2, 0.3, 0.4])
    allocate(folder, 4)
    assert "[2, 2]" in capsys.readouterr().out
    with pytest.raises(ValueError, match=r"depth is 5; .* logged the drift of 4 positions"):
        read_drift(folder, 5)


@pytest.mark.parametrize(("drift", "warned"), [((1.04, 1.02), True), ((0.6, 0.5), True), ((0.5, 0.7), False)])
def test_an_untrained_layer_gives_a_warning(log, caplog, drift, warned):
    allocate(log(drift))
    assert ("looks untrained" in caplog.text) is warned


def test_a_training_of_specialists_is_refused(log, tmp_path):
    folder, config = log([0.1, 0.1]), tmp_path / "draft-last" / "config.json"
    config.parent.mkdir()
    config.write_text(json.dumps({"allocation": [2]}))
    assert read_drift(folder) == pytest.approx([0.1, 0.1])
    config.write_text(json.dumps({"allocation": [1, 1]}))
    with pytest.raises(ValueError, match=r"draft-last/config.json is of specialists, \[1, 1\]"):
        read_drift(folder)


def test_a_line_that_is_not_a_cell_is_named(tmp_path):
    (tmp_path / "cells.jsonl").write_text("<<<<<<< HEAD\n")
    with pytest.raises(ValueError, match=r"cells.jsonl, line 1 is not a cell"):
        read_drift(str(tmp_path))
