"""config.json of a published draft: parsed into a draft's config, and made from one."""

from dataclasses import asdict, fields
from math import isclose
from typing import Any

from torch import Tensor

from poss_lightning.draft.config import SWITCHES, DraftConfig
from poss_lightning.draft.layer import RopeScaling
from poss_lightning.interop.layouts import HEAD, Layout, check_layers
from poss_lightning.target.spec import TargetSpec

DFLASH = "dflash_config"
LAYER_IDS = "eagle_aux_hidden_state_layer_ids"  # the layers that an EAGLE-3 draft fuses, where a file names them
FULL, SLIDING = "full_attention", "sliding_attention"  # in layer_types
OURS = "poss_lightning"  # our config, where a layout has a place for it


def parse(
    published: dict[str, Any],
    layout: Layout,
    allocation: list[int],
    spec: TargetSpec,
    *,
    vocabulary_size: int,
    layers: int = 1,
) -> DraftConfig:
    """The config of a published draft.

    A value that its config.json leaves out has the default of the published code (eagle/model/configs.py).

    Args:
        published: content of config.json.
        vocabulary_size: tokens that the draft proposes, from its tensors.
        layers: that a block draft has, from its tensors.

    Raises:
        ValueError: a value contradicts the target, the tensors, or what a draft of ours computes; the message names it.
    """
    rope = mapping(published, "rope_parameters") | mapping(published, "rope_scaling")  # as transformers merges them
    theta = rope.get("rope_theta") or published.get("rope_theta") or 10000.0
    heads, total = published.get("num_attention_heads"), published.get("vocab_size")
    for name, value, expected in (
        ("hidden_size", published.get("hidden_size"), spec.hidden_size),
        ("vocab_size", total, spec.vocab_size),
        ("draft_vocab_size", published.get("draft_vocab_size") or total, vocabulary_size),
        ("num_attention_heads", heads, spec.heads),
        ("num_key_value_heads", published.get("num_key_value_heads") or heads, spec.kv_heads),
        ("head_dim", published.get("head_dim") or spec.hidden_size // spec.heads, spec.head_dim),
        ("rms_norm_eps", published.get("rms_norm_eps", 1e-6), spec.norm_eps),
        ("partial_rotary_factor", rope.get("partial_rotary_factor") or published.get("partial_rotary_factor") or 1, 1),
        ("hidden_act", published.get("hidden_act", "silu"), "silu"),
    ):
        if not _is_same(value, expected):
            raise ValueError(f"config.json: {name} is {value!r}; a draft of ours for {spec.name} has {expected!r}")
    if not isinstance(width := published.get("intermediate_size"), int):
        raise ValueError(f"config.json: intermediate_size is {width!r}; it must be the width of a layer's MLP")
    if not isinstance(theta, int | float):
        raise ValueError(f"config.json: rope_theta is {theta!r}; it must be a number, the base of the rotation")
    config = DraftConfig(
        target=spec,
        allocation=tuple(allocation),
        depth=layout.depth or sum(allocation),
        detach=layout.kind == "eagle2",
        intermediate_size=None if width == spec.intermediate_size else width,
        vocabulary_size=None if vocabulary_size == spec.vocab_size else vocabulary_size,
        kv=layout.kv,
        kind=layout.kind,
        window=_find_window(published),
        rope_theta=None if _is_same(float(theta), spec.rope_theta) else float(theta),
        rope_scaling=_find_scaling(rope),
        **find_switches(published),
        **(_find_block(published, spec, layers) if layout.kind == "block" else {}),
    )
    check_layers(config)
    _check_layer_ids(published, config)
    return config


def mapping(published: dict[str, Any], name: str) -> dict[str, Any]:
    """What stands under a name, without what is null; {} for nothing."""
    if not isinstance(value := published.get(name) or {}, dict):
        raise ValueError(f"config.json: {name} is {value!r}; it must have names with values, {{A: B}}")
    return {key: each for key, each in value.items() if each is not None}


def find_switches(published: dict[str, Any]) -> dict[str, Any]:
    """The switches of EAGLE-3 drafts; engines look for them in eagle_config, too."""
    nested, found = mapping(published, "eagle_config"), {}
    for name in SWITCHES:
        value = nested.get(name, published.get(name))
        if not isinstance(value, bool | None):
            raise ValueError(f"config.json: {name} is {value!r}; it must be true or false")
        found[name] = bool(value)
    return found


def find_positions(published: dict[str, Any]) -> int:
    """How many tokens a block draft proposes: its first place holds the newest token."""
    size = mapping(published, DFLASH).get("block_size", published.get("block_size"))
    if type(size) is not int or size < 2:
        raise ValueError(f"config.json: block_size is {size!r}; it must be the places of a block, 2 or more")
    return size - 1


def _find_block(published: dict[str, Any], spec: TargetSpec, layers: int) -> dict[str, Any]:
    """The fields that only a block draft has. DFlash counts the target's layers from 0, by their outputs."""
    stated = mapping(published, DFLASH)
    others = {name: value for name, value in stated.items() if value and name not in _OF_BLOCKS}
    others |= {name: True for name in ("is_causal",) if published.get(name)}
    if _find_window(published) or others:
        name = next(iter(others), "layer_types")
        raise ValueError(f"config.json: {name} is {others.get(name, SLIDING)!r}, which a draft of ours does not have")
    ids, mask = stated.get("target_layer_ids"), stated.get("mask_token_id")
    if not isinstance(ids, list) or not ids or not all(type(i) is int and 0 <= i < (spec.layers or 0) - 1 for i in ids):
        raise ValueError(
            f"config.json: target_layer_ids is {ids!r}; it must be numbers of inner layers of {spec.name}, from 0"
        )
    if type(mask) is not int:
        raise ValueError(f"config.json: mask_token_id is {mask!r}; it must be a token of {spec.name}")
    return {"block_layers": layers, "inner_layers": tuple(i + 1 for i in ids), "mask_token": mask}


_OF_BLOCKS = ("target_layer_ids", "mask_token_id", "block_size", "num_target_layers")


def _find_scaling(rope: dict[str, Any]) -> RopeScaling | None:
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if several := [name for name, value in rope.items() if isinstance(value, dict)]:
        raise ValueError(f"config.json: rope_parameters has values for {several[0]}; it must be of one kind of layer")
    if kind == "default":
        return None
    if kind != "llama3":
        raise ValueError(f"config.json: rope_scaling is {kind!r}; a draft of ours has 'default' or 'llama3'")
    numbers: dict[str, Any] = {field.name: rope.get(field.name) for field in fields(RopeScaling)}
    try:
        return RopeScaling(**numbers)
    except ValueError as error:
        raise ValueError(f"config.json: {error}") from error


def _find_window(published: dict[str, Any]) -> int | None:
    """The slots that a query sees; None for all. `sliding_window` alone says nothing: readers go by `layer_types`."""
    kinds, window = published.get("layer_types") or [FULL], published.get("sliding_window")
    if not isinstance(kinds, list) or kinds not in ([FULL] * len(kinds), [SLIDING] * len(kinds)):
        raise ValueError(f"config.json: layer_types is {kinds!r}; all must be {FULL}, or all {SLIDING}")
    if kinds[0] == FULL:
        return None
    if type(window) is not int or window < 1:
        raise ValueError(f"config.json: sliding_window is {window!r}; it must be the slots that a query sees")
    return window


def _check_layer_ids(published: dict[str, Any], config: DraftConfig) -> None:
    """Raise ValueError where a file names other layers than ours: counted from 1, in eagle_config from 0 or 1."""
    ids, ours = published.get(LAYER_IDS), list(config.layers)
    known = [ours]
    if not ids:
        ids = mapping(published, "eagle_config").get(LAYER_IDS)
        known.append([layer - 1 for layer in ours])
    if ids and ids not in known:
        raise ValueError(f"config.json: {LAYER_IDS} is {ids}; a draft of ours for {config.target.name} fuses {ours}")


def rope_parameters(config: DraftConfig) -> dict[str, Any]:
    """A draft's rotary angles under transformers' names."""
    scaling = {} if config.rope_scaling is None else asdict(config.rope_scaling)
    theta = config.rope_theta or config.target.rope_theta
    return {"rope_type": "llama3" if scaling else "default", "rope_theta": theta, **scaling}


def publish(config: DraftConfig, layout: Layout, tensors: dict[str, Tensor], tied: bool) -> dict[str, Any]:
    """The published config.json of a draft of ours.

    Args:
        tensors: the file's.
        tied: whether the target's head is its embedding.
    """
    spec = config.target
    own_head = {"draft_vocab_size": config.vocabulary_size or spec.vocab_size} if HEAD in tensors else {}
    # EAGLE takes "bias" for fc's, and true by default. vLLM and SGLang take it for attention's, SGLang for EAGLE-3
    # for fc's too.
    bias = {} if "fc.bias" in tensors else {"bias": False}
    if "layers.0.self_attn.q_proj.bias" in tensors:
        bias = {"attention_bias": True}
    rope = rope_parameters(config)
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
        "rms_norm_eps": spec.norm_eps,
        "rope_theta": rope.pop("rope_theta"),
        "rope_scaling": rope if config.rope_scaling else None,
        "tie_word_embeddings": tied and not own_head,  # else SGLang uses the embedding as a draft's own head
        "torch_dtype": str(tensors["fc.weight"].dtype).removeprefix("torch."),
        "vocab_size": spec.vocab_size,
        **{name: True for name in SWITCHES if getattr(config, name)},
        **({"layer_types": [SLIDING], "sliding_window": config.window} if config.window else {}),
        **own_head,
        **bias,
        **(_publish_block(config) if config.one_pass else {}),
        **({OURS: asdict(config), LAYER_IDS: list(config.layers)} if layout.states_draft else {}),
    }


def _publish_block(config: DraftConfig) -> dict[str, Any]:
    ids = [layer - 1 for layer in config.layers]
    return {
        "model_type": "qwen3",
        "block_size": config.depth + 1,
        "num_target_layers": config.target.layers,
        DFLASH: {"target_layer_ids": ids, "mask_token_id": config.mask_row},
    }


def _is_same(a: Any, b: Any) -> bool:
    floats = isinstance(a, float) and isinstance(b, float)
    return a == b or (floats and isclose(a, b, rel_tol=1e-6))  # a target loaded from a GGUF file has them in float32
