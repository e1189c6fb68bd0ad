"""The demo on the embedded target, as small as possible: extraction, training, benchmark and report in one."""

import pytest

from poss_lightning.evaluation.rounds import read_rounds
from tests.support.talks import shortened
from tests.test_demo import demo  # noqa: F401 a fixture

pytestmark = [pytest.mark.gpu, pytest.mark.slow]


def test_the_demo_runs(demo, device, tmp_path, monkeypatch):  # noqa: F811
    """With graphs, `tree: auto` and the device's own dtype; on a GPU in bf16-mixed, through FlexAttention."""
    monkeypatch.setattr(demo, "CORPUS", shortened(tmp_path / "short.jsonl.gz"))
    monkeypatch.setattr(demo, "STEPS", 20)
    monkeypatch.setattr(demo, "TOKENS", 4 if device.type == "cpu" else 64)
    demo.main(["--out", str(tmp_path / "demo"), "--minutes", "0.1"])
    assert (tmp_path / "demo" / "report.html").is_file()
    assert read_rounds(tmp_path / "demo" / "benchmark")["method"].nunique() == 8
