"""config.json of a published draft: parsed into a draft's config, and made from one."""

from dataclasses import asdict, fields, replace
from math import isclose
from typing import Any

from torch import Tensor

from poss_lightning.draft.config import SWITCHES, DraftConfig
from poss_lightning.draft.rope import RopeScaling
from poss_lightning.interop.layouts import HEAD, Layout, check_layers
from poss_lightning.target.spec import TargetSpec

DFLASH_KEY = "dflash_config"
OF_BLOCKS = ("target_layer_ids", "mask_token_id", "block_size", "num_target_layers")  # its keys that ours has, too
# settings of DFlash that ours lacks, with the values that change nothing
NEUTRAL = {"input_embedding_scale": 1, "output_multiplier": 1, "use_aux_hidden_state": True, "projector_type": "dflash"}
LAYER_IDS = "eagle_aux_hidden_state_layer_ids"  # the layers that an EAGLE-3 draft fuses, where a file names them
FULL, SLIDING = "full_attention", "sliding_attention"  # in layer_types
CONFIG_KEY = "poss_lightning"  # our config in a file: whole where our plugin loads it, else what has no other place
UNSTATED = ("allocation", "depth", "detach", "kv")


def check_setting(holds: bool, name: str, value: Any, words: str) -> None:
    """Raise ValueError, with the key of config.json and its value, unless `holds`."""
    if not holds:
        raise ValueError(f"config.json: {name} is {value!r}; {words}")


def check_equal(draft: str, pairs: dict[str, tuple[Any, Any]]) -> None:
    """Raise ValueError for the first key whose value is not the one that a draft, in words, has: (stated, its own)."""
    for name, (stated, own) in pairs.items():
        check_setting(_is_same(stated, own), name, stated, f"{draft} has {own!r}")


def mapping(published: dict[str, Any], name: str) -> dict[str, Any]:
    """Return the object at a key, without its nulls; {} where there is none."""
    value = published.get(name) or {}
    check_setting(isinstance(value, dict), name, value, "it must be an object, {A: B}")
    return {key: each for key, each in value.items() if each is not None}


