"""A draft's folder: where it is, the names of its files, and which weights are refused."""

import base64
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from poss_lightning.files import fetch

WEIGHTS, CONFIG = "model.safetensors", "config.json"
TRAINED_ON = "trained_on_64"  # in the header of the weights; "trained_on" had 32 bits a text, too few to tell
SHIPPED = Path(str(files("poss_lightning") / "draft" / "shipped"))  # drafts of the embedded target


def encode_digests(digests: frozenset[int]) -> str:
    """Eight bytes per number, in base 64."""
    return base64.b64encode(np.array(sorted(digests), "<u8").tobytes()).decode()


def decode_digests(text: str) -> frozenset[int]:
    """What `encode_digests` wrote. Raises ValueError for anything else."""
    return frozenset(np.frombuffer(base64.b64decode(text, validate=True), "<u8").tolist())


def shipped() -> list[str]:
    """Names of the drafts that come with the package, e.g. embedded-hass."""
    return sorted(folder.name for folder in SHIPPED.iterdir()) if SHIPPED.is_dir() else []


def local_folder(source: str | Path) -> Path:
    """The local folder of that name, or else the folder of the shipped draft."""
    return SHIPPED / source if source in shipped() and not Path(source).is_dir() else Path(source)


def find_draft(source: str | Path) -> Path:
    """The folder of a draft: local, shipped, or downloaded from the hub. Raises FileNotFoundError."""
    if (folder := local_folder(source)).is_dir():
        return folder
    known = ", ".join(shipped()) or "none"
    return fetch(str(source), "draft", [CONFIG, WEIGHTS], f", nor a shipped draft: {known}")


def check_state(state: Mapping[str, Tensor]) -> None:
    """Raise ValueError for weights that are not real numbers, or not finite in float32, which no draft can use."""
    for name, value in state.items():
        whole = name == "vocabulary"
        if not (value.dtype in (torch.int32, torch.int64) if whole else value.is_floating_point()):
            raise ValueError(f"{name} is {value.dtype}; it must be {'whole' if whole else 'real'} numbers")
        if wrong := int((~value.float().isfinite()).sum()):
            raise ValueError(f"{name} has {wrong} of {value.numel()} numbers that are infinite or not a number")
