"""Write a draft's folder from a training checkpoint of any strategy, without a GPU or a process group."""

import pickle
from pathlib import Path

import torch

from poss_lightning.draft.specialists import CONFIG, TRAINED_ON, DraftConfig, Specialists, decode_digests
from poss_lightning.files import atomic_folder, check_new
from poss_lightning.terminal import announced

PREFIX = "draft."  # of the draft's tensors in the state of `SpecialistTraining`


def export(source: str, out: str, dtype: str = "float32") -> None:
    """Write the draft of a training checkpoint, or of another draft folder, as config.json and model.safetensors.

    Args:
        source: a .ckpt file that `poss fit` wrote, with any strategy; or a draft folder.
        out: folder to write.
        dtype: of the weights in the file: float32, bfloat16 or float16. A 16-bit dtype loses nothing where decoding is
            in that dtype anyway.

    Raises:
        FileExistsError: there is something at `out`.
        FileNotFoundError: there is no such file.
        ValueError: the file is not a checkpoint of `poss fit`, or its weights contradict its config.
    """
    if dtype not in ("float32", "bfloat16", "float16"):
        raise ValueError(f"dtype is {dtype!r}; it must be float32, bfloat16 or float16")
    check_new(out)
    draft = Specialists.from_pretrained(source) if (Path(source) / CONFIG).is_file() else _load_draft(Path(source))
    with announced(f"writing {out}"), atomic_folder(out) as folder:
        draft.to(getattr(torch, dtype)).save_pretrained(folder)
    print(f"{out}: allocation {list(draft.config.allocation)}, for {draft.config.target.name}, in {dtype}")


def _load_draft(checkpoint: Path) -> Specialists:
    stored = load_checkpoint(checkpoint)
    weights = {
        name.removeprefix(PREFIX): value for name, value in stored["state_dict"].items() if name.startswith(PREFIX)
    }
    config = DraftConfig.from_json(stored["draft"], checkpoint)
    try:
        draft = Specialists(config, weights.get("vocabulary"))
        draft.load_state_dict(weights)
        draft.trained_on = decode_digests(stored.get(TRAINED_ON, ""))
    except (RuntimeError, ValueError) as error:
        raise ValueError(f"{checkpoint}: its state_dict does not fit its draft's config: {error}") from error
    return draft


def load_checkpoint(path: Path) -> dict:
    """The content of a training checkpoint: tensors and plain values alone, so no code in the file is run.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is not a checkpoint of `poss fit`.
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
        with announced(f"reading {path}"):
            stored = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (RuntimeError, pickle.UnpicklingError, EOFError, OSError) as error:
        raise ValueError(f"{path} is no whole checkpoint of plain tensors: {str(error).splitlines()[0]}") from error
    for name in ("state_dict", "draft"):
        if not isinstance(stored, dict) or name not in stored:
            raise ValueError(f"{path} has no {name!r}: it is no checkpoint of `poss fit`")
    return stored
