"""Muon: one optimizer equals torch's two, and resumes from a checkpoint."""

import copy

import torch

from poss_lightning.training.optimizers import Muon

SHAPES = [(24, 64), (64, 24), (32, 32)]
OPTIONS = {"lr": 0.01, "weight_decay": 0.1}


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


def test_matrices_take_torch_s_muon_and_vectors_and_heads_adamw():
    ours, theirs = parameters(), parameters()
    mine = Muon(ours, betas=(0.9, 0.95), heads=ours[2:3], **OPTIONS)
    others = [
        torch.optim.Muon(theirs[:2], momentum=0.95, adjust_lr_fn="match_rms_adamw", **OPTIONS),
        torch.optim.AdamW(theirs[2:], betas=(0.9, 0.95), **OPTIONS),
    ]
    for seed in range(4):
        step(seed, ours, mine)
        step(seed, theirs, *others)
    assert all(map(torch.equal, ours, theirs))
    assert not any(map(torch.equal, ours, parameters()))


def take_steps(stored_after: int | None = None) -> list[torch.Tensor]:
    """Parameters and momenta after four steps; after some, the state of a new optimizer is the stored one."""
    own = parameters()
    options = {"betas": (0.9, 0.95), **OPTIONS}
    optimizer = Muon(own, **options)
    for seed in range(4):
        if seed == stored_after:
            stored, optimizer = copy.deepcopy(optimizer.state_dict()), Muon(own, **options)
            optimizer.load_state_dict(stored)
        step(seed, own, optimizer)
    return [*(p.detach() for p in own), *(optimizer.state[p]["momentum_buffer"] for p in own[:3])]


def test_a_stored_state_resumes_bitwise():
    assert all(map(torch.equal, take_steps(stored_after=2), take_steps()))
