"""config.json of the library speculators, vLLM's own trainer: its sizes lie one level deeper than EAGLE's.

    transformer_layer_config   the layer, as transformers describes a Llama of one layer
    speculators_config         how many tokens to draft, and for which target (the "verifier")
    draft_vocab_size, eagle_aux_hidden_state_layer_ids, and the switches of EAGLE-3

Read in speculators 0.9.0 (config.py, models/eagle3/{config,core,model_definitions}.py) and in vLLM 0.32.0
(transformers_utils/configs/speculators/). Both know kind "eagle3" for such drafts, and none for EAGLE 1 and 2.
"""

from typing import Any

from poss_lightning.draft.config import SWITCHES, DraftConfig
from poss_lightning.interop.problems import Checks
from poss_lightning.interop.settings import LAYER_IDS, mapping, rope_parameters
from poss_lightning.target_model import embedded
from poss_lightning.target_model.model import Target

KIND, LAYER_KEYS, ENGINE_KEYS = "speculators_model_type", "transformer_layer_config", "speculators_config"
VERSION = "0.9.0"  # whose classes were read, and load what is written
# keys of EAGLE-3's config.json that do not describe its layer
OUTER_KEYS = {"architectures", "rope_theta", "rope_scaling", "torch_dtype", "draft_vocab_size", "bias", *SWITCHES}
OUTER_KEYS |= {LAYER_IDS, "eagle_config"}


def flatten(stored: dict[str, Any], checks: Checks) -> dict[str, Any]:
    """Put a config.json of this format under the keys of EAGLE-3's."""
    layer = mapping(stored, LAYER_KEYS)
    for key, value, expected in (
        (KIND, stored.get(KIND), "eagle3"),
        (f"{LAYER_KEYS}.model_type", layer.get("model_type"), "llama"),  # Qwen3's has norms for queries and keys
    ):
        allowed = f"a draft of ours in this --input_format has {expected!r}"
        checks.expect(value == expected, key, value, allowed)
    switch = stored.get("norm_before_residual")
    allowed = "vLLM takes it for true and speculators for false: add it, as the draft was trained"
    checks.expect(switch is not None, "norm_before_residual", switch, allowed, "read as true")
    outer = {key: value for key, value in stored.items() if key not in (KIND, LAYER_KEYS, ENGINE_KEYS)}
    return layer | outer | {"norm_before_residual": switch is None or switch}


def find_default_positions(stored: dict[str, Any]) -> int | None:
    """Return how many tokens an engine drafts by the default method; None where the config does not say."""
    engine = mapping(stored, ENGINE_KEYS)
    methods, default = engine.get("proposal_methods") or [{}], engine.get("default_proposal_method")
    is_list = isinstance(methods, list) and all(isinstance(method, dict) for method in methods)
    Checks().expect(is_list, "proposal_methods", methods, "it must be a list of objects, [{A: B}]")  # raises
    chosen = next((method for method in methods if method.get("proposal_type") == default), methods[0])
    return chosen.get("speculative_tokens")


def nest(published: dict[str, Any], config: DraftConfig, target: Target) -> dict[str, Any]:
    """Make the config.json of a draft in this format from the keys of EAGLE-3's.

    Args:
        target: which engines load with the draft, by its name; the embedded one by its folder.
    """
    layer = {key: value for key, value in published.items() if key not in OUTER_KEYS}
    name = str(embedded.folder()) if target.spec.name == embedded.NAME else target.spec.name
    greedy = {"proposal_type": "greedy", "speculative_tokens": config.allocation[0]}
    return {
        "architectures": published["architectures"],
        KIND: "eagle3",
        "speculators_version": VERSION,
        ENGINE_KEYS: {
            "algorithm": "eagle3",
            "proposal_methods": [greedy | {"verifier_accept_k": 1, "accept_tolerance": 0.0}],
            "default_proposal_method": "greedy",
            "verifier": {"name_or_path": name, "architectures": [type(target.model).__name__]},
        },
        LAYER_KEYS: layer | {"rope_parameters": rope_parameters(config), "attention_bias": False, "mlp_bias": False},
        "draft_vocab_size": published["draft_vocab_size"],
        "target_hidden_size": None,
        LAYER_IDS: list(config.aux_layers),
        **{key: getattr(config, key) for key in SWITCHES},  # vLLM's defaults are not all false
        "embed_requires_grad": False,
        "tie_word_embeddings": False,
        "dtype": published["torch_dtype"],
    }
