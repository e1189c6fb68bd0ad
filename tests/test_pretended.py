"""The pretended device obeys the rules of CUDA: what it refuses, where the host waits, what a graph may not do."""

import pytest
import torch

from tests.support.pretended import PretendedDevice
from tests.support.pretended_calls import DEVICE, DeviceError, Pretended
from tests.support.pretended_graphs import replace_cuda

HOST = torch.arange(12.0).view(3, 4)


@pytest.fixture
def device(monkeypatch):
    with PretendedDevice() as device:
        replace_cuda(monkeypatch, device)
        yield device


def moved(*shape: int) -> torch.Tensor:
    return torch.arange(1.0, 1 + torch.Size(shape).numel()).view(shape).to(DEVICE)


class Doubled(torch.autograd.Function):
    """Its backward multiplies by what is on the host."""

    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, gradient):
        return gradient * torch.full((4,), 2.0)


MIXED = {
    "pointwise": lambda: moved(3, 4) + HOST,
    "a number of the device with a row of the host": lambda: moved() * HOST[0],
    "product": lambda: moved(3, 4) @ HOST.T,
    "cat": lambda: torch.cat([moved(4), HOST[0]]),
    "stack of numbers": lambda: torch.stack([moved(), torch.tensor(1.0)]),
    "gather": lambda: moved(3, 4).gather(1, torch.zeros(3, 1, dtype=torch.long)),
    "embedding": lambda: torch.nn.functional.embedding(torch.tensor([1]), moved(3, 4)),
    "into the host": lambda: HOST.clone().add_(moved(3, 4)),
    "into a number of the host": lambda: torch.zeros(()).add_(moved()),
    "an index of the device into the host": lambda: HOST[moved(2).long()],
    "values of the host": lambda: moved(3, 4).index_put_((moved(2).long(),), HOST[:2]),
    "backward": lambda: Doubled.apply(moved(3, 4).requires_grad_()).sum().backward(),
}
ALONE = {
    "a number of Python": lambda: moved(3, 4) * 2,
    "a number of the host": lambda: moved(3, 4) + torch.tensor(2.0),
    "filled by one": lambda: moved(3, 4).masked_fill_(moved(3, 4) > 2, torch.tensor(2.0)),
    "where": lambda: torch.where(moved(3, 4) > 2, moved(3, 4), 0.0),
    "made there": lambda: torch.zeros(3, device=DEVICE) + torch.arange(3, device=DEVICE),
    "a slice": lambda: moved(3, 4)[:, 1:].add_(1),
    "an index of the device": lambda: moved(3, 4)[moved(2).long()],
    "a mask that is filled": lambda: moved(3, 4).index_put_((moved(3, 4) > 2,), moved()),
    "from pinned memory": lambda: HOST.pin_memory().to(DEVICE, non_blocking=True),
    "to pinned memory": lambda: moved(3, 4).to("cpu", non_blocking=True),
}
WAITS = {
    "item": lambda: moved().item(),
    "a branch": lambda: bool(moved() > 0),
    "tolist": lambda: moved(3).tolist(),
    "a copy": lambda: moved(3).cpu(),
    "a copy into the host": lambda: HOST.clone().copy_(moved(3, 4)),
    "from the host": lambda: HOST.to(DEVICE),
    "from pageable memory, all the same": lambda: HOST.to(DEVICE, non_blocking=True),
    "from pinned memory, and waits": lambda: HOST.pin_memory().to(DEVICE),
    "made of numbers": lambda: torch.tensor([1, 2], device=DEVICE),
    "nonzero": lambda: moved(3).nonzero(),
    "a mask as an index": lambda: moved(3, 4)[moved(3, 4) > 2],
    "a mask that is set": lambda: moved(3, 4).index_put_((moved(3, 4) > 10,), moved(2)),
    "rows of the host": lambda: moved(3, 4)[[0, 2]],
    "unique": lambda: moved(3).unique(),
    "repeats": lambda: moved(3).repeat_interleave(moved(3).long()),
    "bincount": lambda: torch.bincount(moved(3).long()),
    "equal": lambda: torch.equal(moved(3), moved(3)),
}


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("name", MIXED)
def test_host_and_device_do_not_mix(device, name, inference):
    with pytest.raises((DeviceError, RuntimeError)), torch.inference_mode(inference and name != "backward"):
        MIXED[name]()


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("name", [*ALONE, *WAITS])
def test_the_host_waits_where_it_waits_for_cuda(device, monkeypatch, name, inference):
    """Beside what puts the operands there."""
    setup = []

    def put_there(*shape):
        here = len(device.waits)
        tensor = torch.arange(1.0, 1 + torch.Size(shape).numel()).view(shape).to(DEVICE)
        setup.extend(device.waits[here:])
        return tensor

    monkeypatch.setitem(globals(), "moved", put_there)
    with torch.inference_mode(inference):
        (ALONE | WAITS)[name]()
    assert bool(len(device.waits) - len(setup)) == (name in WAITS)


