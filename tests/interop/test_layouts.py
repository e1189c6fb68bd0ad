"""Published layouts: a file drafts as its authors compute it and comes back bit for bit; engines find every key."""

import json
from dataclasses import replace

import pytest
import torch
from transformers import AutoConfig

from poss_lightning.draft.config import DraftConfig
from poss_lightning.draft.kinds import load_draft
from poss_lightning.interop import settings
from poss_lightning.interop.layouts import LAYOUTS
from poss_lightning.interop.problems import Checks
from poss_lightning.interop.tensors import check_frozen
from poss_lightning.target_model.model import Target
from tests.interop.published import FUSED, FUSED_BY, KEY, MIDLAYER, SOME, THREE, agree, eagle, eagle3
from tests.support.layouts import BOTH, CONFIG, SHAPES, VOCABULARY, put, read, same, stated
from tests.support.tiny import tiny_draft, tiny_model, tiny_tokenizer

# --- theirs -> ours -> theirs ---

USUAL = {"kind": "eagle3", "detach": False, "allocation": (7,), "depth": 7}
SPEED = USUAL | {"allocation": (1, 3, 4), "depth": 8, "kv": "shared", "vocabulary_size": len(SOME)}
FILES = [  # how it is read, its tensors, its keys, how it is stored; and our config of it
    ("eagle", eagle(), {"rope_theta": 50.0}, "safetensors", {"allocation": (6,), "depth": 1, "rope_theta": 50.0}),
    ("eagle --allocation=[4]", eagle(1, False, torch.bfloat16), {}, "bin", {"allocation": (4,), "depth": 1}),
    ("hass", eagle(), {"rms_norm_eps": 0.1}, "safetensors shards", {"allocation": (6,), "depth": 3, "norm_eps": 0.1}),
    ("poss --allocation=[2,2,3]", eagle(3), {}, "bin shards", {"allocation": (2, 2, 3), "depth": 7}),
    ("eagle3", eagle3(), {KEY: len(SOME)}, "safetensors", USUAL | {"vocabulary_size": len(SOME)}),
    ("eagle3", eagle3(None, torch.bfloat16), {KEY: VOCABULARY}, "bin", USUAL),
    ("speed --allocation=[1,3,4]", eagle3(layers=THREE), {KEY: len(SOME), "num_hidden_layers": 3}, "bin", SPEED),
]


@pytest.mark.parametrize(("arguments", "tensors", "keys", "kind", "own"), FILES)
def test_a_published_file_drafts_as_defined_by_its_names_and_comes_back(
    convert, deep, tmp_path, arguments, tensors, keys, kind, own
):
    name, dtype = arguments.split()[0], tensors["fc.weight"].dtype
    embedding = {"embed_tokens.weight": deep.embed_head.embedding.to(dtype)}
    theirs = put(tmp_path / "theirs", tensors | embedding, kind, **keys)
    convert(theirs, tmp_path / "ours", "--input_format", *arguments.split())
    convert(tmp_path / "ours", tmp_path / "back", "--output_format", {"hass": "eagle", "speed": "vllm"}.get(name, name))
    draft, stored = load_draft(tmp_path / "ours"), read(tmp_path / "ours")
    assert draft.config == DraftConfig(target=draft.config.target, **own)
    assert {tensor.dtype for key, tensor in stored.items() if key not in ("scale", "vocabulary")} == {dtype}
    kept = embedding if draft.config.kind == "eagle2" else {}  # readers of EAGLE-3's take the embedding from the target
    assert same(read(tmp_path / "back"), tensors | kept)
    back, expected = stated(tmp_path / "back"), CONFIG | keys
    free = {"max_position_embeddings", "torch_dtype", "architectures"}  # the target's, the tensors', and a reader's
    assert all(back[key] == expected[key] for key in (back.keys() & expected.keys()) - free)
    assert back.get("bias", True) is ("fc.bias" in tensors)  # EAGLE's reader builds fc by it
    agree(tmp_path / "back", draft, deep)


@pytest.mark.parametrize(("powers_of_two", "dtype"), [(True, torch.bfloat16), (False, torch.float32)])
def test_a_scale_goes_into_the_weights_to_the_bit(convert, deep, tmp_path, powers_of_two, dtype):
    """Products of two numbers of 16 bits are exact in float32; rounded again, vLLM would draft other tokens."""
    draft = tiny_draft(deep, [6])
    draft.scale.uniform_(0.5, 6)
    if powers_of_two:
        draft.scale.copy_(2.0 ** draft.scale.round())
    draft.bfloat16().save_pretrained(tmp_path / "ours")
    convert(tmp_path / "ours", tmp_path / "theirs", "--output_format", "eagle")
    written = read(tmp_path / "theirs")
    weight = written.pop("fc.weight")
    assert weight.dtype == dtype and {tensor.dtype for tensor in written.values()} == {torch.bfloat16}
    assert torch.equal(weight.double(), draft.fc.weight.double() * draft.scale.double())


