"""Several processes that share one piece of work, as torchrun or SLURM start them."""

import os
from collections.abc import Mapping
from typing import NamedTuple

import torch

from poss_lightning.machine import choose_device


class Rank(NamedTuple):
    """Which of several processes this is; it decides nothing but the order of its work and its GPU."""

    rank: int = 0
    world: int = 1
    local: int = 0  # on its machine


def this_rank(environment: Mapping[str, str] = os.environ) -> Rank:
    """From the variables of torchrun or SLURM; a single process if neither set them."""
    for names in (("RANK", "WORLD_SIZE", "LOCAL_RANK"), ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID")):
        if all(environment.get(name, "").isdecimal() for name in names):
            return Rank(*(int(environment[name]) for name in names))
    return Rank()


def local_rank(environment: Mapping[str, str] = os.environ) -> int:
    """Which process of its machine this is; Lightning's launcher sets this variable alone."""
    local = environment.get("LOCAL_RANK", environment.get("SLURM_LOCALID", ""))
    return int(local) if local.isdecimal() else 0


def order(count: int, rank: Rank) -> list[int]:
    """Parts in the order in which a rank takes them: its own share, then those that others may have left, from the end.

    So the others finish a dead rank's share, and a single rank does everything.
    """
    share = range(rank.rank, count, rank.world)
    return [*share, *(number for number in reversed(range(count)) if number not in share)]


def device_of(rank: Rank, device: str) -> str:
    """The device of a rank: each of several on one machine takes a GPU of its own."""
    if rank.world > 1 and (choose_device() if device == "auto" else device) == "cuda":
        return own_gpu(rank.local)
    return device


def own_gpu(local: int) -> str:
    """The GPU of a machine's process of this number; SLURM may show a task its own GPU alone."""
    return f"cuda:{local % max(1, torch.cuda.device_count())}"
