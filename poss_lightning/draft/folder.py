"""A draft's folder: where it is, the names of its files, and what is refused."""

import base64
import pickle
import shlex
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from poss_lightning.files import fetch, read_json
from poss_lightning.terminal import announced, one_line

WEIGHTS, CONFIG = "model.safetensors", "config.json"
TRAINED_ON = "trained_on_64"  # in the header of the weights; "trained_on" had 32 bits a text, too few to tell
SHIPPED = Path(str(files("poss_lightning") / "draft" / "shipped"))  # drafts of the embedded target
OWN, SERVED = "poss_lightning", "PossForCausalLM"  # our key in a published config.json; our plugin's architecture
PUBLISHED = {  # formats of published drafts, by a key or an architecture in config.json
    "speculators_model_type": "speculators",
    "dflash_config": "dflash",
    "DFlashDraftModel": "dflash",
    "draft_vocab_size": "eagle3",
}


def encode_digests(digests: frozenset[int]) -> str:
    """Write eight bytes per number, in base 64."""
    return base64.b64encode(np.array(sorted(digests), "<u8").tobytes()).decode()


def decode_digests(text: str) -> frozenset[int]:
    """Read what `encode_digests` wrote. Raises ValueError for anything else."""
    return frozenset(np.frombuffer(base64.b64decode(text, validate=True), "<u8").tolist())


def shipped() -> list[str]:
    """List the drafts that come with the package, e.g. embedded-hass."""
    return sorted(folder.name for folder in SHIPPED.iterdir())


def local_folder(source: str | Path) -> Path:
    """Return the local folder of that name, or else the folder of the shipped draft."""
    return SHIPPED / source if source in shipped() and not Path(source).is_dir() else Path(source)


def find_draft(source: str | Path) -> Path:
    """Return the folder of a draft: local, shipped, or downloaded from the hub. Raises FileNotFoundError."""
    if (folder := local_folder(source)).exists():
        return folder
    return fetch(str(source), "draft", [CONFIG, WEIGHTS], f", nor a shipped draft: {', '.join(shipped())}")


def check_state(state: Mapping[str, Tensor]) -> None:
    """Raise ValueError for weights that no draft can use: not real, not finite in float32, or all zeros in a matrix."""
    for name, value in state.items():
        kind = "whole" if name == "vocabulary" else "real"
        if not (value.is_floating_point() if kind == "real" else value.dtype in (torch.int32, torch.int64)):
            raise ValueError(f"{name} is {value.dtype}; it must be {kind} numbers")
        if wrong := int((~value.float().isfinite()).sum()):
            raise ValueError(f"{name} has {wrong} of {value.numel()} numbers that are infinite or not a number")
        if value.ndim > 1 and not value.float().any():
            raise ValueError(f"{name} is all zeros: its file is damaged, download it again")


def load_checkpoint(path: Path) -> dict[str, Any]:
    """Load a training checkpoint: only tensors and plain values, so no code in the file runs.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is not a checkpoint of `poss fit`.
    """
    if not path.exists():
        raise FileNotFoundError(f"{path}: no such file")
    try:
        with announced(f"reading {path}"):
            stored = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (RuntimeError, pickle.UnpicklingError, EOFError, OSError) as error:
        raise ValueError(f"{path} is not a complete checkpoint of plain tensors: {one_line(error)}") from error
    for name in ("state_dict", "draft"):
        if not isinstance(stored, dict) or name not in stored:
            raise ValueError(f"{path} has no {name!r}: it is not a checkpoint of `poss fit`")
    return stored


def published_format(stored: dict[str, Any]) -> tuple[str, str]:
    """Return the format of a published draft, and what in its config.json says so; "eagle" where nothing does."""
    names, ours = stored.get("architectures"), stored.get(OWN)
    names = names if isinstance(names, list) else []
    if SERVED in names and ours:  # as our plugin for vLLM loads it
        return ("speed" if ours.get("kind") == "eagle3" else "poss"), SERVED
    mark = next((mark for mark in PUBLISHED if mark in (*stored, *names)), "")
    return PUBLISHED.get(mark, "eagle"), mark or next(iter(names), "architectures")


def check_draft(path: Path, source: str | Path) -> None:
    """Raise ValueError for what is not a draft, where it is known what to give; `source` is what the user named."""
    if path.is_file():
        raise ValueError(
            f"{source} is a file; a draft is a folder with {CONFIG} and {WEIGHTS}, or a checkpoint, *.ckpt"
        )
    if (path / CONFIG).is_file():
        return _check_config(read_json(path / CONFIG), path, source)
    patterns = ("draft-best", "draft-last", "*/draft-best", "last.ckpt", "checkpoints/last.ckpt", "*.ckpt")
    if drafts := [draft for pattern in patterns for draft in sorted(path.glob(pattern))]:
        raise ValueError(f"{source} is a training's folder; its draft is {drafts[0]}")


def _check_config(stored: dict[str, Any], folder: Path, source: str | Path) -> None:
    """Raise ValueError for the config.json of a model, or of a draft in a published format."""
    if "allocation" in stored or not {"architectures", "model_type"} & stored.keys():
        return
    kind, mark = published_format(stored)
    is_model = (stored.get("num_hidden_layers") or 1) > 1 or (folder / "tokenizer.json").is_file()
    if kind == "eagle" and OWN not in stored and is_model:
        raise ValueError(f"{source} is a whole model: it may be the target, and a draft is trained for it")
    convert = f"poss convert {shlex.quote(str(source))} DRAFT --input_format {kind} --target TARGET"
    raise ValueError(f"{source} is a draft in a published format (its config.json has {mark}); convert it: {convert}")
