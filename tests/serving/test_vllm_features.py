"""Features from the real engine: the embedded target's store is that of `poss extract`."""

import pytest

pytest.importorskip("vllm")

import torch

from poss_lightning.corpus.readers import read_conversations
from poss_lightning.features.shards import Reader
from poss_lightning.features.store import FeatureStore
from poss_lightning.features.writing import write_store
from poss_lightning.serving.features import vllm_reader
from poss_lightning.shipped import CORPUS
from poss_lightning.target_model.model import Target
from tests.support.tolerance import LAYER, tolerance

pytestmark = pytest.mark.vllm
LAYERS = (27, 2, 15)  # EAGLE-3's, in a different order
SIZES = {"max_length": 300, "batch_tokens": 700, "shard_bytes": 2**21}


@pytest.fixture(scope="module")
def target() -> Target:
    return Target.load("embedded", "float32", "cpu")


@pytest.fixture(scope="module")
def reader(target) -> Reader:
    with pytest.MonkeyPatch.context() as environment:  # the reader sets more, which other tests must not see
        for name, value in (("VLLM_CPU_KVCACHE_SPACE", "1"), ("VLLM_ENABLE_V1_MULTIPROCESSING", "1")):
            environment.setenv(name, value)
        return vllm_reader(target, LAYERS, max_length=SIZES["max_length"], tensor_parallel=1, device="cpu")


ROUNDING = {"exact": tolerance(terms=1536, sums=30 * LAYER), "float8": torch.finfo(torch.float8_e4m3fn).eps / 2}


@pytest.mark.parametrize(("stored", "most"), ROUNDING.items())
def test_the_store_is_that_of_the_target(tmp_path, target, reader, stored, most):
    """Of five conversations, in several shards.

    In 8 bits a number on the border of two codes may be rounded to either side, which is rare: by half a step of e4m3
    at its coarsest.
    """
    conversations = read_conversations(str(CORPUS), limit=5)
    options = SIZES | {"stored": stored, "layers": LAYERS}
    write_store(tmp_path / "ours", target, conversations, **options)
    write_store(tmp_path / "vllm", target, conversations, **options, reader=lambda *_: reader)
    ours, theirs = FeatureStore(tmp_path / "ours"), FeatureStore(tmp_path / "vllm")
    assert theirs.ids == ours.ids and theirs.target == ours.target and len(theirs.manifest.shards) > 1
    samples = [(ours[i], theirs[i]) for i in range(len(ours))]
    for our, their in samples:
        assert their.tokens.equal(our.tokens) and their.spans == our.spans and their.greedy.equal(our.greedy)
    for name in ("features", "layers"):
        pairs = [(getattr(our, name), getattr(their, name)) for our, their in samples]
        assert all(((their - our).norm(dim=-1) <= most * our.norm(dim=-1)).all() for our, their in pairs)
        if stored == "float8":
            assert torch.cat([(our != their).flatten() for our, their in pairs]).float().mean() <= 1e-3
