"""A vLLM without what the plugin uses is told apart from its source; a stand-in's source is written from the table."""

import logging
import sys
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from poss_lightning.serving import plugin
from poss_lightning.serving.hooks import HOOKS, changed_hooks

BUILDER = "v1/attention/backend.py", "AttentionMetadataBuilder.build_for_drafting"


def write_source(folder, change=lambda file, name, parameters: parameters):
    """A source tree with these hooks; `change` gives others, or False for none."""
    for file, hooks in HOOKS.items():
        lines = []
        for name, wanted in hooks.items():
            if (parameters := change(file, name, wanted)) is False:
                continue
            *owners, own = name.split(".")
            lines += [f"{'    ' * depth}class {owner}:" for depth, owner in enumerate(owners)]
            stub = (
                f"{own}: int" if parameters is None else f"def {own}({', '.join(parameters).removesuffix(', *')}): ..."
            )
            lines.append("    " * len(owners) + stub)
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_text("\n".join(lines))
    return folder


@pytest.mark.parametrize(
    ("named", "parameters", "found"),
    [
        (None, None, []),
        (BUILDER, False, ["v1/attention/backend.py: AttentionMetadataBuilder.build_for_drafting"]),
        (
            BUILDER,
            ("self", "draft_index", "common_attn_metadata"),
            ["build_for_drafting(self, common_attn_metadata, dr"],
        ),
        (BUILDER, ("self", "common_attn_metadata", "draft_index", "more=0"), []),
        (("model_executor/layers/layernorm.py", "RMSNorm.__init__"), ("self", "hidden_size", "epsilon"), ["RMSNorm"]),
        (("envs.py", "VLLM_USE_BREAKABLE_CUDAGRAPH"), False, ["envs.py: VLLM_USE_BREAKABLE_CUDAGRAPH"]),
    ],
)
def test_a_hook_that_is_gone_or_takes_other_parameters_is_named(named, parameters, found, tmp_path):
    folder = write_source(tmp_path, lambda file, name, own: parameters if (file, name) == named else own)
    changed = changed_hooks(folder)
    assert len(changed) == len(found) and all(map(str.__contains__, changed, found))


@pytest.mark.parametrize("fits", [True, False])
def test_the_plugin_registers_all_names_or_warns_once(fits, tmp_path, monkeypatch, caplog):
    write_source(tmp_path / "vllm", lambda file, name, own: own if fits or file != "envs.py" else False)
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(ModelRegistry=(registry := Mock())))
    monkeypatch.setattr(plugin, "changed_hooks", lambda: changed_hooks(tmp_path / "vllm"))
    with caplog.at_level(logging.WARNING):
        plugin.register()
    assert registry.register_model.call_count == (len(plugin.METHODS) if fits else 0)
    assert ("VLLM_USE_BREAKABLE_CUDAGRAPH" in caplog.text) != fits
