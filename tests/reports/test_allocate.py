"""Allocations from drift: positions with about the same drift share a specialist."""

import json

import pytest
from torch.utils.tensorboard import SummaryWriter

from poss_lightning.reports.allocate import allocate, propose, read_drift, variance_within


def test_positions_with_similar_drift_share_a_specialist():
    assert propose([0.1, 0.11, 0.5, 0.52, 0.9, 0.91], 3) == [2, 2, 2]
    assert propose([0.5, 0.7, 0.78, 0.8, 0.81, 0.81], 2) == [1, 5]
    assert propose([0.3] * 4, 1) == [4]


def test_more_specialists_leave_less():
    drift = [0.2, 0.45, 0.5, 0.7, 0.72, 0.9]
    left = [variance_within(drift, propose(drift, count)) for count in range(1, 7)]
    assert left == sorted(left, reverse=True) and left[0] == pytest.approx(1) and left[-1] == 0


def log(folder, drift) -> str:
    with SummaryWriter(str(folder)) as writer:
        writer.add_scalar("val/loss", 3.0, 9)
        for k, value in enumerate(drift, 1):
            writer.add_scalar(f"val_drift_l2/depth_{k}", value, 9)
    return str(folder)


def test_an_allocation_follows_the_drift_of_a_run_and_an_untrained_layer_gives_a_warning(tmp_path, capsys, caplog):
    allocate(log(tmp_path / "trained", [0.1, 0.2, 0.3, 0.4]), 4)
    assert "[2, 2]" in capsys.readouterr().out and not caplog.messages
    for name, drift in {"beyond zeros": (1.04, 1.06), "falling": (0.6, 0.5)}.items():
        allocate(log(tmp_path / name, drift))
        assert f"{name}: the layer looks untrained" in caplog.messages[-1]
    with pytest.raises(ValueError, match="holds 3 runs that logged val_drift_l2; give the folder of one"):
        allocate(str(tmp_path))


def test_drift_is_that_of_one_training_of_a_single_layer(tmp_path):
    folder, config = log(tmp_path, [0.1, 0.2, 0.3]), tmp_path / "draft-last" / "config.json"
    config.parent.mkdir()
    config.write_text(json.dumps({"allocation": [3]}))
    assert read_drift(folder, 2) == pytest.approx([0.1, 0.2])
    with pytest.raises(ValueError, match=r"depth is 5; .* logged the drift of 3 positions"):
        read_drift(folder, 5)
    config.write_text(json.dumps({"allocation": [1, 2]}))
    with pytest.raises(ValueError, match=r"draft-last/config.json is of specialists, \[1, 2\]"):
        read_drift(folder)
    (tmp_path / "cells.jsonl").write_text("<<<<<<< HEAD\n")
    with pytest.raises(ValueError, match=r"cells.jsonl, line 1 is not a cell"):
        read_drift(folder)
