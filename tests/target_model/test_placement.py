"""A target whose layers lie on several devices is the same target.

accelerate's hooks around every module stand for several devices.
"""

import pytest
import torch
from accelerate import dispatch_model
from transformers import AutoConfig

from poss_lightning.decoding.baselines import Generate
from poss_lightning.target_model import loading
from poss_lightning.target_model.cache import TreeCache
from poss_lightning.target_model.generation import PlainDecoder
from poss_lightning.target_model.model import Target
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
    expected = PlainDecoder(target).generate(PROMPTS, 20, STOPS)
    assert PlainDecoder(spread).generate(PROMPTS, 20, STOPS) == expected
    for decoder in (speculate(spread, tiny_draft(spread, [2, 1])), Generate(spread)):
        assert tokens_of(decoder, limit=20) == expected


def test_keys_lie_beside_their_layers_and_follow_a_path():
    """The devices are two names of one."""
    cpu, far = torch.device("cpu"), torch.device("cpu:0")
    cache = TreeCache([cpu, far, cpu], cpu, 2, 9, heads=2, head_dim=8, dtype=torch.float32)
    assert [len(store.slots) for store in cache.stores.values()] == [2, 1]
    torch.manual_seed(0)
    states = torch.randn(3, 2, 2, 2, 4, 8)  # of layers: keys and values of two rows, (B, H, n, d) each
    cache.slots.open(4)
    for layer, (keys, values) in enumerate(states):
        cache.update(keys, values, layer)
    cache.keep_path(torch.tensor([[1, 3], [2, 0]]), torch.tensor([2, 1]))
    cache.select([1])
    for layer, expected in zip(cache.layers, states, strict=True):
        assert torch.stack(layer.store.view(layer.layer, 1)).equal(expected[:, 1:, :, 2:3])


def test_layers_are_spread_over_the_gpus_that_are_not_spared(tiny_folder, monkeypatch):
    config = AutoConfig.from_pretrained(tiny_folder)
    for spared, gpus in ((0, (1, 2, 3)), (None, (0, 1, 2, 3))):
        monkeypatch.setattr(loading, "get_max_memory", lambda: dict.fromkeys((0, 1, 2, 3, "cpu"), 1000))
        placed = loading.placement(config, "cuda", "layers", spared)
        assert placed == {"device_map": "auto", "max_memory": dict.fromkeys(gpus, 850)}  # room for caches
    monkeypatch.setattr(loading, "get_max_memory", lambda: {0: 1000, "cpu": 1000})
    with pytest.raises(ValueError, match="there is no GPU beside the training's"):
        loading.placement(config, "cuda", "layers", 0)
