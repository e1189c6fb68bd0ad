"""Loading of a target's folder by transformers, without ever running code of the folder; and why it fails."""

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from accelerate.utils import get_max_memory
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedConfig

from poss_lightning.target_model.describe import fingerprint

Parallel = Literal["none", "layers"]  # on one device, or layers on several GPUs (transformers' `device_map`)
CHECKED = "*config.json", "*token*.json", "*.index.json", "model*.safetensors"  # files of a target
FILLED = 0.85  # of a GPU's free memory; the rest is for caches and activations


def load_part(kind: Any, folder: Path, **options: Any) -> Any:
    """Call `kind.from_pretrained`, without code of the folder, or of a hub repository that its files name.

    Every use of `from_pretrained` goes through here: left alone, transformers asks at the terminal and then runs it.
    """
    return kind.from_pretrained(folder, trust_remote_code=False, **options)


def load_config(name: str, folder: Path) -> PreTrainedConfig:
    """Load the config of a target; ValueError or FileNotFoundError if its folder is not a model of transformers."""
    if (folder / "adapter_config.json").is_file():
        raise ValueError(f"target {name!r} is an adapter (PEFT): merge it into its model, and save that")
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(f"target {name!r} has no config.json, so it is not a model of transformers")
    _check_files(folder)
    try:
        config = load_part(AutoConfig, folder)
    except Exception as error:  # whatever a foreign file makes it raise
        raise ValueError(explain_failure(name, error)) from error
    config._attn_implementation = None  # it may name code on the hub, and that of transformers reads trees
    return config


def _check_files(folder: Path) -> None:
    """Raise ValueError for a damaged file of a target: transformers does without some, and names none."""
    for file in sorted(file for pattern in CHECKED for file in folder.glob(pattern)):
        try:
            safe_open(file, "pt") if file.suffix == ".safetensors" else json.loads(file.read_bytes())
        except (ValueError, SafetensorError) as error:
            raise ValueError(f"{file} is damaged, download it again: {error}") from error


def placement(config: PreTrainedConfig, device: str, parallel: Parallel, spared: int | None) -> dict[str, Any]:
    """Return the arguments of `from_pretrained` that place a model on its home `device`, or over all GPUs but one.

    Raises:
        ValueError: there is no GPU but the one that is `spared`.
    """
    if parallel == "layers" and device.startswith("cuda"):
        free = {gpu: int(FILLED * size) for gpu, size in get_max_memory().items() if gpu not in ("cpu", spared)}
        if not free:
            raise ValueError("parallel is layers, and there is no GPU beside the training's: store the features first")
        return {"device_map": "auto", "max_memory": free}
    quantized = getattr(config, "quantization_config", None) is not None
    return {"device_map": {"": device}} if quantized else {}  # what is packed cannot be moved later


def load_model(
    name: str, folder: Path, config: PreTrainedConfig, dtype: str | None, device: str, placed: dict[str, Any]
) -> tuple[Any, Any, str | None]:
    """Load model and tokenizer of a target, in `dtype` or the dtype of its files, with all weights.

    `placed` is from `placement`. The third value is the fingerprint of the model as saved, where it must be taken
    before rounding: float16 lacks the smallest numbers of bfloat16.

    Raises:
        ValueError: one of them cannot be loaded; the message says why.
    """
    narrow = dtype == "float16" and not placed
    options = {
        "dtype": getattr(torch, dtype) if dtype and not narrow else "auto",
        "output_loading_info": True,
        **placed,
    }
    if device.startswith("cuda") and not placed and not narrow:  # not through the host's memory
        options["device_map"] = {"": device}
    try:
        tokenizer = load_part(AutoTokenizer, folder)
        model, loading = load_part(AutoModelForCausalLM, folder, config=config, **options)
        as_saved = fingerprint(model) if narrow else None
        model = model.to(torch.float16) if narrow else model
        model = model if placed else model.to(device)
    except Exception as error:  # whatever a foreign file, its library or the device makes it raise
        raise ValueError(explain_failure(name, error)) from error
    if missing := sorted(loading["missing_keys"]):
        raise ValueError(
            f"target {name!r} lacks {len(missing)} weights, the first is {missing[0]}: download its files again"
        )
    if packed := [key for key in loading["unexpected_keys"] if re.search(r"weight_scale|\.scales$|qweight$", key)]:
        raise ValueError(f"target {name!r} is quantised in a way that transformers does not read: see {packed[0]}")
    read = {parameter.rpartition(".")[0] for parameter, _ in model.named_parameters()}
    if left := sorted(key for key in loading["unexpected_keys"] if key.rpartition(".")[0] in read):
        raise ValueError(f"target {name!r} would be without {left[0]}, which its config.json does not have")
    if any(value.device.type == "meta" for value in model.parameters()):
        raise ValueError(f"target {name!r}: some layers do not fit on the GPUs; use more of them")
    return model, tokenizer, as_saved


@contextmanager
def reason(words: str) -> Iterator[None]:
    """Say in words of our own why a model is refused, where the code of transformers fails in its words."""
    try:
        yield
    except (NotImplementedError, torch.OutOfMemoryError, torch.AcceleratorError):
        raise
    except Exception as error:
        raise NotImplementedError(words) from error


def explain_failure(name: str, error: Exception, architecture: str = "") -> str:
    """Explain in one line why a target cannot be used; `architecture` is its class, where what it computes may be."""
    if "trust_remote_code" in str(error):
        line = (
            "it needs code that its files bring or name, and none of that is ever run. Load it yourself if you trust "
            "it: poss_lightning.load(model, tokenizer=tokenizer)"
        )
    else:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
        line = " ".join(lines[: 1 + lines[0].endswith(":")])  # transformers' first line may end there
    what = f" ({architecture})" if architecture and isinstance(error, NotImplementedError) else ""
    return f"target {name!r}{what} cannot be used: {line}"
