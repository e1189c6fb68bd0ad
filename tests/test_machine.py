"""What `auto` comes to: from what a device says of itself, or from a product that is timed."""

import logging
from itertools import count

import pytest
import torch

from poss_lightning import machine
from poss_lightning.machine import (
    best_seconds,
    check_kernel_tools,
    choose_device,
    choose_dtype,
    choose_precision,
    fast_dtype,
)


@pytest.fixture(autouse=True)
def forgotten():
    """What was measured or said before counts in no test."""
    fast_dtype.cache_clear()
    machine._announce.cache_clear()
    yield
    fast_dtype.cache_clear()


def test_this_machine_is_measured_and_said_once(caplog):
    with caplog.at_level(logging.INFO, logger="poss_lightning"):
        chosen = {choose_dtype("auto", "cpu") for _ in range(3)}
    (line,) = [record.getMessage() for record in caplog.records]
    assert chosen < {"bfloat16", "float32"} and line.startswith(f"{chosen.pop()}: this CPU multiplies ")


@pytest.mark.parametrize(
    ("ratio", "dtype", "words", "precision"),
    [
        (0.4, "bfloat16", "this CPU multiplies it in 0.40 of the time of float32", "bf16-mixed"),
        (4.3, "float32", "this CPU multiplies bfloat16 slowly, in 4.3 times the time of float32", "32-true"),
    ],
)
def test_a_cpu_computes_in_what_it_multiplies_faster(monkeypatch, ratio, dtype, words, precision):
    monkeypatch.setattr(machine, "bfloat16_over_float32", lambda device: ratio)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert fast_dtype("cpu") == (dtype, words)
    assert choose_precision("cpu") == choose_precision("auto") == precision
    assert choose_precision("gpu") == "32-true"  # there is none: Lightning says so


@pytest.mark.parametrize(
    ("capability", "dtype", "precision"),
    [((9, 0), "bfloat16", "bf16-mixed"), ((7, 5), "float16", "32-true"), ((6, 1), "float32", "32-true")],
)
def test_a_gpu_says_what_it_can(monkeypatch, capability, dtype, precision):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Card")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    chosen, why = fast_dtype("cuda")
    assert chosen == dtype and why.startswith("Card ")
    assert choose_device() == "cuda" and choose_precision("auto") == choose_precision("gpu") == precision


def test_a_torch_too_old_for_a_gpu_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch, "__version__", "2.10.1+cu128")
    with pytest.raises(ValueError, match=r"device is 'cuda', which takes torch 2.11 or newer; this is 2.10.1\+cu128"):
        choose_device()


def test_apples_gpu_comes_before_the_cpu_and_trains_in_float32(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert choose_device() == "mps" and choose_precision("auto") == "32-true"


def test_without_bfloat16_it_is_float32(monkeypatch):
    def refuse(*arguments, dtype=None, **more):
        if dtype == torch.bfloat16:
            raise TypeError("BFloat16 is not supported on MPS")
        return torch.zeros(*arguments, dtype=dtype)

    monkeypatch.setattr(torch, "ones", refuse)
    assert machine.bfloat16_over_float32("cpu") == float("inf")


@pytest.mark.parametrize("device", ["warp", "cuda:99"])
def test_a_device_that_is_not_there_is_refused(device):
    with pytest.raises(ValueError, match=rf"device is '{device}', which this machine or this torch does not have"):
        choose_device(device)


def test_a_dtype_that_is_none_is_refused():
    with pytest.raises(ValueError, match="dtype is 'int3'; it must be auto, bfloat16, float16 or float32"):
        choose_dtype("int3", "cpu")


def test_works_are_timed_in_turn_and_the_first_run_does_not_count(monkeypatch):
    clock, done = count(), []
    monkeypatch.setattr(machine.time, "perf_counter", lambda: next(clock))
    took = best_seconds({"a": lambda: done.append("a"), "b": lambda: done.append("b")}, repeats=2)
    assert done == ["a", "b"] * 3 and took == {"a": 1, "b": 1}


def test_what_takes_long_is_timed_once_after_a_first(monkeypatch):
    clock, done = count(step=10), []
    monkeypatch.setattr(machine.time, "perf_counter", lambda: next(clock))
    assert best_seconds({"a": lambda: done.append("a")}, repeats=5, enough=15) == {"a": 10} and done == ["a", "a"]


@pytest.fixture
def complete(monkeypatch, tmp_path):
    """A machine that has what kernels are compiled with."""
    (tmp_path / "Python.h").touch()
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(machine, "find_spec", lambda name: name)
    monkeypatch.setattr(machine.shutil, "which", lambda name: name if name in ("clang", "mycc") else None)
    monkeypatch.setattr(machine.sysconfig, "get_paths", lambda scheme: {"include": str(tmp_path)})
    return tmp_path


def test_what_a_gpu_s_kernels_are_compiled_with_is_named_where_it_is_missing(complete, monkeypatch):
    check_kernel_tools()
    monkeypatch.setenv("CC", "mycc")
    check_kernel_tools()
    monkeypatch.setenv("CC", "gcc-99")
    with pytest.raises(ValueError, match=r"needs a C compiler, here gcc-99: apt-get install gcc, or set CC"):
        check_kernel_tools()
    monkeypatch.delenv("CC")
    (complete / "Python.h").unlink()
    with pytest.raises(ValueError, match=r"needs Python's header .*Python\.h: apt-get install python3-dev"):
        check_kernel_tools()
    monkeypatch.setattr(machine, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="needs the package triton; it comes with torch for CUDA: pip install torch"):
        check_kernel_tools()
