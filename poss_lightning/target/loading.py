"""What transformers loads from a folder, none of whose own code ever runs; and why a folder is no target."""

import re
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedConfig

ADAPTER = "adapter_config.json"


def load_part(kind: Any, folder: Path, **options: Any) -> Any:
    """`kind.from_pretrained`, without code of the folder, or of a hub's repository that its files name.

    Every use of transformers' `from_pretrained` is this one: left alone, it asks at the terminal and then runs it.
    """
    return kind.from_pretrained(folder, trust_remote_code=False, **options)


def load_config(name: str, folder: Path) -> PreTrainedConfig:
    """The config of a target.

    Raises:
        ValueError: the folder is no model, or one that transformers does not know; the message says why.
    """
    if (folder / ADAPTER).is_file():
        raise ValueError(f"target {name!r} is an adapter (PEFT): merge it into its model, and save that")
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(f"target {name!r} has no config.json, so it is no model of transformers")
    try:
        config = load_part(AutoConfig, folder)
    except Exception as error:  # whatever a file of others makes it raise
        raise ValueError(explain(name, error)) from error
    config._attn_implementation = None  # it may name code on the hub, and that of transformers reads trees
    return config


def load_model(name: str, folder: Path, config: PreTrainedConfig, device: str, **options: Any) -> tuple[Any, Any]:
    """Model and tokenizer of a target; the model has all its weights.

    Args:
        name: of the target, for messages.
        folder: of its files.
        config: as of `load_config`.
        device: where it computes.
        options: of transformers' `from_pretrained`, for the model.

    Raises:
        ValueError: one of them cannot be loaded; the message says why.
    """
    try:
        tokenizer = load_part(AutoTokenizer, folder)
        model, loading = load_part(AutoModelForCausalLM, folder, config=config, output_loading_info=True, **options)
        model = model if "device_map" in options else model.to(device)
    except Exception as error:  # whatever a file of others, a library for it, or the device makes it raise
        raise ValueError(explain(name, error, device)) from error
    if missing := sorted(loading["missing_keys"]):
        raise ValueError(f"target {name!r} lacks {len(missing)} weights, the first is {missing[0]}: get its files anew")
    if packed := [key for key in loading["unexpected_keys"] if re.search(r"weight_scale|\.scales$|qweight$", key)]:
        raise ValueError(f"target {name!r} is quantised in a way that transformers does not read: see {packed[0]}")
    if any(value.device.type == "meta" for value in model.parameters()):
        raise ValueError(f"target {name!r}: some layers found no room on the GPUs; take more of them")
    return model, tokenizer


def explain(name: str, error: Exception, device: str = "this device") -> str:
    """Why a target cannot be loaded or used, in one line."""
    line = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    if isinstance(error, torch.OutOfMemoryError):
        return f"target {name!r} does not fit on {device}: {line}"
    if "trust_remote_code" in str(error):
        return (
            f"target {name!r} is not supported: it needs code that its files bring or name, and none of that is ever "
            "run. Load it yourself if you trust it: poss_lightning.load(model, tokenizer=tokenizer)"
        )
    if "CUDA" in line:
        return f"target {name!r} cannot run on {device}: {line}"
    return f"target {name!r} cannot be loaded: {line}"
