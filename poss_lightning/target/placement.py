"""Where a target lies: on one device, its layers on several, or every layer divided among several processes.

none      one device
layers    one process, several GPUs: transformers' `device_map`; a forward goes from GPU to GPU
tensors   one process a GPU, started by torchrun: transformers' tensor parallelism; `followers.py`
"""

import json
import math
import os
import re
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, DynamicCache, PreTrainedModel

from poss_lightning.machine import choose_device, free_bytes
from poss_lightning.ranks import device_of, join, this_rank
from poss_lightning.target.cache import SlotStore, forward_of

Parallel = Literal["none", "layers", "tensors"]
GB = 10**9


# --- before it is loaded ---


def home_device(parallel: str, device: str) -> str:
    """The device on which this process computes, or from which its layers are spread.

    Raises:
        ValueError: an unknown way to lie, or a device on which it cannot.
    """
    if parallel not in ("none", "layers", "tensors"):
        raise ValueError(f"parallel is {parallel!r}; it must be none, layers or tensors")
    home = choose_device(device_of(this_rank(), device) if parallel == "tensors" else device)
    if parallel == "layers" and torch.device(home).index is not None:
        raise ValueError(
            f"device is {device!r}, but parallel layers takes every GPU: name them in CUDA_VISIBLE_DEVICES"
        )
    # torchrun counts the processes here, and Lightning's launcher only numbers those that it starts
    here = int(os.environ.get("LOCAL_WORLD_SIZE", int(os.environ.get("LOCAL_RANK", 0)) + 1))
    if parallel == "layers" and here > 1:
        raise ValueError(f"parallel is layers, with which one process takes every GPU, but there are {here} here")
    if parallel == "tensors" and torch.device(home).type != (known := _accelerator()):
        raise ValueError(f"device is {device!r}, but parallel tensors computes on this machine's {known}")
    return home


def placement(name: str, folder: Path, dtype: str | None, device: str, parallel: str, spared: int | None) -> dict:
    """How transformers should load a model: arguments of `from_pretrained`.

    Args:
        name: of the target, for messages.
        folder: of its files.
        dtype: it will have; None for that of its files.
        device: its home.
        parallel: none, layers or tensors.
        spared: number of a GPU that gets no layer.

    Raises:
        ValueError: it does not fit, or cannot be divided so.
    """
    needed = weight_bytes(folder, getattr(torch, dtype) if dtype else None)
    what = f"target {name!r} has {needed / GB:.1f} GB of weights in {dtype or 'the dtype of its files'}"
    if parallel == "tensors":
        return _divide(name, folder, device, needed, what)
    if parallel == "layers" and device == "cuda":
        return _spread(device, needed, what, spared)
    more = "--parallel layers (one process) or --parallel tensors (torchrun) takes several GPUs"
    _check_size(needed, device, what, more if device.startswith("cuda") else "take a machine with more memory")
    return {}


def weight_bytes(folder: Path, dtype: torch.dtype | None) -> int:
    """Bytes of a model's weights once they are loaded, from the headers of its files; 0 where these cannot be read."""
    index, total = folder / "model.safetensors.index.json", 0
    try:
        names = set(json.loads(index.read_text())["weight_map"].values()) if index.is_file() else {"model.safetensors"}
        for file in names:
            with safe_open(folder / file, "pt") as weights:
                for key in weights.keys():  # noqa: SIM118, it is no mapping
                    part = weights.get_slice(key)
                    total += math.prod(part.get_shape()) * _item_bytes(part.get_dtype(), dtype)
    except (OSError, ValueError, KeyError, SafetensorError):  # of which loading itself tells
        return 0
    return total


