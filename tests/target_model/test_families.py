"""Families of targets: each is a tiny random model that decodes losslessly, or is refused with the reason."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from poss_lightning.decoding.baselines import Autoregressive, Generate
from poss_lightning.features.online import OnlineFeatures
from poss_lightning.features.store import FeatureStore
from poss_lightning.features.stream import collate
from poss_lightning.features.writing import write_store
from poss_lightning.target_model import masks
from poss_lightning.target_model.describe import spec_of
from poss_lightning.target_model.generation import pad_right, prefill
from poss_lightning.target_model.model import Target
from poss_lightning.training.module import DraftModule
from poss_lightning.training.unrolled import unrolled_losses
from tests.support import naive
from tests.support.decoders import PROMPTS, plant, speculate, tokens_of
from tests.support.families import FAMILIES, MIXED, OTHERS, SIZE, TURN, WINDOW
from tests.support.stores import SIZES, make_conversations
from tests.support.tiny import tiny_draft, tiny_tokenizer
from tests.support.tolerance import LAYER, close
from tests.support.trees import random_tree


def family(name: str, **changes) -> Target:
    """A random target of the family before the comma, of the sizes that it knows, with random biases and norms."""
    torch.manual_seed(0)
    kind = name.split(",")[0]
    sizes = {key: value for key, value in SIZE.items() if hasattr(AutoConfig.for_model(kind), key)}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes | FAMILIES.get(name, {}) | changes))
    model.generation_config.no_repeat_ngram_size = 1  # as its files may ask for; it must reach no decoder
    for parameter in model.parameters():
        if parameter.ndim == 1:
            parameter.data += 0.2 * torch.randn_like(parameter)
    return Target(model, tiny_tokenizer(), name)


# By default one family per kind of angles and of layers.
FIRST = ("llama", "llama, dynamic", "phi3, longrope", "gemma2")
EACH = [pytest.param(name, marks=() if name in FIRST else pytest.mark.nightly) for name in FAMILIES]


@pytest.fixture(scope="module", params=EACH)
def target(request) -> Target:
    return family(request.param)


def read_trees(target: Target, prompts: list[list[int]], read=None):
    """For every prompt: the tokens of a tree after it, which of the others each one sees, and the features (n, D)."""
    tokens, parents = zip(*(random_tree(seed, 30, vocabulary=300) for seed in range(len(prompts))), strict=True)
    above = [naive.ancestor_mask(each) for each in parents]
    cache = prefill(target, prompts, 30)[0]
    features = (read or target.forward_tree)(torch.tensor(tokens), torch.tensor(above), cache)[0]
    return zip(tokens, above, features, strict=True)


def test_greedy_is_lossless(target):
    expected = tokens_of(Generate(target), limit=20)
    assert len({token for text in expected for token in text}) > 20  # the target does not just repeat itself
    assert tokens_of(Autoregressive(target), limit=20) == expected
    for allocation, *tree in ([1, 3, 2], 6, 40, 5), ([2, 1], 3, 7, 1):
        assert tokens_of(speculate(target, tiny_draft(target, allocation), *tree), limit=20) == expected


@pytest.mark.nightly
@pytest.mark.parametrize("name", OTHERS)
def test_other_families_are_known_to_be_lossless(name):
    target = family(name)
    expected = tokens_of(Generate(target), limit=20)
    assert tokens_of(Autoregressive(target), limit=20) == expected
    assert tokens_of(speculate(target, tiny_draft(target, [2, 1]), 3, 7, 2), limit=20) == expected


@pytest.mark.parametrize("wrong_every", [0, 2])
def test_long_paths_accepted_are_lossless_too(target, wrong_every):
    future = tokens_of(Generate(target), PROMPTS[:1], 58, frozenset())[0]
    speculative = speculate(target, tiny_draft(target, [2, 2, 2]), 6, 7, 1)
    plant(speculative, [future], PROMPTS[:1], wrong_every)
    decoded = speculative.decode(PROMPTS[:1], 50, frozenset())[0]
    assert decoded.tokens == future[:50]
    assert sum(decoded.accepted) > 25


@pytest.mark.filterwarnings("error::FutureWarning")  # of transformers, about arguments that it will drop
def test_a_tree_after_a_cache_equals_its_paths_read_alone(target):
    prompts = [[9] * 4 + list(range(20, 36)), [10, 11, 12]]
    for prompt, (tokens, above, features) in zip(prompts, read_trees(target, prompts), strict=True):
        paths = [[token for token, on in zip(tokens, seen, strict=True) if on] for seen in above]
        assert max(map(len, paths)) > WINDOW + 1
        alone = target.text_features(pad_right([prompt + path for path in paths], target.device))
        last = [len(prompt + path) - 1 for path in paths]
        assert close(features, alone[range(len(paths)), last], sums=3 * LAYER)


@pytest.mark.parametrize("shift", [-1, 1])
@pytest.mark.parametrize("name", ["mistral", "qwen2", "gemma2"])  # in all layers, from one on, in every other
def test_a_window_off_by_one_is_refused_when_loading_and_seen_in_a_tree(name, shift, monkeypatch):
    target, prompts, right = family(name), [list(range(20, 40))], masks.in_window
    ((*_, features),) = read_trees(target, prompts)
    monkeypatch.setattr(masks, "in_window", lambda window, *rest: right(window + shift, *rest))
    ((*_, wrong),) = read_trees(target, prompts)
    assert not any(close(one, other, sums=3 * LAYER) for one, other in zip(wrong, features, strict=True))
    with pytest.raises(ValueError, match="cache and a tree's mask and windows are not those of a plain forward"):
        family(name, sliding_window=64)  # longer than what is read when it is loaded


def test_the_window_of_a_tree_is_the_drawing():
    positions, length = torch.tensor([[3, 4, 4, 5, 5, 6]]), torch.tensor([3])
    tree = torch.tensor(naive.ancestor_mask([0, 0, 0, 1, 2, 4]))
    visible = torch.cat([torch.ones_like(tree)[:, :3], tree], dim=1)  # (n, extent)
    seen = (visible & masks.in_window(2, positions, length, 9))[0, 0].tolist()
    drawn = [line.replace("|", "").split()[1:] for line in masks.__doc__.splitlines()[-6:]]
    assert [["x" if see else "." for see in row] for row in seen] == drawn


def test_the_base_of_a_target_s_angles_is_that_of_its_full_attention():
    assert family("gemma3_text").spec.rope_theta == 1e6  # the sliding layers have 1e4


@pytest.mark.parametrize("name", ["phi3, longrope", "llama, dynamic"])
def test_what_is_drafted_beyond_the_context_does_not_change_other_angles(name):
    """The last rounds draft beyond the limit; so does a finished row that waits for others."""
    target, prompts = family(name), [list(range(20, 16 + TURN)), [5, 6, 7]]
    assert (target.spec.context, family("phi3").spec.context) == (TURN, 512)
    expected = [tokens_of(Generate(target), [prompt], 12, frozenset())[0] for prompt in prompts]
    assert [len(text) for text in expected] == [4, 12]
    assert tokens_of(Autoregressive(target), prompts, 12, frozenset()) == expected
    speculative = speculate(target, tiny_draft(target, [2, 2, 2]), 6, 20, 3)
    assert tokens_of(speculative, prompts, 12, frozenset()) == expected


@pytest.mark.parametrize("name", ["llama, dynamic", "gemma2"])
def test_a_tree_never_synchronises(name):
    """A line that needs a value would break the compiled graph."""
    target, prompts = family(name), [[5, 6, 7, 8, 9], [3, 4]]
    expected = [features for *_, features in read_trees(target, prompts)]
    whole = torch.compile(target.forward_tree, fullgraph=True, backend="eager")
    assert close([features for *_, features in read_trees(target, prompts, whole)], expected, sums=3 * LAYER)


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
LLAMA3 = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LONG = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
# What published configs say, and how many tokens their authors say that the model reads.
CONTEXTS = [
    ("qwen2", 32768, YARN, 131072),  # Qwen2.5, extended as its card says
    ("qwen3", 40960, YARN, 131072),
    ("llama", 163840, YARN | {"factor": 40, "original_max_position_embeddings": 4096}, 163840),
    ("llama", 4096, {"rope_type": "yarn", "factor": 16.0}, 65536),  # what is not said is max_position_embeddings
    ("llama", 4096, {"rope_type": "linear", "factor": 4.0}, 16384),  # vicuna-16k
    ("llama", 131072, LLAMA3 | {"factor": 32.0, "original_max_position_embeddings": 8192}, 131072),
    ("llama", 8192, LLAMA3 | {"factor": 8.0}, 65536),
    ("llama", 4096, {"rope_type": "dynamic", "factor": 2.0}, 4096),  # beyond, each length has its own angles
    ("llama", 131072, LONG | {"original_max_position_embeddings": 4096}, 4096),  # Phi-3
    ("gemma3_text", 131072, {"full_attention": {"rope_type": "linear", "factor": 8.0}}, 131072),  # of all its layers
    ("olmo3", 8192, {"full_attention": {"rope_type": "yarn", "factor": 8.0}}, 65536),
    ("olmo3", 4096, {"rope_type": "default", "rope_theta": 1e4}, 4096),  # transformers reads none of it
]


@pytest.mark.parametrize(("kind", "said", "rope", "context"), CONTEXTS)
def test_a_context_is_as_long_as_the_angles_reach(kind, said, rope, context):
    given = {"rope_scaling": rope} if kind == "llama" else {"rope_parameters": rope}  # older files and newer ones
    config = AutoConfig.for_model(kind, **SIZE | {"max_position_embeddings": said} | given)
    assert spec_of(config, kind).context == context


@pytest.mark.parametrize("name", ["llama, yarn", "llama, linear"])
def test_a_stretched_target_continues_long_prompts_as_transformers_does(name):
    target, prompt = family(name, max_position_embeddings=16), list(range(20, 60))
    expected = tokens_of(Generate(target), [prompt], 12, frozenset())
    assert tokens_of(Autoregressive(target), [prompt], 12, frozenset()) == expected
    assert tokens_of(speculate(target, tiny_draft(target, [1, 2]), 3, 10, 2), [prompt], 12, frozenset()) == expected


REFUSED = {
    "deepseek_v3": (
        {"num_key_value_heads": 4, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 12},
        "its attention does not take a tree's mask and cache",  # keys and values differ in size
    ),
    "doge": ({}, "its attention does not take a tree's mask"),
    "hrm_text": ({}, "it has no list of 24 decoder layers"),
    "jamba": ({}, "layers of linear_attention; only full_attention and sliding_attention can read a tree"),
    "mamba": ({}, "its MambaConfig has no num_attention_heads"),
    "gptj": ({"n_head": 4, "rotary_dim": 4}, r"its logits are not head\(feature\)"),  # its head has a bias
    "gemma3_text": (MIXED | {"head_dim": 8, "use_bidirectional_attention": True}, "not those of a plain forward"),
    "bloom": ({"n_head": 4, "max_position_embeddings": 512}, "its attention does not take a tree's mask and cache"),
    "mpt": ({}, "its MptConfig has no max_position_embeddings, or not one for all layers"),
    "gemma4_unified_text": (MIXED, "its Gemma4UnifiedTextConfig has no head_dim, or not one for all layers"),
    "youtu": ({}, "transformers itself cannot read 8 tokens with it"),
    "opt": ({"word_embed_proj_dim": 16, "ffn_dim": 64}, "its layers and its features differ in width"),
    "electra": ({"is_decoder": True}, r"its logits are not head\(feature\)"),  # whose head is of a different width
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_read_a_tree_is_refused_in_one_line(name):
    changes, reason = REFUSED[name]
    with pytest.raises(ValueError, match=rf"^target '{name}' \(\w+\) cannot be used: [^()]*{reason}[^()]*.*\Z"):
        family(name, **changes)


@pytest.mark.parametrize("name", ["granite", "gemma2", "cohere2"])
def test_in_bfloat16_logits_are_rounded_as_the_model_rounds_them(name):
    """A tie made by the model's rounding must be a tie for the engine, too."""
    target = Target(family(name).model.to(torch.bfloat16), tiny_tokenizer(), name)
    tokens = torch.arange(200)[None]
    assert torch.equal(target.embed_head.logits(target.text_features(tokens)), target.model(tokens).logits)


