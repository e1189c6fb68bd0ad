"""Sums and counts compared with loops over samples, over batches, and over processes."""

import random

import pytest
import torch

from poss_lightning.metrics import BINS, FeatureDrift, PassSums, PositionAcceptance, UnrollAcceptance
from tests.support.tolerance import close


@pytest.mark.parametrize("most", [6, 3, 0])  # beyond it no round reached a position
def test_rounds_are_counted_and_tau_is_one_plus_the_sum_of_products_of_pos_acc(most):
    accepted = [random.Random(0).randint(0, most) for _ in range(200)]
    positions = PositionAcceptance(6)
    for part in torch.tensor(accepted).split(7):
        positions.update(part)
    assert positions.reached.tolist() == [sum(count >= k - 1 for count in accepted) for k in range(1, 7)]
    assert positions.passed.tolist() == [sum(count >= k for count in accepted) for k in range(1, 7)]
    tau = 1 + positions.compute().nan_to_num().cumprod(0).sum()
    assert close(tau, 1 + sum(accepted) / len(accepted))


def chains(proposals, greedy, text, counts):
    """Chain by chain: begin at every slot, and continue while the proposal is the target's and the text's."""
    depth, batch, slots = len(proposals), len(text), len(text[0])
    reached, passed = [0] * depth, [0] * depth
    for b in range(batch):
        for start in range(slots):
            for i in range(depth):
                slot = start + i
                if slot >= slots or counts[b][slot] < i + 1:
                    break
                reached[i] += 1
                if proposals[i][b][slot] != greedy[b][slot]:
                    break
                passed[i] += 1
                if proposals[i][b][slot] != text[b][slot]:
                    break
    return reached, passed


@pytest.mark.parametrize("depth", [4, 13])  # and deeper than the sequence is long
@pytest.mark.parametrize("seed", range(5))
def test_unrolled_against_chain_by_chain(seed, depth):
    generator = torch.Generator().manual_seed(seed)
    proposals, greedy, text = (
        torch.randint(0, 2, shape, generator=generator) for shape in ((depth, 3, 11), (3, 11), (3, 11))
    )
    counts = torch.zeros(3, 11, dtype=torch.long)
    counts[0, 2:9], counts[1, 5:11], counts[2, 0:3] = torch.arange(1, 8), torch.arange(1, 7), torch.arange(1, 4)
    acceptance = UnrollAcceptance(depth)
    acceptance.update(proposals, greedy, text, counts)
    assert (acceptance.reached.tolist(), acceptance.passed.tolist()) == chains(
        proposals.tolist(), greedy.tolist(), text.tolist(), counts.tolist()
    )


def test_drift_against_a_loop():
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(2, 5, 8, generator=generator)
    predictions = [*torch.randn(3, 2, 5, 8, generator=generator), features, -features]  # cosines of 1 and -1, too
    counts = torch.arange(10).view(2, 5) % 6
    drift = FeatureDrift(5)
    drift.update([p[:1] for p in predictions], features[:1], counts[:1])
    drift.update([p[1:] for p in predictions], features[1:], counts[1:])
    for k in range(5):
        pairs = [(predictions[k][b, t], features[b, t]) for b in range(2) for t in range(5) if counts[b, t] >= k + 1]
        expected = {
            "cosine": [float(a @ b / a.norm() / b.norm()) for a, b in pairs],
            "l2": [float((a - b).norm() / b.norm()) for a, b in pairs],
            "norm_ratio": [float(a.norm() / b.norm()) for a, b in pairs],
        }
        for name, values in expected.items():
            assert close(drift.compute()[name][k], sum(values) / len(values), dtype=torch.float32)
        bins = [sum(min(int((c + 1) / 2 * BINS), BINS - 1) == b for c in expected["cosine"]) for b in range(BINS)]
        assert drift.compute()["histogram"][k].tolist() == bins


def test_states_of_processes_are_summed():
    """Here another process has the same."""
    for metric in (PositionAcceptance(3), PassSums(2, 3), FeatureDrift(3)):
        for state in metric.metric_state.values():
            state.add_(1)
        metric.sync(lambda state, group: [state, state], distributed_available=lambda: True)
        assert all((state == 2).all() for state in metric.metric_state.values())