def _item_bytes(stored: str, dtype: torch.dtype | None) -> int:
    """Bytes of a number that is stored as e.g. BF16 or F8_E4M3: floats are converted, what is quantized is not."""
    if dtype is not None and stored in ("F64", "F32", "F16", "BF16"):
        return dtype.itemsize
    bits = re.search(r"\d+", stored)
    return max(1, int(bits[0]) // 8) if bits else 1


def _check_size(needed: float, device: str, what: str, otherwise: str) -> None:
    there = free_bytes(device)
    if there is not None and needed > there:
        raise ValueError(f"{what}, and {device} has {there / GB:.1f} GB for it: {otherwise}")


def _spread(device: str, needed: int, what: str, spared: int | None) -> dict:
    free = {number: free_bytes(f"{device}:{number}") for number in range(torch.cuda.device_count()) if number != spared}
    if not free:
        raise ValueError("parallel is layers, but there is one GPU, which the training needs: store the features first")
    there = sum(bytes or 0 for bytes in free.values())
    if needed > there:
        raise ValueError(
            f"{what}, and these {len(free)} GPUs have {there / GB:.1f} GB for it: take more GPUs, or several machines "
            "with --parallel tensors"
        )
    return {"device_map": "auto", "max_memory": free}


def _divide(name: str, folder: Path, device: str, needed: int, what: str) -> dict:
    world = join(device)
    config = AutoConfig.from_pretrained(folder).get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    if heads % world:
        raise ValueError(
            f"{world} processes cannot share the {heads} key-value heads of {name!r}: start 2, 4, … that divide them"
        )
    _check_size(needed / world, device, f"{what}, {needed / world / GB:.1f} GB of it here", "start more processes")
    try:
        from transformers.distributed import tensor_parallel  # noqa: F401, in which parts are DTensors
        from transformers.distributed.configuration_utils import DistributedConfig
    except ImportError as error:
        raise ValueError("parallel is tensors, which needs transformers 5.17 or newer") from error
    return {"distributed_config": DistributedConfig(tp_size=world)}


def _accelerator() -> str:
    """What transformers divides a model over on this machine."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return "cpu" if accelerator is None else accelerator.type


# --- once it is loaded ---


def check_placement(model: PreTrainedModel, parallel: str) -> None:
    """Raise ValueError where transformers did not place the model as it was asked to."""
    if parallel == "tensors" and not is_divided(model):
        raise ValueError(f"transformers cannot divide a {type(model).__name__}: take parallel layers")
    if any(value.device.type == "meta" for value in model.parameters()):
        raise ValueError("some layers found no room on the GPUs: take more of them")


def is_divided(model: nn.Module) -> bool:
    """Whether processes share its matrices."""
    return any(isinstance(value, DTensor) for value in model.parameters())


def undivided(value: Tensor) -> Tensor:
    """A parameter without its division among processes, all of which must call it."""
    return (value.full_tensor() if isinstance(value, DTensor) else value).detach()


@torch.inference_mode()
def kv_layout(model: PreTrainedModel, device: torch.device) -> list[tuple[torch.device, int]]:
    """Device and heads of every layer's keys in this process, as a forward of one token leaves them."""
    cache = DynamicCache()
    forward_of(model.base_model)(cache, input_ids=torch.zeros(1, 1, dtype=torch.long, device=device))
    return [(layer.keys.device, layer.keys.shape[1]) for layer in cache.layers]  # pyright: ignore


class SpreadStore:
    """A `SlotStore` for layers on several devices: keys and values lie beside the layer that reads them.

    Args:
        devices: of every layer.
        device: of the indices.
        sizes: as of a `SlotStore`.
    """

    def __init__(self, devices: list[torch.device], device: torch.device, **sizes: Any):
        self.device, self.layers = device, len(devices)
        self.batch, self.capacity = sizes["batch"], sizes["capacity"]
        self.stores = {
            place: SlotStore(layers=devices.count(place), device=place, **sizes) for place in dict.fromkeys(devices)
        }
        self.places = [(place, devices[:layer].count(place)) for layer, place in enumerate(devices)]

    def write(self, layers: int, index: Tensor, keys: Tensor, values: Tensor) -> None:
        """As of a `SlotStore`."""
        place, layer = self.places[layers]
        self.stores[place].write(layer, index.to(place), keys, values)

    def move(self, source: Tensor, destination: Tensor) -> None:
        """As of a `SlotStore`."""
        for place, store in self.stores.items():
            store.move(source.to(place), destination.to(place))

    def view(self, layer: int, extent: int) -> tuple[Tensor, Tensor]:
        """As of a `SlotStore`."""
        place, own = self.places[layer]
        return self.stores[place].view(own, extent)

    def clear(self) -> None:
        """As of a `SlotStore`."""
        for store in self.stores.values():
            store.clear()

    def select(self, rows: list[int]) -> None:
        """As of a `SlotStore`."""
        for store in self.stores.values():
            store.select(rows)
        self.batch = len(rows)
