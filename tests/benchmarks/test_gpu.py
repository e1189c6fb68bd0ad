"""`make bench-gpu` without a GPU: every line runs at tiny sizes, a failed row ends no other, a killed run resumes."""

import json

import pytest
import torch

from benchmarks import gpu
from benchmarks.random_target import random_draft
from poss_lightning.clock import Clock
from poss_lightning.decoding.baselines import Autoregressive
from poss_lightning.decoding.decoder import Request
from tests.support.decoders import speculate
from tests.support.tiny import tiny_draft, tiny_target


@pytest.fixture(autouse=True)
def without_gpu(monkeypatch):
    """The embedded target and its draft are tiny ones."""
    target = tiny_target(max_position_embeddings=4096)
    monkeypatch.setenv("POSS_DEVICE", "cpu")
    monkeypatch.setattr(gpu.Target, "load", lambda *_, **__: target)
    monkeypatch.setattr("poss_lightning.evaluation.benchmark.load_draft", lambda name: tiny_draft(target, [2]))


@pytest.mark.nightly
@pytest.mark.parametrize("parts", [[], *([part] for part in gpu.PARTS)], ids=str)
def test_every_part_runs_alone_and_all_together(parts, tmp_path, capsys):
    out = tmp_path / "gpu.json"
    gpu.main(["--out", str(out), *(["--parts", *parts] if parts else [])])
    assert [path.name for path in tmp_path.iterdir()] == ["gpu.json"]
    found, printed = json.loads(out.read_text()), capsys.readouterr().out
    assert all(found[part] and f"\n{part}\n" in printed for part in parts or gpu.PARTS)
    if "rounds" in found:
        rows = {row: figures for row, figures in found["rounds"].items() if row != "copy"}
        assert all(figures["round_ms"] > figures["round_floor_ms"] for figures in rows.values())
        methods = ("plain", "lookup", "draft", "draft+lookup", "chain")
        texts = (
            "batch 1, 16 tokens, T 0",
            "batch 1, 16 tokens, T 1",
            "batch 1, 40 tokens, T 0",
            "batch 2, 16 tokens, T 0",
            "batch 3, 16 tokens, T 0",
        )
        assert list(rows) == [f"{text}, no graphs, {method}" for text in texts for method in methods]


def test_a_row_that_fails_ends_no_other_and_a_killed_run_resumes(monkeypatch, tmp_path, capsys):
    """The exit status says what failed; the same command runs what is missing and nothing else."""
    failing, ran = {"a2": ValueError("no memory"), "b": OSError("no target"), "c2": KeyboardInterrupt()}, []

    def measure(row: str) -> dict:
        ran.append(row)
        if row in failing:
            raise failing[row]
        return {"ms": 1.0}

    def part(*rows: str):
        def measured(scale, device):
            if rows[0] in failing:  # before its first row
                raise failing[rows[0]]
            for row in rows:
                yield row, lambda row=row: measure(row)

        return measured

    monkeypatch.setattr(gpu, "PARTS", {"a": part("a1", "a2", "a3"), "b": part("b"), "c": part("c1", "c2")})
    out = tmp_path / "gpu.json"
    with pytest.raises(KeyboardInterrupt):
        gpu.main(["--out", str(out)])
    assert ran == ["a1", "a2", "a3", "c1", "c2"] and list(json.loads(out.read_text())["a"]) == ["a1", "a3"]
    del failing["c2"], ran[:]
    with pytest.raises(SystemExit, match=r"(?s)these failed.*a, a2\nb$"):
        gpu.main(["--out", str(out)])
    assert ran == ["a2", "c2"] and "ValueError: no memory" in capsys.readouterr().err
    failing.clear()
    gpu.main(["--out", str(out)])
    assert ran[2:] == ["a2", "b"] and [path.name for path in tmp_path.iterdir()] == ["gpu.json"]
    found = json.loads(out.read_text())
    assert {part: {*found[part]} for part in "abc"} == {"a": {"a1", "a2", "a3"}, "b": {"b"}, "c": {"c1", "c2"}}


def test_rows_with_graphs_ask_for_them_so_that_a_failed_capture_is_an_error(monkeypatch):
    monkeypatch.setattr(gpu, "_rate", lambda *_: 1.0)
    monkeypatch.setattr(gpu, "_large_target", lambda *_: tiny_target())
    rows = {row: measure for row, measure in gpu.rounds(gpu.TINY, "cuda") if row != "copy"}
    assert len(rows) == 30 and {measure.args[0].keywords["graphs"] for measure in rows.values()} == {True, False}
    assert all(("no graphs" in row) is not measure.args[0].keywords["graphs"] for row, measure in rows.items())


def test_floors_are_the_bytes_that_must_be_read():
    """D 32, MLP 48, 4 heads and 2 of keys, of 8 each, 320 tokens, 2 layers; float32."""
    target = tiny_target()
    mlp, attention, slot, head = 3 * 32 * 48, 2 * 32 * 32, 2 * 2 * 8, 320 * 32  # projecting keys: 32 * slot
    layer = mlp + attention + 32 * slot + 2 * 32  # two norms
    own = mlp + attention + 32  # without the projections of keys, and with one norm
    join = 2 * 32 * 32 + 32 * slot  # of a slot that the second specialist will read
    drafted = {1: own + head + slot * 10, 3: 3 * (own + head) + 2 * join + slot * (10 + 20 + 30)}
    for depth, needed in drafted.items():
        engine = speculate(target, random_draft(target, (1, 2)), depth, 20, lookup=4)
        next(engine.rounds(Request([[5] * 10], 8, frozenset()), Clock(target.device)))
        verified = 2 * layer + 32 + head + 2 * slot * (10 + engine.plan.nodes + 4)
        floors = {"verify": 4 * verified, "draft": 4 * needed, "round": 4 * (verified + needed)}
        assert gpu.round_bytes(engine) == floors
    plain = Autoregressive(target)
    next(plain.rounds(Request([[5] * 10], 8, frozenset()), Clock(torch.device("cpu"))))
    assert gpu.round_bytes(plain) == {"round": 4 * (2 * layer + 32 + head + 2 * slot * (10 + 1))}
