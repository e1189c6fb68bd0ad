"""The plugin's entry point: vLLM calls `register` in each of its processes, before it reads any config."""

MODEL = "poss_lightning.serving.model:PossForCausalLM"
ARCHITECTURES = ("EaglePossForCausalLM", "Eagle3PossForCausalLM")  # in a folder's config.json, by kind


def register() -> None:
    """Name our model to vLLM. It is imported only when a folder asks for it, so other drafts notice nothing."""
    from vllm import ModelRegistry

    for architecture in ARCHITECTURES:
        ModelRegistry.register_model(architecture, MODEL)
