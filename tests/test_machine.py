"""What `auto` stands for: from what a device reports, or from a product that is timed."""

import logging
from itertools import count

import pytest
import torch

from poss_lightning import machine


@pytest.fixture(autouse=True)
def empty_caches():
    """Whatever was measured or logged before, a test measures and logs anew."""
    machine.fast_dtype.cache_clear()
    machine._log_once.cache_clear()
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


def test_this_machine_is_measured_and_the_choice_logged_once(caplog):
    with caplog.at_level(logging.INFO, logger="poss_lightning"):
        chosen = {machine.choose_dtype("auto", "cpu") for _ in range(3)}
    (line,) = [record.getMessage() for record in caplog.records]
    assert chosen < {"bfloat16", "float32"} and line.startswith(f"{chosen.pop()}: this CPU multiplies ")


@pytest.mark.parametrize(
    ("device", "capability", "ratio", "dtype", "precision"),
    [
        ("cpu", None, 0.4, "bfloat16", "bf16-mixed"),
        ("cpu", None, 4.3, "float32", "32-true"),
        ("mps", None, 0.4, "bfloat16", "32-true"),
        ("cuda", (9, 0), None, "bfloat16", "bf16-mixed"),
        ("cuda", (7, 5), None, "float16", "32-true"),
        ("cuda", (6, 1), None, "float32", "32-true"),
    ],
)
def test_a_cpu_computes_in_what_it_multiplies_faster_and_a_gpu_in_what_it_reports(
    monkeypatch, cuda, device, capability, ratio, dtype, precision
):
    """Apple's GPU comes before the CPU, and trains in float32."""
    monkeypatch.setattr(machine, "bfloat16_over_float32", lambda device: ratio)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: device == "mps")
    cuda(capability)
    assert machine.choose_device() == device and machine.choose_dtype("auto", device) == dtype
    assert machine.choose_precision("auto") == precision
    assert machine.choose_precision("gpu") == (precision if capability else "32-true")  # Lightning reports that none is


def test_a_device_without_bfloat16_computes_in_float32(monkeypatch):
    def refuse(*arguments, dtype=None, **more):
        if dtype == torch.bfloat16:
            raise TypeError("BFloat16 is not supported on MPS")
        return torch.zeros(*arguments, dtype=dtype)

    monkeypatch.setattr(torch, "ones", refuse)
    assert machine.bfloat16_over_float32("cpu") == float("inf")


@pytest.mark.parametrize("device", ["warp", "cuda:99"])
def test_a_missing_device_an_old_torch_and_an_unknown_dtype_are_refused(device, monkeypatch, cuda):
    with pytest.raises(ValueError, match=rf"device is '{device}', which this machine or this torch does not have"):
        machine.choose_device(device)
    with pytest.raises(ValueError, match="dtype is 'int3'; it must be auto, bfloat16, float16 or float32"):
        machine.choose_dtype("int3", "cpu")
    cuda((9, 0))
    monkeypatch.setattr(torch, "__version__", "2.10.1+cu128")
    with pytest.raises(ValueError, match=r"device is 'cuda', which takes torch 2.11 or newer; this is 2.10.1\+cu128"):
        machine.choose_device()


@pytest.mark.parametrize(("step", "options", "rounds"), [(1, {"repeats": 2}, 3), (10, {"repeats": 5, "enough": 25}, 2)])
def test_works_are_timed_in_turn_after_a_first_round_that_does_not_count(monkeypatch, step, options, rounds):
    clock, done = count(step=step), []
    monkeypatch.setattr(machine.time, "perf_counter", lambda: next(clock))
    took = machine.best_seconds({"a": lambda: done.append("a"), "b": lambda: done.append("b")}, **options)
    assert done == ["a", "b"] * rounds and took == {"a": step, "b": step}


def test_what_a_gpu_s_kernels_are_compiled_with_is_named_if_it_is_missing(monkeypatch, tmp_path):
    there = {"triton", "clang", "mycc"}
    monkeypatch.setattr(machine, "find_spec", lambda name: name in there or None)
    monkeypatch.setattr(machine.shutil, "which", lambda name: name if name in there else None)
    monkeypatch.setattr(machine.sysconfig, "get_paths", lambda scheme: {"include": str(tmp_path)})
    header = tmp_path / "Python.h"
    header.touch()
    monkeypatch.delenv("CC", raising=False)
    machine.check_kernel_tools()
    monkeypatch.setenv("CC", "mycc")
    machine.check_kernel_tools()
    header.unlink()
    for gone, words in (
        ("clang", r"needs Python's header .*Python\.h: apt-get install python3-dev"),
        ("mycc", "needs a C compiler, here mycc: apt-get install gcc, or set CC"),
        ("triton", "needs the package triton; it comes with torch for CUDA: pip install torch"),
    ):
        there.remove(gone)
        with pytest.raises(ValueError, match=words):
            machine.check_kernel_tools()
