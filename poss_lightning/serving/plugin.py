"""The plugin's entry point: vLLM calls `register` in each of its processes, before it reads any config."""

import logging

from poss_lightning.interop.layouts import POSS

MODEL = f"poss_lightning.serving.vllm_model:{POSS}"
METHODS = ("", "Eagle", "Eagle3")  # vLLM puts its method before the name in config.json, and asks for both
TESTED = "0.32"  # of vLLM, by `make test-vllm`
logger = logging.getLogger(__name__)


def register() -> None:
    """Name our model to vLLM, which imports it only when a folder asks for it."""
    from vllm import ModelRegistry  # pyright: ignore[reportMissingImports] in an environment of its own

    warn_of_version()
    for method in METHODS:
        ModelRegistry.register_model(f"{method}{POSS}", MODEL)


def warn_of_version() -> None:
    """Log a warning for a vLLM that was not tested: what its documents do not promise may have changed."""
    from vllm import __version__  # pyright: ignore[reportMissingImports]

    if not __version__.startswith(f"{TESTED}."):
        logger.warning("vLLM is %s; poss_lightning was tested with %s: if drafts fail, use that", __version__, TESTED)
