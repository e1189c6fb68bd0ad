"""What the tests of features share."""

from pathlib import Path

import pytest

from poss_lightning.features.writing import write_store
from tests.support.stores import SIZES, make_conversations


@pytest.fixture(scope="session")
def finished(target, tmp_path_factory) -> Path:
    """A store of several shards that one process wrote without interruption; no test changes it."""
    folder = tmp_path_factory.mktemp("finished") / "store"
    write_store(folder, target, make_conversations(), **SIZES)
    return folder
