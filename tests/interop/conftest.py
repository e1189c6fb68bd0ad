"""A target with layers enough for EAGLE-3."""

import pytest

from poss_lightning.target.model import Target
from tests.support.tiny import tiny_target, tiny_tokenizer


@pytest.fixture(scope="session")
def deep() -> Target:
    return tiny_target(num_hidden_layers=8)


@pytest.fixture(scope="session")
def deep_folder(deep, tmp_path_factory) -> str:
    """The same, as a local folder."""
    folder = tmp_path_factory.mktemp("deep-target")
    deep.model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return str(folder)
