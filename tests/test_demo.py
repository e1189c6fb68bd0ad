"""The demo from end to end on a tiny random target: it runs, resumes, and is made smaller for slow machines."""

import json
import re
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest

from poss_lightning.evaluation.rounds import read_rounds
from poss_lightning.target_model.model import Target
from tests.support.talks import shortened
from tests.support.tiny import tiny_draft, write_target

FILE = Path(__file__).parents[1] / "examples" / "demo.py"


@pytest.fixture
def demo():
    spec = spec_from_file_location("demo", FILE)
    spec.loader.exec_module(module := module_from_spec(spec))
    return module


def test_the_demo_runs_and_resumes(demo, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(demo, "CORPUS", shortened(tmp_path / "short.jsonl.gz"))
    target, draft, folder = tmp_path / "target", tmp_path / "single", tmp_path / "demo"
    write_target(target, max_position_embeddings=4096)
    tiny_draft(Target.load(str(target), "float32"), [6], depth=1).save_pretrained(draft)
    for name, small in {"HELD_OUT": 4, "VOCABULARY": 100, "STEPS": 20, "TOKENS": 8}.items():
        monkeypatch.setattr(demo, name, small)
    line = [*("--out", folder), *("--target", target), *("--draft", draft), *("--minutes", "0.1")]
    demo.main([*map(str, line)])
    out = capsys.readouterr().out
    assert (folder / "report.html").is_file() and "1 of 20 steps of each training" in out
    drafted = {"single", "HASS", "PosS-2"}
    methods = {"plain", "lookup", *drafted, *(f"{name}+lookup" for name in drafted)}
    assert {*read_rounds(folder / "benchmark")["method"]} == methods
    assert re.search(r"\d+ of 49 answers with drafted or looked-up tokens are plain decoding's", out)
    written = {path: path.stat().st_mtime_ns for path in folder.rglob("*.safetensors")}
    demo.main([*map(str, line[:-1]), "99"])
    assert "resumes as it was begun" in capsys.readouterr().out
    assert written == {path: path.stat().st_mtime_ns for path in folder.rglob("*.safetensors")}


@pytest.mark.parametrize("seconds", [0.01, 0.1, 0.3, 1.0])
def test_the_demo_is_as_long_as_fits_the_minutes(demo, seconds, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(demo, "seconds_of_text", lambda target: seconds)
    sizes = demo.choose_sizes(tmp_path / "new" / "demo.json", "any", demo.MINUTES)
    assert json.loads((tmp_path / "new" / "demo.json").read_text()) == sizes
    said = [
        f"{sizes[name]} of {most}" for name, most in zip(sizes, (demo.STEPS, demo.QUESTIONS, demo.TOKENS), strict=True)
    ]
    out = capsys.readouterr().out
    assert all(words in out for words in said)
    left = 60 * demo.MINUTES - demo.OVERHEAD - demo.FIXED * seconds
    assert (sizes["steps"] == demo.STEPS) == (demo.WHOLE * seconds <= left)
    assert sizes["steps"] == 20 or demo.WHOLE * seconds * sizes["steps"] / demo.STEPS <= left * 1.05
