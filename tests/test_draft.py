"""The draft's config, folder and start."""

import json

import pytest
import torch
from conftest import tiny_draft, tiny_target
from safetensors.torch import load_file, save_file

from poss_lightning.draft import specialists
from poss_lightning.draft.specialists import DraftConfig, Specialists
from poss_lightning.training.export import export


@pytest.mark.parametrize(
    ("allocation", "expected"),
    [
        ([6], [0] * 8),
        ([1] * 6, [0, 1, 2, 3, 4, 5, 5, 5]),
        ([2, 2, 2], [0, 0, 1, 1, 2, 2, 2, 2]),
        ([1, 3, 4], [0, 1, 1, 1, 2, 2, 2, 2]),
    ],
)
def test_who_serves_which_position(target, allocation, expected):
    config = DraftConfig(target.spec, tuple(allocation), 6)
    assert [config.serving(k) for k in range(1, 9)] == expected


def test_positions_may_be_served_in_another_order(target):
    config = tiny_draft(target, [2, 1, 3], order=(2, 0, 2, 1, 0, 2)).config
    assert [config.serving(k) for k in range(1, 9)] == [2, 0, 2, 1, 0, 2, 2, 2]
    assert config.unserved(3) == {1} and not config.unserved(4)


@pytest.mark.parametrize("order", [(0, 1, 2), (0, 0, 0, 1, 1, 2), (0, 0, 1, 1, 2, 3)], ids=str)
def test_an_order_of_other_specialists_is_refused(target, order):
    with pytest.raises(ValueError, match="rearrangement of"):
        tiny_draft(target, [2, 2, 2], order=order)


def test_a_kv_that_cannot_be_is_refused(target):
    with pytest.raises(ValueError, match="kv is 'half'; it must be separate or shared"):
        tiny_draft(target, [2, 2, 2], kv="half")


@pytest.mark.parametrize("allocation", [[], [0], [2, -1], [1.5], ["2"]])
def test_an_allocation_that_cannot_be_is_refused(target, allocation):
    with pytest.raises(ValueError, match=r"allocation is .* positive integers"):
        DraftConfig(target.spec, tuple(allocation), 6)


def test_a_depth_that_cannot_be_is_refused(target):
    with pytest.raises(ValueError, match="depth is 0"):
        DraftConfig(target.spec, (2,), 0)


@pytest.mark.parametrize("vocabulary", [None, torch.arange(0, 320, 7)])
def test_save_then_load_is_identity(target, tmp_path, vocabulary):
    size = None if vocabulary is None else len(vocabulary)
    draft = Specialists(DraftConfig(target.spec, (1, 3, 2), 7, False, 40, size), vocabulary)
    draft.save_pretrained(tmp_path)
    loaded = Specialists.from_pretrained(tmp_path)
    assert loaded.config == draft.config
    assert loaded.state_dict().keys() == draft.state_dict().keys()
    assert all(torch.equal(value, draft.state_dict()[name]) for name, value in loaded.state_dict().items())
    assert {path.name for path in tmp_path.iterdir()} == {"config.json", "model.safetensors"}


def test_a_shipped_head_is_read_by_its_name_in_whatever_dtype_it_is(target, tmp_path, monkeypatch):
    draft = tiny_draft(target, [2, 2])
    draft.save_pretrained(tmp_path / "full")
    export(str(tmp_path / "full"), str(tmp_path / "heads" / "embedded-pair"), "bfloat16")
    halved = tmp_path / "heads" / "embedded-pair" / "model.safetensors"
    assert all(value.dtype == torch.bfloat16 for value in load_file(halved).values())
    monkeypatch.setattr(specialists, "HEADS", tmp_path / "heads")
    read = Specialists.from_pretrained("embedded-pair")
    for name, value in read.state_dict().items():
        assert value.dtype == torch.float32 and torch.equal(value, draft.state_dict()[name].bfloat16().float())
    monkeypatch.setattr(specialists, "snapshot_download", lambda *args, **options: 1 / 0)
    with pytest.raises(ZeroDivisionError):  # any other name is the hub's
        Specialists.from_pretrained("embedded-other")
    with pytest.raises(ValueError, match="dtype is 'int8'; it must be float32, bfloat16 or float16"):
        export(str(tmp_path / "full"), str(tmp_path / "out"), "int8")


def test_inputs_are_scaled_to_a_mean_square_of_one_and_a_draft_that_starts_from_it_reads_the_same(target):
    draft, other = tiny_draft(target, [2, 2]), tiny_draft(target, [4], seed=1)
    features = torch.randn(500, 32) * torch.logspace(-1, 1, 32)
    features[:, 3] = 0  # dead: must not be blown up
    embedded = torch.randn(500, 32) / 8
    draft.normalise(embedded.square().mean(0).sqrt(), features.square().mean(0).sqrt())
    read = torch.cat([embedded, features], -1) * draft.scale
    assert torch.allclose(read.square().mean(0)[read.any(0)], torch.ones(63), rtol=1e-4)
    assert torch.isfinite(draft.scale.half()).all()
    other.start_from(draft)
    assert torch.equal(other.scale, draft.scale)


