"""config.json of a published draft: parsed into a draft's config, and made from one.

Every key is one of three: it is read (`READ`), it has the one value that changes nothing for a draft of ours
(`NEUTRAL`), or it is known to say nothing of what a draft computes (`HARMLESS`, and the keys of the target's own
config, which many drafts copy). Any other key that is set is named, as an engine may compute something else by it.
"""

import re
from collections.abc import Collection
from dataclasses import asdict, fields, replace
from math import isclose
from typing import Any

from torch import Tensor
from transformers import GenerationConfig, PreTrainedConfig

from poss_lightning.draft.config import SWITCHES, DraftConfig, Kind, RopeScaling
from poss_lightning.draft.folder import OWN as CONFIG_KEY
from poss_lightning.interop.layouts import HEAD, Layout, check_layers
from poss_lightning.interop.problems import Checks, ForeignDraft, Problem
from poss_lightning.target_model.spec import TargetSpec

EAGLE_KEY, DFLASH_KEY = "eagle_config", "dflash_config"  # objects with keys of their own
# Our config is in a file at `CONFIG_KEY`: whole where our plugin loads it, else what has no other place.
UNSTATED = ("allocation", "depth", "detach", "kv")
LAYER_IDS = "eagle_aux_hidden_state_layer_ids"  # the layers that an EAGLE-3 draft fuses, where a file names them
OF_BLOCKS = ("target_layer_ids", "mask_token_id", "block_size", "num_target_layers")  # DFlash's keys that ours has, too
POST_NORM = "return_hidden_post_norm"  # TensorRT-LLM's name of norm_output
FULL, SLIDING = "full_attention", "sliding_attention"  # in layer_types
SIZES = {  # keys of a draft that its target has, and the field of a target's spec
    "hidden_size": "hidden_size",
    "vocab_size": "vocab_size",
    "num_target_layers": "layers",
    "num_attention_heads": "heads",
    "num_key_value_heads": "kv_heads",
    "head_dim": "head_dim",
}
FOREIGN = ("hidden_size", "vocab_size", "num_target_layers")  # of them, those of which a draft has none of its own
READ = {*SIZES, *SWITCHES, LAYER_IDS, POST_NORM, EAGLE_KEY, CONFIG_KEY, "architectures", "num_hidden_layers"}
READ |= {"rope_theta", "rope_scaling", "rope_parameters", "draft_vocab_size", "intermediate_size", "rms_norm_eps"}
READ |= {"layer_types", "sliding_window"}
SHARE = "partial_rotary_factor"  # also among the rotary angles
NEUTRAL = {  # values that change nothing
    "attention_mode": "gqa",
    "causal": False,
    "hidden_act": "silu",
    "input_embedding_scale": 1,
    "is_causal": False,
    "output_multiplier": 1,
    "parallel_draft_step": 1,
    "parallel_drafting": False,
    SHARE: 1,
    "projector_type": "dflash",
    "use_aux_hidden_state": True,
    "use_mtp": False,
}
HARMLESS = {*PreTrainedConfig().to_dict(), *GenerationConfig().to_dict()}  # of transformers, and of writers and readers
HARMLESS |= {"attention_dropout", "auto_map", "embed_requires_grad", "forward_num_total", "initializer_range"}
HARMLESS |= {"load_embedding_from_target", "load_lm_head_from_target", "max_position_embeddings", "max_window_layers"}
HARMLESS |= {"num_lookahead_tokens", "position_per_layer", "pretraining_tp", "speculators_version", "target_model_type"}
HARMLESS |= {"tie_word_embeddings", "torch_dtype", "use_cache", "use_sliding_window", "next_layer_regular"}
HARMLESS |= {"decoder_sparse_step"}  # of experts, which a draft has not
HARMLESS |= {  # as the file has the tensors, or not
    *("attention_bias", "bias", "has_lm_head", "mlp_bias", "parallel_draft_heads_num_layers", "use_mtp_layernorm"),
    *("use_input_layernorm_in_first_layer", "use_last_layernorm"),
}
PLAIN = r"\w*ForCausalLM"  # in EAGLE's own files the target's
ARCHITECTURES = {  # of drafts that compute what a kind does
    "eagle2": rf"{PLAIN}(Eagle)?",
    "eagle3": rf"{PLAIN}(Eagle3)?|(?!PEagle)\w*Eagle3\w*",
    "block": rf"(?!DFlash){PLAIN}|DFlashDraftModel|DFlashQwen3ForCausalLM",
}


def mapping(published: dict[str, Any], name: str) -> dict[str, Any]:
    """Return the object at a key, without its nulls; {} where there is none."""
    value = published.get(name) or {}
    Checks().expect(isinstance(value, dict), name, value, "it must be an object, {A: B}")  # raises
    return {key: each for key, each in value.items() if each is not None}


