"""`poss demo` from end to end on a tiny random target: every command, every file it promises."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from poss_lightning.demo import LADDER, SPARE, Sizes, Speed, _fit, demo, expected_seconds, measure, plan
from poss_lightning.draft.specialists import Specialists
from poss_lightning.evaluation.records import read_records
from poss_lightning.target.model import Target
from tests.support.talks import shortened
from tests.support.tiny import tiny_draft, tiny_model, tiny_tokenizer


def test_the_demo_runs_and_goes_on(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("poss_lightning.demo.CORPUS", shortened(tmp_path / "short.jsonl"))
    folder, target = tmp_path / "demo", tmp_path / "target"
    tiny_model(max_position_embeddings=4096).save_pretrained(target)
    tiny_tokenizer().save_pretrained(target)
    single = tiny_draft(Target.load(str(target), "float32"), [6], depth=1)
    single.save_pretrained(tmp_path / "single")
    heads = {"start_from": str(tmp_path / "single"), "trained": str(tmp_path / "single")}
    sizes = {"conversations": 60, "steps": 2, "limit": 1, "max_new_tokens": 4, "vocabulary_size": 100}
    demo(str(folder), str(target), **heads, **sizes)
    assert (folder / "report.html").is_file()
    records = read_records(folder / "benchmark")
    assert {record.method for record in records} == {
        "plain",
        "lookup",
        "one layer (single)",
        "your HASS, 2 steps from it",
        "your PosS-2, 2 steps from it",
    }
    said = capsys.readouterr().out.splitlines()
    end = said[next(i for i, line in enumerate(said) if line.startswith("Done in ")) :]
    assert len(end) <= 20 and max(map(len, end[:10])) <= 80  # a screen
    assert "Output check (float32): " in "\n".join(end) and "answers equal plain decoding's." in "\n".join(end)
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*.safetensors")}
    demo(str(folder), str(target), **heads, **sizes)  # everything is there: nothing is done again
    assert before == {path: path.stat().st_mtime_ns for path in folder.rglob("*.safetensors")}
    with pytest.raises(ValueError, match="was begun with steps 2, now 3: resume without --steps, or choose another"):
        demo(str(folder), str(target), **heads, **sizes | {"steps": 3})


@pytest.mark.parametrize(("device", "devices"), [("cpu", None), ("cuda", None), ("cuda:1", [1])])
def test_it_trains_on_the_device_that_it_decodes_on(device, devices, tmp_path, monkeypatch):
    given = []
    monkeypatch.setattr("poss_lightning.demo.fit_once", lambda folder, *layers: given.append(layers[-1]))
    _fit(tmp_path, "hass", store="", size=8, steps=1, start="", dtype="float32", device=device)
    trainer = given[0]["trainer"]
    assert (trainer["accelerator"], trainer.get("devices")) == (device.split(":")[0], devices)


# --- how much of it a machine does ---

FAST = Speed("bfloat16", "cpu", read=2000.0, write=40.0, flops=5e11)


@pytest.fixture
def measured(monkeypatch, target):
    """A machine as fast as a test says; nothing is loaded."""

    def machine(speed: Speed):
        monkeypatch.setattr("poss_lightning.demo.measure", lambda target, device: speed)
        monkeypatch.setattr("poss_lightning.demo.Target", SimpleNamespace(load=lambda *arguments: target))

    return machine


def slower(times: float, dtype: str = "float32") -> Speed:
    return replace(FAST, dtype=dtype, read=FAST.read / times, write=FAST.write / times, flops=FAST.flops / times)


def planned(folder: Path, **given) -> Sizes:
    asked = dict.fromkeys(("conversations", "steps", "limit", "max_new_tokens")) | given
    return plan(folder, "embedded", "embedded-hass", None, asked, "auto", "cpu")[0]


@pytest.mark.parametrize("times", [1, 3, 8])
def test_the_largest_that_fits_the_minutes_is_taken(measured, tmp_path, times):
    speed, draft = slower(times), Specialists.from_pretrained("embedded-hass").config
    measured(speed)
    sizes = planned(tmp_path)
    larger = LADDER[: LADDER.index(sizes)]
    assert all(expected_seconds(own, speed, draft) > 15 * 60 * SPARE for own in larger)
    assert expected_seconds(sizes, speed, draft) <= 15 * 60 * SPARE or sizes == LADDER[-1]


def test_minutes_are_those_of_the_kind_of_machine():
    assert [FAST.minutes, slower(2).minutes, replace(FAST, device="cuda").minutes] == [6, 15, 3]


def test_what_was_made_smaller_is_told_and_what_was_asked_for_is_done(measured, tmp_path, capsys):
    measured(slower(0.1))
    assert planned(tmp_path / "fast") == LADDER[0] and "smaller" not in capsys.readouterr().out
    measured(slower(8))
    assert planned(tmp_path / "slow", steps=40).steps == 40
    said = capsys.readouterr().out
    assert "cpu, float32: the target reads 250 tokens/s and writes 5.0." in said
    assert "Made smaller for this machine, from 200 conversations, 40 training steps a draft" in said
    measured(FAST)
    assert planned(tmp_path / "slow") == planned(tmp_path / "slow", steps=40)  # it resumes as it was begun


def test_a_machine_is_measured(target):
    speed = measure(target, "cpu")
    assert speed.dtype == "float32" and min(speed.read, speed.write, speed.flops) > 0
