"""What `auto` means on this machine: the device to compute on, and the number format that it multiplies fast.

And what must be installed to compile for it.
"""

import logging
import os
import shutil
import sysconfig
import time
from collections.abc import Callable, Hashable, Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TypeVar

import torch
from torch.torch_version import TorchVersion

Key = TypeVar("Key", bound=Hashable)

DTYPES = ("bfloat16", "float16", "float32")
GPU_TORCH = "2.11"  # the oldest that computes on a GPU what this package asks for
ROWS, WIDTH = 32, 1024  # of the product that is timed: a tree's rows, a layer's width; 0.1 to 0.2 s
logger = logging.getLogger(__name__)

# Of sums that a module takes along to its device: Apple's GPU has no float64.
SUMS = torch.float32 if torch.backends.mps.is_available() else torch.float64


def choose_device(name: str = "auto") -> str:
    """The device of that name; of `auto` CUDA's, else Apple's (mps), else the CPU.

    Raises:
        ValueError: no tensor can be made there, or this torch is too old for it.
    """
    best = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    device = best if name == "auto" else name
    if device.startswith("cuda") and TorchVersion(torch.__version__) < GPU_TORCH:
        raise ValueError(f"device is {device!r}, which takes torch {GPU_TORCH} or newer; this is {torch.__version__}")
    try:
        if name != "auto":
            torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(
            f"device is {name!r}, which this machine or this torch does not have; try auto or cpu"
        ) from error
    return device


def check_dtype(name: str) -> None:
    """Raise ValueError unless `name` is `auto` or one of `DTYPES`."""
    if name not in ("auto", *DTYPES):
        raise ValueError(f"dtype is {name!r}; it must be auto, {', '.join(DTYPES[:-1])} or {DTYPES[-1]}")


def choose_dtype(name: str, device: str) -> str:
    """The dtype of that name; of `auto` what `fast_dtype` says of the device, which is logged in one line.

    Raises:
        ValueError: as `check_dtype`.
    """
    check_dtype(name)
    if name != "auto":
        return name
    dtype, reason = fast_dtype(device)
    _announce(f"{dtype}: {reason}")
    return dtype


def choose_precision(accelerator: str, dtype: str = "auto") -> str:
    """Lightning's `precision` for a trainer's `accelerator`: bf16-mixed where `dtype` is bfloat16, else 32-true.

    Of `auto` it is bfloat16 where that is fast.
    """
    device = {"gpu": "cuda"}.get(accelerator, accelerator)
    if device == "auto":
        device = choose_device()
    if device not in ("cpu", "cuda") or (device == "cuda" and not torch.cuda.is_available()):
        return "32-true"  # autocast elsewhere is not ours to trust; a GPU that is missing Lightning names itself
    return "bf16-mixed" if choose_dtype(dtype, device) == "bfloat16" else "32-true"


def check_kernel_tools() -> None:
    """Raise ValueError unless kernels for a GPU of Nvidia can be compiled here, as torch.compile does at a first step.

    Raises:
        ValueError: Triton, a C compiler or Python's header is missing, all of which Triton needs.
    """
    header = Path(sysconfig.get_paths(scheme="posix_prefix")["include"]) / "Python.h"
    compilers = [os.environ["CC"]] if "CC" in os.environ else ["gcc", "clang"]  # where Triton looks
    for missing, remedy in (
        (find_spec("triton") is None, "the package triton; it comes with torch for CUDA: pip install torch"),
        (
            not any(map(shutil.which, compilers)),
            f"a C compiler, here {' or '.join(compilers)}: apt-get install gcc, or set CC to yours",
        ),
        (not header.is_file(), f"Python's header {header}: apt-get install python3-dev"),
    ):
        if missing:
            raise ValueError(f"on a GPU attention is compiled before the first step, which needs {remedy}")


@cache
def fast_dtype(device: str) -> tuple[str, str]:
    """The dtype that a device multiplies fastest, and why, in words.

    A GPU of Nvidia says so itself. Elsewhere a product of `ROWS` rows is timed in bfloat16 and in float32: many CPUs
    have bfloat16 only as numbers that are stored, and take two to five times as long to multiply them.
    """
    kind = torch.device(device).type
    if kind == "cuda":
        name, (major, _) = torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device)
        if major >= 8:
            return "bfloat16", f"{name} multiplies it fast"
        return ("float16" if major == 7 else "float32"), f"{name} has no fast bfloat16"
    ratio = bfloat16_over_float32(device)
    what = {"cpu": "this CPU"}.get(kind, f"this machine's {kind}")
    if ratio > 1:
        return "float32", f"{what} multiplies bfloat16 slowly, in {ratio:.1f} times the time of float32"
    return "bfloat16", f"{what} multiplies it in {ratio:.2f} of the time of float32"


def bfloat16_over_float32(device: str) -> float:
    """Seconds of a product in bfloat16 over those in float32; inf where the device has no bfloat16."""

    def product(dtype: torch.dtype) -> Callable[[], object]:
        features, weights = (torch.ones(rows, WIDTH, dtype=dtype, device=device) for rows in (ROWS, WIDTH))
        return lambda: torch.nn.functional.linear(features, weights)

    try:
        seconds = best_seconds({dtype: product(dtype) for dtype in (torch.bfloat16, torch.float32)}, 10, device)
    except (RuntimeError, TypeError):  # macOS before 14 has no bfloat16 on its GPU
        return float("inf")
    return seconds[torch.bfloat16] / seconds[torch.float32]


def best_seconds(
    works: Mapping[Key, Callable[[], object]],
    repeats: int = 3,
    device: str | torch.device = "cpu",
    enough: float = float("inf"),
) -> dict[Key, float]:
    """Seconds of each work, the least of `repeats`, done in turn after a first that is not counted.

    Args:
        works: by any name.
        repeats: how often; fewer, but one, where `enough` seconds have passed.
        device: that is waited for.
    """
    runs: list[dict[Key, float]] = []
    began = time.perf_counter()
    while len(runs) < 2 or (len(runs) <= repeats and time.perf_counter() - began < enough):
        runs.append({name: _seconds(work, device) for name, work in works.items()})
    return {name: min(run[name] for run in runs[1:]) for name in works}


def _seconds(work: Callable[[], object], device: str | torch.device) -> float:
    synchronize(device)
    start = time.perf_counter()
    work()
    synchronize(device)
    return time.perf_counter() - start


def free_bytes(device: str | torch.device) -> int | None:
    """Bytes that a GPU of CUDA has free, or that this machine has in all; None where nothing says."""
    kind = torch.device(device).type
    if kind == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    if kind == "cpu" and "SC_PHYS_PAGES" in os.sysconf_names:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return None


def synchronize(device: str | torch.device) -> None:
    """Wait until a device has done all it was asked for; a CPU always has."""
    kind = torch.device(device).type
    if kind == "cuda":
        torch.cuda.synchronize(device)
    elif kind == "mps":
        torch.mps.synchronize()


@cache
def _announce(line: str) -> None:
    """Say it once a process."""
    logger.info(line)
