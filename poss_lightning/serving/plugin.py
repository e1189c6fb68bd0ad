"""The plugin's entry point: vLLM calls `register` in each of its processes, before it reads any config."""

from poss_lightning.interop.layouts import SERVED

MODEL = "poss_lightning.serving.model:PossForCausalLM"


def register() -> None:
    """Name our model to vLLM. It is imported only when a folder asks for it, so other drafts notice nothing."""
    from vllm import ModelRegistry  # pyright: ignore[reportMissingImports] of an environment of its own

    for layout in SERVED.values():
        ModelRegistry.register_model(layout.architecture, MODEL)
