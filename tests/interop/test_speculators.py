"""The format of the library speculators: EAGLE-3's laws hold in it, and its config.json has its readers' keys."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from poss_lightning.draft.config import DraftConfig
from poss_lightning.draft.kinds import load_draft
from poss_lightning.interop import speculators
from poss_lightning.interop.settings import CONFIG_KEY
from poss_lightning.target_model import embedded
from poss_lightning.target_model.model import Target
from tests.interop.published import FUSED, KEY, SOME, agree, eagle3
from tests.support.layouts import BOTH, put, read, same

# What `Eagle3DraftModel.save_pretrained` of speculators 0.9.0 wrote for sizes like these, with transformers 5.19; LAYER
# without some keys that nobody reads.
LAYER = {key: value for key, value in BOTH.items() if key != "rope_scaling"}
LAYER |= {"attention_bias": False, "mlp_bias": False, "pad_token_id": None}
LAYER |= {"rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"}}
GREEDY = {"proposal_type": "greedy", "accept_tolerance": 0.0, "speculative_tokens": 7, "verifier_accept_k": 1}
SAMPLED = {"proposal_methods": [GREEDY, {"proposal_type": "sample", "speculative_tokens": 3}]}
CONFIG = {
    "architectures": ["Eagle3DraftModel"],
    "auto_map": {"": "config.Eagle3SpeculatorConfig"},
    KEY: len(SOME),
    "dtype": "float16",
    "eagle_aux_hidden_state_layer_ids": FUSED,
    "embed_requires_grad": False,
    "fc_norm": False,
    "norm_before_fc": False,
    "norm_before_residual": False,
    "norm_output": False,
    "speculators_config": {
        "algorithm": "eagle3",
        "default_proposal_method": "greedy",
        "proposal_methods": [GREEDY],
        "verifier": {"architectures": ["LlamaForCausalLM"], "name_or_path": "target"},
    },
    "speculators_model_type": "eagle3",
    "speculators_version": "0.9.0",
    "target_hidden_size": None,
    "tie_word_embeddings": False,
    "transformer_layer_config": LAYER,
    "transformers_version": "5.19.0",
}


def layer(**changes: object) -> dict:
    return {"transformer_layer_config": LAYER | changes}


def write(folder: Path, target: Target, changes: dict) -> Path:
    """A folder as speculators writes it, with changes of its config."""
    embedding = {"embed_tokens.weight": target.embed_head.embedding.half()}
    return put(folder, eagle3(layers=("layers.0",)) | embedding, base=CONFIG, **changes)


def test_a_published_file_drafts_as_eagle_3_and_comes_back(convert, deep, tmp_path, deep_folder):
    rope = {"rope_theta": 50.0, "rope_type": "default"}
    given = layer(rope_parameters=rope, layer_types=["sliding_attention"], sliding_window=16)
    convert(write(tmp_path / "theirs", deep, given), tmp_path / "ours", "--input_format", "speculators")
    draft = load_draft(tmp_path / "ours")
    config = draft.config
    assert (config.kind, config.allocation, config.rope_theta, config.window) == ("eagle3", (7,), 50.0, 16)
    agree(tmp_path / "theirs", draft, deep)
    convert(tmp_path / "ours", tmp_path / "back", "--output_format", "speculators")
    assert same(read(tmp_path / "back"), read(tmp_path / "theirs"))
    back, known = (json.loads((tmp_path / name / "config.json").read_text()) for name in ("back", "theirs"))
    known["speculators_config"]["verifier"]["name_or_path"] = deep_folder
    for ours, theirs, unread in (
        (back.pop("transformer_layer_config"), known.pop("transformer_layer_config"), {"pad_token_id"}),
        (back, known, {"auto_map", "transformers_version"}),  # for its class, and who wrote it
    ):
        ours.pop(CONFIG_KEY, None)  # what only we read
        assert ours == {key: value for key, value in theirs.items() if key not in unread}


@pytest.mark.parametrize(
    ("changes", "given", "own"),
    [
        ({"speculators_config": SAMPLED | {"default_proposal_method": "sample"}}, (), {"allocation": (3,)}),
        ({}, ("--allocation", [4]), {"allocation": (4,)}),
        ({"speculators_config": None}, (), {"allocation": (7,)}),
        (layer(sliding_window=16), (), {"window": None}),  # without layer_types
    ],
)
def test_allocation_and_window_are_read_as_vllm_reads_them(convert, deep, tmp_path, changes, given, own):
    folder = write(tmp_path / "theirs", deep, changes)
    convert(folder, tmp_path / "ours", "--input_format", "speculators", *given)
    config = load_draft(tmp_path / "ours").config
    assert {name: getattr(config, name) for name in own} == own


def test_the_embedded_target_is_named_by_its_folder(deep, monkeypatch):
    """No engine knows it by the name that it has here."""
    monkeypatch.setattr(embedded, "folder", lambda: Path("/cache/smollm2"))
    monkeypatch.setattr(deep, "spec", replace(deep.spec, name="embedded"))
    config = DraftConfig(target=deep.spec, allocation=(5,), depth=5, kind="eagle3")
    made = speculators.nest({"architectures": [], "draft_vocab_size": 9, "torch_dtype": "float32"}, config, deep)
    assert made["speculators_config"]["verifier"]["name_or_path"] == "/cache/smollm2"