@pytest.mark.parametrize("name", ["granite", "gemma2"])
def test_store_and_online_have_the_target_s_own_logits_and_loss(name, tmp_path):
    target = family(name)
    write_store(tmp_path / "store", target, make_conversations(), **SIZES)
    store = FeatureStore(tmp_path / "store")
    assert store.target == target.spec and (store.target.logit_scale, store.target.logit_cap) != (1.0, None)
    sample = store[0]
    logits = target.model(sample.tokens[None]).logits[0]
    for embed_head in (store.embed_head(), OnlineFeatures(target, []).embed_head()):
        assert close(embed_head.logits(sample.features), logits, sums=3 * LAYER)
        some = torch.tensor([3, 50, 280])
        assert close(embed_head.restrict(some).logits(sample.features), logits[:, some], sums=3 * LAYER)
    torch.manual_seed(0)
    module = DraftModule([1, 2], str(tmp_path / "store"))
    batch = collate([[store[i]] for i in range(6)])
    ours, predictions = unrolled_losses(module.draft, module.embed_head, batch, 3, module.loss)
    given = predictions, batch.features[:, 1:], batch.mask.passes, module.embed_head.head
    between = {"scale": module.embed_head.scale, "cap": module.embed_head.cap}
    twin = naive.pass_losses({"feature": 1.0, "token": 0.1, "topk": 1.0}, *given, **between)
    assert close(ours.weighted, twin, sums=3 * LAYER)
