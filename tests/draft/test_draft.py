"""The draft's config, folder and start."""

import json
from dataclasses import replace
from functools import partial
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file, save_file

from poss_lightning.decoding.drafter import make_drafter
from poss_lightning.decoding.drafting import TreeDrafter
from poss_lightning.decoding.plans import TreePlan
from poss_lightning.draft import folder as folders
from poss_lightning.draft.config import DraftConfig
from poss_lightning.draft.kinds import load_draft
from poss_lightning.draft.specialists import DraftModel
from poss_lightning.target_model.cache import Slots
from poss_lightning.target_model.spec import EmbedHead
from tests.support.tiny import tiny_draft, tiny_target
from tests.support.tolerance import LAYER, close
from tests.support.unrolling import LLAMA3


def test_who_serves_which_position(target):
    config = DraftConfig(target=target.spec, allocation=(1, 3, 4), depth=6)
    assert [config.specialist_at(k) for k in range(1, 11)] == [0, 1, 1, 1, 2, 2, 2, 2, 2, 2]


BLOCK, EAGLE3 = {"kind": "block"}, {"kind": "eagle3"}


REFUSED = [
    ({"kv": "half"}, "kv is 'half'; it must be 'separate' or 'shared'"),
    ({"window": 5}, "depth is 6, and the draft's window 5; it must not be deeper"),
    (EAGLE3 | {"layers": 2}, "of a target with 4 or more; tiny has 2"),
    (EAGLE3 | {"fc_norm": True, "norm_before_fc": True}, "fc_norm and norm_before_fc are both true"),
    (EAGLE3 | {"inner_layers": (0, 2)}, r"inner_layers is \[0, 2\]; tiny has 1 to 6"),
    (BLOCK | {"fc_norm": True}, "fc_norm is True, which only kind eagle3 has"),
    (BLOCK | {"allocation": (3, 3)}, "give one number"),
    (BLOCK | {"mask_token": 320}, "has 320 tokens"),
]


def test_a_config_that_cannot_be_is_refused(deep):
    for config, words in REFUSED:
        given = {"allocation": (6,), "depth": 6} | config
        spec = replace(deep.spec, layers=given.pop("layers", 7))
        with pytest.raises(ValueError, match=words):
            DraftConfig(target=spec, **given)


def test_a_depth_beyond_the_window_or_the_block_is_refused_by_all_who_go_so_deep(deep):
    for config, words in (({"window": 6}, "the draft's window 6"), (BLOCK, "the block has 6 positions")):
        draft = tiny_draft(deep, [6], **config)
        with pytest.raises(ValueError, match=f"depth is 7, and {words}"):
            make_drafter(draft, deep.embed_head, TreePlan(7))
        with pytest.raises(ValueError, match=f"depth is 7, and {words}"):
            draft(torch.zeros(1, 9, 32), torch.zeros(1, 9, draft.fc.in_features), 7)


def test_a_draft_with_its_own_head_keeps_none_of_the_targets(deep):
    draft = tiny_draft(deep, [2], kind="eagle3", vocabulary=torch.arange(0, 320, 7))
    drafter = TreeDrafter(draft, deep.embed_head, TreePlan())
    assert drafter.embed_head is deep.embed_head and not drafter.kv_weights.requires_grad


def test_a_cache_that_memory_has_no_room_for_changes_nothing(target, monkeypatch):
    drafter = TreeDrafter(tiny_draft(target, [2]), target.embed_head, TreePlan())
    drafter.start(Slots(2, 10, target.device))
    slots, store = drafter.slots, drafter.store
    monkeypatch.setattr("poss_lightning.decoding.drafting.SlotStore", Mock(side_effect=torch.OutOfMemoryError))
    with pytest.raises(torch.OutOfMemoryError):
        drafter.start(Slots(8, 100, target.device))
    assert (drafter.slots, drafter.store) == (slots, store)


@pytest.mark.parametrize(
    ("allocation", "config", "vocabulary"),
    [
        ([1, 3, 2], {"kind": "eagle2", "intermediate_size": 40, "depth": 7, "detach": False}, torch.arange(0, 320, 7)),
        ([1, 3, 2], {"kind": "eagle3", "intermediate_size": 40, "depth": 7}, None),
        ([1, 3, 2], {"kind": "eagle3"}, torch.arange(0, 320, 7)),
        ([6], {"kind": "block", "block_layers": 2, "inner_layers": (1, 3), "mask_token": 5}, None),
    ],
)
def test_save_then_load_is_identity_and_nothing_frozen_is_stored(deep, tmp_path, allocation, config, vocabulary):
    draft = tiny_draft(deep, allocation, vocabulary=vocabulary, **config)
    draft.init_head(deep.embed_head.restrict(vocabulary))
    draft.save_pretrained(tmp_path)
    loaded = load_draft(tmp_path)
    assert loaded.config == draft.config
    same(loaded, draft)
    assert {path.name for path in tmp_path.iterdir()} == {"config.json", "model.safetensors"}
    own = {"lm_head.weight"} if draft.config.own_head and vocabulary is None else set()
    assert {name for name, value in load_file(tmp_path / "model.safetensors").items() if 320 in value.shape} == own


