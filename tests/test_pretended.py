"""The pretended device obeys the rules of CUDA: what it refuses, where the host waits, what a graph may not do."""

import pytest
import torch

from tests.support.pretended import PretendedDevice
from tests.support.pretended_calls import DEVICE, DeviceError
from tests.support.pretended_graphs import replace_cuda

HOST = torch.arange(12.0).view(3, 4)
MIXED = (
    lambda x, row: x + HOST,
    lambda x, row: x @ HOST.T,
    lambda x, row: torch.cat([row, HOST[0]]),
    lambda x, row: x.gather(1, torch.zeros(3, 1, dtype=torch.long)),
    lambda x, row: HOST.clone().add_(x),
    lambda x, row: HOST[row.long()],
)
ALONE = (
    lambda x, row: (x + torch.tensor(2.0)) * 2,
    lambda x, row: torch.where(x > 2, x, 0.0).masked_fill_(x > 2, torch.tensor(2.0)),
    lambda x, row: torch.zeros(3, device=DEVICE) + x[row[:3].long() % 3, 0],
    lambda x, row: HOST.pin_memory().to(DEVICE, non_blocking=True),
    lambda x, row: x.to("cpu", non_blocking=True),
)
WAITS = (
    lambda x, row: bool(row[0] > 0),
    lambda x, row: row.tolist(),
    lambda x, row: row.cpu(),
    lambda x, row: HOST.to(DEVICE, non_blocking=True),
    lambda x, row: torch.tensor([1, 2], device=DEVICE),
    lambda x, row: row.nonzero(),
    lambda x, row: x[x > 2],
    lambda x, row: x[[0, 2]],
    lambda x, row: row.repeat_interleave(row.long()),
    lambda x, row: torch.equal(row, row),
)


@pytest.fixture
def device(monkeypatch):
    with PretendedDevice() as device:
        replace_cuda(monkeypatch, device)
        yield device


@pytest.mark.parametrize("inference", [False, True])
def test_host_and_device_do_not_mix_and_the_host_waits_where_it_waits_for_cuda(device, inference):
    x, row = HOST.to(DEVICE), torch.arange(1.0, 5).to(DEVICE)
    with torch.inference_mode(inference):
        for work in MIXED:
            with pytest.raises((DeviceError, RuntimeError)):
                work(x, row)
        for work in (*ALONE, *WAITS):
            before = len(device.waits)
            work(x, row)
            assert (len(device.waits) > before) == (work in WAITS)


def test_values_and_gradients_are_the_hosts(device):
    ours, theirs = (x.clone().requires_grad_() for x in (HOST.to(DEVICE), HOST))
    for x in (ours, theirs):
        y = x[:, 1:].softmax(-1).cumsum(0)
        y.view(-1)[::2].mul_(3)
        (y @ y.mT).logsumexp(-1).sum().backward()
    assert torch.equal(ours.grad.cpu(), theirs.grad)


# --- graphs ---


def captured(work, pool=None):
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        result = work()
    return graph, result


def test_a_graph_reads_and_writes_where_it_was_captured_and_knows_the_host_as_it_was(device):
    x, total, number = torch.ones(3).to(DEVICE), torch.zeros(3, device=DEVICE), torch.tensor(2.0)
    graph, doubled = captured(lambda: total.add_(number * x) * 1)
    assert total.tolist() == [0, 0, 0]  # a capture computes nothing
    number.fill_(5)
    graph.replay()
    x.add_(1)
    graph.replay()
    assert doubled.tolist() == total.tolist() == [6, 6, 6]


def test_no_graph_waits(device):
    x, row = HOST.to(DEVICE), torch.ones(4).to(DEVICE)
    for work in WAITS:
        with pytest.raises(DeviceError, match="while a graph is captured"):
            captured(lambda work=work: work(x, row))


def test_memory_of_a_graph_must_stay_and_what_it_makes_is_spoilt_before_it_is_made_again(device):
    x, held = torch.ones(3).to(DEVICE), [torch.ones(3).to(DEVICE)]
    first, made = captured(lambda: [x + held[0], torch.empty(3, device=DEVICE)])
    second, result = captured(lambda: made[0] + 1, first.pool())
    made[1].fill_(1)
    for graph in (first, second):
        graph.replay()
    assert result.tolist() == [3, 3, 3] and made[1].isnan().all()
    held.clear()
    with pytest.raises(DeviceError, match="memory that is gone"):
        first.replay()
