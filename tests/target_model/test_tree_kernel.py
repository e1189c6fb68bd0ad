"""The kernels of exact decoding on a GPU, in Triton's interpreter on the CPU; on a GPU as they are.

Run by hand where triton is not installed: `pip install triton 'numpy<2.4'`.
"""

import os
from importlib.metadata import version

import pytest
import torch

from poss_lightning.target_model.masks import find_paths
from tests.support import naive
from tests.support.tolerance import close
from tests.support.trees import random_tree

DEVICE = "cuda" if os.environ.get("POSS_DEVICE", "cpu") != "cpu" else "cpu"
triton = pytest.importorskip("triton", reason="triton is not installed")
if DEVICE == "cpu" and version("numpy") >= "2.4":
    pytest.skip("triton's interpreter needs numpy below 2.4", allow_module_level=True)
kernel = pytest.importorskip("poss_lightning.target_model.tree_kernel")

CASES = [  # heads, key heads, width, lengths of two texts, window: trees begin in tiles, at their borders, at a split's
    (4, 2, 16, [70, 3], None),
    (4, 2, 16, [5, 250], None),
    (6, 2, 16, [255, 64], None),
    (4, 1, 32, [256, 318], 40),
    (3, 1, 24, [190, 300], 100),
]
if DEVICE == "cuda":
    CASES += [(32, 8, 128, [length, 7900], window) for length in (1, 63, 250, 510, 4000) for window in (None, 1000)]


@pytest.fixture(autouse=True)
def rows_that_ignore_each_other(monkeypatch):
    """In the interpreter, a product as tensor cores make it: numpy's depends on the number of rows."""
    if DEVICE == "cuda":
        return
    import numpy as np
    from triton.runtime import interpreter

    def create_dot(self, a, b, total, *_):
        x, y = a.data.astype(np.float32), np.ascontiguousarray(b.data.astype(np.float32).T)
        out = total.data.copy()
        for i in range(0, x.shape[1], 16):
            out = out + (x[:, None, i : i + 16] * y[None, :, i : i + 16]).sum(-1, dtype=np.float32)
        return interpreter.TensorHandle(out.astype(np.float32), total.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)


@pytest.mark.parametrize(("heads", "shared", "width", "lengths", "window"), CASES, ids=str)
def test_a_node_has_the_bits_of_a_plain_step_and_is_as_defined(heads, shared, width, lengths, window):
    torch.manual_seed(0)
    nodes, extent, dtype = 9, 8192 if DEVICE == "cuda" else 512, torch.bfloat16 if DEVICE == "cuda" else torch.float32
    ancestors = torch.tensor([naive.ancestor_mask(random_tree(seed, nodes)[1]) for seed in range(2)])
    queries = torch.randn(2, nodes, heads, width, dtype=dtype).transpose(1, 2)
    keys, values = torch.randn(2, 2, extent, shared, width, dtype=dtype).transpose(2, 3)

    def attend(q, k, v, length, above):
        given = (x.to(DEVICE) for x in (q, k, v, torch.tensor(length), *find_paths(above)))
        return kernel.tree_attention(*given, window=window).cpu()

    found = attend(queries, keys, values, lengths, ancestors)
    for row in range(2):
        for node in (0, 4, 8):
            path = ancestors[row, node].nonzero()[:, 0]
            place = lengths[row] + len(path) - 1
            in_order = torch.arange(extent)
            in_order[lengths[row] : place + 1] = lengths[row] + path
            k, v = (x[row : row + 1, :, in_order] for x in (keys, values))
            k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (k, v))  # slot-major, as a cache
            plain = attend(queries[row : row + 1, :, node : node + 1], k, v, [place], torch.ones(1, 1, 1) > 0)
            assert torch.equal(plain[0, 0], found[row, node])
            seen = slice(max(0, place + 1 - window) if window else 0, place + 1)
            k, v = (x[0, :, seen].double().transpose(0, 1) for x in (k, v))
            defined = naive.attention(queries[row, :, node].double(), list(k), list(v))
            assert close(found[row, node], defined, len(k), sums=2, of=v.abs().max())
