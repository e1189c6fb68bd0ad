"""A target for drafts of every kind."""

import pytest

from tests.support.tiny import tiny_target


@pytest.fixture(scope="session")
def deep():
    """With inner layers to read."""
    return tiny_target(num_hidden_layers=7)
