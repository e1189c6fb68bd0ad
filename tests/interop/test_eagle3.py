"""EAGLE-3's published layout: the same laws as for the others, and what its files say twice must agree."""

from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig

from poss_lightning.draft.specialists import Specialists
from poss_lightning.interop.convert import parse_published
from poss_lightning.interop.layouts import LAYOUTS
from poss_lightning.target.model import Target
from tests.support import naive
from tests.support.layouts import BOTH, CONFIG, SHAPES, VOCABULARY, D, put, read, same, stated
from tests.support.tiny import tiny_draft
from tests.support.unrolling import LLAMA3

FUSED = [2, 4, 5]
SOME = torch.arange(1, VOCABULARY, 3)
# The names of eagle/model/cnets.py; its config.json has CONFIG's keys and the first of these (traineagle3/).
KEY, FUSED_BY = "draft_vocab_size", "eagle_aux_hidden_state_layer_ids"
LAYER = SHAPES | {f"self_attn.{name}_proj.weight": (rows, 2 * D) for name, rows in (("q", 32), ("k", 16), ("v", 16))}
LAYER |= {"input_layernorm.weight": (D,), "hidden_norm.weight": (D,)}
NAMES = {"fc.weight", "norm.weight", "lm_head.weight"} | {f"midlayer.{name}" for name in LAYER}


def random_file(
    ids: Tensor | None = SOME, dtype: torch.dtype = torch.float16, layers: tuple[str, ...] = ("midlayer",)
) -> dict[str, Tensor]:
    """Random weights under the published names; None is the whole vocabulary."""
    generator, rows = torch.Generator().manual_seed(0), VOCABULARY if ids is None else len(ids)
    shapes = {"fc.weight": (D, 3 * D), "norm.weight": (D,), "lm_head.weight": (rows, D)}
    shapes |= {f"{layer}.{name}": shape for layer in layers for name, shape in LAYER.items()}
    made = {name: (torch.randn(shape, generator=generator) * 0.2).to(dtype) for name, shape in shapes.items()}
    return made if ids is None else made | maps(ids)


def maps(ids: Tensor) -> dict[str, Tensor]:
    marks = torch.tensor([token in ids for token in range(VOCABULARY)])
    return {"d2t": torch.tensor([token - row for row, token in enumerate(ids.tolist())]), "t2d": marks}


def agree(folder: Path, draft: Specialists, target: Target, depth: int = 4, config: dict | None = None) -> None:
    """Logits of what ours drafts from a prompt of 5 slots are those of the twin of a published folder.

    Args:
        config: the keys of its config.json, where they are not as EAGLE publishes them.
    """
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(VOCABULARY, (4 + depth,), generator=generator)
    outputs = torch.randn(5, len(draft.config.layers) * D, generator=generator)
    twin = naive.PublishedEagle3(read(folder), config or stated(folder), draft.config.allocation)
    expected = torch.stack(twin.chain(target.embed_head.embedding, tokens, outputs, depth))  # (K, V)
    embed_head, ours = target.embed_head.restrict(draft.vocabulary), torch.full_like(expected, -torch.inf)
    features = torch.stack(naive.chain(draft, target.embed_head.embed(tokens), outputs, 4, depth))
    ours[:, draft.token_ids(torch.arange(len(embed_head.head)))] = draft.logits(features, embed_head)
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)


# --- theirs -> ours -> theirs, and ours -> theirs -> ours ---


@pytest.mark.parametrize(
    ("ids", "dtype", "kind", "theta"),
    [
        (SOME, torch.float16, "safetensors", None),
        (SOME, torch.float32, "bin shards", 50.0),
        (None, torch.bfloat16, "bin", None),
    ],
)
def test_a_published_file_drafts_as_defined_by_its_names_and_comes_back(
    convert, deep, tmp_path, capsys, ids, dtype, kind, theta
):
    tensors, rows = random_file(ids, dtype), VOCABULARY if ids is None else len(ids)
    given = {KEY: rows} | ({} if theta is None else {"rope_theta": theta})
    embedding = {"embed_tokens.weight": deep.embed_head.embedding.to(dtype)}
    convert(put(tmp_path / "theirs", tensors | embedding, kind, **given), tmp_path / "ours", "--input_format", "eagle3")
    assert f"reads the outputs of target layers {FUSED}" in capsys.readouterr().out
    convert(tmp_path / "ours", tmp_path / "back", "--output_format", "eagle3")
    assert same(read(tmp_path / "back"), tensors)  # its readers take the embedding from the target
    back, expected = stated(tmp_path / "back"), CONFIG | given
    free = {"max_position_embeddings", "torch_dtype", "architectures"}  # the target's, the tensors', and nobody's
    assert all(back[key] == expected[key] for key in (back.keys() & expected.keys()) - free)

    draft, stored = Specialists.from_pretrained(tmp_path / "ours"), read(tmp_path / "ours")
    config = draft.config
    assert (config.kind, config.allocation, config.depth, config.detach) == ("eagle3", (7,), 7, False)
    assert (config.rope_theta, config.vocabulary_size) == (theta, None if ids is None else rows)
    assert {tensor.dtype for key, tensor in stored.items() if key not in ("scale", "vocabulary")} == {dtype}
    agree(tmp_path / "back", draft, deep)


