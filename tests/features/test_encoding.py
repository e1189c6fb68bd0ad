"""Features as bytes: what 8 bits keep, bounded entry by entry."""

import math

import pytest
import torch

from poss_lightning.features.encoding import decode, encode, vector_bytes

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


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


def naive_e4m3() -> torch.Tensor:
    """Every number of e4m3: four bits of exponent with bias 7, three of mantissa; it has no infinity."""
    numbers = [m / 8 * 2.0**-6 for m in range(8)]
    numbers += [(1 + m / 8) * 2.0 ** (e - 7) for e in range(1, 16) for m in range(8) if (e, m) != (15, 7)]
    return torch.tensor([sign * number for number in numbers for sign in (1, -1)], dtype=torch.float64)


def naive_scale(vector: torch.Tensor) -> float:
    return 2.0 ** math.ceil(math.log2(vector.double().abs().max() / 448)) if vector.any() else 1.0


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_entry_becomes_the_nearest_number(dtype):
    for vector in features(dtype):
        grid = naive_e4m3() * naive_scale(vector)
        nearest = (grid - vector.double()[:, None]).abs().amin(1)
        difference = (kept(vector).double() - vector.double()).abs()
        torch.testing.assert_close(difference, nearest, rtol=0, atol=1e-7 if dtype == torch.float16 else 0)


@pytest.mark.parametrize("largest", [448.0, 449.0, 464.0, 1e-30, 3e38])
def test_the_largest_entry_fits_anywhere_between_powers_of_two(largest):
    x = torch.tensor([largest, -largest / 2, largest / 300, 0.0])
    assert kept(x).isfinite().all() and kept(x).equal(kept(kept(x)))
    torch.testing.assert_close(kept(x), x, rtol=1 / 16, atol=0)


@pytest.mark.parametrize("broken", [math.inf, -math.inf, math.nan])
def test_what_is_not_finite_is_not_hidden(broken):
    x = features(torch.bfloat16)
    x[2, 7] = broken
    assert not kept(x)[2].isfinite().any() and kept(x)[[0, 1, 3, 4, 5, 6]].isfinite().all()


def test_codes_are_read_as_torch_reads_them():
    codes = torch.arange(256, dtype=torch.uint8)
    numbers = codes.view(torch.float8_e4m3fn).to(torch.bfloat16)
    found = decode(torch.cat([torch.ones(1).view(torch.uint8), codes]), "float8", torch.bfloat16)
    finite = numbers.isfinite()  # two codes are nan, which encode never leaves beside a finite scale
    assert finite.sum() == 254 and found[finite].equal(numbers[finite]) and found[128].signbit()
