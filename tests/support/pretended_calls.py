"""Tensors of the pretended device, and what CUDA's rules say of an operation on them; see `pretended`."""

import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

DEVICE = torch.device("privateuseone", 0)  # "pretend", when a `PretendedDevice` has been made
PACKAGE = "poss_lightning"
aten = torch.ops.aten

# The size or the value of what these give is not known before the device has come so far.
SIZED_BY_VALUES = {
    aten._local_scalar_dense,
    aten._unique2,
    aten.bincount,
    aten.equal,
    aten.masked_select,
    aten.nonzero,
    aten.repeat_interleave,
}
INDEXING = {aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_}
COPYING = {aten.copy_, aten._to_copy}
TAKES_NUMBERS = INDEXING | {aten.fill_, aten.masked_fill, aten.masked_fill_}  # as all that works element by element
ALLOCATING = {aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty, aten.new_empty_strided}


class DeviceError(Exception):
    """What CUDA refuses. It is no RuntimeError: the package goes on without graphs where it meets one of these."""


class Memory:
    """One allocation on the device. It is there as long as some tensor refers to it."""

    __slots__ = ("__weakref__",)


class Pretended(Tensor):
    """A tensor on `DEVICE`.

    Attributes:
        host: its values; views share their storage.
        memory: where they are.
    """

    host: Tensor
    memory: Memory

    @staticmethod
    def __new__(cls, host: Tensor, memory: Memory):
        layout = {"strides": host.stride(), "storage_offset": host.storage_offset(), "dtype": host.dtype}
        self = Tensor._make_wrapper_subclass(cls, host.shape, **layout, device=DEVICE)
        self.host, self.memory = host, memory
        return self

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise DeviceError(f"{func} is called where no `PretendedDevice` is entered")

    def data_ptr(self) -> int:
        return self.host.data_ptr()

    def tolist(self) -> Any:
        return self.cpu().tolist()


@cache
def writes_of(func: Any) -> dict[str, bool]:
    """Whether an operation changes an argument in place, by its name."""
    return {each.name: bool(each.alias_info and each.alias_info.is_write) for each in func._schema.arguments}


class Call:
    """An operation and its arguments."""

    def __init__(self, func: Any, args: tuple, kwargs: dict[str, Any]):
        self.func, self.args, self.kwargs = func, args, kwargs
        self.packet, self.writes = func.overloadpacket, writes_of(func)
        self.by_name = dict(zip(self.writes, args, strict=False)) | kwargs
        self.device_tensors = [tensor for tensor in tensors_of(self.by_name) if isinstance(tensor, Pretended)]
        asked = kwargs.get("device")
        self.asked = None if asked is None else torch.device(asked).type
        self.on_device = bool(self.device_tensors) or self.asked == DEVICE.type

    def written(self) -> list[Tensor]:
        """Tensors that it changes in place."""
        return tensors_of([self.by_name.get(name) for name, writes in self.writes.items() if writes])

    def on_host(self) -> tuple[tuple, dict[str, Any]]:
        """The arguments with values in the place of tensors of the device."""
        args, kwargs = replace_tensors(lambda tensor: getattr(tensor, "host", tensor), (self.args, self.kwargs))
        return args, kwargs if self.asked is None else kwargs | {"device": torch.device("cpu")}

    def gives_host(self, result: Tensor) -> bool:
        """Whether a result belongs to the host."""
        return self.asked not in (None, DEVICE.type) or bool(self.args and result is self.args[0])

    def check_devices(self) -> None:
        """Raise DeviceError where tensors of host and device are mixed."""
        packet = self.packet
        if packet in COPYING:
            return
        takes_numbers = torch.Tag.pointwise in self.func.tags or packet in TAKES_NUMBERS
        for name, value in self.by_name.items():
            for tensor in tensors_of(value):
                number = takes_numbers and tensor.ndim == 0 and not self.writes[name]
                index = packet in INDEXING and name == "indices"
                if not (isinstance(tensor, Pretended) or number or index):
                    here = f"{name} of {self.func} is on the host, with shape {tuple(tensor.shape)}"
                    raise DeviceError(f"{place()}: {here}, and others are on the device")

    def synchronises(self, pinned: dict[int, Tensor]) -> str | None:
        """Why the host waits; None where it does not."""
        if self.packet in INDEXING:
            return self._index_synchronises()
        if self.packet in COPYING:
            return self._copy_synchronises(pinned)
        return str(self.packet) if self.packet in SIZED_BY_VALUES else None

    def _index_synchronises(self) -> str | None:
        indices = [index for index in self.args[1] if index is not None]
        masks = [index.dtype in (torch.bool, torch.uint8) for index in indices]
        fills = self.packet is not aten.index and self.args[2].numel() == 1 and all(masks)
        if any(masks) and not fills:
            return "a mask as an index"
        return None if all(isinstance(index, Pretended) for index in indices) else "an index from the host"

    def _copy_synchronises(self, pinned: dict[int, Tensor]) -> str | None:
        if self.packet is aten.copy_:
            source, target = self.by_name["src"], self.by_name["self"]
            there = isinstance(target, Pretended)
        elif self.asked:
            source, target, there = self.by_name["self"], None, self.asked == DEVICE.type
        else:
            return None
        if isinstance(source, Pretended) == there:
            return None
        host = source if there else target  # None where torch makes it, which is then pinned
        is_pinned = host is None or host.untyped_storage().data_ptr() in pinned
        if is_pinned and self.by_name.get("non_blocking"):
            return None
        return "a copy to the device" if there else "a copy from the device"


def storage_id(tensor: Tensor) -> int:
    """The same for all views of an allocation, as long as it is there."""
    return getattr(tensor, "host", tensor).untyped_storage()._cdata


def tensors_of(value: Any) -> list[Tensor]:
    """Those in a nest of lists, tuples and dicts; torch's own pytrees take ten times longer."""
    if isinstance(value, Tensor):
        return [value]
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return [tensor for part in parts for tensor in tensors_of(part)]


def replace_tensors(change: Callable[[Tensor], Any], value: Any) -> Any:
    """The same nest with `change(tensor)` for every tensor."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, dict):
        return {name: replace_tensors(change, part) for name, part in value.items()}
    return type(value)(replace_tensors(change, part) for part in value) if isinstance(value, list | tuple) else value


def place() -> str:
    """The innermost function of the package that runs, as file:function; else "elsewhere"."""
    frame = sys._getframe(1)
    while frame is not None:
        parts = Path(frame.f_code.co_filename).parts
        if PACKAGE in parts and "tests" not in parts:
            inside = "/".join(parts[len(parts) - parts[::-1].index(PACKAGE) :])
            return f"{inside}:{frame.f_code.co_name}"
        frame = frame.f_back
    return "elsewhere"