def same(draft: DraftModel, other: DraftModel) -> None:
    ours, theirs = draft.state_dict(), other.state_dict()
    assert ours.keys() == theirs.keys() and all(value.equal(theirs[name]) for name, value in ours.items())


def test_a_shipped_draft_is_read_by_its_name_in_whatever_dtype_it_is(target, tmp_path, monkeypatch):
    draft = tiny_draft(target, [2, 2]).bfloat16()
    draft.save_pretrained(tmp_path / "embedded-pair")
    monkeypatch.setattr(folders, "SHIPPED", tmp_path)
    same(load_draft("embedded-pair"), draft.float())
    with pytest.raises(FileNotFoundError, match=r"nor a hub id .*, nor a shipped draft: embedded-pair"):
        load_draft("embedded-other")


def test_the_shipped_drafts_are_complete_and_small():
    hass, poss = (load_draft(name).config for name in folders.shipped())
    assert (hass.allocation, poss.allocation) == ((6,), (2, 2, 2)) and not hass.target.difference(poss.target)
    assert sum(path.stat().st_size for path in folders.SHIPPED.rglob("*.safetensors")) <= 32e6


def test_inputs_are_scaled_to_a_mean_square_of_one_and_a_draft_that_starts_from_it_reads_the_same(target):
    draft, other = tiny_draft(target, [2, 2]), tiny_draft(target, [4], seed=1)
    features = torch.randn(500, 32) * torch.logspace(-1, 1, 32)
    features[:, 3] = 0  # dead: must not be blown up
    embedded = torch.randn(500, 32) / 8
    draft.normalise(embedded.square().mean(0).sqrt(), features.square().mean(0).sqrt())
    read = torch.cat([embedded, features], -1) * draft.scale
    assert close(read.square().mean(0)[read.any(0)], torch.ones(63), terms=500, sums=2)
    assert torch.isfinite(draft.scale.half()).all()
    other.start_from(draft)
    assert torch.equal(other.scale, draft.scale)


def test_fc_norm_begins_with_inputs_of_a_mean_square_of_one_or_as_the_fc_without_it(deep):
    plain, normed = (tiny_draft(deep, [4], kind="eagle3", fc_norm=switch) for switch in (False, True))
    sizes = torch.tensor([10.0, 300.0, 4000.0])  # of the vectors of each inner layer; beside them norm_eps is nothing
    parts = torch.nn.functional.normalize(torch.randn(500, 3, 32) * torch.logspace(-1, 1, 32), dim=-1) * 32**0.5
    inputs = (parts * sizes[:, None]).flatten(1)
    usual = inputs.square().mean(0).sqrt()
    for norm in normed.fc_norm:
        norm.weight.data.fill_(1)  # as a new one
    normed.normalise(torch.ones(32), usual)
    read = []
    normed.fc.register_forward_pre_hook(lambda _, given: read.append(given[0]))
    normed.fuse(inputs)
    assert close(read[0].square().mean(0), torch.ones(96), terms=500, sums=4)
    normed.start_from(plain)
    normed.init_fc_norm(usual)
    assert close(normed.fuse(inputs), plain.fuse(inputs), terms=500, sums=4)
    assert not close(normed.fuse(2 * inputs), plain.fuse(2 * inputs), dtype=torch.bfloat16)


def test_a_damaged_folder_says_what_is_wrong(target, tmp_path):
    def refused(words, kind=ValueError):
        with pytest.raises(kind, match=words):
            load_draft(tmp_path)

    config, weights = tmp_path / "config.json", tmp_path / "model.safetensors"
    refused(r"has no config\.json", FileNotFoundError)
    tiny_draft(target, [2]).save_pretrained(tmp_path)
    stored, state = json.loads(config.read_text()), load_file(weights)
    for changed, words in (
        ({"span": 2}, r"config\.json is not a draft's config .*span"),
        ({"target": stored["target"] | {"heads": "4"}}, r"target's heads is '4'; it must be a valid integer"),
        ({"allocation": [2, 2]}, r"model\.safetensors does not fit its config"),
    ):
        config.write_text(json.dumps(stored | changed))
        refused(words)
    config.write_text(json.dumps(stored))
    save_file({name: value for name, value in state.items() if name != "fc.weight"}, weights)
    refused(r"fc\.weight")
    weights.write_bytes(b"cos\nsystem\n(S'true'\ntR.")  # a pickle is not even opened
    refused(r"model\.safetensors is damaged, or not a safetensors file")


