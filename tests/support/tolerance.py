"""How far two computations of one number may be apart: what rounding explains, whatever CPU or GPU rounds."""

from collections.abc import Mapping
from typing import Any

import torch

LAYER = 8  # sums of a decoder layer, one after another: norm, keys, scores, softmax, values, output, gate, down


def tolerance(terms: int = 64, sums: int = 1, dtype: torch.dtype = torch.float32) -> float:
    """Return how far two computations may be apart, as a share of what is summed (Σ|x||w| + |b| of a product).

    A sum of n terms rounds n times, up or down, by eps/2 of what is summed at most: a random walk, which rarely goes
    beyond 4 √n eps/2 (Higham and Mary, 2019). Two computations differ by twice as much. Sums one after another, as
    layers are that keep the size of what passes them, make one longer walk. Types narrower than float32 are summed in
    float32, and each sum is rounded once more at its end, by eps/2 of `dtype`:

        4 √(terms · sums) eps(float32) + √sums eps(dtype), and with eps(float64) for float64

    Args:
        terms: of the longest sum; 64 is as wide as layers of tiny targets are.
        sums: one after another between what both were given and what is compared. A backward has twice as many.
        dtype: the narrowest in which one of the two computed.
    """
    eps, eps_of_sums = (torch.finfo(each).eps for each in (dtype, dtype if dtype == torch.float64 else torch.float32))
    return 4 * (terms * sums) ** 0.5 * eps_of_sums + sums**0.5 * eps


def tolerance_of_adamw(terms: int = 64, sums: int = 1, dtype: torch.dtype = torch.float32) -> float:
    """Return how far apart weights may be after steps of AdamW, as a share of how far they moved (norms).

    AdamW divides a gradient by its own size. Where that is below the gradient's error, a share ε of the usual gradient,
    a step goes either way: for a share ε of the weights it differs by twice its length, which makes 2 √ε of the norm.
    A norm averages, and the usual error is a quarter of the rarest, so 2 √ε is √tolerance.
    """
    return tolerance(terms, sums, dtype) ** 0.5


def close(
    found: Any, expected: Any, terms: int = 64, sums: int = 1, dtype: torch.dtype | None = None, of: Any = None
) -> bool:
    """Return whether two numbers, tensors, or lists or dicts of them, are equal up to `tolerance`.

    Args:
        dtype: by default that of the narrower tensor; float64 for numbers of Python.
        of: what is summed, a number for each that is compared or one for all; by default the largest of `expected`.
    """
    if isinstance(expected, Mapping):
        return found.keys() == expected.keys() and all(
            close(found[name], value, terms, sums, dtype, of) for name, value in expected.items()
        )
    if isinstance(expected, list | tuple):
        pairs = zip(found, expected, strict=True)
        return all(close(one, other, terms, sums, dtype, of) for one, other in pairs)
    tensors = [torch.as_tensor(x, dtype=None if hasattr(x, "dtype") else torch.float64) for x in (found, expected)]
    floats = [x.dtype for x in tensors if x.is_floating_point()] or [torch.float64]
    dtype = dtype or max(floats, key=lambda each: torch.finfo(each).eps)
    ours, theirs = (x.detach().cpu().double() for x in tensors)
    assert ours.shape == theirs.shape, f"shapes are {[*ours.shape]} and {[*theirs.shape]}"
    size = max(theirs[theirs.isfinite()].abs().tolist(), default=0) if of is None else of
    apart = torch.where(ours == theirs, 0, (ours - theirs).abs() / (tolerance(terms, sums, dtype) * size))
    if far := not (apart <= 1).all():  # and where one is not a number
        print(f"{int((apart > 1).sum())} of {apart.numel()} are too far apart, up to {apart.max():.3g} tolerances")
    return not far
