"""Feature stores of the tiny target."""

from collections.abc import Callable

import pytest

from poss_lightning.features.writing import write_store
from poss_lightning.target_model.model import Target
from tests.support.talks import SIZES, talks
from tests.support.tiny import tiny_target


@pytest.fixture(scope="session")
def make_store(tmp_path_factory) -> Callable[..., str]:
    """Writes a store of a target's features of the usual talks, or of the first `limit`."""

    def make(target: Target, limit: int | None = None, **options) -> str:
        folder = tmp_path_factory.mktemp("store")
        write_store(folder, target, talks()[:limit], **SIZES, **options)
        return str(folder)

    return make


@pytest.fixture(scope="session")
def store(make_store, tiny_folder) -> str:
    return make_store(Target.load(tiny_folder, "float32"))


@pytest.fixture(scope="session")
def inner(make_store) -> str:
    """A store with inner layers, one more than a draft reads."""
    return make_store(tiny_target(num_hidden_layers=7), layers=(2, 6, 3, 4))
