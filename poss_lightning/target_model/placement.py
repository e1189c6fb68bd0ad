"""Where a target lies: on one device, or with its layers on several GPUs (transformers' `device_map`)."""

from typing import Any, Literal

from accelerate.utils import get_max_memory
from transformers import PreTrainedConfig

Parallel = Literal["none", "layers"]
FILLED = 0.85  # of a GPU's free memory; the rest is for caches and activations


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