def test_a_single_layer_may_be_numbered(convert, deep, tmp_path):
    """As NVIDIA's ModelOpt exports it."""
    for out, layer in (("named", "midlayer"), ("numbered", "layers.0")):
        theirs = put(tmp_path / layer, random_file(layers=(layer,)), **{KEY: len(SOME)})
        convert(theirs, tmp_path / out, "--input_format", "eagle3")
    assert same(read(tmp_path / "named"), read(tmp_path / "numbered"))
    assert (tmp_path / "named" / "config.json").read_text() == (tmp_path / "numbered" / "config.json").read_text()


# --- SPEED: several layers, one cache ---

THREE = ("layers.0", "layers.1", "layers.2")


@pytest.mark.parametrize("allocation", [[3, 3, 2], [1, 3, 4]], ids=str)
def test_speeds_specialists_draft_as_its_trainer_has_it_and_go_to_our_plugin(convert, deep, tmp_path, allocation):
    tensors = random_file(layers=THREE)
    put(tmp_path / "theirs", tensors, **{KEY: len(SOME)})
    convert(tmp_path / "theirs", tmp_path / "ours", "--input_format", "speed", "--allocation", allocation)
    draft = Specialists.from_pretrained(tmp_path / "ours")
    assert draft.config.allocation == tuple(allocation)
    assert (draft.config.kind, draft.config.kv, draft.config.detach) == ("eagle3", "shared", False)
    convert(tmp_path / "ours", tmp_path / "back", "--output_format", "vllm")
    assert same(read(tmp_path / "back"), tensors)
    agree(tmp_path / "back", draft, deep, depth=8)


# --- engines ---

# What their code asks for, read in vllm 0.33.0 (model_executor/models/llama_eagle3.py and llama.py, transformers_utils/
# configs/eagle.py, v1/worker/gpu_model_runner.py) and sglang 0.5.23 (srt/models/llama_eagle3.py and llama.py,
# srt/model_executor/model_runner_components/spec_aux_hidden_state.py). None: the key must not be there.
ENGINES = {
    "architectures": ["LlamaForCausalLMEagle3"],  # registered by both; vLLM leaves a name that ends so as it is
    "tie_word_embeddings": False,  # else SGLang takes the embedding for the head
    "bias": False,  # SGLang's fc has one where this is true; attention in both
    "attention_bias": None,
    "norm_before_residual": None,  # vLLM: the residual continues from h itself
    "norm_output": None,  # both: the output is fed back before the norm, or after it where this is true
    "norm_before_fc": None,
    "fc_norm": None,  # both: a norm for each fused layer where this is true
    "target_hidden_size": None,  # else hidden_size
    "num_aux_hidden_states": None,  # else 3
    "eagle_config": None,  # else layers 2, half, and all less 3, as counted here; vLLM and SGLang count it differently
    FUSED_BY: None,
    "logit_scale": None,
}


@pytest.mark.parametrize(
    ("engine", "method"), [("vllm", '"method": "eagle3"'), ("sglang", "--speculative-algorithm EAGLE3 ")]
)
@pytest.mark.parametrize("ids", [SOME, torch.arange(VOCABULARY)], ids=["some", "all named"])
def test_engines_find_each_key_and_compute_the_same(convert, deep, tmp_path, capsys, engine, method, ids):
    draft = tiny_draft(deep, [8], vocabulary=ids, kind="eagle3")
    draft.scale.uniform_(0.5, 2)
    draft.save_pretrained(tmp_path / "ours")
    convert(tmp_path / "ours", tmp_path / "theirs", "--output_format", engine)
    assert method in capsys.readouterr().out
    # Where all tokens are proposed, vLLM has no parameter for d2t, and stops.
    assert read(tmp_path / "theirs").keys() == NAMES | ({"d2t", "t2d"} if ids is SOME else set())
    asked, given = BOTH | ENGINES | {KEY: len(ids)}, stated(tmp_path / "theirs")
    assert {key: given.get(key) for key in asked} == asked
    assert given.keys() <= asked.keys() | {"rope_theta", "torch_dtype"}
    assert {path.name for path in (tmp_path / "theirs").iterdir()} == {"config.json", "model.safetensors"}
    parsed = AutoConfig.from_pretrained(tmp_path / "theirs")  # as both read it
    assert parsed.draft_vocab_size == asked[KEY] and parsed.rope_parameters["rope_theta"] == deep.spec.rope_theta
    agree(tmp_path / "theirs", draft, deep)


VARIANTS = [  # what a config says beyond EAGLE-3's first release, and who reads it beside speculators
    ({"fc_norm": True}, ["vllm", "sglang"]),
    ({"norm_output": True, "fc_norm": True, "norm_eps": 0.01}, ["vllm", "sglang"]),
    ({"rope_scaling": LLAMA3}, ["vllm", "sglang"]),
    ({"inner_layers": (1, 3, 6)}, ["vllm", "sglang"]),
    ({"inner_layers": (3,), "fc_norm": True}, ["vllm", "sglang"]),
    ({"norm_before_residual": True}, ["vllm"]),
    ({"norm_before_fc": True, "norm_before_residual": True, "rope_scaling": LLAMA3}, ["vllm"]),
]


