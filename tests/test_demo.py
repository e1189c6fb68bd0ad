"""`poss demo` from end to end on a tiny random target, and how it is made smaller for slow machines."""

from pathlib import Path

import pytest

from poss_lightning.demo import (
    LADDER,
    SPARE,
    Sizes,
    Speed,
    _fit,
    demo,
    expected_seconds,
    measure_speed,
    plan_sizes,
    resume_demo,
)
from poss_lightning.evaluation.records import read_records
from poss_lightning.target.model import Target
from tests.support.talks import shortened
from tests.support.tiny import tiny_draft, tiny_model, tiny_tokenizer


def test_the_demo_runs_and_resumes(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("poss_lightning.demo.CORPUS", shortened(tmp_path / "short.jsonl"))
    folder, target = tmp_path / "demo", tmp_path / "target"
    tiny_model(max_position_embeddings=4096).save_pretrained(target)
    tiny_tokenizer().save_pretrained(target)
    tiny_draft(Target.load(str(target), "float32"), [6], depth=1).save_pretrained(tmp_path / "single")
    drafts = {"start_from": str(tmp_path / "single"), "trained": str(tmp_path / "single")}
    sizes = {"conversations": 60, "steps": 2, "limit": 1, "max_new_tokens": 4, "vocabulary_size": 100}
    demo(str(folder), str(target), **drafts, **sizes)
    assert (folder / "report.html").is_file()
    assert {record.method for record in read_records(folder / "benchmark")} == {
        "plain",
        "lookup",
        "one layer (single)",
        "your HASS, 2 steps from it",
        "your PosS-2, 2 steps from it",
    }
    lines = capsys.readouterr().out.splitlines()
    end = lines[next(i for i, line in enumerate(lines) if line.startswith("Done in ")) :]
    assert len(end) <= 20 and max(map(len, end[:10])) <= 80  # a screen
    assert "Output check (float32): " in "\n".join(end) and "answers equal plain decoding's." in "\n".join(end)
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*.safetensors")}
    demo(str(folder), str(target), **drafts, **sizes)
    assert before == {path: path.stat().st_mtime_ns for path in folder.rglob("*.safetensors")}
    with pytest.raises(ValueError, match="was begun with steps 2, now 3: resume without these options, or choose"):
        demo(str(folder), str(target), **drafts, **sizes | {"steps": 3})


@pytest.mark.parametrize(("device", "devices"), [("cpu", None), ("cuda", None), ("cuda:1", [1])])
def test_it_trains_on_the_device_that_it_decodes_on(device, devices, tmp_path, monkeypatch):
    given = []
    monkeypatch.setattr("poss_lightning.demo.fit_once", lambda folder, *layers: given.append(layers[-1]))
    _fit(tmp_path, "hass", store="", size=8, steps=1, start="", dtype="float32", device=device)
    trainer = given[0]["trainer"]
    assert (trainer["accelerator"], trainer.get("devices")) == (device.split(":")[0], devices)


@pytest.fixture
def planned(monkeypatch, target, tmp_path):
    """Plans the demo for a CPU that multiplies float32 fast, so many times slower than a usual one."""

    def run(slower: float, folder: Path = tmp_path, **asked: int) -> tuple[Sizes, Speed]:
        speed = Speed(read=2000 / slower, write=40 / slower)
        monkeypatch.setattr("poss_lightning.demo.measure_speed", lambda target: speed)
        return plan_sizes(folder, target, None, asked), speed

    return run


@pytest.mark.parametrize("slower", [1, 3, 8])
def test_the_largest_sizes_that_fit_the_minutes_are_taken(planned, slower):
    sizes, speed = planned(slower)
    larger, most = LADDER[: LADDER.index(sizes)], 15 * 60 * SPARE
    assert all(expected_seconds(each, speed) > most for each in larger)
    assert expected_seconds(sizes, speed) <= most or sizes == LADDER[-1]


def test_smaller_sizes_are_announced_and_sizes_asked_for_are_kept(planned, tmp_path, capsys):
    assert planned(0.1)[0] == LADDER[0] and "smaller" not in capsys.readouterr().out
    sizes, _ = planned(8, tmp_path / "slow", steps=40)
    printed = capsys.readouterr().out
    assert "cpu, float32: the target reads 250 tokens/s and writes 5.0." in printed
    assert "Made smaller for this machine, from 200 conversations, 40 training steps per draft" in printed
    assert sizes.steps == 40 and resume_demo(tmp_path / "slow", {"steps": 40}) == (sizes, "float32")


def test_a_machine_is_measured(target):
    assert min(measure_speed(target)) > 0
