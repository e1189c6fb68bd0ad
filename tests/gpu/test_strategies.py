"""Trainings on a device, each in separate processes: the steps of a plain loop, on any number of GPUs."""

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from tests.support import ranks
from tests.support.processes import forked, printed
from tests.support.ranks import accelerator_of
from tests.support.steps import difference, plain_steps, weights, write_initial

pytestmark = [pytest.mark.gpu, pytest.mark.slow]  # on the CPU tests/training/test_strategies.py says more
HAS_DEEPSPEED = find_spec("deepspeed") is not None
needs_deepspeed = pytest.mark.skipif(not HAS_DEEPSPEED, reason="DeepSpeed is not installed; see `make setup`")
TORCH, ZERO = ["ddp"], ["zero1", "zero2", "zero3"]
BATCHES, CLIP = 4, 20.0  # of a step; some gradients of this target are longer, some are not
# Adam divides small gradients by their own size, so their rounding counts: 2e-5 of what changed on one CPU. A mean over
# the wrong slots is 1e-1 away.
NEAR = 1e-3


@pytest.fixture(scope="module")
def initial(store, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("initial") / "weights.safetensors"
    write_initial(path, store)
    return path


@pytest.fixture(scope="module")
def one(store, initial, device, tmp_path_factory) -> Path:
    """The folder of a training by one process."""
    return train(tmp_path_factory.mktemp("one"), ["one"], 1, store, initial, device) / "one"


@pytest.fixture(scope="module")
def two(store, initial, device, tmp_path_factory) -> Path:
    """Trainings by two processes, in one folder per strategy; each library has its own processes."""
    if device.type == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip(f"needs two GPUs, and there is {torch.cuda.device_count()}")
    out = tmp_path_factory.mktemp("two")
    for strategies in (TORCH, ZERO) if HAS_DEEPSPEED else (TORCH,):
        train(out, strategies, 2, store, initial, device)
    return out


def train(out: Path, strategies: list[str], world: int, store: str, initial: Path, device: torch.device) -> Path:
    common = {"world": world, "accumulate": BATCHES // world, "accelerator": accelerator_of(device), "clip": CLIP}
    runs = [{"strategy": strategy, "folder": str(out / strategy), **common} for strategy in strategies]
    log = out / f"{strategies[0]}.log"
    assert forked(log, world, ranks.main, store, str(initial), runs) == [0] * world, printed(log)
    return out


def test_a_training_takes_the_steps_of_a_plain_loop_on_the_cpu(store, initial, one, report):
    found = difference(weights(one), plain_steps(store, initial, BATCHES, CLIP), initial)
    report("four steps against a plain loop on the CPU, relative to what changed", found)
    assert found < NEAR


@pytest.mark.parametrize("strategy", [*TORCH, *(pytest.param(name, marks=needs_deepspeed) for name in ZERO)])
def test_two_processes_take_the_steps_of_one(initial, one, two, strategy):
    assert difference(weights(two / strategy), weights(one), initial) < NEAR
