"""`poss demo` from end to end on a tiny random target, and how it is made smaller for slow machines."""

import re
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from poss_lightning import demo as module
from poss_lightning.demo import STEPS, TRAINED, _fit, choose_sizes, demo, describe_learning
from poss_lightning.evaluation.rounds import read_rounds
from poss_lightning.reports.measures import TAU_MICRO
from poss_lightning.reports.scalars import read_scalars
from poss_lightning.reports.statistics import Estimate
from poss_lightning.target.model import Target
from tests.support.talks import shortened
from tests.support.tiny import tiny_draft, write_target


def test_the_demo_runs_and_resumes(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("poss_lightning.demo.CORPUS", shortened(tmp_path / "short.jsonl"))
    folder, target = tmp_path / "demo", tmp_path / "target"
    write_target(target, max_position_embeddings=4096)
    tiny_draft(Target.load(str(target), "float32"), [6], depth=1).save_pretrained(tmp_path / "single")
    drafts = {"trained": str(tmp_path / "single")}
    monkeypatch.setattr(module, "HELD_OUT", 4)
    monkeypatch.setattr(module, "STEPS", 20)
    monkeypatch.setattr(module, "VALIDATIONS", 2)
    monkeypatch.setattr(module, "TOKENS", 8)
    monkeypatch.setattr(module, "VOCABULARY", 100)
    demo(str(folder), str(target), **drafts, minutes=0.1)
    assert (folder / "report.html").is_file()
    drafted = {"single", "HASS, 2 steps", "PosS-2, 2 steps"}
    methods = {"plain", "lookup", *drafted, *(f"{name}+lookup" for name in drafted)}
    assert {*read_rounds(folder / "benchmark")["method"]} == methods
    end = capsys.readouterr().out.partition("\nDone in ")[2]
    assert end.count("\n") <= 24 and max(map(len, end.splitlines()[:-5])) <= 80  # a screen
    for name, run in TRAINED.items():  # the last τ that a training logged is that of the replay
        (scalars,) = read_scalars(folder / run).values()
        (_, first), *_, (_, last) = scalars["val/tau_tree"]
        assert re.search(rf"from {first:.2f} to {last:.2f} \(\S+\) with {name}\b", " ".join(end.split()))
    assert re.search(r"Output check \(float32\): \d+ of \d+ answers equal plain decoding's\.", end)
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*.safetensors")}
    demo(str(folder), str(target), **drafts, minutes=99)
    assert "resumes as it was begun" in capsys.readouterr().out
    assert before == {path: path.stat().st_mtime_ns for path in folder.rglob("*.safetensors")}
    with pytest.raises(ValueError, match=r"begun with other settings \(dtype '\w+', now 'float16'\)"):
        demo(str(folder), str(target), **drafts, dtype="float16")


def test_learning_is_told_from_the_first_validation_to_the_replay(tmp_path, monkeypatch):
    rows = [SimpleNamespace(method=name, values={TAU_MICRO.name: Estimate(1.5, 1.4, 1.6)}) for name in TRAINED]
    monkeypatch.setattr("poss_lightning.demo.find", lambda folder: SimpleNamespace(overall=rows))
    monkeypatch.setattr("poss_lightning.demo.read_scalars", lambda folder: {"": {"val/tau_tree": [(0, 1.0), (9, 1.4)]}})
    rise = "from 1.00 to 1.50 (1.40…1.60) with"
    assert describe_learning(tmp_path, 10).endswith(f" went {rise} HASS, and {rise} PosS-2.")


def test_it_trains_on_the_gpu_that_it_decodes_on(tmp_path, monkeypatch):
    monkeypatch.setattr("poss_lightning.demo.fit_once", fit := Mock())
    _fit(tmp_path, "HASS", steps=4, dtype="float32", device="cuda:1")
    assert fit.call_args.args[-1]["trainer"].items() >= {"accelerator": "cuda", "devices": [1]}.items()


@pytest.mark.parametrize("seconds", [0.01, 0.2, 0.5, 1.0])
def test_the_demo_is_as_long_as_fits_the_minutes_of_the_machine(seconds, target, monkeypatch, capsys):
    """Here 15, as it multiplies float32; the last validation is that of the last step."""
    monkeypatch.setattr("poss_lightning.demo.seconds_of_text", lambda target: seconds)
    sizes = choose_sizes(target, None)
    assert sizes["steps"] % module.VALIDATIONS == 0 and f"{sizes['steps']} of {STEPS} steps" in capsys.readouterr().out
    most = 0.85 * 15 * 60 - module.OVERHEAD
    assert (sizes["steps"] == STEPS and sizes["max_new_tokens"] == module.TOKENS) == (module.WHOLE * seconds <= most)
    assert module.WHOLE * seconds * sizes["steps"] / STEPS <= most
