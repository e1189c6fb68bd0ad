"""Examples in docstrings."""

import doctest

import pytest

from poss_lightning.decoding import lookup, trees, verification
from poss_lightning.draft import config
from poss_lightning.target_model import thoughts


@pytest.mark.parametrize("module", [config, lookup, thoughts, trees, verification], ids=lambda module: module.__name__)
def test_examples_show_what_is_returned(module, target):
    found = doctest.testmod(module, extraglobs={"target": target.spec})
    assert found.attempted and not found.failed
