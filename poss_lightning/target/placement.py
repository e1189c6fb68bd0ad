"""Where a target lies: on one device, or with its layers on several GPUs (transformers' `device_map`)."""

from pathlib import Path
from typing import Any, Literal

import torch
from accelerate.utils import get_max_memory
from transformers import PreTrainedConfig

from poss_lightning.machine import choose_device, free_bytes
from poss_lightning.ranks import local_rank

Parallel = Literal["none", "layers"]
GB = 10**9
FILLED = 0.85  # of a GPU's free memory; the rest is for caches and activations


def home_device(parallel: str, device: str) -> str:
    """Return the device on which this process computes, or the first of those over which layers are spread.

    Raises:
        ValueError: an unknown device, or values that do not go together.
    """
    home = choose_device(device)
    if parallel == "layers" and torch.device(home).index is not None:
        raise ValueError(
            f"device is {device!r}, but parallel layers takes every GPU: name them in CUDA_VISIBLE_DEVICES"
        )
    if parallel == "layers" and local_rank():
        raise ValueError("parallel is layers, with which one process takes every GPU, but several were started here")
    return home


def placement(
    name: str, folder: Path, config: PreTrainedConfig, dtype: str | None, device: str, parallel: str, spared: int | None
) -> dict[str, Any]:
    """Return the arguments of `from_pretrained` that place the model of a folder.

    `dtype` is the one it will have (None for that of its files), `device` its home, and `spared` the number of a GPU
    that gets no layer.

    Raises:
        ValueError: it does not fit.
    """
    needed = weight_bytes(folder, config, getattr(torch, dtype) if dtype else None)
    what = f"target {name!r} has {needed / GB:.1f} GB of weights in {dtype or 'the dtype of its files'}"
    if parallel == "layers" and device == "cuda":
        return _spread(needed, what, spared)
    free = free_bytes(device)
    if free is not None and needed > free:
        more = "--parallel layers takes several GPUs" if device.startswith("cuda") else "use a machine with more"
        raise ValueError(f"{what}, and {device} has {free / GB:.1f} GB for it: {more}")
    quantized = getattr(config, "quantization_config", None) is not None
    return {"device_map": {"": device}} if quantized else {}  # what is packed cannot be moved later


def weight_bytes(folder: Path, config: PreTrainedConfig, dtype: torch.dtype | None) -> float:
    """Estimate the bytes of a model's loaded weights from the sizes of its files."""
    stored = sum(path.stat().st_size for path in folder.glob("model*.safetensors"))
    kept = config.dtype if isinstance(config.dtype, torch.dtype) else dtype
    return stored * (dtype.itemsize / kept.itemsize if dtype and kept else 1)


def _spread(needed: float, what: str, spared: int | None) -> dict[str, Any]:
    free = {gpu: int(FILLED * size) for gpu, size in get_max_memory().items() if gpu not in ("cpu", spared)}
    if not free:
        raise ValueError("parallel is layers, but there is one GPU, which the training needs: store the features first")
    there = sum(free.values())
    if needed > there:
        raise ValueError(f"{what}, and these {len(free)} GPUs have {there / GB:.1f} GB for it: use more GPUs")
    return {"device_map": "auto", "max_memory": free}
