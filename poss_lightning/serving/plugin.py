"""The plugin's entry point: vLLM calls `register` in each of its processes, before it reads any config."""

from poss_lightning.interop.layouts import POSS

MODEL = f"poss_lightning.serving.vllm_model:{POSS}"
METHODS = ("", "Eagle", "Eagle3")  # vLLM puts its method before the name in config.json, and asks for both


def register() -> None:
    """Name our model to vLLM, which imports it only when a folder asks for it."""
    from vllm import ModelRegistry  # pyright: ignore[reportMissingImports] in an environment of its own

    for method in METHODS:
        ModelRegistry.register_model(f"{method}{POSS}", MODEL)