def test_a_draft_from_before_inputs_were_scaled_is_read(target, tmp_path):
    draft = tiny_draft(target, [2, 2])
    draft.save_pretrained(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    del state["scale"]
    save_file(state, tmp_path / "model.safetensors")
    assert torch.equal(Specialists.from_pretrained(tmp_path).scale, torch.ones(64))


def test_nothing_frozen_is_stored(target, tmp_path):
    tiny_draft(target, [2, 2]).save_pretrained(tmp_path)
    vocabulary = target.spec.vocab_size
    assert all(vocabulary not in tensor.shape for tensor in load_file(tmp_path / "model.safetensors").values())


def test_a_wrong_allocation_does_not_load(target, tmp_path):
    tiny_draft(target, [2, 2]).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"allocation": [2, 2, 2]}))
    with pytest.raises(ValueError, match=r"model\.safetensors does not fit its config\.json"):
        Specialists.from_pretrained(tmp_path)


def test_a_damaged_folder_says_what_is_wrong(target, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"has no config\.json"):
        Specialists.from_pretrained(tmp_path)
    tiny_draft(target, [2]).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"span": 2}))
    with pytest.raises(ValueError, match=r"config\.json is not a draft's config .*span"):
        Specialists.from_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config))
    state = load_file(tmp_path / "model.safetensors")
    save_file({name: value for name, value in state.items() if name != "fc.weight"}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"fc\.weight"):
        Specialists.from_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"cos\nsystem\n(S'true'\ntR.")  # a pickle is not even opened
    with pytest.raises(ValueError, match=r"model\.safetensors does not fit"):
        Specialists.from_pretrained(tmp_path)
    with pytest.raises(FileNotFoundError, match="neither a local folder nor a hub id"):
        Specialists.from_pretrained("nobody/no-draft")


def test_starting_from_fewer_specialists_copies_who_served_the_first_position(target):
    single, pair, triple = (tiny_draft(target, a, seed) for seed, a in enumerate(([6], [2, 4], [2, 2, 2])))
    triple.start_from(pair)
    assert torch.equal(triple.fc.weight, pair.fc.weight)
    for mine, theirs in ((0, 0), (1, 1), (2, 1)):  # positions 1, 3 and 5
        assert torch.equal(triple.layers[mine].q_proj.weight, pair.layers[theirs].q_proj.weight)
    triple.start_from(single)
    assert all(torch.equal(layer.q_proj.weight, single.layers[0].q_proj.weight) for layer in triple.layers)
    triple.layers[0].q_proj.weight.data.zero_()  # copies, not the same tensors
    assert single.layers[0].q_proj.weight.any() and triple.layers[1].q_proj.weight.any()


def test_a_start_of_other_sizes_or_another_target_is_refused(target):
    with pytest.raises(ValueError, match="other sizes"):
        tiny_draft(target, [2, 2], intermediate_size=40).start_from(tiny_draft(target, [4]))
    with pytest.raises(ValueError, match="another target: fingerprint"):
        tiny_draft(target, [2, 2]).start_from(tiny_draft(tiny_target(3), [4]))


def test_a_single_layer_copied_into_specialists_drafts_the_same(target):
    from poss_lightning.draft.unroll import unroll

    single, many = tiny_draft(target, [6]), tiny_draft(target, [1, 2, 3], 1)
    many.start_from(single)
    embedded, features = torch.randn(2, 9, 32), torch.randn(2, 9, 32)
    for a, b in zip(unroll(single, embedded, features, 6), unroll(many, embedded, features, 6), strict=True):
        torch.testing.assert_close(a, b)


def test_a_wider_layer_starts_as_the_narrow_one_and_has_more_to_learn_with(target):
    narrow, wide = tiny_draft(target, [6]), tiny_draft(target, [6], seed=1, intermediate_size=100)
    inner = narrow.layers[0].down_proj.in_features
    wide.start_from(narrow)
    inputs = torch.randn(2, 1, 9, 32)
    for mine, theirs in zip(wide(*inputs, 3), narrow(*inputs, 3), strict=True):
        assert torch.allclose(mine, theirs, atol=1e-6)
    wide(*inputs, 1)[0].square().sum().backward()
    assert wide.layers[0].gate_proj.weight[inner:].any() and wide.layers[0].down_proj.weight.grad[:, inner:].all()
