"""Muon: steps are orthogonal, equal torch's, and resume from a checkpoint; processes share them."""

import copy
import os
from pathlib import Path

import pytest
import torch

from poss_lightning.training import muon
from poss_lightning.training.muon import LENGTH, Muon, orthogonalize
from tests.support.processes import forked

SHAPES = [(24, 64), (64, 24), (32, 32)]


def parameters() -> list[torch.nn.Parameter]:
    torch.manual_seed(0)
    return [torch.nn.Parameter(torch.randn(shape)) for shape in [*SHAPES, (7,)]]


def step(seed: int, own: list[torch.nn.Parameter], *optimizers: torch.optim.Optimizer) -> None:
    """Of random gradients."""
    torch.manual_seed(seed)
    for p in own:
        p.grad = torch.randn(p.shape)
    for optimizer in optimizers:
        optimizer.step()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_step_has_the_same_length_in_all_directions(shape):
    """Twin: U Vᵀ of the singular value decomposition; also where one direction is a hundred times the others."""
    plain = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    for matrix in (plain, plain + 100 * plain[:, :1] @ plain[:1]):
        found = orthogonalize(matrix).float()
        u, _, v = torch.linalg.svd(matrix, full_matrices=False)
        assert torch.linalg.svdvals(found).max() < 1.3
        assert torch.nn.functional.cosine_similarity(found.flatten(), (u @ v).flatten(), dim=0) > 0.85


def test_matrices_take_torch_s_muon_and_vectors_and_heads_adamw():
    ours, theirs = parameters(), parameters()
    options = {"lr": 0.01, "weight_decay": 0.1}
    mine = Muon(ours, betas=(0.9, 0.95), heads=ours[2:3], **options)
    others = [
        torch.optim.Muon(theirs[:2], momentum=0.95, adjust_lr_fn="match_rms_adamw", **options),
        torch.optim.AdamW(theirs[2:], betas=(0.9, 0.95), **options),
    ]
    for seed in range(4):
        step(seed, ours, mine)
        step(seed, theirs, *others)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)
    assert not torch.allclose(ours[0], parameters()[0], atol=0.1 * LENGTH * 0.01)


def share_steps(folder: Path) -> None:
    rank = int(os.environ["RANK"])
    torch.distributed.init_process_group("gloo")
    made = []
    muon.orthogonalize = lambda matrix: (made.append(matrix.shape), orthogonalize(matrix))[1]
    torch.save(take_steps(rank=rank, world=2), folder / f"{rank}.pt")
    assert made == 4 * [[(32, 32), (64, 24)], [(24, 64)]][rank]  # matrices of similar size together, the largest first
    torch.distributed.destroy_process_group()


def take_steps(stored_after: int | None = None, **share: int) -> list[torch.Tensor]:
    """Parameters and momenta after four steps; after some, the state of a new optimizer is the stored one."""
    own = parameters()
    options = {"lr": 0.01, "betas": (0.9, 0.95), "weight_decay": 0.1, **share}
    optimizer = Muon(own, **options)
    for seed in range(4):
        if seed == stored_after:
            stored, optimizer = copy.deepcopy(optimizer.state_dict()), Muon(own, **options)
            optimizer.load_state_dict(stored)
        step(seed, own, optimizer)
    return [*(p.detach() for p in own), *(optimizer.state[p]["momentum"] for p in own[:3])]


def test_two_processes_take_the_steps_of_one_bitwise(tmp_path):
    forked(2, share_steps, tmp_path)
    alone = take_steps()
    for rank in range(2):
        assert all(map(torch.equal, torch.load(tmp_path / f"{rank}.pt"), alone))


def test_a_stored_state_resumes_bitwise():
    assert all(map(torch.equal, take_steps(stored_after=2), take_steps()))
