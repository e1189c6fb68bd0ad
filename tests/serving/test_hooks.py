"""A vLLM without what the plugin uses is told apart from its source; a stand-in's source is written from the table."""

import logging
import sys
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from poss_lightning.serving import plugin
from poss_lightning.serving.hooks import HOOKS, changed_hooks


def write_source(folder, hooks=HOOKS):
    """A source tree with these hooks."""
    for line in hooks.strip().splitlines():
        if not line.startswith(" "):
            (file := folder / line).parent.mkdir(parents=True, exist_ok=True)
            file.write_text("")
            continue
        *owners, own = line.strip().split(".")
        lines = [*(f"{'    ' * depth}class {owner}:" for depth, owner in enumerate(owners))]
        lines.append("    " * len(owners) + (f"def {own}: ..." if own.endswith(")") else f"{own}: int"))
        file.write_text(file.read_text() + "\n".join(lines) + "\n")
    return folder


@pytest.mark.parametrize(
    ("old", "new", "found"),
    [
        ("", "", []),
        ("    AttentionBackend.get_name()\n", "", ["v1/attention/backend.py: AttentionBackend.get_name()"]),
        ("hidden_size, eps", "hidden_size, epsilon", ["layernorm.py: RMSNorm.__init__(self, hidden_size, eps)"]),
        ("hidden_size, eps", "hidden_size, eps, more=0", []),
        ("VLLM_USE_BREAKABLE_CUDAGRAPH", "OTHER", ["envs.py: VLLM_USE_BREAKABLE_CUDAGRAPH"]),
    ],
)
def test_a_hook_that_is_gone_or_takes_other_parameters_is_named(old, new, found, tmp_path):
    changed = changed_hooks(write_source(tmp_path, HOOKS.replace(old, new) if old else HOOKS))
    assert len(changed) == len(found) and all(map(str.endswith, changed, found))


@pytest.mark.parametrize("fits", [True, False])
def test_the_plugin_registers_all_names_or_warns_once(fits, tmp_path, monkeypatch, caplog):
    write_source(tmp_path / "vllm", HOOKS if fits else HOOKS.replace("VLLM_USE_BREAKABLE_CUDAGRAPH", "OTHER"))
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(ModelRegistry=(registry := Mock())))
    monkeypatch.setattr(plugin, "changed_hooks", lambda: changed_hooks(tmp_path / "vllm"))
    with caplog.at_level(logging.WARNING):
        plugin.register()
    assert registry.register_model.call_count == (len(plugin.METHODS) if fits else 0)
    assert ("VLLM_USE_BREAKABLE_CUDAGRAPH" in caplog.text) != fits
