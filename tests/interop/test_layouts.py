"""Published layouts: a file drafts as its authors compute it and comes back bit for bit; engines find every key."""

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig

from poss_lightning.draft.config import DraftConfig
from poss_lightning.draft.specialists import Specialists
from poss_lightning.interop import settings
from poss_lightning.interop.layouts import LAYOUTS
from poss_lightning.interop.tensors import check_frozen
from poss_lightning.target.model import Target
from tests.support import naive
from tests.support.layouts import BOTH, CONFIG, SHAPES, VOCABULARY, D, put, read, same, stated
from tests.support.tiny import tiny_draft, tiny_model, tiny_target, tiny_tokenizer


def published(target: Target, layers: int, bias: bool = True, dtype: torch.dtype = torch.float16) -> dict[str, Tensor]:
    """Random weights under the names of cnets1.py, with the target's embedding."""
    generator = torch.Generator().manual_seed(layers)
    shapes = {"fc.weight": (D, 2 * D)} | ({"fc.bias": (D,)} if bias else {})
    shapes |= {f"layers.{i}.{name}": shape for i in range(layers) for name, shape in SHAPES.items()}
    tensors = {name: torch.randn(shape, generator=generator) * 0.2 for name, shape in shapes.items()}
    tensors["embed_tokens.weight"] = target.embed_head.embedding
    return {name: tensor.to(dtype) for name, tensor in tensors.items()}


