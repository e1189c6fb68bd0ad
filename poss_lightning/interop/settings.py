"""config.json of a published draft: read into a draft's config, and written from it."""

from math import isclose
from typing import Any

from torch import Tensor

from poss_lightning.draft.specialists import DraftConfig
from poss_lightning.interop.layouts import Layout, check_layers
from poss_lightning.target.spec import TargetSpec

FUSED = "eagle_aux_hidden_state_layer_ids"  # the layers that an EAGLE-3 draft fuses, where a file says
OTHERWISE = ("norm_before_residual", "norm_output")  # switches of EAGLE-3 drafts that compute something else


def read(given: dict[str, Any], layout: Layout, allocation: list[int], spec: TargetSpec, proposed: int) -> DraftConfig:
    """The config of a published draft.

    What its config.json leaves out is what the published code takes then (eagle/model/configs.py).

    Args:
        given: what config.json says.
        proposed: rows of the head that it proposes.

    Raises:
        ValueError: it contradicts the target or the tensors, or what a draft of ours computes; the message names it.
    """
    rotary = given.get("rope_parameters") or given
    scaling = given.get("rope_scaling") or given.get("rope_parameters") or {}
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    heads, total = given.get("num_attention_heads"), given.get("vocab_size")
    for name, value, own in (
        ("hidden_size", given.get("hidden_size"), spec.hidden_size),
        ("vocab_size", total, spec.vocab_size),
        ("draft_vocab_size", given.get("draft_vocab_size") or total, proposed),
        ("num_attention_heads", heads, spec.heads),
        ("num_key_value_heads", given.get("num_key_value_heads") or heads, spec.kv_heads),
        ("head_dim", given.get("head_dim") or spec.hidden_size // spec.heads, spec.head_dim),
        ("rms_norm_eps", given.get("rms_norm_eps", 1e-6), spec.norm_eps),
        ("rope_scaling", kind, "default"),
        ("hidden_act", given.get("hidden_act", "silu"), "silu"),
        *((name, bool(given.get(name)), False) for name in OTHERWISE),
    ):
        if not _same(value, own):
            raise ValueError(f"config.json: {name} is {value!r}; a draft of ours for {spec.name} has {own!r}")
    if not isinstance(width := given.get("intermediate_size"), int):
        raise ValueError(f"config.json: intermediate_size is {width!r}; it must be the width of a layer's MLP")
    theta = float(rotary.get("rope_theta") or 10000.0)
    config = DraftConfig(
        spec,
        tuple(allocation),
        layout.depth or sum(allocation),
        detach=layout.kind == "eagle2",
        intermediate_size=None if width == spec.intermediate_size else width,
        vocabulary_size=None if proposed == spec.vocab_size else proposed,
        kv=layout.kv,
        kind=layout.kind,
        rope_theta=None if _same(theta, spec.rope_theta) else theta,
    )
    check_layers(config)
    _check_fused(given, config)
    return config


def _check_fused(given: dict[str, Any], config: DraftConfig) -> None:
    """Where a file names layers, they must be those of the published code; it counts from 1 (vLLM) or 0 (SGLang)."""
    ids = given.get(FUSED) or (given.get("eagle_config") or {}).get(FUSED)
    ours = list(config.layers)
    if ids and ids not in (ours, [layer - 1 for layer in ours]):
        raise ValueError(f"config.json: {FUSED} is {ids}; a draft of ours for {config.target.name} fuses {ours}")


def write(config: DraftConfig, layout: Layout, tensors: dict[str, Tensor], tied: bool) -> dict[str, Any]:
    """What config.json says of a draft of ours.

    Args:
        tensors: the file's.
        tied: whether the target's head is its embedding.
    """
    spec = config.target
    own_head = {"draft_vocab_size": config.vocabulary_size or spec.vocab_size} if config.kind == "eagle3" else {}
    # EAGLE reads "bias" as fc's, and takes true where there is none; vLLM and SGLang read it as attention's, SGLang
    # for EAGLE-3 as fc's too.
    bias = {} if "fc.bias" in tensors else {"bias": False}
    if "layers.0.self_attn.q_proj.bias" in tensors:
        bias = {"attention_bias": True}
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
        # PosS' readers are told how many layers there are, and stack what this says; SPEED's read it here.
        "num_hidden_layers": len(config.allocation) if config.kind == "eagle3" else 1,
        "rms_norm_eps": spec.norm_eps,
        "rope_scaling": None,
        "rope_theta": config.rope_theta or spec.rope_theta,
        "tie_word_embeddings": tied and not own_head,  # else SGLang takes the embedding for a draft's own head
        "torch_dtype": str(tensors["fc.weight"].dtype).removeprefix("torch."),
        "vocab_size": spec.vocab_size,
        **own_head,
        **bias,
    }


def _same(a: Any, b: Any) -> bool:
    floats = isinstance(a, float) and isinstance(b, float)
    return a == b or (floats and isclose(a, b, rel_tol=1e-6))  # a target read from a GGUF file has them in float32