def test_values_and_gradients_are_the_hosts(device):
    ours, theirs = (x.clone().requires_grad_() for x in (HOST.to(DEVICE), HOST))
    for x in (ours, theirs):
        y = x[:, 1:].softmax(-1).cumsum(0)
        y.view(-1)[::2].mul_(3)
        (y @ y.mT).logsumexp(-1).sum().backward()
    assert isinstance(ours.grad, Pretended)
    assert torch.equal(ours.grad.cpu(), theirs.grad)


def test_autocast_rounds_what_cudas_does(device):
    x = moved(4, 4)
    with torch.autocast("pretend", dtype=torch.bfloat16):
        dtypes = [y.dtype for y in (x @ x, x + x, (x @ x).softmax(-1), torch.nn.functional.rms_norm(x @ x, (4,)))]
    assert dtypes == [torch.bfloat16, torch.float32, torch.float32, torch.float32]


# --- graphs ---


def captured(work, pool=None):
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        result = work()
    return graph, result


def test_a_graph_reads_and_writes_where_it_was_captured(device):
    x, total = moved(3), torch.zeros(3, device=DEVICE)
    graph, doubled = captured(lambda: total.add_(2 * x) * 1)
    assert total.tolist() == [0, 0, 0]  # a capture computes nothing
    graph.replay()
    x.add_(1)
    graph.replay()
    assert doubled.tolist() == total.tolist() == [6, 10, 14]


def test_what_the_host_knew_is_baked(device):
    x, number = moved(3), torch.tensor(2.0)
    graph, result = captured(lambda: x * number)
    number.fill_(5)
    graph.replay()
    assert result.tolist() == [2, 4, 6]


@pytest.mark.parametrize("name", WAITS)
def test_no_graph_waits(device, monkeypatch, name):
    """The operands are put there before."""
    shelf = {shape: moved(*shape) for shape in ((), (2,), (3,), (3, 4))}
    monkeypatch.setitem(globals(), "moved", lambda *shape: shelf[shape])
    with pytest.raises(DeviceError, match="while a graph is captured"):
        captured(WAITS[name])


def test_memory_of_a_graph_must_stay(device):
    x, held = moved(3), [moved(3)]
    graph, _ = captured(lambda: x + held[0])
    graph.replay()
    held.clear()
    with pytest.raises(DeviceError, match="memory that is gone"):
        graph.replay()


def test_graphs_of_a_pool_hand_on_what_they_make(device):
    x = moved(3)
    first, made = captured(lambda: [2 * x])
    second, result = captured(lambda: made[0] + 1, first.pool())
    made.clear()
    for graph in (first, second):
        graph.replay()
    assert result.tolist() == [3, 5, 7]


def test_a_graph_finds_nothing_of_its_last_run(device):
    """What it makes is spoilt before it is made again."""
    graph, result = captured(lambda: torch.empty(3, device=DEVICE))
    result.fill_(1)
    graph.replay()
    assert result.isnan().all()


def test_outside_of_the_mode_nothing_is_computed():
    with PretendedDevice():
        x = moved(3)
    with pytest.raises(DeviceError, match="no `PretendedDevice` is entered"):
        x + 1
