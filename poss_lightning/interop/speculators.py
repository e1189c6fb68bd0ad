"""config.json of the library speculators, vLLM's own trainer: its sizes lie one level deeper than EAGLE's.

    transformer_layer_config   the layer, as transformers describes a Llama of one layer
    speculators_config         how many tokens to draft, and for which target (the "verifier")
    draft_vocab_size, eagle_aux_hidden_state_layer_ids, and the switches of EAGLE-3

Read in speculators 0.9.0 (config.py, models/eagle3/{config,core,model_definitions}.py) and in vLLM 0.32.0
(transformers_utils/configs/speculators/). Both know kind "eagle3" for such drafts, and none for EAGLE 1 and 2.
"""

from typing import Any

from poss_lightning.draft.config import SWITCHES
from poss_lightning.interop.settings import LAYER_IDS, mapping
from poss_lightning.target import embedded
from poss_lightning.target.model import Target

KIND, LAYER, ENGINE = "speculators_model_type", "transformer_layer_config", "speculators_config"
VERSION = "0.9.0"  # whose classes were read, and load what is written
# of the published keys, those that describe the layer; the last two where it has a window
WITHIN = "model_type hidden_act hidden_size intermediate_size max_position_embeddings num_attention_heads "
WITHIN += "num_key_value_heads head_dim num_hidden_layers rms_norm_eps tie_word_embeddings vocab_size layer_types "
WITHIN += "sliding_window"


def flatten(stored: dict[str, Any]) -> dict[str, Any]:
    """The keys of EAGLE-3's config.json, of one in this format.

    Raises:
        ValueError: it is not of this format, or of another method than EAGLE-3; or its layer is no Llama's.
    """
    if KIND not in stored:
        raise ValueError(
            f"config.json has no {KIND}, so it is not of the speculators format: say --input_format eagle3"
        )
    if not (layer := mapping(stored, LAYER)):
        raise ValueError(f"config.json: {LAYER} is {stored.get(LAYER)!r}; it must describe the draft's layer")
    width = layer.get("hidden_size")
    for name, value, expected in (
        (KIND, stored[KIND], "eagle3"),
        (f"{LAYER}.model_type", layer.get("model_type"), "llama"),  # Qwen3's has norms for queries and keys
        (f"{LAYER}.num_hidden_layers", layer.get("num_hidden_layers"), 1),
        ("target_hidden_size", stored.get("target_hidden_size") or width, width),
    ):
        if value != expected:
            raise ValueError(f"config.json: {name} is {value!r}; a draft of ours has {expected!r}")
    if stored.get("norm_before_residual") is None:
        raise ValueError(
            "config.json has no norm_before_residual, which vLLM takes for true and speculators for false: add it, as "
            "the draft was trained"
        )
    return layer | {name: stored.get(name) for name in ("draft_vocab_size", LAYER_IDS, *SWITCHES)}


def find_allocation(stored: dict[str, Any]) -> list[Any] | None:
    """One layer for the tokens that an engine drafts by the config's default method; None where it names no method."""
    engine = mapping(stored, ENGINE)
    methods = [method for method in engine.get("proposal_methods") or () if isinstance(method, dict)]
    default = engine.get("default_proposal_method")
    method = next((each for each in methods if each.get("proposal_type") == default), next(iter(methods), None))
    return None if method is None else [method.get("speculative_tokens")]


def nest(published: dict[str, Any], layers: tuple[int, ...], positions: int, target: Target) -> dict[str, Any]:
    """The config.json of a draft in this format, from the keys of EAGLE-3's.

    Args:
        published: as EAGLE-3's would be.
        layers: of the target that the draft reads; counted as ours are, 0 is the embedding.
        positions: tokens that an engine drafts, if nobody says otherwise.
        target: which engines load with the draft, by its name; the embedded one has none but its folder's.
    """
    scaling = published["rope_scaling"] or {"rope_type": "default"}
    rope = {"rope_parameters": scaling | {"rope_theta": published["rope_theta"]}}
    layer = {key: published[key] for key in WITHIN.split() if key in published}
    greedy = {"proposal_type": "greedy", "speculative_tokens": positions, "verifier_accept_k": 1}
    name = str(embedded.folder()) if target.spec.name == embedded.NAME else target.spec.name
    return {
        "architectures": published["architectures"],
        KIND: "eagle3",
        "speculators_version": VERSION,
        ENGINE: {
            "algorithm": "eagle3",
            "proposal_methods": [greedy | {"accept_tolerance": 0.0}],
            "default_proposal_method": "greedy",
            "verifier": {"name_or_path": name, "architectures": [type(target.model).__name__]},
        },
        LAYER: layer | rope | {"attention_bias": False, "mlp_bias": False},
        "draft_vocab_size": published["draft_vocab_size"],
        "target_hidden_size": None,
        LAYER_IDS: list(layers),
        **{key: published.get(key, False) for key in SWITCHES},  # vLLM's defaults are not all false
        "embed_requires_grad": False,
        "tie_word_embeddings": False,
        "dtype": published["torch_dtype"],
    }