def test_weights_that_cannot_draft_are_refused_by_name(deep, tmp_path, convert):
    """Both of ours and of a published draft; else every proposal is wrong, and nothing says why."""
    tiny_draft(deep, [2]).save_pretrained(tmp_path / "ours")
    convert(tmp_path / "ours", tmp_path / "theirs", "--output_format", "eagle")
    read_theirs = partial(convert, tmp_path / "theirs", tmp_path / "out", "--input_format", "eagle")
    for folder, read in ("ours", partial(load_draft, tmp_path / "ours")), ("theirs", read_theirs):
        path = tmp_path / folder / "model.safetensors"
        state = load_file(path)
        [name] = (name for name in state if name.endswith("q_proj.weight"))
        save_file(state | {name: state[name].double() * 1e300}, path)  # infinite in float32
        with pytest.raises(
            ValueError, match=rf"{folder}.*q_proj\.weight.* \d+ of \d+ numbers that are infinite or not"
        ):
            read()


def test_a_head_of_its_own_begins_as_the_target_s_and_continues_as_another_draft_s(deep):
    vocabularies = torch.arange(0, 320, 2), torch.arange(0, 320, 3)
    draft, other = (tiny_draft(deep, [2, 2], vocabulary=own, kind="eagle3") for own in vocabularies)
    embed_head = EmbedHead(deep.embed_head.embedding, deep.embed_head.head, scale=0.5)
    draft.init_head(embed_head.restrict(draft.vocabulary))
    features = torch.randn(3, 32)
    scaled = draft.norm(features)  # what its head reads
    assert close(draft.logits(features, embed_head), embed_head.restrict(draft.vocabulary).logits(scaled), sums=2)
    draft.start_from(other)
    assert torch.equal(draft.lm_head.weight[::3], other.lm_head.weight[::2])  # tokens 0, 6, 12, …
    assert torch.equal(draft.lm_head.weight[1], deep.embed_head.head[2] * 0.5)  # the other does not have it


OTHER_STARTS = [
    ({"intermediate_size": 40}, {}, "other sizes"),
    (EAGLE3, {}, "kind eagle2, and this one eagle3"),
    (EAGLE3, EAGLE3 | {"fc_norm": True}, "fc_norm, and this one has not: make fc_norm true"),
    (BLOCK, BLOCK | {"inner_layers": (1, 3)}, r"aux_layers \(1, 3\), and this one \(2, 4, 5\)"),
]


def test_a_start_that_this_draft_cannot_take_over_is_refused(deep, target):
    for config, start, words in OTHER_STARTS:
        with pytest.raises(ValueError, match=f"the draft to start from has {words}"):
            tiny_draft(deep, [4], **config).start_from(tiny_draft(deep, [4], **start))
    with pytest.raises(ValueError, match="a different target: fingerprint"):
        tiny_draft(target, [2, 2]).start_from(tiny_draft(tiny_target(3), [4]))


VARIANT = {"norm_before_fc": True, "norm_before_residual": True, "rope_scaling": LLAMA3}


@pytest.mark.parametrize(
    ("kind", "variant", "few", "many"), [("eagle2", {}, [6], [1, 2, 3]), ("eagle3", VARIANT, [2, 4], [2, 2, 2])]
)
def test_specialists_copied_from_who_served_their_first_position_draft_the_same(deep, kind, variant, few, many):
    start = tiny_draft(deep, few, kind=kind, rope_theta=50.0, **variant)
    draft = tiny_draft(deep, many, 1, kind=kind)
    draft.start_from(start)
    assert {name: getattr(draft.config, name) for name in variant} == variant
    assert len({parameter.data_ptr() for parameter in draft.parameters()}) == len([*draft.parameters()])  # copies
    embedded, read = torch.randn(2, 9, 32), torch.randn(2, 9, 96 if kind == "eagle3" else 32)
    for a, b in zip(start(embedded, read, 6), draft(embedded, read, 6), strict=True):
        assert a.equal(b) and start.logits(a, deep.embed_head).equal(draft.logits(b, deep.embed_head))


def test_a_wider_layer_starts_as_the_narrow_one_and_has_more_to_learn_with(target):
    narrow, wide = tiny_draft(target, [6]), tiny_draft(target, [6], seed=1, intermediate_size=100)
    inner = narrow.layers[0].down_proj.in_features
    wide.start_from(narrow)
    inputs = torch.randn(2, 1, 9, 32)
    for mine, theirs in zip(wide(*inputs, 3), narrow(*inputs, 3), strict=True):
        assert close(mine, theirs, terms=100, sums=3 * LAYER)
    wide(*inputs, 1)[0].square().sum().backward()
    assert wide.layers[0].gate_proj.weight[inner:].any() and wide.layers[0].down_proj.weight.grad[:, inner:].all()
