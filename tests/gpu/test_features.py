"""Features that a device computes and encodes are those of the CPU up to rounding."""

from typing import get_args

import pytest
import torch

from poss_lightning.features.manifest import Stored, decode, encode
from poss_lightning.features.store import FeatureStore
from poss_lightning.features.writing import write_store
from tests.support.talks import SIZES, talks
from tests.support.tolerance import LAYER, close

pytestmark = pytest.mark.gpu


@pytest.mark.nightly
def test_a_store_of_the_device_is_the_cpu_s_to_rounding(target, store, tmp_path):
    """Float32 sums are in a different order."""
    exact = FeatureStore(store)
    write_store(tmp_path / "own", target, talks(), **SIZES, layers=exact.manifest.layers)
    own = FeatureStore(tmp_path / "own")
    assert own.manifest.target == exact.manifest.target  # so that a draft of one fits the other
    for ours, theirs in zip(own, exact, strict=True):
        assert (ours.id, ours.spans) == (theirs.id, theirs.spans)
        assert torch.equal(ours.tokens, theirs.tokens) and torch.equal(ours.greedy, theirs.greedy)
        for found, expected in ((ours.features, theirs.features), (ours.layers, theirs.layers)):
            assert close(found, expected, sums=7 * LAYER)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("stored", get_args(Stored))
def test_the_same_features_are_encoded_and_decoded_to_the_same_bits(store, device, stored, dtype):
    sample = FeatureStore(store)[0]
    features = torch.cat([sample.features[:, None], sample.layers], dim=1).to(dtype)  # (T, 1 + layers, D)
    features[0, 0, 0] = 448  # with which the quotient by the largest number of 8 bits is a power of two
    raw = encode(features, stored)
    assert torch.equal(encode(features.to(device), stored).cpu(), raw)
    assert torch.equal(decode(raw.to(device), stored, dtype).cpu(), decode(raw, stored, dtype))
