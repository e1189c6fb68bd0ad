"""What this package uses of vLLM that its documents do not promise, as one table, compared with vLLM's source.

Nothing is imported: the source is read, so the plugin can decide before vLLM builds anything, and a version can be
compared from its unpacked wheel:

    python -c "from poss_lightning.serving.hooks import changed_hooks; print(changed_hooks('unpacked/vllm'))"
"""

import ast
from importlib.util import find_spec
from pathlib import Path

# By file: what is called or overridden, and its parameters. Those before `*` are the first, in this order; those after
# it are given by name. A name with an annotation of its own (an attribute, a field) has None.
LAYERS, V1 = "model_executor/layers", "v1/attention/backend.py"
HOOKS: dict[str, dict[str, tuple[str, ...] | None]] = {
    # which position is drafted: internals.count_steps
    V1: {
        "AttentionBackend.get_builder_cls": (),
        "AttentionBackend.get_name": (),
        "AttentionMetadataBuilder.build_for_drafting": ("self", "common_attn_metadata", "draft_index"),
        "AttentionMetadataBuilder.update_draft_decode_metadata": ("self", "metadata"),
        "AttentionMetadataBuilder.supports_draft_decode_metadata_update": None,
    },
    "forward_context.py": {"get_forward_context": (), "ForwardContext.attn_metadata": None},
    "config/vllm.py": {"VllmConfig.use_v2_model_runner": ("self",)},
    "envs.py": {"VLLM_USE_BREAKABLE_CUDAGRAPH": None},
    # keys of specialists that do not run: internals.write_keys_values
    f"{LAYERS}/attention/attention.py": {
        "Attention.__init__": (
            "self",
            "num_heads",
            "head_size",
            "scale",
            "*",
            "num_kv_heads",
            "cache_config",
            "prefix",
        ),
        "unified_kv_cache_update": ("key", "value", "layer_name"),
    },
    # the draft itself: vllm_model
    f"{LAYERS}/layernorm.py": {"RMSNorm.__init__": ("self", "hidden_size", "*", "eps")},
    f"{LAYERS}/linear.py": {
        "ColumnParallelLinear.__init__": ("self", "input_size", "output_size", "*", "bias", "prefix"),
        "QKVParallelLinear.__init__": (
            *("self", "hidden_size", "head_size", "total_num_heads", "total_num_kv_heads", "*", "bias", "prefix"),
        ),
        "ReplicatedLinear.__init__": ("self", "input_size", "output_size", "bias", "*", "prefix", "return_bias"),
        "RowParallelLinear.__init__": ("self", "input_size", "output_size", "*", "bias", "prefix"),
    },
    f"{LAYERS}/logits_processor.py": {"LogitsProcessor.__init__": ("self", "vocab_size")},
    f"{LAYERS}/rotary_embedding/__init__.py": {"get_rope": ("head_size", "max_position", "*", "rope_parameters")},
    f"{LAYERS}/vocab_parallel_embedding.py": {
        "ParallelLMHead.__init__": ("self", "num_embeddings", "embedding_dim", "*", "prefix"),
    },
    "model_executor/models/llama.py": {
        "LlamaMLP.__init__": ("self", "hidden_size", "intermediate_size", "hidden_act", "*", "prefix"),
    },
    "model_executor/models/llama_eagle3.py": {
        "Eagle3LlamaForCausalLM.compute_logits": ("self", "hidden_states"),
        "Eagle3LlamaForCausalLM.combine_hidden_states": ("self", "hidden_states"),
        "Eagle3LlamaForCausalLM.embed_input_ids": ("self", "input_ids"),
    },
    "model_executor/models/utils.py": {
        "AutoWeightsLoader.load_weights": ("self", "weights", "*", "mapper"),
        "WeightsMapper.orig_to_new_prefix": None,
        "WeightsMapper.orig_to_new_substr": None,
        "WeightsMapper.orig_to_new_stacked": None,
        "maybe_prefix": ("prefix", "name"),
    },
    # features: connector
    "distributed/kv_transfer/kv_connector/v1/example_hidden_states_connector.py": {
        "ExampleHiddenStatesConnector.get_finished": ("self", "finished_req_ids"),
        "extract_from_kv_cache": ("kv_cache", "slot_mapping", "num_tokens"),
        **{f"PendingSave.{name}": None for name in ("req_id", "filename", "token_ids", "block_ids")},
    },
}


def changed_hooks(folder: str | Path | None = None) -> list[str]:
    """The hooks that vLLM's source lacks or that have other parameters, a line each.

    Args:
        folder: of the package `vllm`; None for the installed one, and [] where none is.
    """
    if folder is None and (spec := find_spec("vllm")) is None:
        return []
    root = Path(folder or str(spec.origin).removesuffix("__init__.py"))  # pyright: ignore[reportPossiblyUnboundVariable]
    changed = []
    for file, hooks in HOOKS.items():
        found = _definitions(root / file)
        for name, wanted in hooks.items():
            if name not in found or not _takes(found[name], wanted):
                changed.append(f"{file}: {name}" + ("" if wanted is None else f"({', '.join(wanted)})"))
    return changed


def _definitions(file: Path) -> dict[str, list[str] | None]:
    """The parameters of each function and method of a file, by dotted name; None for an annotated name."""
    found: dict[str, list[str] | None] = {}

    def visit(body: list[ast.stmt], prefix: str) -> None:
        for node in body:
            if isinstance(node, ast.FunctionDef):
                given = node.args
                found[prefix + node.name] = [each.arg for each in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
            elif isinstance(node, ast.ClassDef):
                visit(node.body, f"{prefix}{node.name}.")
            elif isinstance(node, ast.AnnAssign):
                found[prefix + ast.unparse(node.target)] = None
            elif isinstance(node, ast.If):
                visit(node.body, prefix)

    visit(ast.parse(file.read_text()).body if file.is_file() else [], "")
    return found


def _takes(found: list[str] | None, wanted: tuple[str, ...] | None) -> bool:
    if found is None or wanted is None:
        return found == wanted
    first, named = (wanted[: wanted.index("*")], wanted[wanted.index("*") + 1 :]) if "*" in wanted else (wanted, ())
    return tuple(found[: len(first)]) == first and {*named} <= {*found}