def agree(folder: Path, draft: Specialists, target: Target, depth: int = 6) -> None:
    """What ours drafts from a prompt of 5 slots is what the twin of a published folder does."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(VOCABULARY, (4 + depth,), generator=generator)
    features = torch.randn(5, D, generator=generator)
    twin = naive.PublishedDraft(read(folder), stated(folder), draft.config.allocation[0])
    expected = twin.chain(target.embed_head.embedding, tokens, features, depth)
    unknown = torch.full((depth - 1, D), torch.nan)  # features of drafted slots are not read
    ours = naive.chain(draft, target.embed_head.embed(tokens), torch.cat([features, unknown]), 4, depth)
    torch.testing.assert_close(torch.stack(ours), torch.stack(expected), rtol=1e-4, atol=1e-5)


# --- theirs -> ours -> theirs, and ours -> theirs -> ours ---


@pytest.mark.parametrize(
    ("name", "allocation", "changes", "dtype", "kind"),
    [
        ("eagle", None, {"rope_theta": 50.0}, torch.float16, "safetensors"),
        ("eagle", [4], {"bias": False}, torch.bfloat16, "bin"),
        ("hass", None, {"rms_norm_eps": 0.1}, torch.float32, "safetensors shards"),
        ("poss", [2, 2, 2], {}, torch.float32, "bin shards"),
    ],
)
def test_a_published_file_drafts_as_defined_by_its_names_and_comes_back(
    convert, target, tmp_path, name, allocation, changes, dtype, kind
):
    bias = changes.get("bias", True)
    tensors = published(target, len(allocation or [6]), bias, dtype)
    theirs = put(tmp_path / "theirs", tensors, kind, **changes)
    convert(theirs, tmp_path / "ours", "--input_format", name, *(["--allocation", allocation] if allocation else []))
    convert(tmp_path / "ours", tmp_path / "back", f"--output_format={'poss' if name == 'poss' else 'eagle'}")
    assert same(read(tmp_path / "back"), tensors)
    back, expected = stated(tmp_path / "back"), CONFIG | changes
    free = {"max_position_embeddings", "torch_dtype"}  # the target's, and the tensors'
    assert all(back[key] == expected[key] for key in (back.keys() & expected.keys()) - free)
    assert back.get("bias", True) is bias  # EAGLE's reader builds fc by it

    draft, stored = Specialists.from_pretrained(tmp_path / "ours"), read(tmp_path / "ours")
    assert draft.config.allocation == tuple(allocation or [6])
    assert draft.config.depth == {"eagle": 1, "hass": 3, "poss": sum(allocation or [])}[name]
    assert (draft.config.rope_theta, draft.config.norm_eps) == (changes.get("rope_theta"), changes.get("rms_norm_eps"))
    assert {tensor.dtype for key, tensor in stored.items() if key != "scale"} == {dtype}
    assert not any(VOCABULARY in tensor.shape for tensor in stored.values())
    agree(tmp_path / "back", draft, target)


def test_a_draft_comes_back_but_for_what_only_training_knows(convert, target, tmp_path):
    draft = tiny_draft(target, [2, 2, 2], intermediate_size=40, depth=8, detach=False)
    torch.nn.init.normal_(draft.fc.bias)
    draft.save_pretrained(tmp_path / "ours")
    convert(tmp_path / "ours", tmp_path / "theirs", "--output_format", "poss")
    convert(tmp_path / "theirs", tmp_path / "back", "--input_format", "poss", "--allocation", [2, 2, 2])
    assert same(read(tmp_path / "back"), read(tmp_path / "ours"))
    back = Specialists.from_pretrained(tmp_path / "back").config
    assert back.target.difference(target.spec) is None
    assert back == replace(draft.config, target=back.target, depth=6, detach=True)


def test_a_scale_of_powers_of_two_goes_into_the_weights_to_the_bit(convert, target, tmp_path):
    draft = tiny_draft(target, [6])
    draft.scale.copy_(2.0 ** torch.randint(-6, 6, (2 * D,), generator=torch.Generator().manual_seed(0)))
    draft.save_pretrained(tmp_path / "ours")
    convert(tmp_path / "ours", tmp_path / "theirs", "--output_format", "eagle")
    convert(tmp_path / "theirs", tmp_path / "back", "--input_format", "eagle")
    back, some = Specialists.from_pretrained(tmp_path / "back"), torch.randn(2, 1, 9, D)
    assert (back.scale == 1).all() and torch.equal(back.join(*some), draft.join(*some))


def test_a_draft_of_16_bits_loses_nothing_by_its_scale(convert, target, tmp_path):
    """Products of two numbers of 16 bits are exact in float32; rounded again, vLLM would draft other tokens."""
    draft = tiny_draft(target, [6])
    draft.scale.uniform_(0.5, 2)
    draft.fc.bias.data.zero_()
    draft.bfloat16().save_pretrained(tmp_path / "ours")
    convert(tmp_path / "ours", tmp_path / "theirs", "--output_format", "eagle")
    written = read(tmp_path / "theirs")
    assert torch.equal(written["fc.weight"].double(), draft.fc.weight.double() * draft.scale.double())
    assert {tensor.dtype for name, tensor in written.items() if name != "fc.weight"} == {torch.bfloat16}


@pytest.mark.parametrize("tied", [True, False])
def test_a_head_and_an_embedding_are_checked_in_the_targets_own_dtype(convert, tmp_path, tied):
    """The target is stored in bfloat16, the draft in float32; the target's tensors are recognised and not kept."""
    model = tiny_model(tie_word_embeddings=tied).bfloat16()
    for part in (model, tiny_tokenizer()):
        part.save_pretrained(tmp_path / "target")
    tensors = published(tiny_target(), 1, dtype=torch.float32)
    tensors["embed_tokens.weight"] = model.get_input_embeddings().weight.float()
    head = {"lm_head.weight": model.get_output_embeddings().weight.detach().float()}
    put(tmp_path / "theirs", tensors | {name: tensor.clone() for name, tensor in head.items()})
    convert(tmp_path / "theirs", tmp_path / "ours", "--input_format", "eagle", target=tmp_path / "target")
    convert(tmp_path / "ours", tmp_path / "back", "--output_format", "eagle", target=tmp_path / "target")
    assert same(read(tmp_path / "back"), tensors)
    assert stated(tmp_path / "back")["tie_word_embeddings"] is tied


@pytest.mark.parametrize(
    ("stored", "between", "accepted"),
    [
        (torch.float32, torch.bfloat16, False),  # neither dtype rounds so coarsely
        (torch.bfloat16, torch.float16, True),
        (torch.float16, torch.bfloat16, False),
    ],
    ids=str,
)
def test_an_embedding_may_differ_by_the_rounding_of_the_coarser_dtype(target, stored, between, accepted):
    """The target's, in float32, went through a different dtype before it was stored; one bit more is too much."""
    own = target.embed_head.embedding
    theirs = own.to(between).to(stored)
    for tensor, fits in ((theirs, accepted), (theirs * (1 + 3 * torch.finfo(between).eps), False)):
        with nullcontext() if fits else pytest.raises(ValueError, match="rows differ by more than the rounding"):
            check_frozen({"embed_tokens.weight": tensor}, target.embed_head, LAYOUTS["eagle"])


