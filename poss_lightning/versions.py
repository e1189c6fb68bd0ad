"""Versions of the package and of what it stands on, read without importing any of it."""

import sys
from importlib.metadata import PackageNotFoundError, version

from poss_lightning import __version__

STACK = ("torch", "lightning", "transformers", "torchmetrics", "datasets", "deepspeed")


def versions() -> dict[str, str]:
    """By name, Python among them; what is not installed is left out (DeepSpeed may be)."""
    numbers = {"poss-lightning": __version__, "python": ".".join(map(str, sys.version_info[:3]))}
    for name in STACK:
        try:
            numbers[name] = version(name)
        except PackageNotFoundError:
            continue
    return numbers
