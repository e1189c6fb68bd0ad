"""A target whose layers lie on several devices is the same target; one that does not fit is refused.

accelerate's hooks around every module stand for several devices.
"""

from pathlib import Path

import pytest
import torch
from accelerate import dispatch_model
from transformers import AutoConfig

from poss_lightning.decoding.autoregressive import Generate
from poss_lightning.target import loading, placement
from poss_lightning.target.cache import TreeCache
from poss_lightning.target.generation import PlainLoop
from poss_lightning.target.model import Target
from tests.support.decoders import PROMPTS, STOPS, speculate, tokens_of
from tests.support.tiny import tiny_draft, tiny_model, tiny_tokenizer


def test_hooks_leave_trees_caches_and_baselines_as_they_are(target):
    """They move the inputs of every module, here to the device where they are."""
    model = tiny_model()
    names = [name for name, module in model.named_modules() if not list(module.children())]
    dispatch_model(model, dict.fromkeys(names, "cpu"), force_hooks=True)
    spread = Target(model, tiny_tokenizer(), "tiny")
    assert model.model.layers[0].mlp.up_proj._hf_hook is not None and not spread.spans_devices
    assert spread.spec.difference(target.spec) is None
    expected = PlainLoop(target).generate(PROMPTS, 20, STOPS)
    assert PlainLoop(spread).generate(PROMPTS, 20, STOPS) == expected
    for decoder in (speculate(spread, tiny_draft(spread, [2, 1])), Generate(spread)):
        assert tokens_of(decoder, limit=20) == expected


def test_keys_lie_beside_their_layers_and_follow_a_path():
    """The devices are two names of one."""
    cpu, far = torch.device("cpu"), torch.device("cpu:0")
    cache = TreeCache([cpu, far, cpu], cpu, 2, 9, heads=2, head_dim=8, dtype=torch.float32)
    assert [len(store.keys) for store in cache.stores.values()] == [2, 1]
    torch.manual_seed(0)
    states = torch.randn(3, 2, 2, 2, 4, 8)  # of layers: keys and values of two rows, (B, H, n, d) each
    cache.slots.open(4)
    for layer, (keys, values) in enumerate(states):
        cache.update(keys, values, layer)
    cache.keep_path(torch.tensor([[1, 3], [2, 0]]), torch.tensor([2, 1]))
    cache.select([1])
    for layer, expected in zip(cache.layers, states, strict=True):
        assert torch.stack(layer.store.view(layer.layer, 1)).equal(expected[:, 1:, :, 2:3])


def test_a_target_that_does_not_fit_is_refused_before_it_is_loaded(tiny_folder, monkeypatch):
    """One line: the bytes needed, those there, and what helps."""
    whole = Path(tiny_folder, "model.safetensors").stat().st_size
    monkeypatch.setattr(placement, "GB", 1000)
    monkeypatch.setattr(placement, "free_bytes", lambda device: whole // 2 - 1)
    with monkeypatch.context() as patch:
        patch.setattr(loading.AutoModelForCausalLM, "from_pretrained", lambda *_: pytest.fail("it was loaded"))
        with pytest.raises(ValueError, match=rf"{whole / 2000:.1f} GB of weights in bfloat16, and cpu has .* for it"):
            Target.load(tiny_folder, "bfloat16", "cpu")
    monkeypatch.setattr(placement, "free_bytes", lambda device: whole)
    Target.load(tiny_folder, "float32", "cpu")


def test_what_helps_depends_on_the_device(tiny_folder, monkeypatch):
    folder, config = Path(tiny_folder), AutoConfig.from_pretrained(tiny_folder)
    half = (folder / "model.safetensors").stat().st_size // 2
    monkeypatch.setattr(placement, "free_bytes", lambda device: half)
    monkeypatch.setattr(placement, "get_max_memory", lambda: dict.fromkeys((0, 1, 2, 3, "cpu"), half))
    with pytest.raises(ValueError, match=r"cuda:1 has .*: --parallel layers takes several GPUs"):
        placement.placement("big", folder, config, "float32", "cuda:1", "none", None)
    fits = placement.placement("big", folder, config, "float32", "cuda", "layers", 0)
    assert fits == {"device_map": "auto", "max_memory": dict.fromkeys((1, 2, 3), int(0.85 * half))}  # room for caches
    for gpus, words in ((3, "these 2 GPUs have .* use more GPUs"), (1, "there is one GPU, which the training needs")):
        monkeypatch.setattr(placement, "get_max_memory", lambda gpus=gpus: dict.fromkeys((*range(gpus), "cpu"), half))
        with pytest.raises(ValueError, match=words):
            placement.placement("big", folder, config, "float32", "cuda", "layers", 0)


def test_parallel_layers_is_one_process(tiny_folder, monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "1")
    with pytest.raises(ValueError, match="one process takes every GPU, but several were started here"):
        Target.load(tiny_folder, "float32", "cpu", "layers")
