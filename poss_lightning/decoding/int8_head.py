"""A draft's head in 8 bits. On a CPU the head takes most of a draft step, and a proposal need not be exact.

Features and the rows of the head become whole numbers, each row with a scale of its own. Sums of their products are
exact, so no logit depends on what stands beside it in a batch. Verification never passes here: the output stays the
target's own.
"""

from functools import cache, partial

import torch
from torch import Tensor
from torch.nn.functional import linear

from poss_lightning.machine import best_seconds
from poss_lightning.target.spec import Product

LEVELS = 127  # of a feature, with a sign
# Of a weight. CPUs without VNNI add two products in 16 bits, which 2 * 255 * 64 still fits; the instruction takes
# features without a sign, so the largest is 255.
WEIGHT_LEVELS = (127, 64)
CHUNK = 4096  # rows of a head that are quantized at once: no second head in float32
FASTER = 1.2  # a head in 8 bits must be so many times faster to be taken


class Int8Head:
    """Takes the place of `linear` for one head: features (..., D) -> logits (..., V) in float32.

    Args:
        head: (V, D)
        levels: of a weight, with a sign; see `exact_levels`.
    """

    @torch.no_grad()  # a head of the draft's own could be trained
    def __init__(self, head: Tensor, levels: int):
        rows, scales = zip(*(quantize_rows(part, levels) for part in head.split(CHUNK)), strict=True)
        self.scale = torch.cat(scales).flatten()  # (V,)
        self.packed = torch.ops.onednn.qlinear_prepack(torch.cat(rows), None)
        self.zeros = torch.zeros(len(head), dtype=torch.int32)

    def __call__(self, features: Tensor, head: Tensor) -> Tensor:
        """As `linear` is called; `head` is the one that was quantized."""
        rows, scale = quantize_rows(features.flatten(0, -2), LEVELS)
        unsigned = (rows.to(torch.int16) + LEVELS + 1).to(torch.uint8)
        logits = torch.ops.onednn.qlinear_pointwise(
            unsigned, 1.0, LEVELS + 1, self.packed, self.scale, self.zeros, None, 1.0, 0, torch.float32, "none", [], ""
        )
        return logits.mul_(scale).unflatten(0, features.shape[:-1])


def quantize_rows(rows: Tensor, levels: int) -> tuple[Tensor, Tensor]:
    """Rows (N, D) as whole numbers of at most `levels` in int8, and the scales (N, 1) in float32 that undo it."""
    scale = rows.float().abs().amax(-1, keepdim=True) / levels
    return (rows / scale.clamp(min=torch.finfo(torch.float32).tiny)).round().to(torch.int8), scale


@cache
def exact_levels() -> int | None:
    """The most levels of a weight whose sums are exact on this CPU, tried on the largest sums.

    None where no sums are, or where this torch has no such product.
    """
    if not torch.backends.mkldnn.is_available():
        return None
    most, least = torch.ones(2, 64), -torch.ones(2, 64)
    for levels in WEIGHT_LEVELS:
        try:
            sums = [Int8Head(sign, levels)(most, sign) for sign in (most, least)]
        except (AttributeError, RuntimeError):
            return None
        if all((total - sign * 64).abs().max() < 0.01 for total, sign in zip(sums, (1, -1), strict=True)):
            return levels
    return None


@torch.inference_mode()
def choose_product(head: Tensor, int8: bool | None, rows: int = 10) -> Product:
    """`linear`, or the head (V, D) in 8 bits: as asked, or where it is timed to be faster.

    Raises:
        ValueError: 8 bits are asked for, but the head is not on a CPU, or this CPU has no exact products of bytes.
    """
    levels = exact_levels() if int8 is not False and head.device.type == "cpu" else None
    if levels is None:
        if int8:
            raise ValueError(f"int8_head is true; it is for CPUs with exact products of bytes, not this {head.device}")
        return linear
    int8_product = Int8Head(head, levels)
    if int8:
        return int8_product
    features = torch.ones(rows, head.shape[1], dtype=head.dtype)
    seconds = best_seconds({product: partial(product, features, head) for product in (linear, int8_product)})
    return int8_product if FASTER * seconds[int8_product] < seconds[linear] else linear
