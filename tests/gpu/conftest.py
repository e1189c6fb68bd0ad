"""Fixtures of the laws on a device: `make test-gpu` runs them on CUDA; without POSS_DEVICE they run on the CPU."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from poss_lightning.features.writing import write_store
from poss_lightning.machine import choose_device
from poss_lightning.target.model import Target
from tests.support.talks import talks
from tests.support.tiny import tiny_model, tiny_tokenizer

# Heads of 16 numbers, as Triton multiplies nothing narrower; inner layers for EAGLE-3; room for several graphs.
SIZES = {"hidden_size": 64, "num_hidden_layers": 7, "max_position_embeddings": 4096}
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
def exact_products() -> Iterator[None]:
    """Switch TF32 off, which some containers switch on: laws in float32 are about float32."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)


@pytest.fixture(scope="module", autouse=True)
def compiled_always() -> Iterator[None]:
    """Laws meet more shapes than a training. Beyond its limit dynamo would run FlexAttention eagerly."""
    torch.compiler.reset()
    with torch._dynamo.config.patch(recompile_limit=64, fail_on_recompile_limit_hit=True):
        yield


@pytest.fixture(scope="session")
def folder(tmp_path_factory) -> Path:
    """A tiny target."""
    folder = tmp_path_factory.mktemp("target")
    tiny_model(**SIZES).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def target(folder, device) -> Target:
    """In float32, on the device."""
    return Target.load(str(folder), "float32", str(device))


@pytest.fixture(scope="session")
def store(folder, tmp_path_factory) -> str:
    """Features with inner layers, as the CPU computes them."""
    store = tmp_path_factory.mktemp("store")
    on_cpu = Target.load(str(folder), "float32", "cpu")
    write_store(store, on_cpu, talks(), max_length=128, batch_tokens=1024, shard_bytes=2**20, layers=INNER)
    return str(store)


@pytest.fixture
def report(record_property) -> Callable[[str, object], None]:
    """Report a figure by its name; see `pytest_terminal_summary`."""
    return record_property


def pytest_terminal_summary(terminalreporter) -> None:
    """Print what tests of this folder reported, and why others were skipped, one line each."""
    lines = {report.longrepr[2]: None for report in _here(terminalreporter, "skipped")}
    for report in _here(terminalreporter, "passed"):
        lines |= {f"{name}: {value}": None for name, value in report.user_properties}
    for line in lines:
        terminalreporter.write_line(line)


def _here(terminalreporter, outcome: str) -> list[pytest.TestReport]:
    return [report for report in terminalreporter.getreports(outcome) if "tests/gpu/" in report.nodeid]
