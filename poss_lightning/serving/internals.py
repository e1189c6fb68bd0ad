"""How a draft learns which position it drafts, and writes keys without attending, in vLLM 0.32.

count_steps        A model is not told which position it drafts, but the builders of attention metadata are: on the V1
                   model runner by `build_for_drafting(…, draft_index)`, on the V2 runner by one
                   `update_draft_decode_metadata` per step. So the builders of our layers write down the step.
draft_position     A model reads what they wrote from the forward context.
write_keys_values  vLLM writes keys and values where it attends. Ours are written for specialists that do not run, too.

A CUDA graph of the V2 runner records the Python of all steps, and so each step's specialist. Any other graph would
replay one step for all of them, and is refused.
"""

# pyright: reportMissingImports=false
# vLLM has an environment of its own: make test-vllm

from typing import Any

from torch import Tensor
from vllm import envs
from vllm.config import VllmConfig
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.attention.attention import Attention, unified_kv_cache_update


def check_engine(config: VllmConfig) -> None:
    """Raise RuntimeError for a setting that would mix up specialists."""
    if envs.VLLM_USE_BREAKABLE_CUDAGRAPH and not config.use_v2_model_runner:
        raise RuntimeError("VLLM_USE_BREAKABLE_CUDAGRAPH is 1; it must be 0, as one graph serves all draft positions")


def count_steps(attention: Attention) -> None:
    """Let the metadata of this layer carry `draft_index`: 0 where a round begins, plus 1 per drafted token."""
    backend = attention.attn_backend
    builder = backend.get_builder_cls()

    class CountingBuilder(builder):
        def __init__(self, *arguments: Any, **options: Any):
            super().__init__(*arguments, **options)
            if self.vllm_config.use_v2_model_runner and not self.supports_draft_decode_metadata_update:
                raise RuntimeError(
                    f"attention backend {backend.get_name()} does not count draft steps on vLLM's V2 model runner: "
                    "set VLLM_USE_V2_MODEL_RUNNER=0, or a different attention_backend in --speculative-config"
                )

        def build(self, *arguments: Any, **options: Any) -> Any:
            metadata = super().build(*arguments, **options)
            metadata.draft_index = 0
            return metadata

        def build_for_drafting(self, common_attn_metadata: Any, draft_index: int) -> Any:
            metadata = super().build_for_drafting(common_attn_metadata, draft_index)
            metadata.draft_index = draft_index
            return metadata

        def update_draft_decode_metadata(self, metadata: Any) -> None:
            super().update_draft_decode_metadata(metadata)
            metadata.draft_index += 1

    class CountingBackend(backend):
        @staticmethod
        def get_builder_cls() -> type[CountingBuilder]:
            return CountingBuilder

    attention.attn_backend = CountingBackend


def draft_position(attention: Attention) -> int:
    """Return the position (from 1) that this forward drafts; 1 in runs without metadata, which measure memory."""
    metadata = get_forward_context().attn_metadata
    if isinstance(metadata, list):
        raise RuntimeError("two batches overlap (enable_dbo), which specialists cannot tell apart: switch it off")
    return 1 if metadata is None else metadata[attention.layer_name].draft_index + 1


def write_keys_values(attention: Attention, keys: Tensor, values: Tensor) -> None:
    """Put keys and values (tokens, kv heads * d) of this forward's slots into a layer's cache, without attending."""
    heads = (-1, attention.num_kv_heads, attention.head_size)
    unified_kv_cache_update(keys.view(heads), values.view(heads), attention.layer_name)
