"""Processes of a test, forked from a server that has imported torch, which takes seconds.

The test itself cannot fork: on a GPU its backward has left threads behind.
"""

import multiprocessing
import os
import socket
import time
from collections.abc import Callable
from importlib.util import find_spec

import pytest
import torch
from torch.multiprocessing import start_processes

multiprocessing.set_forkserver_preload(["poss_lightning.cli", "poss_lightning.training.module"])
needs_deepspeed = pytest.mark.skipif(not find_spec("deepspeed"), reason="DeepSpeed is not installed; see `make setup`")
SECONDS = 600  # after which what still runs is taken to hang, even on a busy machine


def forked(world: int, work: Callable[..., None], *given: object) -> None:
    """Let `world` ranks do `work(*given)`, as if started by torchrun; one that fails ends all, and the test."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        shared = {"WORLD_SIZE": world, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free.getsockname()[1]}
    ranks = start_processes(_rank, (shared, work, given), world, join=False, start_method="forkserver")
    end = time.monotonic() + SECONDS
    try:
        while not ranks.join(end - time.monotonic(), grace_period=0):
            assert time.monotonic() < end
    finally:
        for rank in ranks.processes:
            rank.kill()


def _rank(rank: int, shared: dict[str, object], work: Callable[..., None], given: tuple) -> None:
    torch.set_num_threads(1)  # as in the test's own process: sums of two threads differ in their last bits
    own = {"RANK": rank, "LOCAL_RANK": rank, "NODE_RANK": 0}
    os.environ.update({name: str(value) for name, value in (shared | own).items()})
    work(*given)