def parse_config(
    published: dict[str, Any],
    layout: Layout,
    allocation: list[int],
    spec: TargetSpec,
    vocabulary: int,
    layers: int = 1,
    *,
    checks: Checks,
    harmless: Collection[str] = (),
) -> DraftConfig:
    """Parse the config of a published draft.

    A value that its config.json leaves out has the default of the published code (eagle/model/configs.py).

    Args:
        published: content of config.json, on one level.
        vocabulary: tokens that the draft proposes, by its tensors.
        layers: in the file, by its tensors.
        checks: notes what is wrong and can be read nevertheless.
        harmless: keys that say nothing of the draft, beside `HARMLESS`.

    Raises:
        ValueError: what is wrong has no repair; `ForeignDraft` where a size is of a different target.
    """
    stated = {name: value for name, value in published.items() if value is not None}
    rope = mapping(stated, "rope_parameters") | mapping(stated, "rope_scaling")  # as transformers merges them
    switches = stated | mapping(stated, EAGLE_KEY)  # where engines look for them first
    switches |= {"norm_output": switches.get("norm_output") or switches.get(POST_NORM)}
    _check_sizes(stated, spec)
    _check_layers(checks, stated, layout, layers)
    _check_keys(checks, stated, layout.kind, spec, {*HARMLESS, *harmless})
    allowed, size = f"the draft proposes {vocabulary} tokens", stated.get("draft_vocab_size", spec.vocab_size)
    checks.expect(size == vocabulary, "draft_vocab_size", size, allowed, "ignored")
    theta = (stated | rope).get("rope_theta", 10000.0)
    allowed = "it must be a number, the base of the rotation"
    checks.expect(is_number := type(theta) in (int, float), "rope_theta", theta, allowed, "read as 10000")
    config = DraftConfig(
        target=spec,
        allocation=tuple(allocation),
        depth=layout.depth or sum(allocation),
        detach=layout.kind == "eagle2",
        intermediate_size=_unless_same(stated.get("intermediate_size"), spec.intermediate_size),
        vocabulary_size=_unless_same(vocabulary, spec.vocab_size),
        kv=layout.kv,
        kind=layout.kind,
        window=_find_window(checks, stated, layout.kind),
        rope_theta=_unless_same(float(theta if is_number else 10000), spec.rope_theta),
        rope_scaling=_find_scaling(checks, rope),
        norm_eps=_unless_same(stated.get("rms_norm_eps", 1e-6), spec.norm_eps),
        **{name: switches[name] for name in SWITCHES if switches.get(name)},
        **(_find_block(checks, stated, spec, layers) if layout.kind == "block" else {}),
    )
    if layout.kind == "eagle3":
        config = replace(config, inner_layers=_find_layers(checks, stated, config))
    ours = {name: value for name, value in mapping(stated, CONFIG_KEY).items() if name in UNSTATED[1:]}
    depth, allowed = ours.get("depth", config.depth), f"block_size says {config.depth}"
    if not checks.expect(not config.one_pass or depth == config.depth, "depth", depth, allowed, "ignored"):
        del ours["depth"]
    config = replace(config, **ours)
    check_layers(config)
    return config


