"""The format of the library speculators: EAGLE-3's laws hold in it, and its config.json has its readers' keys."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from poss_lightning.draft.specialists import Specialists
from poss_lightning.interop import settings, speculators
from poss_lightning.interop.layouts import LAYOUTS
from poss_lightning.target import embedded
from poss_lightning.target.model import Target
from tests.interop.published import FUSED, KEY, SOME, agree, eagle3
from tests.support.layouts import BOTH, put, read, same
from tests.support.tiny import tiny_draft

# What `Eagle3DraftModel.save_pretrained` of speculators 0.9.0 wrote for sizes like these, with transformers 5.19; LAYER
# without some keys that nobody reads.
LAYER = {key: value for key, value in BOTH.items() if key != "rope_scaling"}
LAYER |= {"attention_bias": False, "mlp_bias": False, "pad_token_id": None}
LAYER |= {"rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"}}
GREEDY, SAMPLED = ({"proposal_type": name, "speculative_tokens": n} for name, n in (("greedy", 2), ("sample", 3)))
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
        "proposal_methods": [GREEDY | {"accept_tolerance": 0.0, "speculative_tokens": 7, "verifier_accept_k": 1}],
        "verifier": {"architectures": ["LlamaForCausalLM"], "name_or_path": "target"},
    },
    "speculators_model_type": "eagle3",
    "speculators_version": "0.9.0",
    "target_hidden_size": None,
    "tie_word_embeddings": False,
    "transformer_layer_config": LAYER,
    "transformers_version": "5.19.0",
}


def theirs(folder: Path, target: Target, changes: dict | None = None, layer: dict | None = None, **tensors) -> Path:
    """A folder as speculators writes it, with changes of its config; None leaves a key out."""
    embedding = target.embed_head.embedding.half()
    put(folder, eagle3(layers=("layers.0",)) | {"embed_tokens.weight": embedding} | tensors)
    changes = {"transformer_layer_config": LAYER | (layer or {})} | (changes or {})
    left_out = [key for key, value in changes.items() if value is None]
    kept = {key: value for key, value in (CONFIG | changes).items() if key not in left_out}
    (folder / "config.json").write_text(json.dumps(kept))
    return folder


def test_a_published_file_drafts_as_eagle_3_and_comes_back(convert, deep, tmp_path, deep_folder, capsys):
    rope = {"rope_parameters": {"rope_theta": 50.0, "rope_type": "default"}}
    convert(theirs(tmp_path / "theirs", deep, layer=rope), tmp_path / "ours", "--input_format", "speculators")
    draft = Specialists.from_pretrained(tmp_path / "ours")
    assert (draft.config.kind, draft.config.allocation, draft.config.rope_theta) == ("eagle3", (7,), 50.0)
    agree(tmp_path / "theirs", draft, deep)
    convert(tmp_path / "ours", tmp_path / "back", "--output_format", "speculators")
    assert f"vllm serve {tmp_path / 'back'}" in capsys.readouterr().out
    assert same(read(tmp_path / "back"), read(tmp_path / "theirs"))
    back = json.loads((tmp_path / "back" / "config.json").read_text())
    assert back["speculators_config"]["verifier"].pop("name_or_path") == deep_folder
    known = json.loads(json.dumps(CONFIG))
    del known["speculators_config"]["verifier"]["name_or_path"]
    layer, known_layer = (config.pop("transformer_layer_config") for config in (back, known))
    assert layer.items() <= (known_layer | rope).items()
    assert all(back[key] == known[key] for key in back)
    assert known.keys() - back.keys() == {"auto_map", "transformers_version"}  # for its class, and who wrote it


@pytest.mark.parametrize(
    ("layer", "window"),
    [
        ({"layer_types": ["sliding_attention"], "sliding_window": 16}, 16),
        ({"sliding_window": 16}, None),  # as vLLM reads it
    ],
    ids=str,
)
def test_a_sliding_window_comes_and_goes(convert, deep, tmp_path, layer, window):
    convert(theirs(tmp_path / "theirs", deep, layer=layer), tmp_path / "ours", "--input_format", "speculators")
    draft = Specialists.from_pretrained(tmp_path / "ours")
    assert draft.config.window == window
    convert(tmp_path / "ours", tmp_path / "back", "--output_format", "speculators")
    back = json.loads((tmp_path / "back" / "config.json").read_text())["transformer_layer_config"]
    assert {name: back.get(name) for name in layer} == (layer if window else dict.fromkeys(layer))


def engine(*methods: object, default: str = "greedy") -> dict:
    return {"speculators_config": {"proposal_methods": [*methods], "default_proposal_method": default}}


@pytest.mark.parametrize(
    ("changes", "given", "allocation"),
    [
        (engine(GREEDY), (), (2,)),
        (engine(GREEDY, SAMPLED, default="sample"), (), (3,)),
        (engine(GREEDY), ("--allocation", "[4]"), (4,)),
        ({"speculators_config": None}, (), (7,)),
    ],
)
def test_the_tokens_that_an_engine_drafts_are_the_allocation(convert, deep, tmp_path, changes, given, allocation):
    folder = theirs(tmp_path / "theirs", deep, changes)
    convert(folder, tmp_path / "ours", "--input_format", "speculators", *given)
    assert Specialists.from_pretrained(tmp_path / "ours").config.allocation == allocation


def test_the_embedded_target_is_named_by_its_folder(deep, monkeypatch):
    """No engine knows it by the name that it has here."""
    monkeypatch.setattr(embedded, "folder", lambda: Path("/cache/smollm2"))
    draft = tiny_draft(deep, [5], kind="eagle3")
    published = settings.publish(draft.config, LAYOUTS["speculators"], draft.state_dict(), tied=True)
    for name, found in (("embedded", "/cache/smollm2"), ("OWNER/NAME", "OWNER/NAME")):
        monkeypatch.setattr(deep, "spec", replace(deep.spec, name=name))
        made = speculators.nest(published, draft.config, deep)
        assert made["speculators_config"]["verifier"]["name_or_path"] == found
