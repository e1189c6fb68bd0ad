"""A draft's folder, from a checkpoint of training, whatever strategy wrote it: without a GPU or a process group."""

import pickle
from pathlib import Path

import torch

from poss_lightning.draft.specialists import CONFIG, DraftConfig, Specialists

PREFIX = "draft."  # of the draft's tensors in the state of `SpecialistTraining`


def export(source: str, out: str, dtype: str = "float32") -> None:
    """Write a draft as a folder, config.json and model.safetensors: of a training checkpoint, or of another folder.

    Args:
        source: a .ckpt file that `poss fit` wrote, with any strategy; or a draft folder.
        out: folder to write.
        dtype: of what is written: float32, bfloat16 or float16. Half of float32's bytes lose nothing where decoding is
            in that dtype anyway.

    Raises:
        FileExistsError: `out` is there already.
        FileNotFoundError: there is no such file.
        ValueError: it is no checkpoint of ours, or its weights contradict its config.
    """
    if dtype not in ("float32", "bfloat16", "float16"):
        raise ValueError(f"dtype is {dtype!r}; it must be float32, bfloat16 or float16")
    if Path(out).exists():
        raise FileExistsError(f"{out} is there already: choose another folder or remove it")
    draft = Specialists.from_pretrained(source) if (Path(source) / CONFIG).is_file() else _trained(Path(source))
    draft.to(getattr(torch, dtype)).save_pretrained(out)
    print(f"{out}: allocation {list(draft.config.allocation)}, for {draft.config.target.name}, in {dtype}")


def _trained(checkpoint: Path) -> Specialists:
    stored = load_checkpoint(checkpoint)
    weights = {
        name.removeprefix(PREFIX): value for name, value in stored["state_dict"].items() if name.startswith(PREFIX)
    }
    config = DraftConfig.from_json(stored["draft"], checkpoint)
    try:
        draft = Specialists(config, weights.get("vocabulary"))
        draft.load_state_dict(weights)
    except (RuntimeError, ValueError) as error:
        raise ValueError(f"{checkpoint}: its state_dict does not fit its draft's config: {error}") from error
    return draft


def load_checkpoint(path: Path) -> dict:
    """What a checkpoint holds; tensors and plain values only, nothing in the file is run.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is no checkpoint of ours.
    """
    if (path / CONFIG).is_file():
        raise ValueError(
            f"{path} is a draft's folder; give a training's checkpoints/last.ckpt, or `poss replay` the draft"
        )
    if path.is_dir():
        raise ValueError(f"{path} is a folder, and no draft's; give a .ckpt file, as `poss fit` writes it")
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file")
    try:
        stored = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (RuntimeError, pickle.UnpicklingError, EOFError, OSError) as error:
        raise ValueError(f"{path} is no whole checkpoint of plain tensors: {str(error).splitlines()[0]}") from error
    for name in ("state_dict", "draft"):
        if not isinstance(stored, dict) or name not in stored:
            raise ValueError(f"{path} has no {name!r}: it is no checkpoint of `poss fit`")
    return stored