@pytest.mark.parametrize("tied", [True, False])
def test_a_head_and_an_embedding_are_checked_in_the_targets_own_dtype(convert, tmp_path, tied):
    """The target is stored in bfloat16, the draft in float32; the target's tensors are recognised and not kept."""
    model = tiny_model(num_hidden_layers=8, tie_word_embeddings=tied).bfloat16()
    for part in (model, tiny_tokenizer()):
        part.save_pretrained(tmp_path / "target")
    tensors = eagle()
    tensors["embed_tokens.weight"] = model.get_input_embeddings().weight.detach().float()
    head = {"lm_head.weight": model.get_output_embeddings().weight.detach().float().clone()}
    put(tmp_path / "theirs", tensors | head)
    convert(tmp_path / "theirs", tmp_path / "ours", "--input_format", "eagle", target=tmp_path / "target")
    convert(tmp_path / "ours", tmp_path / "back", "--output_format", "eagle", target=tmp_path / "target")
    assert same(read(tmp_path / "back"), tensors)
    assert stated(tmp_path / "back")["tie_word_embeddings"] is tied
    own = tiny_draft(Target.load(str(tmp_path / "target"), None, "cpu"), [6], kind="eagle3")
    own.save_pretrained(tmp_path / "own")
    convert(tmp_path / "own", tmp_path / "untied", "--output_format", "eagle3", target=tmp_path / "target")
    assert not stated(tmp_path / "untied")["tie_word_embeddings"]  # its head is its own


@pytest.mark.parametrize(
    ("stored", "between", "accepted"),
    [
        (torch.float32, torch.bfloat16, False),  # neither dtype rounds so coarsely
        (torch.bfloat16, torch.float16, True),
        (torch.float16, torch.bfloat16, False),
    ],
)
def test_an_embedding_may_differ_by_the_rounding_of_the_coarser_dtype(target, stored, between, accepted):
    """The target's, in float32, went through a different dtype before it was stored; one bit more is too much."""
    theirs = target.embed_head.embedding.to(between).to(stored)
    for tensor, fits in ((theirs, accepted), (theirs * (1 + 3 * torch.finfo(between).eps), False)):
        checks = Checks()
        assert bool(check_frozen({"embed_tokens.weight": tensor}, target.embed_head, LAYOUTS["eagle"], checks)) != fits
        assert fits or "differs by more than the rounding" in str(checks.problems[0])


