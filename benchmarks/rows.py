"""Which operations of this CPU give a row different bits beside other rows: `python -m benchmarks.rows`.

Plain decoding reads a token alone, drafted decoding beside others. Both have the same bits where every operation gives
a row the bits that it has among `ROWS`, whatever their number.
"""

import os
from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.nn.functional import linear, rms_norm, scaled_dot_product_attention, silu

from poss_lightning.prepack import Prepacked, can_prepack

ROWS, COUNTS = 96, (1, 2, 3, 4, 5, 8, 12, 16, 17, 24, 31, 32, 33, 48, 60, 64, 65, 80, 95)
SHAPES = ((576, 576), (192, 576), (1536, 576), (576, 1536), (49152, 576))  # the embedded target's weights (N, K)
HEADS, CONTEXT, WIDTH = 3, 512, 64


def counts_that_differ(operation: Callable[..., Tensor], *rows: Tensor) -> list[int]:
    """Return how many of the rows make a row of the result differ from that among all rows."""
    every = operation(*rows)
    return [n for n in COUNTS if not operation(*(x[:n].clone() for x in rows)).equal(every[:n])]


def products(dtype: torch.dtype) -> Iterator[tuple[str, list[int]]]:
    for shape in SHAPES:
        weight, x = torch.randn(shape).to(dtype) * 0.05, torch.randn(ROWS, shape[1]).to(dtype)
        yield f"linear {shape}", counts_that_differ(lambda x, weight=weight: linear(x, weight), x)
        if can_prepack(dtype):
            yield f"prepacked {shape}", counts_that_differ(Prepacked(weight), x)


def others(dtype: torch.dtype) -> Iterator[tuple[str, list[int]]]:
    x, weight = torch.randn(ROWS, 576).to(dtype), torch.randn(576).to(dtype)
    functions = {
        "rms_norm": lambda x: rms_norm(x, (576,), weight, 1e-5),
        "mean of squares": lambda x: x.float().square().mean(-1),
        "silu": silu,
        "cos": lambda x: (100 * x.float()).cos(),
        "exp": torch.exp,
        "softmax": lambda x: x.float().softmax(-1),
        "log_softmax": lambda x: x.float().log_softmax(-1),
    }
    for name, function in functions.items():
        yield name, counts_that_differ(function, x)


def attention(dtype: torch.dtype) -> Iterator[tuple[str, list[int]]]:
    """Of texts beside others, of nodes beside others, and of one text with other numbers or more of them hidden."""
    queries, keys, values = (torch.randn(ROWS, HEADS, n, WIDTH).to(dtype) for n in (HEADS, CONTEXT, CONTEXT))
    seen = torch.arange(CONTEXT) < 100

    def attend(queries: Tensor, keys: Tensor, values: Tensor, seen: Tensor = seen) -> Tensor:
        return scaled_dot_product_attention(queries, keys, values, attn_mask=seen.expand(len(queries), 1, 1, -1))

    def nodes(queries: Tensor) -> Tensor:
        """Return the output of rows as nodes of one text."""
        return attend(queries[:, :, 0].transpose(0, 1)[None], keys[:1], values[:1])[0].transpose(0, 1)

    yield "attention of texts", counts_that_differ(attend, queries, keys, values)
    yield "attention of nodes", counts_that_differ(nodes, queries)
    one, hidden = (queries[:1], keys[:1], values[:1]), [x[:1].clone() for x in (keys, values)]
    for x in hidden:
        x[:, :, 100:] = torch.randn(CONTEXT - 100, WIDTH)
    expected = attend(*one)
    yield "attention, other numbers hidden", [1] * (not attend(one[0], *hidden).equal(expected))
    short = attend(one[0], *(x[:, :, :128] for x in one[1:]), seen[:128])
    yield "attention, fewer numbers hidden", [1] * (not short.equal(expected))


@torch.inference_mode()
def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    limit = os.environ.get("ONEDNN_MAX_CPU_ISA", "no limit")
    print(f"torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}, oneDNN: {limit}; of {ROWS} rows")
    for dtype in (torch.bfloat16, torch.float32):
        for part in (products, others, attention):
            for name, counts in part(dtype):
                print(f"{dtype!s:15} {name:32} {f'differs at {counts}' if counts else 'same'}")


if __name__ == "__main__":
    main()
