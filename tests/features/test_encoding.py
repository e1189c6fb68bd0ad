"""Features as bytes: what 8 bits keep, bounded entry by entry."""

import math

import pytest
import torch

from poss_lightning.features.manifest import decode, encode, vector_bytes

CODES = torch.arange(256, dtype=torch.uint8)
E4M3 = CODES.view(torch.float8_e4m3fn).double()  # two codes are nan, which encode never leaves beside a finite scale


def features(dtype: torch.dtype) -> torch.Tensor:
    """(7, 48): vectors of very different size, with an entry far larger than the rest; the first is zero."""
    drawn = torch.randn(7, 48, generator=torch.Generator().manual_seed(0)) * torch.logspace(-3, 2, 7)[:, None]
    drawn[:, 5] *= 200
    drawn[0], drawn[1, ::3] = 0, 0
    return drawn.clamp(-60_000, 60_000).to(dtype)


def kept(x: torch.Tensor) -> torch.Tensor:
    raw = encode(x, "float8")
    assert raw.dtype == torch.uint8 and raw.shape == (*x.shape[:-1], vector_bytes(x.shape[-1], x.dtype, "float8"))
    return decode(raw, "float8", x.dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_every_entry_becomes_the_nearest_number(dtype):
    for vector in features(dtype):
        scale = 2.0 ** math.ceil(math.log2(vector.double().abs().max() / 448)) if vector.any() else 1.0
        grid = E4M3[E4M3.isfinite()] * scale
        nearest = (grid - vector.double()[:, None]).abs().amin(1)
        difference = (kept(vector).double() - vector.double()).abs()
        smallest = torch.finfo(dtype).tiny * torch.finfo(dtype).eps
        assert ((difference - nearest).abs() <= smallest).all()


@pytest.mark.parametrize("largest", [448.0, 449.0, 464.0, 1e-30, 3e38])
def test_the_largest_entry_fits_anywhere_between_powers_of_two(largest):
    x = torch.tensor([largest, -largest / 2, largest / 300, 0.0])
    assert kept(x).isfinite().all() and kept(x).equal(kept(kept(x)))
    assert ((kept(x) - x).abs() <= torch.finfo(torch.float8_e4m3fn).eps / 2 * x.abs()).all()


@pytest.mark.parametrize("broken", [math.inf, -math.inf, math.nan])
def test_what_is_not_finite_is_not_hidden(broken):
    x = features(torch.bfloat16)
    x[2, 7] = broken
    assert not kept(x)[2].isfinite().any() and kept(x)[[0, 1, 3, 4, 5, 6]].isfinite().all()


def test_codes_are_read_as_torch_reads_them():
    found = decode(torch.cat([torch.ones(1).view(torch.uint8), CODES]), "float8", torch.bfloat16)
    finite = E4M3.isfinite()
    assert finite.sum() == 254 and found[finite].double().equal(E4M3[finite]) and found[128].signbit()
