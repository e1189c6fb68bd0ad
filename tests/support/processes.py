"""Processes of a test, forked from a server that has imported torch, which takes seconds.

The test itself cannot fork: on a GPU its backward has left threads behind.
"""

import multiprocessing
import os
import socket
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import wait
from pathlib import Path

import torch

fork = multiprocessing.get_context("forkserver")
fork.set_forkserver_preload(["poss_lightning.cli", "poss_lightning.training.module"])
SECONDS = 600  # until all have ended, even on a busy machine


def forked(log: Path, world: int, work: Callable[..., None], *given: object) -> None:
    """Let `world` ranks do `work(*given)`, as if started by torchrun; one that fails ends all, and the test.

    Rank r prints to `log`.r.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        shared = {"WORLD_SIZE": world, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free.getsockname()[1]}
    ranks = [fork.Process(target=_rank, args=(log, shared, rank, work, given)) for rank in range(world)]
    for rank in ranks:
        rank.start()
    try:
        left, end = ranks, time.monotonic() + SECONDS
        while left and not any(rank.exitcode for rank in ranks) and time.monotonic() < end:
            wait([rank.sentinel for rank in left], end - time.monotonic())
            left = [rank for rank in left if rank.exitcode is None]
    finally:
        for rank in ranks:
            rank.kill()
            rank.join()
    printed = [path.read_text()[-2000:] for path in sorted(log.parent.glob(f"{log.name}.*"))]
    assert not any(rank.exitcode for rank in ranks), "\n".join(printed)


def _rank(log: Path, shared: dict[str, object], rank: int, work: Callable[..., None], given: tuple) -> None:
    torch.set_num_threads(1)  # as in the test's own process: sums of two threads differ in their last bits
    own = {"RANK": rank, "LOCAL_RANK": rank, "NODE_RANK": 0}
    os.environ.update({name: str(value) for name, value in (shared | own).items()})
    sys.stdout = sys.stderr = open(f"{log}.{rank}", "w", buffering=1)  # noqa: SIM115
    for stream in (1, 2):
        os.dup2(sys.stderr.fileno(), stream)
    work(*given)
