"""A pretended device: tensors that say they are on a GPU and hold their values on the CPU, under the rules of CUDA.

    host      torch.tensor([1, 2])  ──── .to(DEVICE) ───▶  Pretended   a copy, so that nothing is shared by accident
    device    Pretended + Pretended                     =  Pretended   computed on the CPU, so with the CPU's values
              Pretended + tensor of the host            =  DeviceError, but for a number (0-dim) where CUDA takes one
              .item(), .tolist(), x[mask], .to("cpu")      a wait: the host waits until the device has come so far

What it cannot show: kernels, streams, times, and lines that ask whether a device is CUDA's.
"""

from functools import cache, partial
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from tests.support.pretended_calls import Call, DeviceError, Memory, Pretended, aten, place, replace_tensors, storage_id

# What CUDA's autocast computes in its own dtype, and what in float32; of those that the package or its target uses.
AUTOCAST = "AutocastPrivateUse1"
LOWERED = ("addmm", "baddbmm", "bmm", "linear", "matmul", "mm", "scaled_dot_product_attention")
FLOAT = ("cumsum", "exp", "linalg_vector_norm", "log", "log_softmax.int", "norm.Scalar", "pow.Tensor_Scalar", "prod")
FLOAT += ("rms_norm", "rsqrt", "softmax.int", "smooth_l1_loss", "sum", "sum.dim_IntList")


MODULE = SimpleNamespace(  # what torch asks of `torch.pretend`
    is_available=lambda: True,
    device_count=lambda: 1,
    manual_seed_all=lambda seed: None,  # random numbers are the CPU's
    get_amp_supported_dtype=lambda: [torch.bfloat16, torch.float16],
    _is_in_bad_fork=lambda: False,
)


class PretendedDevice(TorchDispatchMode):
    """While it is entered, there is a device `DEVICE`.

    Attributes:
        waits: of the host, so far: which function of the package waits, and for what.
        captures: graphs captured so far.
        graph: the one that is captured now.
        pinned: memory of the host that the device reads by itself.
    """

    def __init__(self):
        super().__init__()
        self.waits: list[str] = []
        self.captures = 0
        self.graph: Any = None
        self.pinned: dict[int, Tensor] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in (aten.is_pinned.default, aten._pin_memory.default):
            return self._pin(func, args[0])
        if decomposes(func):  # into others; inference mode asks for such ones
            with self:
                return func.decompose(*args, **kwargs)
        call = Call(func, args, kwargs)
        if not call.on_device:
            return func(*args, **kwargs)
        call.check_devices()
        if what := call.synchronises(self.pinned):
            if self.graph:
                raise DeviceError(f"{place()}: {what}, while a graph is captured")
            self.waits.append(f"{place()}: {what}")
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


@cache
def decomposes(func: Any) -> bool:
    return func._can_decompose()


def register() -> tuple[torch.library.Library, ...]:
    """Tell torch of the device, once; what is returned must be kept."""
    _setup_privateuseone_for_python_backend("pretend", backend_module=MODULE)
    # `torch.tensor(..., device=DEVICE)` then makes a tensor of the host, and moves it, as it does for CUDA.
    torch._C._set_only_lift_cpu_tensors(True)
    others, listed = (torch.library.Library(namespace, "IMPL", AUTOCAST) for namespace in ("_", "aten"))
    others.fallback(torch.library.fallthrough_kernel)
    for names, dtype in ((LOWERED, None), (FLOAT, torch.float32)):
        for name in names:
            listed.impl(name, partial(_autocast, getattr(aten, name.partition(".")[0]), dtype))
    for module in ("torch.optim.optimizer", "torch.utils._foreach_utils"):  # as on CUDA, all weights at once
        import_module(module)._foreach_supported_types.append(Pretended)
    return others, listed


def _autocast(operation: Any, dtype: torch.dtype | None, /, *args: Any, **kwargs: Any) -> Any:
    """Do an operation in a dtype, or in autocast's own."""
    dtype = dtype or torch.get_autocast_dtype("pretend")
    args, kwargs = replace_tensors(lambda x: x.to(dtype) if x.is_floating_point() else x, (args, kwargs))
    with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)):
        return operation(*args, **kwargs)


LIBRARIES = (
    register()
)  # where pytest collects, before anything has a gradient: autograd counts devices when it first runs
