"""Published folders of drafts, made up."""

import json
from pathlib import Path

import pytest
import torch
from huggingface_hub import save_torch_state_dict
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.support.command import unchanged
from tests.support.tiny import SIZE

D, INNER, VOCABULARY = 32, 48, 320  # of the tiny target
SHAPES = {  # of a published layer
    "self_attn.q_proj.weight": (32, D),
    "self_attn.k_proj.weight": (16, D),
    "self_attn.v_proj.weight": (16, D),
    "self_attn.o_proj.weight": (D, 32),
    "mlp.gate_proj.weight": (INNER, D),
    "mlp.up_proj.weight": (INNER, D),
    "mlp.down_proj.weight": (D, INNER),
    "post_attention_layernorm.weight": (D,),
}
CONFIG = SIZE | {  # keys of SafeAILab/EAGLE, eagle/train/EAGLE-LLaMA3-Instruct-8B.json
    "architectures": ["LlamaForCausalLM"],
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "model_type": "llama",
    "num_hidden_layers": 1,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
}


def put(folder: Path, tensors: dict[str, Tensor], kind: str = "safetensors", base: dict = CONFIG, **config) -> Path:
    """A folder as it is published: "safetensors" or "bin", in one file or in "shards"; with changes of its config."""
    folder.mkdir(parents=True, exist_ok=True)
    if "shards" in kind:
        save_torch_state_dict(tensors, folder, max_shard_size=20_000, safe_serialization="safetensors" in kind)
        assert len(list(folder.iterdir())) > 3
    elif kind == "safetensors":
        save_file(tensors, folder / "model.safetensors")
    else:
        torch.save(tensors, folder / "pytorch_model.bin")
    (folder / "config.json").write_text(json.dumps(base | config))
    return folder


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(a[name].dtype == b[name].dtype and a[name].equal(b[name]) for name in a)


def read(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "model.safetensors")


def stated(folder: Path) -> dict:
    """The keys of a config.json on one level, where it is in the format of speculators too."""
    config = json.loads((folder / "config.json").read_text())
    layer = config.get("transformer_layer_config", {})
    rope = layer.get("rope_parameters", {})
    scaling = {} if rope.get("rope_type") == "default" else {"rope_scaling": rope}
    return layer | config | rope | (scaling if rope else {})


ASKED = ("model_type", "num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "hidden_act")
ASKED += ("num_key_value_heads", "rms_norm_eps", "vocab_size", "tie_word_embeddings")
BOTH = {key: CONFIG[key] for key in ASKED} | {"head_dim": 8, "max_position_embeddings": 512, "rope_scaling": None}


class Code:
    def __reduce__(self):
        return Path.touch, (Path("ran"),)


def refused(convert, tmp_path: Path, words: str, *arguments: object) -> None:
    """In one line, and nothing is left."""
    with unchanged(tmp_path), pytest.raises((ValueError, OSError)) as caught:
        convert(*arguments)
    assert words in str(caught.value) and "\n" not in str(caught.value)
