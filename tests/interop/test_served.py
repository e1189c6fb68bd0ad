"""What `poss convert --output_format vllm` writes for our plugin: any draft, whole, under the names that it loads."""

import json
import tomllib
from importlib import import_module
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig

from poss_lightning.draft.config import DraftConfig
from poss_lightning.draft.specialists import Specialists
from poss_lightning.interop.layouts import METHODS, SERVED
from poss_lightning.interop.settings import CONFIG_KEY
from poss_lightning.interop.tensors import find_vocabulary, to_ours
from poss_lightning.serving import plugin
from tests.interop.published import FUSED_BY, KEY, MIDLAYER, SOME
from tests.support import naive
from tests.support.layouts import SHAPES, VOCABULARY, D, read
from tests.support.tiny import tiny_draft
from tests.support.unrolling import LLAMA3

ROOT = Path(__file__).parents[2]
DRAFTS = [
    ([1, 3, 2], {"kv": "shared", "rope_theta": 50.0}, None),
    ([6], {}, SOME),
    ([3, 3], {"kind": "eagle3", "kv": "shared"}, SOME),
    ([2, 2, 2], {"kind": "eagle3", "fc_norm": True, "norm_output": True}, None),
    ([3, 3], {"kind": "eagle3", "norm_before_residual": True, "norm_before_fc": True, "rope_scaling": LLAMA3}, None),
]
OUTSIDE = {"eagle2": {"fc.weight", "fc.bias"}, "eagle3": {"fc.weight", "norm.weight", "lm_head.weight"}}
LAYER = {"eagle2": SHAPES, "eagle3": MIDLAYER}


@pytest.mark.parametrize(("allocation", "config", "vocabulary"), DRAFTS)
def test_a_served_folder_holds_the_draft(convert, deep, tmp_path, capsys, allocation, config, vocabulary):
    draft = tiny_draft(deep, allocation, vocabulary=vocabulary, intermediate_size=40, **config)
    draft.scale.uniform_(0.5, 2)
    draft.save_pretrained(tmp_path / "ours")
    convert(tmp_path / "ours", tmp_path / "served", "--output_format", "vllm")
    kind, layout = draft.config.kind, SERVED[draft.config.kind]
    assert f'"method": "{METHODS[kind]}", "model": "{tmp_path}/served", "num_spec' in capsys.readouterr().out

    parsed = AutoConfig.from_pretrained(tmp_path / "served")  # as vLLM reads it
    assert DraftConfig.from_json(json.dumps(getattr(parsed, CONFIG_KEY)), "config.json") == draft.config
    assert parsed.architectures == [layout.architecture]
    assert getattr(parsed, KEY, VOCABULARY) == (draft.config.vocabulary_size or VOCABULARY)
    assert getattr(parsed, FUSED_BY) == list(draft.config.layers)

    tensors = read(tmp_path / "served")
    names = OUTSIDE[kind] | {f"layers.{i}.{name}" for i in range(len(allocation)) for name in LAYER[kind]}
    names |= {f"fc_norm.{i}.weight" for i in range(3 * draft.config.fc_norm)}
    names |= {"input_norm.weight"} if draft.config.norm_before_fc else set()
    names |= {"d2t", "t2d", "lm_head.weight"} if vocabulary is not None else set()
    assert tensors.keys() == names
    if kind == "eagle2" and vocabulary is not None:
        assert tensors["lm_head.weight"].equal(deep.embed_head.head[SOME])
    back = Specialists(draft.config, vocabulary)
    ids = find_vocabulary(tensors, layout, VOCABULARY)
    back.load_state_dict(to_ours(tensors, draft.config, layout, ids, deep.embed_head).state)
    generator = torch.Generator().manual_seed(0)
    embedded, inputs = (torch.randn(9, width, generator=generator) for width in (D, draft.fc.in_features))
    inputs = inputs if draft.config.reads_inner_layers else inputs[:, :D]
    ours, theirs = (torch.stack(naive.chain(each, embedded, inputs, 4, 5)) for each in (draft, back))
    torch.testing.assert_close(theirs, ours, rtol=1e-4, atol=1e-5)  # the scale is rounded into the weights


def test_the_entry_point_is_there():
    points = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]["vllm.general_plugins"]
    module, name = points["poss_lightning"].split(":")
    assert getattr(import_module(module), name) is plugin.register
    module, name = plugin.MODEL.split(":")
    assert f"class {name}(" in (ROOT / f"{module.replace('.', '/')}.py").read_text()
