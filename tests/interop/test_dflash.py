"""DFlash's published layout: what its files call our tensors, there and back, and what they say that ours cannot be."""

import json
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from poss_lightning.draft.config import DraftConfig
from poss_lightning.draft.kinds import load_draft
from poss_lightning.interop.layouts import LAYOUTS
from poss_lightning.interop.problems import Checks
from poss_lightning.interop.settings import parse_config
from tests.support.layouts import CONFIG, VOCABULARY, put, read, same
from tests.support.tiny import tiny_draft

LAYER = {  # theirs -> ours
    "input_layernorm": "input_norm",
    "self_attn.q_norm": "q_norm",
    "self_attn.k_norm": "k_norm",
    "post_attention_layernorm": "norm",
    **{f"self_attn.{name}_proj": f"{name}_proj" for name in "qkvo"},
    **{f"mlp.{name}_proj": f"{name}_proj" for name in ("gate", "up", "down")},
}
NAMES = {"fc": "fc", "hidden_norm": "context_norm", "norm": "norm"}
NAMES |= {f"layers.{i}.{theirs}": f"layers.{i}.{ours}" for i in range(2) for theirs, ours in LAYER.items()}
STATED = {
    "model_type": "qwen3",
    "head_dim": 8,
    "rope_theta": 10000.0,
    "block_size": 6,
    "num_hidden_layers": 2,
    "num_target_layers": 8,
    "dflash_config": {"mask_token_id": 319, "target_layer_ids": [1, 3, 4]},
}


def dflash(deep) -> dict[str, Tensor]:
    """Random weights under the published names."""
    draft = tiny_draft(deep, [5], kind="block", block_layers=2)
    return {f"{theirs}.weight": draft.state_dict()[f"{ours}.weight"] for theirs, ours in NAMES.items()}


def test_a_published_file_becomes_ours_by_name_and_comes_back(convert, deep, tmp_path, capsys):
    tensors = dflash(deep)
    convert(put(tmp_path / "theirs", tensors, **STATED), tmp_path / "ours", "--input_format", "dflash")
    ours = load_draft(tmp_path / "ours")
    own = {"kind": "block", "allocation": (5,), "depth": 5, "block_layers": 2, "detach": False}
    given = {"inner_layers": (2, 4, 5), "mask_token": 319}
    assert ours.config == DraftConfig(target=ours.config.target, **own, **given)
    assert torch.equal(ours.mask, deep.embed_head.embedding[319])
    for theirs, name in NAMES.items():
        assert torch.equal(ours.state_dict()[f"{name}.weight"], tensors[f"{theirs}.weight"])
    for output in ("dflash", "vllm"):
        convert(tmp_path / "ours", tmp_path / output, "--output_format", output)
        assert "reads target layers [2, 4, 5], counted from 1" in capsys.readouterr().out
        assert same(read(tmp_path / output), tensors)
        stated = json.loads((tmp_path / output / "config.json").read_text())
        assert {name: stated[name] for name in STATED} == STATED
        assert stated["architectures"] == ["DFlashDraftModel"]


@pytest.mark.parametrize(
    "given",
    [
        STATED["dflash_config"] | {"dflash_config": None},
        {"mask_token_id": 3, "input_embedding_scale": 1.0, "projector_type": "dflash", "final_logit_softcapping": 30.0},
    ],
    ids=str,
)
def test_settings_may_lie_on_the_top_level_and_say_what_is_so_anyway(deep, given):
    """As z-lab reads them: in dflash_config first."""
    spec = replace(deep.spec, logit_cap=30.0)
    plain, other = (
        parse_config(CONFIG | STATED | each, LAYOUTS["dflash"], [5], spec, VOCABULARY, 2, checks=Checks())
        for each in ({}, given)
    )
    assert plain == other and plain.mask_row == 319
