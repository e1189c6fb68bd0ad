"""`poss demo` from end to end on a tiny random target, and how it is made smaller for slow machines."""

import re
from unittest.mock import Mock

import pytest

from poss_lightning.demo import LADDER, SPARE, Sizes, _fit, demo, plan_sizes
from poss_lightning.evaluation.rounds import read_rounds
from poss_lightning.target.model import Target
from tests.support.talks import shortened
from tests.support.tiny import tiny_draft, write_target


def test_the_demo_runs_and_resumes(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("poss_lightning.demo.CORPUS", shortened(tmp_path / "short.jsonl"))
    folder, target = tmp_path / "demo", tmp_path / "target"
    write_target(target, max_position_embeddings=4096)
    tiny_draft(Target.load(str(target), "float32"), [6], depth=1).save_pretrained(tmp_path / "single")
    drafts = {"start_from": str(tmp_path / "single"), "trained": str(tmp_path / "single")}
    monkeypatch.setattr("poss_lightning.demo.LADDER", (Sizes(60, 2, 1, 4),))
    demo(str(folder), str(target), **drafts)
    assert (folder / "report.html").is_file()
    trained = {f"your {name}, 2 steps from it" for name in ("HASS", "PosS-2")}
    assert {*read_rounds(folder / "benchmark")["method"]} == {"plain", "lookup", "one layer (single)", *trained}
    end = capsys.readouterr().out.partition("\nDone in ")[2]
    assert end.count("\n") <= 20 and max(map(len, end.splitlines()[:10])) <= 80  # a screen
    assert re.search(r"Output check \(float32\): \d+ of \d+ answers equal plain decoding's\.", end)
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*.safetensors")}
    demo(str(folder), str(target), **drafts, minutes=99)
    assert "resumes as it was begun: 60 conversations, 2 training steps per draft" in capsys.readouterr().out
    assert before == {path: path.stat().st_mtime_ns for path in folder.rglob("*.safetensors")}
    with pytest.raises(ValueError, match=r"holds a different store \(dtype '\w+', now 'float16'\)"):
        demo(str(folder), str(target), **drafts, dtype="float16")


def test_it_trains_on_the_gpu_that_it_decodes_on(target, tmp_path, monkeypatch):
    tiny_draft(target, [6]).save_pretrained(tmp_path / "start")
    monkeypatch.setattr("poss_lightning.demo.fit_once", fit := Mock())
    _fit(tmp_path, "hass", store="", start=str(tmp_path / "start"), steps=1, dtype="float32", device="cuda:1")
    assert fit.call_args.args[-1]["trainer"].items() >= {"accelerator": "cuda", "devices": [1]}.items()


@pytest.mark.parametrize("slower", [0.1, 1, 8])
def test_the_largest_sizes_that_fit_the_minutes_are_taken(slower, target, tmp_path, monkeypatch, capsys):
    """On a CPU that multiplies float32 fast, so many times slower than a usual one."""
    speed = (2000 / slower, 40 / slower)
    monkeypatch.setattr("poss_lightning.demo.measure_speed", lambda target: speed)
    sizes, most = plan_sizes(tmp_path, target, None), 15 * 60 * SPARE
    assert sizes == next((each for each in LADDER if each.seconds(*speed) <= most), LADDER[-1])
    assert ("Made smaller for this machine, from 200 conv" in capsys.readouterr().out) == (sizes != LADDER[0])
