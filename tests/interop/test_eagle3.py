"""EAGLE-3's variants: they travel to those that know them, and what a file says twice must agree."""

from dataclasses import asdict, replace

import pytest
import torch

from poss_lightning.draft.kinds import load_draft, make_draft
from poss_lightning.interop.convert import Published, parse_published
from poss_lightning.interop.layouts import LAYOUTS
from poss_lightning.interop.problems import Checks
from poss_lightning.interop.tensors import Draft, sort_layers
from tests.interop.published import FUSED, FUSED_BY, KEY, SOME, agree, eagle3
from tests.support.layouts import CONFIG, VOCABULARY, D, put, same, stated
from tests.support.tiny import tiny_draft
from tests.support.tolerance import close
from tests.support.unrolling import LLAMA3

ROPE = {"rope_type": "llama3", **asdict(LLAMA3)}
VARIANTS = [  # what a config says beyond EAGLE-3's first release, and who reads it beside speculators
    ({"norm_output": True, "fc_norm": True, "norm_eps": 0.01}, ["vllm", "sglang"]),
    ({"inner_layers": (1, 3, 6), "rope_scaling": LLAMA3, "intermediate_size": 40}, ["vllm", "sglang"]),
    ({"inner_layers": (3,), "fc_norm": True}, ["vllm", "sglang"]),
    ({"norm_before_fc": True, "norm_before_residual": True}, ["vllm"]),
]


@pytest.mark.parametrize(("variant", "engines"), VARIANTS, ids=str)
def test_variants_travel_to_those_that_know_them_and_back(convert, deep, tmp_path, variant, engines):
    draft = tiny_draft(deep, [8], vocabulary=SOME, kind="eagle3", **variant)
    draft.scale.uniform_(0.5, 2)
    draft.save_pretrained(tmp_path / "ours")
    for output in [*engines, "speculators"]:
        convert(tmp_path / "ours", tmp_path / output, "--output_format", output)
        agree(tmp_path / output, draft, deep)
        fused_by = {FUSED_BY: [layer - 1 for layer in draft.config.aux_layers]}  # counted from 0
        from_0 = fused_by if "inner_layers" in variant and output != "speculators" else None
        assert stated(tmp_path / output).get("eagle_config") == from_0  # which SGLang reads
        back = "speculators" if output == "speculators" else "eagle3"
        convert(tmp_path / output, tmp_path / f"back-{output}", "--input_format", back)
        read_back = load_draft(tmp_path / f"back-{output}")
        assert read_back.config == replace(draft.config, target=read_back.config.target)
        agree(tmp_path / output, read_back, deep)
    for output in {"eagle3", "vllm", "sglang"} - set(engines):
        with pytest.raises(ValueError, match="in this output_format it must be"):
            convert(tmp_path / "ours", tmp_path / output, "--output_format", output)


@pytest.mark.parametrize(
    ("layer", "given"),
    [
        ("layers.0", {}),  # as NVIDIA's ModelOpt numbers it
        ("midlayer", {"rope_parameters": ROPE | {"rope_theta": 50.0}}),  # as transformers 5 writes both in one
        # as NVIDIA's files put switches
        ("midlayer", {"norm_before_residual": True, "eagle_config": {"norm_before_residual": False}}),
        ("midlayer", {"norm_before_fc": True, "eagle_config": {"norm_output": True}}),
    ],
    ids=str,
)
def test_a_variants_file_drafts_as_its_definition_says(convert, deep, tmp_path, layer, given):
    switches, rope = given | given.get("eagle_config", {}), given.get("rope_parameters", {})
    extra = {"input_norm.weight": torch.rand(3 * D) + 0.5} if switches.get("norm_before_fc") else {}
    put(tmp_path / "theirs", eagle3(layers=(layer,)) | extra, **{KEY: len(SOME)}, **given)
    convert(tmp_path / "theirs", tmp_path / "ours", "--input_format", "eagle3")
    said = CONFIG | {KEY: len(SOME), "rope_scaling": rope} | switches | rope
    agree(tmp_path / "theirs", load_draft(tmp_path / "ours"), deep, config=said)


@pytest.mark.parametrize(
    ("ids", "change"),
    [
        (SOME, {"t2d": None}),
        (SOME, {"t2d": torch.zeros(VOCABULARY, dtype=torch.bool)}),
        (SOME, {"d2t": eagle3()["d2t"].int()}),
        (None, {"lm_head.weight": None}),
    ],
    ids=["no marks", "nothing marked", "int32", "no head"],
)
def test_what_engines_do_without_may_be_missing(deep, ids, change):
    """Marks; and the head of a draft that proposes all tokens, which is then the target's."""
    given = CONFIG | {KEY: None if ids is None else len(ids)}
    tensors = eagle3(ids) | ({"lm_head.weight": deep.embed_head.head} if ids is None else {})
    left = {name: tensor for name, tensor in (tensors | change).items() if tensor is not None}
    files = (Published(given, each, LAYOUTS["eagle3"], [7], Checks()) for each in (left, tensors))
    part, whole = (parse_published(each, deep) for each in files)
    assert not part.problems
    assert same(part.state, whole.state) and part.config == whole.config


@pytest.mark.parametrize(("ids", "layers"), [([1, 3, 4], FUSED), ([2, 3, 6], [3, 4, 7])])
def test_layers_are_counted_from_0_where_sglang_reads_them(deep, ids, layers):
    given = CONFIG | {KEY: len(SOME), "eagle_config": {FUSED_BY: ids}}
    config = parse_published(Published(given, eagle3(), LAYOUTS["eagle3"], [7], Checks()), deep).config
    assert [*config.aux_layers] == layers and (config.inner_layers is None) == (layers == FUSED)


@pytest.mark.parametrize("variant", [{}, {"fc_norm": True}, {"norm_before_fc": True}], ids=str)
def test_layers_in_any_order_are_written_in_ascending_order(deep, variant):
    """What is made of the outputs of layers 5, 2 and 4 stays."""
    draft = tiny_draft(deep, [3], kind="eagle3", inner_layers=(5, 2, 4), **variant)
    for each in (draft.scale, *draft.fc_norm.parameters()) if variant else (draft.scale,):
        each.data.uniform_(0.5, 2)
    ascending = sort_layers(Draft(draft.config, draft.state_dict()))
    other, outputs = make_draft(ascending.config), torch.randn(3, 7, D)
    other.load_state_dict(ascending.state)
    five, two, four = outputs
    assert other.config.aux_layers == (2, 4, 5)
    assert close(
        other.fuse(torch.cat([two, four, five], -1)), draft.fuse(torch.cat([five, two, four], -1)), terms=3 * D
    )
