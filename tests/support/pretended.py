"""A pretended device: tensors that say they are on a GPU and hold their values on the CPU, under the rules of CUDA.

    host      torch.tensor([1, 2])  ──── .to(DEVICE) ───▶  Pretended   a copy, so that nothing is shared by accident
    device    Pretended + Pretended                     =  Pretended   computed on the CPU, so with the CPU's values
              Pretended + tensor of the host            =  DeviceError, but for a number (0-dim) where CUDA takes one
              .item(), .tolist(), x[mask], .to("cpu")      a `Wait`: the host waits until the device has come so far

What it cannot show: kernels, streams, times, and lines that ask whether a device is CUDA's.
"""

import sys
from collections.abc import Callable
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

if TYPE_CHECKING:
    from tests.support.pretended_graphs import Graph

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
# What CUDA's autocast computes in its own dtype, and what in float32; of those that the package or its target uses.
AUTOCAST = "AutocastPrivateUse1"
LOWERED = ("addmm", "baddbmm", "bmm", "linear", "matmul", "mm", "scaled_dot_product_attention")
FLOAT = ("cumsum", "exp", "linalg_vector_norm", "log", "log_softmax.int", "norm.Scalar", "pow.Tensor_Scalar", "prod")
FLOAT += ("rms_norm", "rsqrt", "softmax.int", "smooth_l1_loss", "sum", "sum.dim_IntList")


class DeviceError(Exception):
    """What CUDA refuses. It is no RuntimeError: the package goes on without graphs where it meets one of these."""


class Wait(NamedTuple):
    """The host waits for the device."""

    what: str
    place: str  # file and function of the package that ask for it, else "elsewhere"


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

    @property
    def is_cuda(self) -> bool:
        return True

    def data_ptr(self) -> int:
        return self.host.data_ptr()

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def __deepcopy__(self, memo: dict) -> Tensor:
        copy = self.detach().clone()
        if isinstance(self, torch.nn.Parameter):
            copy = torch.nn.Parameter(copy, self.requires_grad)
        return memo.setdefault(id(self), copy)

    def __repr__(self, **kwargs: Any) -> str:
        return f"Pretended({self.host})"


class PretendedDevice(TorchDispatchMode):
    """While it is entered, there is a device `DEVICE`.

    Attributes:
        waits: of the host, so far.
        captures: graphs captured so far.
        graph: the one that is captured now.
    """

    def __init__(self):
        super().__init__()
        _register()
        self.waits: list[Wait] = []
        self.captures = 0
        self.graph: Graph | None = None
        self.usual: list[bool] = []  # torch's setting, each time that it is entered
        self.pinned: dict[int, Tensor] = {}  # memory of the host that the device reads by itself

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here, and to skip it would cost time at every operation

    def __enter__(self):
        # `torch.tensor(..., device=DEVICE)` then makes a tensor of the host, and moves it, as it does for CUDA.
        self.usual.append(torch._C._only_lift_cpu_tensors())
        torch._C._set_only_lift_cpu_tensors(True)
        return super().__enter__()

    def __exit__(self, *error):
        torch._C._set_only_lift_cpu_tensors(self.usual.pop())
        return super().__exit__(*error)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        call = Call(func, args, kwargs or {})
        if func in (aten.is_pinned.default, aten._pin_memory.default):
            return self._pin(func, args[0])
        if call.rules.consists_of_others:  # inference mode asks for such ones
            with self:
                return func.decompose(*args, **call.kwargs)
        if not call.on_device:
            return func(*args, **call.kwargs)
        if func is aten._fused_sdp_choice.default:
            return 0  # attention that consists of other operations
        call.check_devices()
        if what := call.synchronises(self.pinned):
            self._wait(what)
        return self._compute(call)

    def _compute(self, call: "Call") -> Any:
        args, kwargs = call.on_host()
        inputs = {id(tensor.host): tensor for tensor in call.device_tensors}
        memories = {storage_id(tensor): tensor.memory for tensor in call.device_tensors}
        result = self.graph.add(call, args, kwargs) if self.graph else call.func(*args, **kwargs)

        def wrap(host: Tensor) -> Tensor:
            if (same := inputs.get(id(host))) is not None:  # written in place
                return same
            if call.gives_host(host):
                return host
            memory = memories.setdefault(storage_id(host), Memory())
            views = any(tensor.memory is memory and not tensor.is_inference() for tensor in call.device_tensors)
            with torch.inference_mode(torch.is_inference_mode_enabled() and not views):  # as torch has it of views
                return Pretended(host, memory)

        return replace_tensors(wrap, result)

    def _pin(self, func: Any, tensor: Tensor) -> Any:
        storage = tensor.untyped_storage().data_ptr()
        if func is aten.is_pinned.default:
            return storage in self.pinned
        copy = tensor.clone()
        self.pinned[copy.untyped_storage().data_ptr()] = copy
        return copy

    def _wait(self, what: str) -> None:
        wait = Wait(what, place())
        if self.graph:
            raise DeviceError(f"{wait.place}: {what}, while a graph is captured")
        self.waits.append(wait)


