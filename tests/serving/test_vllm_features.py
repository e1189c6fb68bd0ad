"""Features from the real engine: the embedded target's store is that of `poss extract`."""

import pytest

pytest.importorskip("vllm")

import torch

from poss_lightning.corpus.readers import read_conversations
from poss_lightning.demo import CORPUS
from poss_lightning.features.shards import Reader
from poss_lightning.features.store import FeatureStore
from poss_lightning.features.writing import write_store
from poss_lightning.serving.features import vllm_reader
from poss_lightning.target.model import Target

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


def both(folder, target, reader, stored: str) -> tuple[FeatureStore, FeatureStore]:
    """Stores of five conversations, in several shards: ours, vLLM's."""
    conversations = read_conversations(str(CORPUS), limit=5)
    options = SIZES | {"stored": stored, "layers": LAYERS}
    write_store(folder / "ours", target, conversations, **options)
    write_store(folder / "vllm", target, conversations, **options, reader=lambda *_: reader)
    ours, theirs = FeatureStore(folder / "ours"), FeatureStore(folder / "vllm")
    assert theirs.ids == ours.ids and theirs.target == ours.target and len(theirs.manifest.shards) > 1
    for our, their in pairs(ours, theirs):
        assert their.tokens.equal(our.tokens) and their.spans == our.spans and their.greedy.equal(our.greedy)
    return ours, theirs


def pairs(ours: FeatureStore, theirs: FeatureStore):
    return [(ours[i], theirs[i]) for i in range(len(ours))]


def largest_difference(ours: FeatureStore, theirs: FeatureStore, name: str) -> float:
    """Over all vectors: |theirs - ours| / |ours|."""
    vectors = [(getattr(our, name), getattr(their, name)) for our, their in pairs(ours, theirs)]
    return max(float(((b - a).norm(dim=-1) / a.norm(dim=-1)).max()) for a, b in vectors)


def test_the_exact_store_is_that_of_the_target(tmp_path, target, reader):
    ours, theirs = both(tmp_path, target, reader, "exact")
    for name in ("features", "layers"):
        difference = largest_difference(ours, theirs, name)
        print(f"\n{name}: largest relative difference {difference:.1e} over {ours.lengths.sum():,} tokens")
        assert difference <= 1e-4


def test_the_store_in_8_bits_is_that_of_the_target(tmp_path, target, reader):
    """A number on the border of two codes may be rounded to either side; that is rare."""
    ours, theirs = both(tmp_path, target, reader, "float8")
    for name in ("features", "layers"):
        differ = torch.cat([(getattr(a, name) != getattr(b, name)).flatten() for a, b in pairs(ours, theirs)])
        print(f"\n{name}, 8 bits: {differ.float().mean():.1e} of the numbers have another code")
        assert differ.float().mean() <= 1e-3
        assert largest_difference(ours, theirs, name) <= 2**-4  # half a step of e4m3 at its coarsest
