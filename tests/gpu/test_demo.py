"""`poss demo` on the embedded target, as small as possible: extraction, training, benchmark and report in one."""

import pytest

from poss_lightning.demo import demo
from poss_lightning.evaluation.rounds import read_rounds
from poss_lightning.reports.summary import split_methods
from tests.support.talks import shortened

pytestmark = [pytest.mark.gpu, pytest.mark.slow]


def test_the_demo_runs_and_is_exact_in_float32(device, tmp_path, monkeypatch):
    """With graphs, `tree: auto` and the device's own dtype; on a GPU in bf16-mixed, through FlexAttention."""
    monkeypatch.setattr("poss_lightning.demo.CORPUS", shortened(tmp_path / "short.jsonl"))
    folder = tmp_path / "demo"
    monkeypatch.setattr("poss_lightning.demo.STEPS", 4)
    monkeypatch.setattr("poss_lightning.demo.TOKENS", 4 if device.type == "cpu" else 64)
    demo(str(folder), device=str(device))
    assert (folder / "report.html").is_file()
    rounded = (folder / "exact").exists()  # in bfloat16 the demo decodes some answers again, in float32
    methods = split_methods(read_rounds(folder / ("exact" if rounded else "benchmark")))
    plain = methods.pop("plain")
    assert len(methods) == (3 if rounded else 7)
    assert all((answers["answer"] == plain["answer"]).all() for answers in methods.values())
