"""Files of published drafts: loaded without running any code in them, and written completely or not at all."""

import pickle
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from poss_lightning.draft.folder import CONFIG, WEIGHTS
from poss_lightning.files import atomic_folder, read_json
from poss_lightning.terminal import announced

PICKLED = "pytorch_model.bin"
FILES = [CONFIG, "model*.safetensors*", "pytorch_model*.bin*"]  # of a published draft


@announced("reading the tensors of a draft")
def load_tensors(folder: Path) -> dict[str, Tensor]:
    """Load all tensors of a folder, from one file or from shards with an index; .safetensors is preferred over .bin."""
    for file in (folder / WEIGHTS, folder / PICKLED):
        if file.is_file():
            return _load_file(file)
        if (index := Path(f"{file}.index.json")).is_file():
            shards = sorted({*read_json(index).get("weight_map", {}).values()})
            return {name: tensor for shard in shards for name, tensor in _load_file(folder / shard).items()}
    raise FileNotFoundError(f"{folder} has neither {WEIGHTS} nor {PICKLED}, nor the index of their shards")


def _load_file(path: Path) -> dict[str, Tensor]:
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        stored = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise ValueError(
            f"{path} is not loaded, as it is damaged or holds more than plain tensors: get a .safetensors file"
        ) from error
    except (SafetensorError, RuntimeError, EOFError) as error:
        raise ValueError(f"{path} is damaged, download it again: {str(error).splitlines()[0]}") from error
    if not isinstance(stored, dict) or not all(isinstance(tensor, Tensor) for tensor in stored.values()):
        raise ValueError(f"{path} is not a table of names and tensors")
    return stored


@announced("writing a draft")
def write_folder(folder: Path, tensors: dict[str, Tensor], config: str, token_map: list[int] | None = None) -> None:
    """Write a draft's folder: one file of tensors, as the published code reads no shards.

    Args:
        folder: must not exist, else FileExistsError.
        config: text of config.json.
        token_map: ids of a smaller vocabulary, for token_map.pt.
    """
    with atomic_folder(folder) as temporary:
        contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
        save_file(contiguous, temporary / WEIGHTS, {"format": "pt"})
        (temporary / CONFIG).write_text(config)
        if token_map is not None:
            torch.save(token_map, temporary / "token_map.pt")