def _check_sizes(stated: dict[str, Any], spec: TargetSpec) -> None:
    """Refuse sizes that are not the target's; of a different target where they cannot be a draft's own."""
    sizes = {"num_target_layers": spec.layers, "head_dim": spec.hidden_size // spec.heads} | stated
    sizes = {"num_key_value_heads": sizes.get("num_attention_heads")} | sizes | mapping(stated, DFLASH_KEY)
    for key, field in SIZES.items():
        if (value := sizes.get(key)) != (expected := getattr(spec, field)):
            problem = Problem(key, value, f"a draft of ours for {spec.name} has {expected}")
            raise ForeignDraft(problem) if key in FOREIGN and value is not None else ValueError(problem)


def _check_layers(checks: Checks, stated: dict[str, Any], layout: Layout, layers: int) -> None:
    """Check that the file has as many layers as engines build, and is of an architecture that computes the same."""
    listed = stated.get("architectures")
    names = [*map(str, listed)] if isinstance(listed, list) else []
    is_known = all(re.fullmatch(ARCHITECTURES[layout.kind], name) for name in names)
    checks.expect(is_known, "architectures", names, "a draft of ours does not compute what it names", "ignored")
    is_copy = layout.kind == "eagle3" and names and all(re.fullmatch(rf"(?!Eagle){PLAIN}", name) for name in names)
    count = stated.get("num_hidden_layers", layers)
    holds = count == layers or (count == 1 and layout.several) or bool(is_copy)  # PosS' is of one specialist
    checks.expect(holds, "num_hidden_layers", count, f"the file has {layers}", "ignored")


def _check_keys(
    checks: Checks, stated: dict[str, Any], kind: Kind, spec: TargetSpec, harmless: Collection[str]
) -> None:
    """Name every key by which an engine may compute something else than a draft of ours."""
    neutral = NEUTRAL | {"final_logit_softcapping": spec.logit_cap, "target_hidden_size": spec.hidden_size}
    read_keys = {*READ, DFLASH_KEY, *OF_BLOCKS} if kind == "block" else READ
    rope = mapping(stated, "rope_parameters") | mapping(stated, "rope_scaling")
    top = stated | {key: value for key, value in rope.items() if key == SHARE}
    for level in (top, mapping(stated, EAGLE_KEY), mapping(stated, DFLASH_KEY) if kind == "block" else {}):
        for key, value in level.items():
            if key in neutral:
                allowed = f"a draft of ours has {neutral[key]!r}"
                checks.expect(value in (neutral[key], None), key, value, allowed, "ignored")
            elif key not in read_keys:
                allowed = "a draft of ours does not have it, and an engine may compute something else by it"
                checks.expect(key in harmless or not value, key, value, allowed, "ignored")


def _find_block(checks: Checks, stated: dict[str, Any], spec: TargetSpec, layers: int) -> dict[str, Any]:
    """Return the fields that only a block draft has. Each setting is in dflash_config, else on the top level."""
    top_level, nested = {name: stated.get(name) for name in OF_BLOCKS}, mapping(stated, DFLASH_KEY)
    for key in OF_BLOCKS:
        pair = {str(level[key]): level[key] for level in (top_level, nested) if level.get(key) is not None}
        checks.expect(len(pair) < 2, key, list(pair.values()), "it must have one value", f"read as {nested.get(key)}")
    top_level |= nested
    mask = top_level["mask_token_id"]
    is_token, allowed = type(mask) is int and 0 <= mask < spec.vocab_size, f"it must be one of {spec.vocab_size} tokens"
    checks.expect(is_token, "mask_token_id", mask, f"{allowed} of {spec.name}", "read as the last of them")
    ids = _count_layers(checks, "target_layer_ids", top_level["target_layer_ids"], 0, spec)
    return {"block_layers": layers, "inner_layers": ids, "mask_token": mask if is_token else None}


def _count_layers(checks: Checks, key: str, ids: Any, start: int, spec: TargetSpec) -> tuple[int, ...] | None:
    """Number inner layers of the target from 1, by their outputs, where a key counts them from `start`."""
    inside = range(start, spec.layers - 1 + start)
    is_list = isinstance(ids, list) and bool(ids) and all(type(i) is int for i in ids)
    shifts = [[i + n for i in ids] for n in (0, -1, 1)] if is_list else []
    fitting = next((shifted for shifted in shifts if {*shifted} <= {*inside}), None)
    allowed = f"it must be numbers of inner layers of {spec.name}, from {start}"
    repair = f"read as {fitting}" if fitting else "ignored" if key == LAYER_IDS else ""
    checks.expect(ids == fitting and is_list, key, ids, allowed, repair)
    ascending = sorted(fitting or [])
    allowed = f"published code takes layers of {spec.layers} in ascending order, each once"
    repair = f"read as {ascending}" if len({*ascending}) == len(ascending) else ""
    checks.expect(fitting in (None, sorted({*ascending})), key, fitting, allowed, repair)
    return tuple(i + 1 - start for i in ascending) or None


def _find_scaling(checks: Checks, rope: dict[str, Any]) -> RopeScaling | None:
    of_kinds = [name for name, value in rope.items() if isinstance(value, dict)]
    allowed = f"it must be for one kind of layer, not for {of_kinds}"
    checks.expect(not of_kinds, "rope_parameters", rope, allowed, "ignored")
    kind = rope.get("rope_type") or rope.get("type") or "default"
    supported = ("default", "mrope", "llama3")  # of text alone, mrope's angles are the default
    checks.expect(kind in supported, "rope_scaling", kind, "a draft of ours has 'default' or 'llama3'", "ignored")
    if kind != "llama3" or of_kinds:
        return None
    numbers: dict[str, Any] = {field.name: rope.get(field.name) for field in fields(RopeScaling)}
    return RopeScaling(**numbers)


def _find_window(checks: Checks, stated: dict[str, Any], kind: Kind) -> int | None:
    """Return the slots that a query sees; None for all. `sliding_window` alone says nothing: `layer_types` decides."""
    kinds, window = stated.get("layer_types") or [FULL], stated.get("sliding_window")
    alike = kinds[0] if isinstance(kinds, list) and kinds == kinds[:1] * len(kinds) else None
    if alike == FULL:
        return None
    allowed = f"all must be {FULL}" + ("" if kind == "block" else f", or all {SLIDING}")  # z-lab's window moves
    if not checks.expect(kind != "block" and alike == SLIDING, "layer_types", kinds, allowed, "ignored"):
        return None
    checks.expect(window is not None, "sliding_window", window, "it must be the slots that a query sees", "ignored")
    return window


def _find_layers(checks: Checks, stated: dict[str, Any], config: DraftConfig) -> tuple[int, ...] | None:
    """Return the layers that an EAGLE-3 file names; None for the usual. eagle_config counts from 0 or from 1.

    Others it counts from 0, as SGLang does. On the top level all count from 1, as in vLLM.
    """
    top, usual = stated.get(LAYER_IDS), list(config.aux_layers)
    ids, from_0 = top or mapping(stated, EAGLE_KEY).get(LAYER_IDS), [layer - 1 for layer in usual]
    allowed = f"it counts from 1, and the usual layers of {config.target.name} are {usual}"
    is_right = checks.expect(not top or top != from_0, LAYER_IDS, top, allowed, f"read as {usual}")
    if not is_right or not ids or ids in (usual, from_0):
        return None
    return _count_layers(checks, LAYER_IDS, ids, 1 if top else 0, config.target)


def rope_parameters(config: DraftConfig) -> dict[str, Any]:
    """Describe a draft's rotary angles under transformers' names."""
    scaling = {} if config.rope_scaling is None else asdict(config.rope_scaling)
    theta = config.rope_theta or config.target.rope_theta
    return {"rope_type": "llama3" if scaling else "default", "rope_theta": theta, **scaling}


def publish(config: DraftConfig, layout: Layout, tensors: dict[str, Tensor], tied: bool) -> dict[str, Any]:
    """Make the published config.json of a draft of ours.

    Args:
        tensors: of the file.
        tied: whether the target's head is its embedding.
    """
    spec = config.target
    own_head = {"draft_vocab_size": config.vocabulary_size or spec.vocab_size} if HEAD in tensors else {}
    # EAGLE takes "bias" for fc's, and true by default. vLLM and SGLang take it for attention's, SGLang for EAGLE-3
    # for fc's too.
    bias = {} if "fc.bias" in tensors else {"bias": False}
    if "layers.0.self_attn.q_proj.bias" in tensors:
        bias = {"attention_bias": True}
    rope, from_0 = rope_parameters(config), [layer - 1 for layer in config.aux_layers]
    layers = {LAYER_IDS: list(config.aux_layers), "eagle_config": {LAYER_IDS: from_0}}  # as vLLM reads them; as SGLang
    block = {
        "model_type": "qwen3",
        "block_size": config.depth + 1,
        "num_target_layers": spec.layers,
        DFLASH_KEY: {"target_layer_ids": from_0, "mask_token_id": config.mask_row},
    }
    return {
        "architectures": [layout.architecture],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": spec.hidden_size,
        "intermediate_size": config.intermediate_size or spec.intermediate_size,
        "max_position_embeddings": spec.context,
        "num_attention_heads": spec.heads,
        "num_key_value_heads": spec.kv_heads,
        "head_dim": spec.head_dim,
        # PosS takes the number of layers as an argument, and builds each with this many.
        "num_hidden_layers": config.layer_count if config.kind != "eagle2" or layout.states_draft else 1,
        "rms_norm_eps": config.eps,
        "rope_theta": rope.pop("rope_theta"),
        "rope_scaling": rope if config.rope_scaling else None,
        "tie_word_embeddings": tied and not own_head,  # else SGLang uses the embedding as a draft's own head
        "torch_dtype": str(tensors["fc.weight"].dtype).removeprefix("torch."),
        "vocab_size": spec.vocab_size,
        **{name: True for name in SWITCHES if getattr(config, name)},
        **({"layer_types": [SLIDING], "sliding_window": config.window} if config.window else {}),
        **own_head,
        **bias,
        **(block if config.one_pass else {}),
        CONFIG_KEY: {name: each for name, each in asdict(config).items() if layout.states_draft or name in UNSTATED},
        **({LAYER_IDS: list(config.aux_layers)} if layout.states_draft else {}),
        **(layers if config.own_head and config.inner_layers else {}),
    }


def _unless_same(value: Any, of_target: Any) -> Any:
    """Return a draft's own value; None for the target's, whose floats a GGUF file rounds to float32."""
    is_close = isinstance(value, float) and isclose(value, of_target, rel_tol=1e-6)
    return None if value == of_target or is_close else value
