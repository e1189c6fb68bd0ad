"""What `auto` stands for: what a device reports."""

import logging
from functools import partial
from itertools import count

import pytest
import torch

from poss_lightning import machine


@pytest.fixture(autouse=True)
def empty_caches():
    """Whatever was chosen or logged before, a test chooses and logs anew."""
    machine.fast_dtype.cache_clear()
    yield
    machine.fast_dtype.cache_clear()


@pytest.fixture
def cuda(monkeypatch):
    """A function that sets whether there is a GPU of CUDA, and its capability."""

    def pretend(capability: tuple[int, int] | None) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: capability is not None)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Card")
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)

    return pretend


def test_the_choice_is_logged_once(caplog):
    with caplog.at_level(logging.INFO, logger="poss_lightning"):
        chosen = {machine.choose_dtype("auto", "cpu") for _ in range(3)}
    (line,) = [record.getMessage() for record in caplog.records]
    assert chosen < {"bfloat16", "float32"} and line.startswith(f"{chosen.pop()}: this CPU ")


@pytest.mark.parametrize(
    ("device", "capability", "instructions", "dtype", "precision"),
    [
        ("cpu", None, "amx_tile", "bfloat16", "bf16-mixed"),
        ("cpu", None, None, "float32", "32-true"),
        ("mps", None, None, "bfloat16", "32-true"),
        ("cuda", (9, 0), None, "bfloat16", "bf16-mixed"),
        ("cuda", (7, 5), None, "float16", "32-true"),
        ("cuda", (6, 1), None, "float32", "32-true"),
    ],
)
def test_a_device_computes_in_what_it_reports(monkeypatch, cuda, device, capability, instructions, dtype, precision):
    """Apple's GPU comes before the CPU, and trains in float32."""
    monkeypatch.setattr(machine.platform, "machine", lambda: "x86_64")
    for name in ("avx512_bf16", "amx_tile"):
        monkeypatch.setattr(torch.cpu, f"_is_{name}_supported", lambda name=name: name == instructions)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: device == "mps")
    cuda(capability)
    assert machine.choose_device() == device and machine.choose_dtype("auto", device) == dtype
    assert machine.choose_precision("auto") == precision
    assert machine.choose_precision("gpu") == (precision if capability else "32-true")  # Lightning reports that none is


def test_works_are_timed_in_turn_after_a_first_round_that_does_not_count(monkeypatch):
    for step, options, rounds in ((1, {"repeats": 2}, 3), (10, {"repeats": 5, "enough": 25}, 2)):
        clock, done = count(step=step), []
        monkeypatch.setattr(machine.time, "perf_counter", partial(next, clock))
        took = machine.best_seconds({name: partial(done.append, name) for name in "ab"}, **options)
        assert done == ["a", "b"] * rounds and took == {"a": step, "b": step}


def test_what_a_gpu_s_kernels_are_compiled_with_is_named_if_it_is_missing(monkeypatch, tmp_path):
    there = {"triton", "clang", "mycc"}
    monkeypatch.setattr(machine, "find_spec", lambda name: name in there or None)
    monkeypatch.setattr(machine.shutil, "which", lambda name: name if name in there else None)
    monkeypatch.setattr(machine.sysconfig, "get_paths", lambda scheme: {"include": str(tmp_path)})
    (tmp_path / "Python.h").touch()
    monkeypatch.delenv("CC", raising=False)
    machine.check_kernel_tools()
    monkeypatch.setenv("CC", "mycc")
    machine.check_kernel_tools()
    there.remove("mycc")
    with pytest.raises(ValueError, match="needs a C compiler, here mycc: apt-get install gcc, or set CC"):
        machine.check_kernel_tools()
