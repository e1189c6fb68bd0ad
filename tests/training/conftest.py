"""What the tests of training share."""

import pytest

from poss_lightning.features.writing import write_store
from poss_lightning.target.model import Target
from tests.support.talks import talks


@pytest.fixture(scope="module")
def store(tmp_path_factory, tiny_folder):
    folder = tmp_path_factory.mktemp("store")
    write_store(
        folder, Target.load(tiny_folder, "float32"), talks(), max_length=128, batch_tokens=1024, shard_bytes=2**20
    )
    return str(folder)
