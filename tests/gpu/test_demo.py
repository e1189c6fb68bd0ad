"""`poss demo` on the embedded target, as small as it goes: extraction, training, benchmark and report in one."""

import pytest

from poss_lightning.demo import demo
from poss_lightning.evaluation.records import read_records
from poss_lightning.reports.summary import group

pytestmark = [pytest.mark.gpu, pytest.mark.slow]


def test_the_demo_runs_and_is_exact_in_float32(device, tmp_path):
    """With graphs, `tree: auto` and the device's own dtype; on a GPU in bf16-mixed, through FlexAttention."""
    on_cpu = device.type == "cpu"
    sizes = {"conversations": 20, "steps": 2, "limit": 1, "max_new_tokens": 8 if on_cpu else 64}
    demo(str(tmp_path), **sizes, device=str(device))
    assert (tmp_path / "report.html").is_file()
    methods = group(read_records(tmp_path / "exact"))
    plain = methods.pop("autoregressive")
    assert {"single", "hass", "poss2", "trained"} <= methods.keys()
    for answers in methods.values():
        assert {key: answer.tokens for key, answer in answers.items()} == {key: plain[key].tokens for key in answers}
