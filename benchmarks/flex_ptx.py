"""The kernels that FlexAttention becomes on a GPU, compiled here without one: `python -m benchmarks.flex_ptx sm_90`.

It needs torch built for CUDA, and Triton, but neither a device nor a driver: `make flex-ptx`. The block of the unroll
runs on the CPU with the sizes of a target. Every graph that dynamo makes of it is moved to `cuda`, as a graph, and
inductor and Triton compile that to PTX and to a cubin. The properties of the device are made up; nothing is timed.
"""

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.nn.attention import flex_attention
from torch.utils._pytree import tree_map

from poss_lightning.draft import attention

SHAPES = {"Llama-3-8B": (32, 8, 128), "GQA, d 64": (32, 8, 64), "SmolLM2-135M": (9, 3, 64)}  # H, kv heads, d
LENGTHS = ([300], [1000], [90, 30])  # of conversations; the last row is shorter than two blocks
MULTIPROCESSORS = {"sm_90": 132, "sm_80": 108}  # H100, A100
GPU = torch.device("cuda", 0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("arch", choices=MULTIPROCESSORS)
    arch = parser.parse_args().arch
    try:
        import triton
    except ImportError:
        sys.exit(f"flex_ptx: torch {torch.__version__} has no Triton; use torch built for CUDA: make flex-ptx")
    print(f"torch {torch.__version__}, Triton {triton.__version__}, {arch}")
    for name, (heads, kv_heads, head_dim) in SHAPES.items():
        torch._dynamo.reset()
        frames, kernels = compile_block(arch, heads, kv_heads, head_dim)
        print(
            f"\n{name}: H {heads}, kv heads {kv_heads}, d {head_dim}: {frames} frames, {len(kernels)} kernels compiled"
        )
        for kernel in {
            kernel.metadata.name: kernel for kernel in kernels
        }.values():  # of those to choose from, the last
            print(f"  {describe(kernel)}")


def compile_block(arch: str, heads: int, kv_heads: int, head_dim: int) -> tuple[int, list]:
    """How many frames dynamo compiled over all `LENGTHS`, forward and backward, and the kernels of Triton in them."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._inductor.compile_fx import compile_fx_inner, select_decomp_table

    graphs, kernels = [], []

    def compile_for_gpu(graph: GraphModule, inputs: list, **kwargs):
        compile_fx_inner(*move_to_gpu(graph, inputs), **kwargs)
        return torch._functorch.aot_autograd.make_boxed_func(graph.forward)  # what runs stays on the CPU

    def backend(graph: GraphModule, inputs: list):
        graphs.append(graph)
        make = aot_autograd(
            fw_compiler=compile_for_gpu, bw_compiler=compile_for_gpu, decompositions=select_decomp_table()
        )
        return make(graph, inputs)

    def compiled(function):
        return torch.compile(function, dynamic=True, fullgraph=True, backend=backend)

    with pretended_gpu(arch, kernels), patch.object(attention, "_compiled", compiled):
        for skip, lengths in enumerate(LENGTHS):
            count = sum(lengths)
            positions = torch.cat([torch.arange(length) for length in lengths])[None]
            queries, keys, values = (
                torch.randn(1, n, count, head_dim, dtype=torch.bfloat16, requires_grad=True)
                for n in (heads, kv_heads, kv_heads)
            )
            packing = attention.Packing([lengths], positions)
            out, norm = attention.flex_block(queries, keys, values, skip, packing)
            (out.float().sum() + norm.sum()).backward()
    return len(graphs), kernels


def move_to_gpu(graph: GraphModule, inputs: list) -> tuple[GraphModule, list]:
    """The same graph and fake inputs, on `GPU`."""

    def move(x):
        if isinstance(x, torch.device):
            return GPU
        if not isinstance(x, Tensor):
            return x
        with x.fake_mode:  # pyright: ignore[reportAttributeAccessIssue]
            return torch.empty_strided(x.size(), x.stride(), dtype=x.dtype, device=GPU)

    graph = deepcopy(graph)
    for part in graph.modules():  # the masks are graphs of their own
        if isinstance(part, GraphModule):
            for node in part.graph.nodes:
                node.meta |= {
                    key: tree_map(move, node.meta[key]) for key in ("val", "example_value") & node.meta.keys()
                }
                node.args, node.kwargs = tree_map(move, node.args), tree_map(move, node.kwargs)
            part.recompile()
    return graph, [move(x) for x in inputs]


@contextmanager
def pretended_gpu(arch: str, kernels: list) -> Iterator[None]:
    """Inductor and Triton find a GPU of that architecture; what they compile goes to `kernels`, and is not loaded."""
    import triton
    from torch._dynamo.device_interface import CudaInterface
    from torch._inductor import config
    from torch._inductor.runtime import triton_helpers, triton_heuristics
    from triton.backends.compiler import GPUTarget

    number = int(arch.removeprefix("sm_"))
    properties = SimpleNamespace(
        name=arch,
        major=number // 10,
        minor=number % 10,
        multi_processor_count=MULTIPROCESSORS[arch],
        regs_per_multiprocessor=65536,
        max_threads_per_multi_processor=2048,
        max_threads_per_block=1024,
        warp_size=32,
    )
    device = {"get_device_properties": properties, "current_device": 0, "device_count": 1, "is_bf16_supported": True}
    answers = [
        (torch.cuda, device | {"get_device_capability": divmod(number, 10)}),
        (CudaInterface, device | {"is_available": True, "get_compute_capability": number, "get_raw_stream": 0}),
        (CudaInterface, {"is_triton_capable": True, "raise_if_triton_unavailable": None}),
        (CudaInterface.Worker, {"get_device_properties": properties}),
        (triton_helpers, {"set_driver_to_gpu": None}),
        (triton_heuristics.CachingAutotuner, {"_make_launchers": None}),
        (flex_attention, {"_validate_device": None}),  # which refuses gradients on a CPU
    ]
    compile_kernel = triton.compile

    def record(*args, **kwargs):
        kernels.append(compile_kernel(*args, **kwargs))
        return kernels[-1]

    driver = SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", number, 32), get_current_device=lambda: 0, utils=None
    )
    triton.runtime.driver.set_active(driver)
    with ExitStack() as stack, tempfile.TemporaryDirectory() as cache:
        stack.enter_context(patch.dict("os.environ", TORCHINDUCTOR_CACHE_DIR=cache, TRITON_CACHE_DIR=cache))
        stack.enter_context(config.patch(compile_threads=1, fx_graph_cache=False, use_static_cuda_launcher=False))
        stack.enter_context(patch.object(triton, "compile", record))
        for place, values in answers:
            for name, value in values.items():
                stack.enter_context(patch.object(place, name, lambda *_, value=value, **__: value))
        yield


def describe(kernel) -> str:
    """Name, sizes of PTX, and what a block of threads takes."""
    from triton.backends import nvidia

    tool, name = Path(nvidia.__file__).parent / "bin/cuobjdump", kernel.metadata.name
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(kernel.asm["cubin"])
        cubin.flush()
        usage = subprocess.run([tool, "-res-usage", cubin.name], capture_output=True, text=True, check=True).stdout
    counts = dict(part.split(":")[:2] for part in usage.split() if ":" in part and part.split(":")[1].isdigit())
    return (
        f"{name}: {len(kernel.asm['ptx'])} bytes of PTX, {counts['REG']} registers, {counts['STACK']} bytes of stack, "
        f"{kernel.metadata.shared} bytes shared, {kernel.metadata.num_warps} warps"
    )


if __name__ == "__main__":
    main()
