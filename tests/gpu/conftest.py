"""Fixtures of the laws on a device: `make test-gpu` runs them on CUDA; without POSS_DEVICE they run on the CPU."""

import os
from collections.abc import Iterator

import pytest
import torch

from poss_lightning.features.writing import write_store
from poss_lightning.machine import choose_device
from poss_lightning.target_model.model import Target
from tests.support.talks import SIZES, talks
from tests.support.tiny import write_target

# Heads of 16 numbers, as Triton multiplies nothing narrower; inner layers for EAGLE-3; room for several graphs.
WIDE = {"hidden_size": 64, "num_hidden_layers": 7, "max_position_embeddings": 4096}
INNER = (2, 3, 4)


@pytest.fixture(scope="session", autouse=True)
def device() -> torch.device:
    """The device that POSS_DEVICE names; if there is none, the session ends, so that nothing seems tested."""
    name = os.environ.get("POSS_DEVICE", "cpu")
    try:
        return torch.device(choose_device(name))
    except ValueError as error:
        pytest.exit(f"POSS_DEVICE: {error}", returncode=1)


@pytest.fixture(scope="module", autouse=True)
def exact_and_compiled() -> Iterator[None]:
    """Laws in float32 are about float32, but some containers switch TF32 on.

    They meet more shapes than a training, and beyond its limit dynamo would run FlexAttention eagerly.
    """
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    torch.compiler.reset()
    with torch._dynamo.config.patch(recompile_limit=64, fail_on_recompile_limit_hit=True):
        yield
    torch.set_float32_matmul_precision(before)


@pytest.fixture(scope="session")
def folder(tmp_path_factory) -> str:
    """A tiny target."""
    return write_target(tmp_path_factory.mktemp("target"), **WIDE)


@pytest.fixture(scope="session")
def target(folder, device) -> Target:
    """In float32, on the device."""
    return Target.load(folder, "float32", str(device))


@pytest.fixture(scope="session")
def store(folder, tmp_path_factory) -> str:
    """Features with inner layers, as the CPU computes them."""
    store = tmp_path_factory.mktemp("store")
    on_cpu = Target.load(folder, "float32", "cpu")
    write_store(store, on_cpu, talks(), **SIZES, layers=INNER)
    return str(store)
