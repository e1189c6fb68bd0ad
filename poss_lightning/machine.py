"""What `auto` means on this machine: the device to compute on, and the number format that it multiplies fast."""

import logging
import os
import platform
import shutil
import sysconfig
import time
from collections.abc import Callable, Hashable, Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.torch_version import TorchVersion

Key = TypeVar("Key", bound=Hashable)

DTYPES = ("bfloat16", "float16", "float32")
GPU_TORCH = "2.11"  # the oldest that can run this package on a GPU
SUMS = torch.float32 if torch.backends.mps.is_available() else torch.float64  # Apple's GPU has no float64

logger = logging.getLogger(__name__)


def choose_device(name: str = "auto") -> str:
    """Return the device of that name; for `auto` cuda if there is one, else mps (Apple's), else cpu.

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


def choose_dtype(name: str, device: str) -> str:
    """The dtype of that name; for `auto` that of `fast_dtype`. Raises ValueError for other names."""
    if name in DTYPES:
        return name
    if name != "auto":
        raise ValueError(f"dtype is {name!r}; it must be auto, {', '.join(DTYPES[:-1])} or {DTYPES[-1]}")
    return fast_dtype(device)


def choose_precision(accelerator: str, dtype: str = "auto") -> str:
    """Lightning's `precision` for a trainer's `accelerator`: bf16-mixed if `dtype` is, or `auto` chooses, bfloat16."""
    device = {"gpu": "cuda"}.get(accelerator, accelerator)
    if device == "auto":
        device = choose_device()
    if device not in ("cpu", "cuda") or (device == "cuda" and not torch.cuda.is_available()):
        return "32-true"  # autocast elsewhere is not tested; Lightning itself reports a missing GPU
    return "bf16-mixed" if choose_dtype(dtype, device) == "bfloat16" else "32-true"


def check_kernel_tools() -> None:
    """Raise ValueError unless torch.compile can compile for an Nvidia GPU here, as Triton does at the first step."""
    header = Path(sysconfig.get_paths(scheme="posix_prefix")["include"]) / "Python.h"
    compilers = [os.environ["CC"]] if "CC" in os.environ else ["gcc", "clang"]  # where Triton looks
    names = " or ".join(compilers)
    for is_here, needed in (
        (find_spec("triton"), "the package triton; it comes with torch for CUDA: pip install torch"),
        (any(map(shutil.which, compilers)), f"a C compiler, here {names}: apt-get install gcc, or set CC to yours"),
        (header.is_file(), f"Python's header {header}: apt-get install python3-dev"),
    ):
        if not is_here:
            raise ValueError(f"on a GPU attention is compiled before the first step, which needs {needed}")


@cache
def fast_dtype(device: str) -> str:
    """Return the dtype that a device multiplies fastest, as it reports it, and log the reason once.

    Many CPUs only store bfloat16, and take two to five times as long to multiply it.
    """
    kind = torch.device(device).type
    if kind == "cuda":
        name, (major, _) = torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device)
        dtype = "bfloat16" if major >= 8 else "float16" if major == 7 else "float32"
    else:
        name, dtype = f"this {kind.upper()}", "float32" if kind == "cpu" and not multiplies_bfloat16() else "bfloat16"
    logger.info("%s: %s multiplies %s", dtype, name, "it fast" if dtype == "bfloat16" else "no bfloat16, or slowly")
    return dtype


def multiplies_bfloat16() -> bool:
    """Whether this CPU has instructions for products in bfloat16: AVX-512-BF16, AMX, or ARM's."""
    if platform.machine() == "aarch64":
        return torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


def best_seconds(
    works: Mapping[Key, Callable[[], object]],
    repeats: int = 3,
    device: str | torch.device = "cpu",
    enough: float = float("inf"),
) -> dict[Key, float]:
    """Seconds of each work, the least of `repeats`: all are done in turn, after a first time that is not counted.

    After `enough` seconds there are no more repeats, but at least one.
    """
    runs: list[dict[Key, float]] = []
    began = time.perf_counter()
    while len(runs) < 2 or (len(runs) <= repeats and time.perf_counter() - began < enough):
        runs.append({name: timed(work, device) for name, work in works.items()})
    return {name: min(run[name] for run in runs[1:]) for name in works}


def timed(work: Callable[[], object], device: str | torch.device = "cpu") -> float:
    """Return the seconds of one run of a work, on a device that was idle before."""
    synchronize(device)
    start = time.perf_counter()
    work()
    synchronize(device)
    return time.perf_counter() - start


@cache
def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a function for any sizes, as a whole graph or with an error, once for all that call it."""
    return torch.compile(function, dynamic=True, fullgraph=True)


def to_device_async(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor of the host to a device, without waiting for what is queued there."""
    if device.type in ("cpu", "mps"):
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def synchronize(device: str | torch.device) -> None:
    """Wait until a device has finished all queued work; a CPU has no queue."""
    kind = torch.device(device).type
    if kind == "cuda":
        torch.cuda.synchronize(device)
    elif kind == "mps":
        torch.mps.synchronize()
