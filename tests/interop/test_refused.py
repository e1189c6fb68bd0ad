"""What is refused, in one line that names it, and nothing is left: wrong files, damaged folders, wrong arguments."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import huggingface_hub
import pytest
import torch

from poss_lightning.draft.config import DraftConfig
from poss_lightning.draft.kinds import load_draft
from poss_lightning.interop.layouts import check_expressible, find_layout
from poss_lightning.target_model.model import Target
from tests.interop import test_speculators as speculators
from tests.interop.published import FUSED_BY, KEY, SOME, THREE, eagle, eagle3
from tests.interop.test_dflash import STATED, dflash
from tests.support.layouts import CONFIG, VOCABULARY, Code, D, put, refused


def write(folder: Path, name: str, target: Target, kind: str = "safetensors", **changes: object) -> Path:
    """A published folder that is right but for changes, by key or tensor; None leaves a tensor out."""
    tensors, config = {
        "poss": lambda: (eagle(3), CONFIG),
        "eagle3": lambda: (eagle3(), CONFIG | {KEY: len(SOME)}),
        "speed": lambda: (eagle3(layers=THREE), CONFIG | {KEY: len(SOME)}),
        "speculators": lambda: (eagle3(layers=("layers.0",)), speculators.CONFIG),
        "dflash": lambda: (dflash(target), CONFIG | STATED),
    }[name]()
    of_tensors = {key: value for key, value in changes.items() if "." in key or key in ("d2t", "t2d")}
    of_config = {key: value for key, value in changes.items() if key not in of_tensors}
    kept = {key: tensor for key, tensor in (tensors | of_tensors).items() if tensor is not None}
    return put(folder, kept, kind, config, **of_config)


UP = "layers.1.mlp.up_proj.weight"
BLOCK, EAGLE3_NAME = {"target_layer_ids": [1], "mask_token_id": 3}, ["LlamaForCausalLMEagle3"]
POSS = "poss --allocation=[2,2,2]"
COMPUTED_BY_OTHERS = [  # a key that ours has not: a file, where in its config the key is, and values
    ("dflash", "", {"causal": True, "architectures": ["JetSpecDraftModel"], "dflash_version": 2, "swa_block": 4}),
    ("dflash", "", {"parallel_drafting": True, "projector_type": "domino", "selector_rank": 16}),
    ("dflash", "dflash_config", {"causal": True, "markov": True, "attention_mode": "mla", "conv_kernel_size": 2}),
    ("eagle3", "", {"architectures": ["PEagleDraftModel"], "mask_token_id": 3, "medusa_num_heads": 4, "n_predict": 3}),
    ("eagle3", "", {"parallel_drafting": True, "ptd_token_id": 3, "target_hidden_size": 64}),
    ("eagle3", "", {"quantization_config": {"bits": 4}}),
    ("eagle3", "eagle_config", {"use_aux_hidden_state": False, "parallel_draft_step": 4, "eh_proj_before_attn": True}),
]
WRONG = [  # a file, how it is converted, and what is wrong with it
    (POSS, {UP: None}, f"{UP} is missing"),
    (POSS, {"layers.0.self_attn.q_proj.bias": torch.zeros(D)}, "q_proj.bias is torch.float32 [32]; it has no place"),
    (POSS, {UP: torch.zeros(47, D)}, f"{UP} is torch.float32 [47, 32]; it must be floats [48, 32]"),
    (POSS, {UP: torch.zeros(48, D)}, "up_proj.weight is all zeros: its file is damaged"),
    ("eagle3", {"d2t": None, "t2d": torch.ones(999) > 0}, "d2t is missing; lm_head.weight has 107 rows"),
    ("eagle3", {"d2t": None, "t2d": None}, "d2t is missing; lm_head.weight has 107 rows for 320 tokens"),
    (
        "eagle3",
        {"embed_tokens.weight": torch.zeros(VOCABULARY, D)},
        "embed_tokens.weight is torch.float32 [320, 32]; it is not the target's",
    ),
    ("eagle3", {"d2t": torch.zeros(107, dtype=torch.int64)}, "t2d is torch.bool [320]; it does not mark the 107"),
    ("eagle3", {"d2t": -torch.arange(107)}, "d2t is torch.int64 [107]; it must lead to ascending ids"),
    ("eagle3", {KEY: 106}, "draft_vocab_size is 106; the draft proposes 107 tokens"),
    ("eagle3", {"rope_scaling": {"rope_type": "yarn"}}, "rope_scaling is 'yarn'; a draft of ours has"),
    ("eagle3", {"rope_parameters": {"full_attention": {"factor": 8}}}, "for one kind of layer, not for ['full_atte"),
    ("eagle3", {FUSED_BY: [1, 3, 4]}, "ids is [1, 3, 4]; it counts from 1, and the usual layers of"),  # in vLLM
    ("eagle3", {FUSED_BY: [4, 2, 5]}, "ids is [4, 2, 5]; published code takes layers of 8 in ascending order"),
    ("eagle3", {"eagle_config": {FUSED_BY: [2, 3, 7]}}, "ids is [2, 3, 7]; it must be numbers of inner layers of"),
    ("speculators", {"norm_before_residual": None}, "norm_before_residual is None; vLLM takes it for true and"),
    ("speculators", {"transformer_layer_config": None}, "transformer_layer_config.model_type is None; a draft of"),
    ("speculators", speculators.layer(num_hidden_layers=2), "num_hidden_layers is 2; the file has 1"),
    ("speculators", speculators.layer(layer_types=["sliding_attention"]), "sliding_window is None; it must be"),
    ("dflash", {"block_size": None}, "block_size is None; it must be the places of a block"),
    ("dflash", {"dflash_config": {"target_layer_ids": [1]}}, "mask_token_id is None"),
    ("dflash", {"dflash_config": BLOCK | {"use_swa": True}}, "use_swa is True; a draft of ours does not have it"),
    ("dflash", {"is_causal": True}, "is_causal is True"),
    ("dflash", {"layer_types": ["sliding_attention"], "sliding_window": 9}, "layer_types is ['sliding_attention']"),
    *(
        (
            name,
            {place: STATED.get(place, {}) | {key: value}} if place else {key: value},
            f"config.json: {key} is {value!r}; a ",
        )
        for name, place, changes in COMPUTED_BY_OTHERS
        for key, value in changes.items()
    ),
    ("eagle3", {"num_hidden_layers": 4, "architectures": EAGLE3_NAME}, "num_hidden_layers is 4; the file has 1"),
    ("dflash", {"num_hidden_layers": 5}, "num_hidden_layers is 5; the file has 2"),
    ("dflash", {"num_target_layers": 36}, "num_target_layers is 36; a draft of ours for"),
    ("dflash", {"mask_token_id": 5}, "mask_token_id is [5, 319]; it must have one value"),
    ("dflash", {"dflash_config": BLOCK | {"block_size": 16}}, "block_size is [6, 16]; it must have one value"),
    ("dflash", {"dflash_config": BLOCK | {"mask_token_id": 320}}, "mask_token_id is 320; it must be one of 320 tokens"),
    ("poss", {}, "it has 3 layers, and allocation is None: give the positions that each serves"),
    ("poss --allocation=[3,3]", {}, "it has 3 layers, and allocation is [3, 3]: give"),
    ("eagle3 --allocation=[2,2]", {}, "allocation is [2, 2]; a file of this format has one layer: give one number"),
    ("poss --input_format=eagle", {}, "it has 3 layers, and a file of this format has one"),
    ("poss --input_format=ours --output_format=poss --allocation=[2,2]", {}, "states its own: leave it out"),
    ("poss --input_format=eagle3", {UP: None}, "hidden_norm.weight is missing; this layout needs it (and "),
    ("eagle3 --input_format=speculators", {}, "speculators_model_type is None; a draft of ours in this"),
    ("speculators --input_format=eagle3", {"norm_output": True}, "hidden_size is None; a draft of ours for"),
    ("speed --input_format=eagle3", {}, "it has 3 layers, and a file of this format has one"),
    ("dflash --input_format=eagle", {}, "it has 2 layers, and a file of this format has one"),
    ("dflash --allocation=[3]", {}, "allocation is [3]; the file states block_size: leave"),
]


@pytest.mark.parametrize(("arguments", "changes", "words"), WRONG)
def test_what_is_wrong_in_a_file_or_does_not_fit_it_is_refused(convert, deep, tmp_path, arguments, changes, words):
    name, *options = arguments.split()
    folder = write(tmp_path / "theirs", name, deep, **changes)
    run = convert if changes else partial(convert, target="nowhere")  # a target is loaded where all else fits
    refused(run, tmp_path, words, folder, tmp_path / "out", "--input_format", name, *options)


@pytest.mark.parametrize("prefix", ["model.", "draft_model.", "module.draft."])
@pytest.mark.parametrize("is_head_too", [True, False])
def test_tensors_with_a_prefix_are_named(convert, deep, tmp_path, prefix, is_head_too):
    named = {prefix * (is_head_too or "." in name) + name: each for name, each in eagle3().items()}
    folder = put(tmp_path / "theirs", named, **{KEY: len(SOME)})
    words = f"{prefix}fc.weight is torch.float16 [32, 96]; the file must have fc.weight: remove '{prefix}' from"
    refused(convert, tmp_path, words, folder, tmp_path / "out", "--input_format", "eagle3")


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:5000])


HARMLESS = {  # in published files, and saying nothing that changes what a draft computes
    "auto_map": {"AutoModel": "x.Y"},
    "decoder_sparse_step": 1,  # SpecForge's for Qwen3-Next, without experts
    "eagle_config": {"use_aux_hidden_state": True, "next_layer_regular": True, "parallel_draft_step": 1},
    "num_beams": 4,
    "num_hidden_layers": 40,  # of EAGLE's own files of a 13B target, whose config they copy
    "parallel_drafting": False,
    "target_model_type": "llama",
    "sliding_window": 512,
    "use_sliding_window": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}


def test_keys_that_change_nothing_are_not_refused(convert, deep, tmp_path):
    for number, keys in enumerate(({}, *({key: value} for key, value in HARMLESS.items()), HARMLESS)):
        folder = put(tmp_path / f"theirs-{number}", eagle3(), **{KEY: len(SOME)} | keys)
        convert(folder, tmp_path / f"ours-{number}", "--input_format", "eagle3")
        assert load_draft(tmp_path / f"ours-{number}").config == load_draft(tmp_path / "ours-0").config


@pytest.mark.parametrize(
    ("kind", "file", "damage", "words"),
    [
        ("safetensors", "config.json", Path.unlink, "No such file or directory: "),
        (
            "safetensors",
            "model*",
            lambda file: file.write_bytes(b"{"),
            "model.safetensors is damaged, download it again: ",
        ),
        ("safetensors shards", "model-00001-*", Path.unlink, "No such file or directory: "),
        (
            "bin",
            "*.bin",
            lambda file: file.write_bytes(b"version https://git-lfs"),
            "is not loaded, as it is damaged or holds more",
        ),
        ("bin", "*.bin", lambda file: file.write_bytes(b""), "pytorch_model.bin is damaged, download it again: EOFE"),
        ("bin", "*.bin", cut, "pytorch_model.bin is damaged, download it again: "),
        (
            "bin",
            "*.bin",
            partial(torch.save, {"fc.weight": Code()}),
            "bin is not loaded, as it is damaged or holds more than plain",
        ),
        ("bin", "*.bin", partial(torch.save, [1, 2]), "pytorch_model.bin is not a table of names and tensors"),
    ],
)
def test_a_folder_that_is_damaged_is_refused(convert, deep, tmp_path, monkeypatch, kind, file, damage, words):
    monkeypatch.chdir(tmp_path)  # code in a file would leave a file here
    theirs = write(tmp_path / "theirs", "poss", deep, kind)
    damage(next(theirs.glob(file)))
    refused(convert, tmp_path, words, theirs, "out", "--input_format", "poss", "--allocation", [2, 2, 2])


@pytest.mark.parametrize(
    ("name", "changes", "found"),
    [
        *((name, {}, name) for name in ("eagle3", "speculators", "dflash")),
        ("poss", {"architectures": ["DFlashDraftModel"]}, "dflash"),
        ("poss", {"architectures": 5}, "eagle"),
    ],
)
def test_a_published_draft_is_recognised(deep, tmp_path, monkeypatch, name, changes, found):
    """In a folder, and on the hub, where it may have no model.safetensors."""
    folder = write(tmp_path / "theirs", name, deep, "bin", **changes)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *args, **options: folder)
    for source in (folder, "owner/draft"):
        with pytest.raises(
            ValueError, match=rf"json has \w+\).* poss convert {source} DRAFT --input_format {found} --targ"
        ):
            load_draft(source)


@pytest.mark.parametrize(
    ("output_format", "allocation", "own", "of_target", "words"),
    [
        ("poss", [1, 3, 2], {}, {}, "the draft's allocation is [1, 3, 2]; in this output_format it must be [1, 1, 2]"),
        ("poss", [2, 2], {"kv": "shared"}, {}, "kv is shared; in this output_format it must be separate"),
        ("vllm", [2, 2], {}, {"logit_cap": 30.0}, "logit_cap is 30.0; in this output_format it must be None"),
        ("poss", [6], {}, {"head_dim": 16}, "head_dim is 16; in this output_format it must be 8"),
        ("eagle", [6], {"vocabulary_size": 9}, {}, "vocabulary_size is 9; in this output_format it must be 320"),
        ("eagle3", [3, 2], {"kind": "eagle3"}, {}, "number of specialists is 2; in this output_format it must be 1"),
        ("eagle3", [6], {"kind": "block"}, {}, "kind is block; in this output_format it must be eagle3"),
        ("vllm", [2, 2], {"window": 8}, {}, "window is 8; in this output_format it must be None"),
        ("eagle3", [8], {"kind": "eagle3"}, {"layers": 4}, "it fuses layers [2, 2, 1] of 4; published code takes"),
    ],
)
def test_what_a_layout_cannot_express_is_refused(deep, output_format, allocation, own, of_target, words):
    spec = replace(deep.spec, **of_target)
    config = DraftConfig(target=spec, allocation=tuple(allocation), depth=5, **own)
    with pytest.raises(ValueError) as caught:
        check_expressible(config, find_layout(output_format, config))
    assert words in str(caught.value)
