"""The plugin in a vLLM that was tested, and in a later one."""

import sys
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from poss_lightning.serving import plugin


@pytest.mark.parametrize(("version", "warned"), [(f"{plugin.TESTED}.1+cpu", 0), (f"{plugin.TESTED}9.0", 1)])
def test_all_names_are_registered_and_an_untested_version_is_named(version, warned, monkeypatch, caplog):
    registry = Mock()
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(ModelRegistry=registry, __version__=version))
    plugin.register()
    assert registry.register_model.call_count == len(plugin.METHODS)
    assert len(caplog.messages) == warned and all(version in message for message in caplog.messages)