def test_what_a_config_leaves_out_has_the_default_of_the_published_code(target):
    """And a number that a GGUF file rounded to float32 is still the same, as are mrope's angles of text."""
    left_out = {key: value for key, value in CONFIG.items() if key not in ("rope_theta", "rms_norm_eps", "hidden_act")}
    rope = {"rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"}}
    mrope = CONFIG | {"rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]}}
    for given in (left_out, CONFIG | {"rope_scaling": None, "rms_norm_eps": 9.99999974e-7}, left_out | rope, mrope):
        config = settings.parse_config(given, LAYOUTS["eagle"], [6], target.spec, VOCABULARY)
        assert config == DraftConfig(target=target.spec, allocation=(6,), depth=1)


# --- engines ---

LAYER = {f"layers.0.{name}" for name in SHAPES}
ATTENTION = {f"layers.0.self_attn.{name}_proj.bias" for name in "qkvo"}

# What their code asks for, read in vllm 0.33.0 (model_executor/models/llama_eagle.py and llama.py, transformers_utils/
# configs/eagle.py) and sglang 0.5.23 (srt/models/llama_eagle.py and llama.py). None: the key must not be there.
ENGINES = {
    "vllm": (
        {"fc.weight"} | LAYER | ATTENTION,  # fc has no bias, and a file's is dropped; no embedding, so the target's
        {"architectures": ["LlamaForCausalLM"], "attention_bias": True},  # becomes EagleLlamaForCausalLM
    ),
    "sglang": (
        {"fc.weight", "fc.bias"} | LAYER,  # fc always has a bias, at random where the file has none
        {"architectures": ["LlamaForCausalLMEagle"], "attention_bias": None, "bias": None},  # both are attention's
    ),
}


@pytest.mark.parametrize("engine", ENGINES)
def test_engines_find_each_key_and_compute_the_same(convert, target, tmp_path, engine):
    draft = tiny_draft(target, [6])
    draft.scale.uniform_(0.5, 2)
    torch.nn.init.normal_(draft.fc.bias)
    draft.save_pretrained(tmp_path / "ours")
    convert(tmp_path / "ours", tmp_path / "theirs", "--output_format", engine)
    names, keys = ENGINES[engine]
    assert read(tmp_path / "theirs").keys() == names
    config = stated(tmp_path / "theirs")
    assert {key: config.get(key) for key in BOTH | keys} == BOTH | keys
    parsed = AutoConfig.from_pretrained(tmp_path / "theirs")  # as both read it
    assert parsed.model_type == "llama" and parsed.rope_parameters["rope_theta"] == target.spec.rope_theta
    agree(tmp_path / "theirs", draft, target)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_published_draft_without_a_bias_goes_to_engines(convert, target, tmp_path, engine):
    put(tmp_path / "theirs", published(target, 1, bias=False), bias=False)
    convert(tmp_path / "theirs", tmp_path / "served", "--input_format", "eagle", "--output_format", engine)
    assert read(tmp_path / "served").keys() == ENGINES[engine][0] - ATTENTION
    assert not stated(tmp_path / "served").get("attention_bias")


def test_a_smaller_vocabulary_is_sglangs_token_map_and_one_of_all_tokens_is_none(convert, target, tmp_path, capsys):
    for name, kept in (("some", torch.arange(0, VOCABULARY, 3)), ("all", torch.arange(VOCABULARY))):
        tiny_draft(target, [6], vocabulary=kept).save_pretrained(tmp_path / name)
    convert(tmp_path / "some", tmp_path / "mapped", "--output_format", "sglang")
    stored = torch.load(tmp_path / "mapped" / "token_map.pt", weights_only=True)
    assert stored == list(range(0, VOCABULARY, 3))
    assert f"--speculative-token-map {tmp_path}/mapped/token_map.pt" in capsys.readouterr().out
    for engine, (names, _) in ENGINES.items():
        convert(tmp_path / "all", tmp_path / engine, "--output_format", engine)
        assert read(tmp_path / engine).keys() <= names
        assert not (tmp_path / engine / "token_map.pt").exists()
