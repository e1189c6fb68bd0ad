"""`make bench-gpu` without a GPU: every line runs at tiny sizes, and a killed run resumes."""

import json
from unittest.mock import Mock

import pytest

from benchmarks import gpu
from benchmarks.random_target import random_draft
from poss_lightning.clock import Clock
from poss_lightning.decoding.decoder import Request
from tests.support.decoders import speculate
from tests.support.tiny import tiny_draft, tiny_target


@pytest.mark.nightly
def test_every_part_runs_and_a_killed_run_resumes(monkeypatch, tmp_path, capsys):
    """On the CPU; the embedded target and its draft are tiny ones."""
    monkeypatch.setenv("POSS_DEVICE", "cpu")
    target = tiny_target(max_position_embeddings=4096)
    monkeypatch.setattr(gpu.Target, "load", lambda *_, **__: target)
    monkeypatch.setattr("poss_lightning.evaluation.benchmark.load_draft", lambda name: tiny_draft(target, [2]))
    out = tmp_path / "gpu.json"
    first, last = ({name: Mock(side_effect=part) for name, part in gpu.PARTS.items()} for _ in range(2))
    monkeypatch.setattr(gpu, "PARTS", first | {"answers": Mock(side_effect=KeyboardInterrupt)})
    with pytest.raises(KeyboardInterrupt):
        gpu.main(["--out", str(out)])
    monkeypatch.setattr(gpu, "PARTS", last)
    gpu.main(["--out", str(out)])
    assert [name for name, part in last.items() if part.called] == ["answers"]
    assert [path.name for path in tmp_path.iterdir()] == ["gpu.json"]
    found = json.loads(out.read_text())
    figures = found["rounds"]["batch 2, graphs"]
    floors = figures["draft"]["floor_ms"] + figures["verify"]["floor_ms"]
    assert figures["round"]["floor_ms"] == pytest.approx(floors) and figures["round"]["over_floor"] > 1
    assert found["step"]["T 64"]["speed_ratio"] > 0 and found["answers"]["hass+lookup"]["tau_macro"] >= 1
    assert found["extract"]["embedded"]["extract_tokens_per_second"] > 0
    printed = capsys.readouterr().out
    assert all(f"\n{part}\n" in printed for part in gpu.PARTS)


def test_floors_are_the_bytes_that_must_be_read():
    """D 32, MLP 48, 4 heads and 2 of keys, of 8 each, 320 tokens, 2 layers; float32."""
    target = tiny_target()
    engine = speculate(target, random_draft(target, (1, 2)), 3, 20)
    next(engine.rounds(Request([[5] * 10], 8, frozenset()), Clock(target.device)))
    mlp, attention, slot, head = 3 * 32 * 48, 2 * 32 * 32, 2 * 2 * 8, 320 * 32  # projecting keys: 32 * slot
    layer = mlp + attention + 32 * slot + 2 * 32  # two norms
    assert gpu.verify_bytes(engine, 20) == 4 * (2 * layer + 32 + head + 2 * slot * (10 + 20))
    own = mlp + attention + 32  # without the projections of keys, and with one norm
    join = 2 * 32 * 32 + 32 * slot  # of a slot that the second specialist will read
    assert gpu.draft_bytes(engine, 1) == 4 * (own + head + slot * 10)
    assert gpu.draft_bytes(engine, 3) == 4 * (3 * (own + head) + 2 * join + slot * (10 + 20 + 30))