@pytest.mark.parametrize(("variant", "engines"), VARIANTS, ids=str)
def test_variants_travel_to_those_that_know_them_and_back(convert, deep, tmp_path, variant, engines):
    draft = tiny_draft(deep, [7], vocabulary=SOME, kind="eagle3", detach=False, **variant)
    draft.scale.uniform_(0.5, 2)
    draft.save_pretrained(tmp_path / "ours")
    assert Specialists.from_pretrained(tmp_path / "ours").config == draft.config
    for output in [*engines, "speculators"]:
        convert(tmp_path / "ours", tmp_path / output, "--output_format", output)
        agree(tmp_path / output, draft, deep)
        fused_by = {FUSED_BY: [layer - 1 for layer in draft.config.layers]}  # counted from 0
        from_0 = fused_by if "inner_layers" in variant and output != "speculators" else None
        assert stated(tmp_path / output).get("eagle_config") == from_0  # which SGLang reads
        back = "speculators" if output == "speculators" else "eagle3"
        convert(tmp_path / output, tmp_path / f"back-{output}", "--input_format", back)
        read_back = Specialists.from_pretrained(tmp_path / f"back-{output}")
        assert read_back.config == replace(draft.config, target=read_back.config.target)
        agree(tmp_path / output, read_back, deep)
    for output in {"eagle3", "vllm", "sglang"} - set(engines):
        with pytest.raises(ValueError, match=r"and in this layout it is \w+; use --output_format speculators or vllm"):
            convert(tmp_path / "ours", tmp_path / output, "--output_format", output)


ROPE = {"rope_type": "llama3", **asdict(LLAMA3)}


@pytest.mark.parametrize(
    "given",
    [
        {"rope_scaling": ROPE},
        {"rope_parameters": ROPE | {"rope_theta": 50.0}},  # as transformers 5 writes both in one
        {"eagle_config": {"norm_before_residual": True}},  # as NVIDIA's files put switches
        {"norm_before_residual": True, "eagle_config": {"norm_before_residual": False}},
        {"norm_before_fc": True, "eagle_config": {"norm_output": True}},
    ],
    ids=str,
)
def test_a_variants_file_drafts_as_its_definition_says(convert, deep, tmp_path, given):
    switches = {**given, **given.get("eagle_config", {})}
    extra = {"input_norm.weight": torch.rand(3 * D) + 0.5} if switches.get("norm_before_fc") else {}
    put(tmp_path / "theirs", random_file() | extra, **{KEY: len(SOME)}, **given)
    convert(tmp_path / "theirs", tmp_path / "ours", "--input_format", "eagle3")
    rope = given.get("rope_parameters") or given.get("rope_scaling")
    said = CONFIG | {KEY: len(SOME)} | switches | {"rope_scaling": rope}
    said |= {"rope_theta": (rope or {}).get("rope_theta") or said["rope_theta"]}
    agree(tmp_path / "theirs", Specialists.from_pretrained(tmp_path / "ours"), deep, config=said)


@pytest.mark.parametrize(
    ("ids", "change"),
    [
        (SOME, {"t2d": None}),
        (SOME, {"t2d": torch.zeros(VOCABULARY, dtype=torch.bool)}),
        (SOME, {"d2t": maps(SOME)["d2t"].int()}),
        (None, {"lm_head.weight": None}),
    ],
    ids=["no marks", "nothing marked", "int32", "no head"],
)
def test_what_engines_do_without_may_be_missing(deep, ids, change):
    """Marks; and the head of a draft that proposes all tokens, which is then the target's."""
    given = CONFIG | {KEY: None if ids is None else len(ids)}
    tensors = random_file(ids) | ({"lm_head.weight": deep.embed_head.head} if ids is None else {})
    left = {name: tensor for name, tensor in (tensors | change).items() if tensor is not None}
    part, whole = (parse_published(given, each, LAYOUTS["eagle3"], [7], deep) for each in (left, tensors))
    assert same(part.state, whole.state) and part.config == whole.config


@pytest.mark.parametrize(
    ("ids", "layers"),
    [
        ({FUSED_BY: FUSED}, FUSED),
        ({"eagle_config": {FUSED_BY: [1, 3, 4]}}, FUSED),
        ({FUSED_BY: [2, 3, 6]}, [2, 3, 6]),
        ({"eagle_config": {FUSED_BY: [2, 3, 6]}}, [3, 4, 7]),
    ],
    ids=str,
)
def test_layers_are_counted_as_engines_do(deep, ids, layers):
    config = parse_published(CONFIG | {KEY: len(SOME)} | ids, random_file(), LAYOUTS["eagle3"], [7], deep).config
    assert [*config.layers] == layers and (config.inner_layers is None) == (layers == FUSED)
