"""Trainings on a device, each in separate processes: the steps of a plain loop, on any number of GPUs."""

import pytest
import torch
from safetensors.torch import load_file

from tests.support import ranks
from tests.support.processes import forked, needs_deepspeed
from tests.support.steps import difference, plain_steps, weights, write_initial
from tests.support.tolerance import LAYER, tolerance_of_adamw

pytestmark = [pytest.mark.gpu, pytest.mark.slow]  # on the CPU tests/training/test_strategies.py says more
PROCESSES = [
    pytest.param(1, ["one"], id="alone"),
    pytest.param(1, ["zero1", "zero2", "zero3"], id="ZeRO alone", marks=needs_deepspeed),
    pytest.param(2, ["ddp"], id="DDP"),
    pytest.param(2, ["zero1", "zero2", "zero3"], id="ZeRO", marks=needs_deepspeed),
]
BATCHES, CLIP = 4, 20.0  # of a step; some gradients of this target are longer, some are not
NEAR = tolerance_of_adamw(sums=3 * 3 * LAYER)  # forward and backward of three passes


@pytest.mark.parametrize("world, strategies", PROCESSES)
def test_a_training_takes_the_steps_of_a_plain_loop_on_the_cpu(store, device, tmp_path, world, strategies):
    if device.type == "cuda" and torch.cuda.device_count() < world:
        pytest.skip(f"needs two GPUs, and there is {torch.cuda.device_count()}")
    initial = tmp_path / "weights.safetensors"
    write_initial(initial, store)
    common = {"world": world, "accumulate": BATCHES // world, "accelerator": device.type, "clip": CLIP}
    runs = [{"strategy": strategy, "folder": str(tmp_path / strategy), **common} for strategy in strategies]
    forked(world, ranks.main, store, str(initial), runs)
    expected = plain_steps(store, initial, BATCHES, CLIP)
    for strategy in strategies:
        assert difference(weights(tmp_path / strategy), expected, load_file(initial)) < NEAR
