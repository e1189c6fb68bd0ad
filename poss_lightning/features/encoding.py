"""Features as bytes: exactly as the target computed them, or in 8 bits with one scale per vector.

`float8` is e4m3 and not int8: a few dimensions of a hidden state are some 20 times larger than the rest, and would
leave the median entry about six of int8's 127 levels. A floating-point number keeps its relative precision.
"""

from typing import Literal

import torch
from torch import Tensor

Stored = Literal["exact", "float8"]
SCALE_BYTES = 4  # a float32 before the codes of its vector


def vector_bytes(width: int, dtype: torch.dtype, stored: str) -> int:
    """Return the bytes of one vector of `width` numbers of the target's dtype."""
    return width * dtype.itemsize if stored == "exact" else SCALE_BYTES + width


def encode(features: Tensor, stored: str) -> Tensor:
    """Encode (..., D) as (..., vector_bytes) uint8. In 8 bits, one inf or nan makes its whole vector non-finite."""
    if stored == "exact":
        return features.contiguous().view(torch.uint8)
    scales = _scales(features)  # (..., 1)
    codes = (features / scales).to(torch.float8_e4m3fn)  # (..., D)
    return torch.cat([scales.view(torch.uint8), codes.view(torch.uint8)], -1)


def decode(raw: Tensor, stored: str, dtype: torch.dtype) -> Tensor:
    """Decode (..., vector_bytes) uint8 to (..., D) of `dtype`; exact features are a view of `raw`."""
    if stored == "exact":
        return raw.view(dtype)
    scales = raw[..., :SCALE_BYTES].contiguous().view(torch.float32)  # (..., 1)
    wide = torch.float32 if dtype == torch.float16 else dtype  # a scale may lie below the smallest float16
    return _numbers(raw[..., SCALE_BYTES:]).to(wide).mul_(scales.to(wide)).to(dtype)


def _scales(features: Tensor) -> Tensor:
    """Return absmax / the largest e4m3 number, up to a power of two so products are exact: (..., D) -> (..., 1)."""
    largest = features.abs().amax(-1, keepdim=True).float()
    quotient = (largest / torch.finfo(torch.float8_e4m3fn).max).clamp(min=torch.finfo(torch.float32).tiny)
    power = (quotient.view(torch.int32) + 0x7FFFFF & 0x7F800000).view(torch.float32)  # the bits of the exponent alone
    return power.where(largest.isfinite(), torch.inf)


def _numbers(codes: Tensor) -> Tensor:
    """Convert e4m3 (uint8) to bfloat16, exactly, and on a CPU some ten times faster than torch does.

    The bits move to their places in bfloat16, s...eeee mmm....; the factor is the difference of the biases.
    """
    bits = codes.view(torch.int8).to(torch.int16)  # the sign fills the upper byte
    bits.bitwise_left_shift_(4).bitwise_and_(0x07F0 - 0x8000)
    return bits.view(torch.bfloat16).mul_(2.0 ** (127 - 7))