class Rules(NamedTuple):
    """What holds for an operation, whatever its arguments are."""

    packet: Any  # the operation without its overload
    names: list[str]  # of its arguments
    writes: frozenset[str]  # which of them it changes in place
    takes_numbers: bool  # of the host, beside tensors of the device
    consists_of_others: bool

    @classmethod
    @cache
    def of(cls, func: Any) -> "Rules":
        arguments, packet = func._schema.arguments, func.overloadpacket
        return cls(
            packet,
            [argument.name for argument in arguments],
            frozenset(argument.name for argument in arguments if argument.alias_info and argument.alias_info.is_write),
            torch.Tag.pointwise in func.tags or packet in TAKES_NUMBERS,
            func._can_decompose(),
        )


class Call:
    """An operation and its arguments."""

    def __init__(self, func: Any, args: tuple, kwargs: dict[str, Any]):
        self.func, self.args, self.kwargs = func, args, kwargs
        self.rules = Rules.of(func)
        self.by_name = dict(zip(self.rules.names, args, strict=False)) | kwargs
        self.device_tensors = [tensor for tensor in tensors_of(self.by_name) if isinstance(tensor, Pretended)]
        asked = kwargs.get("device")
        self.asked = None if asked is None else torch.device(asked).type
        self.on_device = bool(self.device_tensors) or self.asked == DEVICE.type

    def written(self) -> list[Tensor]:
        """Tensors that it changes in place."""
        return tensors_of([self.by_name.get(name) for name in self.rules.writes])

    def on_host(self) -> tuple[tuple, dict[str, Any]]:
        """The arguments with values in the place of tensors of the device."""
        args, kwargs = replace_tensors(lambda tensor: getattr(tensor, "host", tensor), (self.args, self.kwargs))
        return args, kwargs if self.asked is None else kwargs | {"device": torch.device("cpu")}

    def gives_host(self, result: Tensor) -> bool:
        """Whether a result belongs to the host."""
        return self.asked not in (None, DEVICE.type) or bool(self.args and result is self.args[0])

    def check_devices(self) -> None:
        """Raise DeviceError where tensors of host and device are mixed."""
        packet, _, writes, takes_numbers, _ = self.rules
        if packet in COPYING:
            return
        for name, value in self.by_name.items():
            for tensor in tensors_of(value):
                number = takes_numbers and tensor.ndim == 0 and name not in writes
                index = packet in INDEXING and name == "indices"
                if not (isinstance(tensor, Pretended) or number or index):
                    here = f"{name} of {self.func} is on the host, with shape {tuple(tensor.shape)}"
                    raise DeviceError(f"{place()}: {here}, and others are on the device")

    def synchronises(self, pinned: dict[int, Tensor]) -> str | None:
        """Why the host waits; None where it does not."""
        packet = self.rules.packet
        if packet in SIZED_BY_VALUES:
            return str(packet)
        if packet in INDEXING:
            return self._index_synchronises()
        if packet in COPYING:
            return self._copy_synchronises(pinned)
        return None

    def _index_synchronises(self) -> str | None:
        indices = [index for index in self.args[1] if index is not None]
        masks = [index.dtype in (torch.bool, torch.uint8) for index in indices]
        fills = self.rules.packet is not aten.index and self.args[2].numel() == 1 and all(masks)
        if any(masks) and not fills:
            return "a mask as an index"
        return None if all(isinstance(index, Pretended) for index in indices) else "an index from the host"

    def _copy_synchronises(self, pinned: dict[int, Tensor]) -> str | None:
        new = self.rules.packet is aten._to_copy
        source = self.args[0 if new else 1]
        other = self.kwargs.get("device") if new else self.args[0].device
        if other is None or torch.device(other).type == source.device.type:
            return None
        waits = not (self.kwargs.get("non_blocking") or (not new and len(self.args) > 2 and self.args[2]))
        host = source if not isinstance(source, Pretended) else None if new else self.args[0]
        pageable = host is not None and host.untyped_storage().data_ptr() not in pinned
        return f"a copy {'to' if source.device.type == 'cpu' else 'from'} the device" if waits or pageable else None


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


@cache
def _register() -> tuple[torch.library.Library, ...]:
    """Tell torch of the device, once, and not before a test needs it; what is returned must be kept."""
    _setup_privateuseone_for_python_backend("pretend", backend_module=_Module())
    others, listed = (torch.library.Library(namespace, "IMPL", AUTOCAST) for namespace in ("_", "aten"))
    others.fallback(torch.library.fallthrough_kernel)
    for names, dtype in ((LOWERED, None), (FLOAT, torch.float32)):
        for name in names:
            listed.impl(name, partial(_autocast, getattr(aten, name.partition(".")[0]), dtype))
    for module in ("torch.optim.optimizer", "torch.utils._foreach_utils"):  # as on CUDA, all weights at once
        import_module(module)._foreach_supported_types.append(Pretended)
    return others, listed


class _Module:
    """What torch asks of `torch.pretend`."""

    def is_available(self) -> bool:
        return True

    def device_count(self) -> int:
        return 1

    def current_device(self) -> int:
        return 0

    def manual_seed_all(self, seed: int) -> None:
        """Random numbers are the CPU's."""

    def _is_in_bad_fork(self) -> bool:
        return False

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]


def _autocast(operation: Any, dtype: torch.dtype | None, /, *args: Any, **kwargs: Any) -> Any:
    """Do an operation in a dtype, or in autocast's own."""
    dtype = dtype or torch.get_autocast_dtype("pretend")
    args, kwargs = replace_tensors(lambda x: x.to(dtype) if x.is_floating_point() else x, (args, kwargs))
    with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)):
        return operation(*args, **kwargs)
