"""The twin that `make bench-train` is held against computes the same loss and gradients."""

import published
import pytest
import torch
from conftest import tiny_draft

from poss_lightning.losses import pass_losses


@pytest.mark.parametrize("allocation", [[6], [3, 3], [1, 1, 4]], ids=str)
def test_the_published_step_has_the_same_loss_and_gradients(target, allocation):
    draft = tiny_draft(target, allocation)
    generator = torch.Generator().manual_seed(0)
    embedded, inputs, features = torch.randn(3, 2, 13, 32, generator=generator)
    counts = (torch.arange(13) + 1).clamp(max=9).expand(2, -1)

    def gradients(losses):
        (losses * torch.arange(1, 7)).sum().backward()
        found = [p.grad.clone() for p in draft.parameters()]
        draft.zero_grad()
        return found

    predictions = draft(embedded, inputs, 6)
    ours = pass_losses(predictions, features, counts, target.ends.head, 1.0, 0.1, 1.0).weighted
    twins = torch.stack(published.step(draft, target.ends.head, embedded, inputs, features, counts))
    torch.testing.assert_close(ours, twins, rtol=1e-5, atol=1e-5)
    for a, b in zip(gradients(ours), gradients(twins), strict=True):
        assert (a - b).norm() <= 1e-5 * b.norm()
