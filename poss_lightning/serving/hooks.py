"""What this package uses of vLLM that its documents do not promise, as one table, compared with vLLM's source.

Nothing is imported: the source is read, so the plugin can decide before vLLM builds anything, and a version can be
compared from its unpacked wheel:

    python -c "from poss_lightning.serving.hooks import changed_hooks; print(changed_hooks('unpacked/vllm'))"
"""

import ast
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

# By file: what is called or overridden, with the parameters that are given; without any, an attribute or a field.
HOOKS = """
v1/attention/backend.py
    AttentionBackend.get_builder_cls()
    AttentionBackend.get_name()
    AttentionMetadataBuilder.build_for_drafting(self, common_attn_metadata, draft_index)
    AttentionMetadataBuilder.update_draft_decode_metadata(self, metadata)
    AttentionMetadataBuilder.supports_draft_decode_metadata_update
forward_context.py
    get_forward_context()
    ForwardContext.attn_metadata
config/vllm.py
    VllmConfig.use_v2_model_runner(self)
envs.py
    VLLM_USE_BREAKABLE_CUDAGRAPH
model_executor/layers/attention/attention.py
    Attention.__init__(self, num_heads, head_size, scale, num_kv_heads, cache_config, prefix)
    unified_kv_cache_update(key, value, layer_name)
model_executor/layers/layernorm.py
    RMSNorm.__init__(self, hidden_size, eps)
model_executor/layers/linear.py
    ColumnParallelLinear.__init__(self, input_size, output_size, bias, prefix)
    QKVParallelLinear.__init__(self, hidden_size, head_size, total_num_heads, total_num_kv_heads, bias, prefix)
    ReplicatedLinear.__init__(self, input_size, output_size, bias, prefix, return_bias)
    RowParallelLinear.__init__(self, input_size, output_size, bias, prefix)
model_executor/layers/logits_processor.py
    LogitsProcessor.__init__(self, vocab_size)
model_executor/layers/rotary_embedding/__init__.py
    get_rope(head_size, max_position, rope_parameters)
model_executor/layers/vocab_parallel_embedding.py
    ParallelLMHead.__init__(self, num_embeddings, embedding_dim, prefix)
model_executor/models/llama.py
    LlamaMLP.__init__(self, hidden_size, intermediate_size, hidden_act, prefix)
model_executor/models/llama_eagle3.py
    Eagle3LlamaForCausalLM.compute_logits(self, hidden_states)
    Eagle3LlamaForCausalLM.combine_hidden_states(self, hidden_states)
    Eagle3LlamaForCausalLM.embed_input_ids(self, input_ids)
model_executor/models/utils.py
    AutoWeightsLoader.load_weights(self, weights, mapper)
    WeightsMapper.orig_to_new_prefix
    WeightsMapper.orig_to_new_substr
    WeightsMapper.orig_to_new_stacked
    maybe_prefix(prefix, name)
distributed/kv_transfer/kv_connector/v1/example_hidden_states_connector.py
    ExampleHiddenStatesConnector.get_finished(self, finished_req_ids)
    extract_from_kv_cache(kv_cache, slot_mapping, num_tokens)
    PendingSave.req_id
    PendingSave.filename
    PendingSave.token_ids
    PendingSave.block_ids
"""


def changed_hooks(folder: str | Path | None = None) -> list[str]:
    """List the hooks that vLLM's source lacks, or that take other parameters, a line each.

    Args:
        folder: of the package `vllm`; None for the installed one, and [] where none is.
    """
    if folder is None and (spec := find_spec("vllm")) is None:
        return []
    root = Path(folder or str(spec.origin).removesuffix("__init__.py"))  # pyright: ignore[reportPossiblyUnboundVariable]
    changed, path, found = [], root, {}
    for line in HOOKS.strip().splitlines():
        if not line.startswith(" "):
            path = root / line
            found = dict(_definitions(ast.parse(path.read_text()).body if path.is_file() else []))
            continue
        name, _, parameters = line.strip(" )").partition("(")
        if name not in found or not {*parameters.split(", ")} - {""} <= found[name]:
            changed.append(f"{path.relative_to(root)}: {line.strip()}")
    return changed


def _definitions(body: list[ast.stmt], prefix: str = "") -> Iterator[tuple[str, set[str]]]:
    """Map functions, methods and annotated names of a module, by dotted name, to their parameters."""
    for node in body:
        match node:
            case ast.FunctionDef(name=name, args=given):
                yield prefix + name, {each.arg for each in (*given.posonlyargs, *given.args, *given.kwonlyargs)}
            case ast.ClassDef(name=name, body=inner):
                yield from _definitions(inner, f"{prefix}{name}.")
            case ast.AnnAssign(target=target):
                yield prefix + ast.unparse(target), set()
            case ast.If(body=inner):
                yield from _definitions(inner, prefix)
