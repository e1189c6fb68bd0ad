"""The plugin's entry point: vLLM calls `register` in each of its processes, before it reads any config."""

import logging

from poss_lightning.interop.layouts import POSS
from poss_lightning.serving.hooks import changed_hooks

MODEL = f"poss_lightning.serving.vllm_model:{POSS}"
logger = logging.getLogger(__name__)
METHODS = ("", "Eagle", "Eagle3")  # vLLM puts its method before the name in config.json, and asks for both


def register() -> None:
    """Name our model to vLLM, which imports it only when a folder asks for it.

    A vLLM that lacks what the model uses is warned about and left as it is: it may serve something else.
    """
    if changed := changed_hooks():
        return logger.warning("poss_lightning serves no drafts here (tested: vLLM 0.32): %s", "; ".join(changed))
    from vllm import ModelRegistry  # pyright: ignore[reportMissingImports] in an environment of its own

    for method in METHODS:
        ModelRegistry.register_model(f"{method}{POSS}", MODEL)