def parse_config(
    published: dict[str, Any], layout: Layout, allocation: list[int], spec: TargetSpec, vocabulary: int, layers: int = 1
) -> DraftConfig:
    """Parse the config of a published draft.

    A value that its config.json leaves out has the default of the published code (eagle/model/configs.py).

    Args:
        published: content of config.json.
        vocabulary: tokens that the draft proposes, by its tensors.
        layers: of a block draft, by its tensors.
    """
    stated = {name: value for name, value in published.items() if value is not None}
    rope = mapping(stated, "rope_parameters") | mapping(stated, "rope_scaling")  # as transformers merges them
    switches = stated | mapping(stated, "eagle_config")  # where engines look for them first
    heads, eps = stated.get("num_attention_heads"), stated.get("rms_norm_eps", 1e-6)
    check_equal(
        f"a draft of ours for {spec.name}",
        {
            "hidden_size": (stated.get("hidden_size"), spec.hidden_size),
            "vocab_size": (stated.get("vocab_size"), spec.vocab_size),
            "num_attention_heads": (heads, spec.heads),
            "num_key_value_heads": (stated.get("num_key_value_heads", heads), spec.kv_heads),
            "head_dim": (stated.get("head_dim", spec.hidden_size // spec.heads), spec.head_dim),
            "partial_rotary_factor": ((stated | rope).get("partial_rotary_factor", 1), 1),
            "hidden_act": (stated.get("hidden_act", "silu"), "silu"),
        },
    )
    theta, size = (stated | rope).get("rope_theta", 10000.0), stated.get("draft_vocab_size", spec.vocab_size)
    check_setting(isinstance(theta, int | float), "rope_theta", theta, "it must be a number, the base of the rotation")
    check_setting(size == vocabulary, "draft_vocab_size", size, f"the draft proposes {vocabulary} tokens")
    config = DraftConfig(
        target=spec,
        allocation=tuple(allocation),
        depth=layout.depth or sum(allocation),
        detach=layout.kind == "eagle2",
        intermediate_size=_unless_same(stated.get("intermediate_size"), spec.intermediate_size),
        vocabulary_size=_unless_same(vocabulary, spec.vocab_size),
        kv=layout.kv,
        kind=layout.kind,
        window=_find_window(stated),
        rope_theta=_unless_same(float(theta), spec.rope_theta),
        rope_scaling=_find_scaling(rope),
        norm_eps=_unless_same(eps, spec.norm_eps),
        **{name: switches[name] for name in SWITCHES if name in switches},
        **(_find_block(stated, spec, layers) if layout.kind == "block" else {}),
    )
    if layout.kind == "eagle3":
        config = replace(config, inner_layers=_find_layers(stated, config))
    own = mapping(stated, CONFIG_KEY)  # of a draft that was ours
    config = replace(config, **{name: own[name] for name in UNSTATED[1:] if name in own})
    words = f"block_size says {sum(allocation)}"
    check_setting(not config.one_pass or config.depth == sum(allocation), "depth", config.depth, words)
    check_layers(config)
    return config


def find_positions(published: dict[str, Any]) -> int:
    """Return the number of tokens that a block draft proposes: its first place holds the newest token."""
    size: Any = mapping(published, DFLASH_KEY).get("block_size", published.get("block_size"))
    check_setting(type(size) is int and size > 1, "block_size", size, "it must be the places of a block, 2 or more")
    return size - 1


def _find_block(stated: dict[str, Any], spec: TargetSpec, block_layers: int) -> dict[str, Any]:
    """Return the fields that only a block draft has. Each setting is in dflash_config, else on the top level."""
    neutral = NEUTRAL | {"final_logit_softcapping": spec.logit_cap}
    found = {name: stated.get(name) for name in (*OF_BLOCKS, *neutral)} | mapping(stated, DFLASH_KEY)
    others = {name: value for name, value in found.items() if name not in OF_BLOCKS}
    others |= {"is_causal": stated.get("is_causal"), "layer_types": _find_window(stated) and SLIDING}
    for name, value in others.items():
        check_setting(not value or value == neutral.get(name), name, value, "a draft of ours does not have it")
    layers, mask = _count_layers("target_layer_ids", found["target_layer_ids"], 0, spec), found["mask_token_id"]
    check_setting(type(mask) is int, "mask_token_id", mask, f"it must be a token of {spec.name}")
    return {"block_layers": block_layers, "inner_layers": layers, "mask_token": mask}


def _count_layers(name: str, ids: Any, first: int, spec: TargetSpec) -> tuple[int, ...]:
    """Number inner layers of the target from 1, by their outputs, where a key counts them from `first`."""
    known = isinstance(ids, list) and all(type(i) is int and first <= i < spec.layers - 1 + first for i in ids)
    words = f"it must be numbers of inner layers of {spec.name}, from {first}"
    check_setting(known and bool(ids), name, ids, words)
    return tuple(i + 1 - first for i in ids)


def _find_scaling(rope: dict[str, Any]) -> RopeScaling | None:
    of_kinds = [name for name, value in rope.items() if isinstance(value, dict)]
    check_setting(not of_kinds, "rope_parameters", rope, f"it must be for one kind of layer, not for {of_kinds}")
    kind = rope.get("rope_type") or rope.get("type") or "default"
    known = ("default", "mrope", "llama3")  # of text alone, mrope's angles are the default
    check_setting(kind in known, "rope_scaling", kind, "a draft of ours has 'default' or 'llama3'")
    if kind != "llama3":
        return None
    numbers: dict[str, Any] = {field.name: rope.get(field.name) for field in fields(RopeScaling)}
    return RopeScaling(**numbers)


def _find_window(stated: dict[str, Any]) -> int | None:
    """Return the slots that a query sees; None for all. `sliding_window` alone says nothing: `layer_types` decides."""
    kinds, window = stated.get("layer_types") or [FULL], stated.get("sliding_window")
    one_kind = isinstance(kinds, list) and kinds in ([FULL] * len(kinds), [SLIDING] * len(kinds))
    check_setting(one_kind, "layer_types", kinds, f"all must be {FULL}, or all {SLIDING}")
    if kinds[0] == FULL:
        return None
    check_setting(window is not None, "sliding_window", window, "it must be the slots that a query sees")
    return window


def _find_layers(stated: dict[str, Any], config: DraftConfig) -> tuple[int, ...] | None:
    """Return the layers that an EAGLE-3 file names; None for the usual. eagle_config counts from 0 or from 1.

    Others it counts from 0, as SGLang does. On the top level all count from 1, as in vLLM.
    """
    top, usual = stated.get(LAYER_IDS), list(config.aux_layers)
    ids, from_0 = top or mapping(stated, "eagle_config").get(LAYER_IDS), [layer - 1 for layer in usual]
    words = f"it counts from 1, and the usual layers of {config.target.name} are {usual}"
    check_setting(not top or top != from_0, LAYER_IDS, top, words)
    if not ids or ids in (usual, from_0):
        return None
    return _count_layers(LAYER_IDS, ids, 1 if top else 0, config.target)


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


def _is_same(a: Any, b: Any) -> bool:
    floats = isinstance(a, float) and isinstance(b, float)
    return a == b or (floats and isclose(a, b, rel_tol=1e-6))  # a target loaded from a GGUF file has them in float32


def _unless_same(value: Any, of_target: Any) -> Any:
    """Return a draft's own value; None for the target's."""
    return None if _is_same(value, of_target) else value
