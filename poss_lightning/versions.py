"""Versions of the package and of what it is built on, read without importing any of it."""

import sys
from importlib.metadata import PackageNotFoundError, version

from poss_lightning import __version__

STACK = ("torch", "lightning", "transformers", "torchmetrics", "datasets", "deepspeed")


def versions() -> dict[str, str]:
    """Versions by name, with Python's; packages that are not installed, as DeepSpeed may not be, are left out."""
    numbers = {"poss-lightning": __version__, "python": ".".join(map(str, sys.version_info[:3]))}
    for name in STACK:
        try:
            numbers[name] = version(name)
        except PackageNotFoundError:
            continue
    return numbers
