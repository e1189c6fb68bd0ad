"""Model families of transformers, tiny."""

from tests.support import tiny

WINDOW, TURN = 4, 64  # tokens a sliding layer sees, fewer than trees are deep; where the angles of a "longrope" turn
SIZE = tiny.SIZE | {"num_hidden_layers": 3, "initializer_range": 0.3}
SIZE |= {"tie_word_embeddings": False}  # random and tied, a target would repeat what it reads
MIXED = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
SCALED = {"embedding_multiplier": 3.0, "residual_multiplier": 0.7, "attention_multiplier": 0.4, "logits_scaling": 6.0}
QWEN = {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}
LONG = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0, 1.5], "long_factor": [4.0, 9.0]}


def rope(rope_type: str, **more) -> dict:
    return {"rope_parameters": {"rope_type": rope_type, "rope_theta": 1e4, "factor": 4.0, **more}}


FAMILIES = {
    "llama": {},
    "llama, linear": rope("linear"),
    "llama, llama3": rope("llama3", low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32),
    "llama, yarn": rope("yarn", original_max_position_embeddings=128),
    "llama, dynamic": rope("dynamic") | {"max_position_embeddings": TURN},
    "qwen2": QWEN,
    "qwen3": QWEN | {"head_dim": 16},
    "mistral": {"sliding_window": WINDOW},
    "olmo2": {},
    "olmo3": MIXED | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},  # of which its angles have none
    "phi3": {"sliding_window": WINDOW, "partial_rotary_factor": 0.5},
    "phi3, longrope": {
        "rope_parameters": LONG | {"partial_rotary_factor": 0.5},
        "original_max_position_embeddings": TURN,
    },
    "gemma2": MIXED | {"head_dim": 8, "final_logit_softcapping": 3.0, "attn_logit_softcapping": 5.0},
    "gemma3_text": MIXED | {"head_dim": 8},
    "granite": SCALED,
    "falcon": {"multi_query": True},  # its attention asks for sdpa by name
    "falcon, new": {"new_decoder_architecture": True, "num_kv_heads": 2, "initializer_range": 0.5},
    "gpt_bigcode": {},  # all heads share one key
    "cohere2": MIXED | {"logit_scale": 0.3},
}
# Others that decode losslessly with `SIZE` alone.
# fmt: off
OTHERS = [
    "afmoe", "apertus", "arcee", "aria_text", "beam", "biogpt", "bitnet", "cohere", "cohere2_moe", "cwm",
    "diffllama", "ernie4_5", "ernie4_5_moe", "exaone", "exaone4", "exaone_moe", "flex_olmo", "flint", "gemma",
    "glm", "glm4", "gpt-sw3", "gpt2", "gpt_neox", "gpt_oss", "granite_swa", "granitemoe", "granitemoe_swa",
    "granitemoeshared", "hyperclovax", "internlm3", "iquestcoder", "jais2", "jetmoe", "laguna", "mellum",
    "minimax_m2", "ministral3", "mixtral", "nanochat", "nemotron", "olmo", "olmoe", "opt", "persimmon", "phimoe",
    "qwen2_moe", "qwen3_moe", "sarvam_moe", "seed_oss", "smollm3", "stablelm", "starcoder2", "vaultgemma", "xglm",
]
# fmt: on