def test_what_a_config_leaves_out_has_the_default_of_the_published_code(target):
    """And a number that a GGUF file rounded to float32 is still the same, as are mrope's angles of text."""
    left_out = {key: value for key, value in CONFIG.items() if key not in ("rope_theta", "rms_norm_eps", "hidden_act")}
    rope = {"rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"}}
    mrope = CONFIG | {"rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]}}
    for given in (left_out | rope, CONFIG | {"rope_scaling": None, "rms_norm_eps": 9.99999974e-7}, mrope):
        checks = Checks()
        config = settings.parse_config(given, LAYOUTS["eagle"], [6], target.spec, VOCABULARY, checks=checks)
        assert not checks.problems
        assert config == DraftConfig(target=target.spec, allocation=(6,), depth=1)


# --- engines ---

EAGLE = {"fc.weight"} | {f"layers.0.{name}" for name in SHAPES}
ATTENTION = {f"layers.0.self_attn.{name}_proj.bias" for name in "qkvo"}
OWN_HEAD = {"fc.weight", "norm.weight", "lm_head.weight"}
EAGLE3 = OWN_HEAD | {f"midlayer.{name}" for name in MIDLAYER}
MAPS = {"d2t", "t2d"}
NUMBERED, NUMBERED3 = ({f"{layer}.{name}" for layer in THREE for name in within} for within in (SHAPES, MIDLAYER))
EAGLE3_KEYS = {
    KEY: len(SOME),
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
PLUGIN = {"architectures": ["PossForCausalLM"], FUSED_BY: []}
# What their code asks for, read in vllm 0.33.0 (model_executor/models/llama_eagle.py, llama_eagle3.py and llama.py,
# transformers_utils/configs/eagle.py, v1/worker/gpu_model_runner.py) and sglang 0.5.23 (srt/models/llama_eagle.py,
# llama_eagle3.py and llama.py, srt/model_executor/model_runner_components/spec_aux_hidden_state.py). None: the key must
# not be there.
ENGINES = [  # an engine and a draft; the tensors and keys
    # fc has no bias, and a file's is dropped; no embedding, so the target's; becomes EagleLlamaForCausalLM
    ("vllm", [8], {}, EAGLE | ATTENTION, {"architectures": ["LlamaForCausalLM"], "attention_bias": True}),
    ("vllm", [8], {}, EAGLE, {"architectures": ["LlamaForCausalLM"], "attention_bias": None, "bias": False}),
    # fc always has a bias, at random where the file has none; both keys are attention's
    ("sglang", [8], {}, EAGLE | {"fc.bias"}, {"architectures": ["LlamaForCausalLMEagle"], "bias": None}),
    ("vllm", [8], {"kind": "eagle3", "vocabulary": SOME}, EAGLE3 | MAPS, EAGLE3_KEYS),
    ("sglang", [8], {"kind": "eagle3", "vocabulary": SOME}, EAGLE3 | MAPS, EAGLE3_KEYS),
    # a vocabulary of all tokens is none: vLLM has no parameter for its d2t, and stops
    ("vllm", [8], {"kind": "eagle3", "vocabulary": torch.arange(VOCABULARY)}, EAGLE3, EAGLE3_KEYS | {KEY: VOCABULARY}),
    # our plugin loads any draft, whole
    ("vllm", [2, 2, 2], {}, NUMBERED | {"fc.weight", "fc.bias"}, PLUGIN | {"num_hidden_layers": 3}),
    ("vllm", [6], {"vocabulary": SOME}, EAGLE | MAPS | {"fc.bias", "lm_head.weight"}, PLUGIN | {KEY: len(SOME)}),
    (
        "vllm",
        [2, 1, 3],
        {"kind": "eagle3", "kv": "shared", "vocabulary": SOME, "norm_before_fc": True},
        NUMBERED3 | OWN_HEAD | MAPS | {"input_norm.weight"},
        PLUGIN | {"num_hidden_layers": 3, KEY: len(SOME), FUSED_BY: FUSED, "norm_before_fc": True, "bias": False},
    ),
]


@pytest.mark.parametrize(("engine", "allocation", "options", "tensors", "keys"), ENGINES)
def test_engines_find_each_key_and_compute_the_same(
    convert, deep, tmp_path, engine, allocation, options, tensors, keys
):
    draft = tiny_draft(deep, allocation, **options)
    draft.scale.uniform_(0.5, 2)
    if tensors >= ATTENTION:  # else it is zero
        torch.nn.init.normal_(draft.fc.bias)
    draft.save_pretrained(tmp_path / "ours")
    convert(tmp_path / "ours", tmp_path / "theirs", "--output_format", engine)
    assert {path.name for path in (tmp_path / "theirs").iterdir()} == {"config.json", "model.safetensors"}
    assert read(tmp_path / "theirs").keys() == tensors
    asked, given = BOTH | keys, stated(tmp_path / "theirs")
    assert {key: given.get(key) for key in asked} == asked
    assert given.keys() <= asked.keys() | {"rope_theta", "torch_dtype", settings.CONFIG_KEY}
    parsed = AutoConfig.from_pretrained(tmp_path / "theirs")  # as both read it
    assert parsed.model_type == "llama" and parsed.rope_parameters["rope_theta"] == deep.spec.rope_theta
    own = json.loads(draft.config.to_json())
    kept = own if "PossForCausalLM" in keys["architectures"] else {name: own[name] for name in settings.UNSTATED}
    assert getattr(parsed, settings.CONFIG_KEY) == kept
    agree(tmp_path / "theirs", draft, deep)
    with pytest.raises(ValueError, match=r"\(its config.json has \w+\)") as refusal:
        load_draft(tmp_path / "theirs")
    command = str(refusal.value).partition("poss convert ")[2].split()
    assert command[1] == "DRAFT" and command[4:] == ["--target", "TARGET"]
    convert(command[0], tmp_path / "back", *command[2:4])
    back = load_draft(tmp_path / "back")
    assert back.config == replace(draft.config, target=back.config.target, vocabulary_size=back.config.vocabulary_size)
    agree(tmp_path / "theirs", back, deep)


def test_a_smaller_vocabulary_of_the_targets_head_is_its_rows_or_sglangs_token_map(convert, deep, tmp_path):
    tiny_draft(deep, [6], vocabulary=SOME).save_pretrained(tmp_path / "ours")
    for engine in ("vllm", "sglang"):
        convert(tmp_path / "ours", tmp_path / engine, "--output_format", engine)
    assert read(tmp_path / "vllm")["lm_head.weight"].equal(deep.embed_head.head[SOME])
    assert torch.load(tmp_path / "sglang" / "token_map.pt", weights_only=True) == SOME.tolist()
