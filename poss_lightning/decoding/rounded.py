"""A draft's head in 8 bits. On a CPU reading the head is most of a draft step, and a guess need not be exact.

Features and the rows of the head are rounded to whole numbers from -127 to 127, each row with a scale of its own. Sums
of their products are exact, so no logit depends on what stands beside it in a batch. Judging never passes here: what is
said stays the target's own.
"""

from functools import cache

import torch
from torch import Tensor

MOST = 127  # of 8 bits with a sign
# Whether this CPU multiplies bytes as fast as it reads them, and this torch knows how.
BYTES = getattr(torch.cpu, "_is_vnni_supported", bool)() and torch.backends.mkldnn.is_available()
ROWS = 4096  # of a head, rounded at once: no second one in float32


def pays(head: Tensor) -> bool:
    """Whether a head is read sooner in 8 bits: in 16 bits on a CPU that multiplies bytes."""
    return BYTES and head.device.type == "cpu" and head.itemsize == 2 and exact()


@cache
def exact() -> bool:
    """Whether sums of products are exact here: with instructions of before VNNI they are cut to 16 bits."""
    ones = torch.ones(1, 64)
    return abs(RoundedHead(ones)(ones, ones).item() - 64) < 0.01


class RoundedHead:
    """Takes the place of `project` for one head: features (..., D) -> logits (..., V) in float32.

    Args:
        head: (V, D)
    """

    @torch.no_grad()  # a head of the draft's own could be trained
    def __init__(self, head: Tensor):
        rounded, scales = zip(*(whole(rows) for rows in head.split(ROWS)), strict=True)
        self.scale = torch.cat(scales).flatten()  # (V,)
        self.packed = torch.ops.onednn.qlinear_prepack(torch.cat(rounded), None)
        self.zeros = torch.zeros(len(head), dtype=torch.int32)

    def __call__(self, features: Tensor, head: Tensor) -> Tensor:
        """As `project` is called; `head` is the one that was rounded."""
        read, scale = whole(features.flatten(0, -2))
        unsigned = (read.to(torch.int16) + MOST + 1).to(torch.uint8)  # as the instruction wants them
        logits = torch.ops.onednn.qlinear_pointwise(
            unsigned, 1.0, MOST + 1, self.packed, self.scale, self.zeros, None, 1.0, 0, torch.float32, "none", [], ""
        )
        return logits.mul_(scale).unflatten(0, features.shape[:-1])


def whole(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Rows (N, D) as whole numbers in int8, and the scales (N, 1) in float32 by which they are what they were."""
    scale = rows.float().abs().amax(-1, keepdim=True) / MOST
    return (rows / scale.clamp(min=torch.finfo(torch.float32).tiny)).round().to(torch.int8), scale
