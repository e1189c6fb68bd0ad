"""Files of published drafts: read from a folder or the hub, written whole. Nothing in them is ever run."""

import json
import pickle
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from poss_lightning.draft.specialists import CONFIG, WEIGHTS
from poss_lightning.files import atomic

PICKLED = "pytorch_model.bin"
FILES = [CONFIG, "model*.safetensors*", "pytorch_model*.bin*"]  # of a published draft


def read_config(folder: Path) -> dict[str, Any]:
    """What a folder's config.json says.

    Raises:
        FileNotFoundError: there is none.
        ValueError: it is no JSON object, or of vLLM's speculators format, whose sizes and switches stand elsewhere.
    """
    path = folder / CONFIG
    if not path.is_file():
        raise FileNotFoundError(f"{folder} has no {CONFIG}")
    try:
        stored = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(stored, dict):
        raise ValueError(f"{path} is a {type(stored).__name__}; it must be an object")
    if kind := stored.get("speculators_model_type"):
        raise ValueError(
            f"{path} is of the speculators format ({kind}), which is not read: only what EAGLE, HASS, PosS and SPEED "
            "publish is"
        )
    return stored


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors of a folder, of one file or of shards with an index; .safetensors before .bin.

    Raises:
        FileNotFoundError: no such file, or a shard is missing.
        ValueError: a file is damaged or holds more than tensors.
    """
    for name in (WEIGHTS, PICKLED):
        if (folder / name).is_file():
            return _load(folder / name)
        if (index := folder / f"{name}.index.json").is_file():
            return {name: tensor for shard in _shards(index) for name, tensor in _load(shard).items()}
    raise FileNotFoundError(f"{folder} has neither {WEIGHTS} nor {PICKLED}, nor the index of their shards")


def _shards(index: Path) -> list[Path]:
    try:
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{index} is no index of shards: {type(error).__name__} {error}") from error
    if outside := [name for name in names if Path(name).name != name]:
        raise ValueError(f"{index} names {outside[0]!r}, which is no file beside it")
    return [index.parent / name for name in names]


def _load(path: Path) -> dict[str, Tensor]:
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing")
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        stored = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise ValueError(f"{path} is not read, as it holds more than plain tensors: get a .safetensors file") from error
    except (SafetensorError, RuntimeError, EOFError) as error:
        raise ValueError(f"{path} is damaged: {str(error).splitlines()[0]}") from error
    if not isinstance(stored, dict) or not all(isinstance(tensor, Tensor) for tensor in stored.values()):
        raise ValueError(f"{path} is no table of names and tensors")
    return stored


def write(folder: Path, tensors: dict[str, Tensor], config: str, pickled: bool, token_map: list[int] | None) -> None:
    """Write a folder that appears only when it is whole.

    Args:
        folder: must not be there yet.
        tensors: go into one file, as the published readers know no shards.
        config: text of config.json.
        pickled: whether as pytorch_model.bin, which is all that EAGLE's first release reads.
        token_map: ids of a smaller vocabulary, for token_map.pt; None for none.
    """
    temporary = folder.with_name(f".{folder.name}.tmp")
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    shutil.rmtree(temporary, ignore_errors=True)  # of a killed one
    try:
        with atomic(temporary / (PICKLED if pickled else WEIGHTS)) as path:
            torch.save(tensors, path) if pickled else save_file(tensors, path, {"format": "pt"})
        with atomic(temporary / CONFIG) as path:
            path.write_text(config)
        if token_map is not None:
            torch.save(token_map, temporary / "token_map.pt")
        temporary.replace(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
