"""The chunked loss against the definition."""

import naive
import pytest
import torch

from poss_lightning.losses import pass_losses


def problem(seed=0, depth=3, batch=2, count=9, width=16, vocabulary=50):
    generator = torch.Generator().manual_seed(seed)
    predictions = [torch.randn(batch, count, width, generator=generator, requires_grad=True) for _ in range(depth)]
    features = torch.randn(batch, count, width, generator=generator)
    counts = torch.randint(0, depth + 2, (batch, count), generator=generator)
    return predictions, features, counts, torch.randn(vocabulary, width, generator=generator)


@pytest.mark.parametrize("weights", [(1.0, 0.1, 1.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0), (1.0, 0.1, 0.0)])
@pytest.mark.parametrize("chunk", [1, 4, 1000])
@pytest.mark.parametrize("between", [{}, {"scale": 0.3}, {"cap": 3.0}, {"scale": 0.3, "cap": 1.0}], ids=str)
def test_loss_and_gradient_are_the_definition_s(weights, chunk, between):
    predictions, features, counts, head = problem()
    ours = pass_losses(predictions, features, counts, head, *weights, chunk=chunk, **between)
    by = torch.tensor([1.0, 0.5, 2.0])
    ours_gradient = torch.autograd.grad((ours.weighted * by).sum(), predictions)
    naive_sums = naive.pass_losses(predictions, features, counts, head, *weights, **between)
    naive_gradient = torch.autograd.grad((naive_sums * by).sum(), predictions)
    torch.testing.assert_close(ours.weighted.double(), naive_sums, rtol=1e-5, atol=1e-5)
    for a, b in zip(ours_gradient, naive_gradient, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_parts_and_counts():
    predictions, features, counts, head = problem()
    losses = pass_losses(predictions, features, counts, head, 1.0, 0.1, 2.0)
    torch.testing.assert_close(losses.weighted, losses.feature + 0.1 * losses.token + 2.0 * losses.topk)
    assert losses.slots.tolist() == [int((counts >= k).sum()) for k in (1, 2, 3)]


def test_guesses_are_the_draft_s_likeliest_rows():
    predictions, features, counts, head = problem()
    guesses = pass_losses(predictions, features, counts, head).guesses
    for k, prediction in enumerate(predictions):
        expected = (prediction @ head.T).argmax(-1)
        assert torch.equal(guesses[k][counts > 0], expected[counts > 0])
        assert (guesses[k][counts == 0] == -1).all()


def test_no_slot_counts():
    predictions, features, counts, head = problem()
    losses = pass_losses(predictions, features, counts * 0, head)
    losses.weighted.sum().backward()
    assert losses.weighted.tolist() == [0, 0, 0] and all((p.grad == 0).all() for p in predictions)


def test_the_gradient_is_that_of_finite_differences():
    predictions, features, counts, head = problem(depth=1, batch=1, count=2, width=3, vocabulary=5)
    double = [p.detach().double().requires_grad_() for p in predictions]

    def entropies(*passes):
        losses = pass_losses(list(passes), features.double(), counts.clamp(min=1), head.double(), 0.0, 0.3, 0.7, topk=2)
        return losses.weighted

    analytic = torch.autograd.grad(entropies(*double).sum(), double)[0]
    for index in range(double[0].numel()):
        step = torch.zeros_like(double[0]).flatten()
        step[index] = 1e-2
        step = step.view_as(double[0])
        with torch.no_grad():
            slope = (entropies(double[0] + step) - entropies(double[0] - step)).sum() / 2e-2
        assert abs(float(slope) - float(analytic.flatten()[index])) < 1e-3
