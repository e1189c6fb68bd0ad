"""The published step that `make bench-train` compares with computes the same loss and gradients."""

import pytest
import torch

from benchmarks import published
from poss_lightning.losses.chunks import Heads
from poss_lightning.losses.passes import pass_losses
from tests.support.tiny import tiny_draft
from tests.support.tolerance import LAYER, close


@pytest.mark.parametrize("allocation", [[6], [3, 3], [1, 1, 4]], ids=str)
def test_the_published_step_has_the_same_loss_and_gradients(target, allocation):
    draft = tiny_draft(target, allocation)
    generator = torch.Generator().manual_seed(0)
    embedded, inputs, features = torch.randn(3, 2, 13, 32, generator=generator)
    counts = (torch.arange(13) + 1).clamp(max=9).expand(2, -1)
    predictions, by = draft(embedded, inputs, 6), torch.arange(1.0, 7)
    ours = pass_losses(predictions, features, counts, Heads(target.embed_head.head), pass_weights=by)
    twins = torch.stack(published.step(draft, target.embed_head.head, embedded, inputs, features, counts))
    assert close(ours.weighted, twins, sums=6 * LAYER)
    gradients = (torch.autograd.grad(loss, [*draft.parameters()]) for loss in (ours.total, (twins * by).sum()))
    assert close(*gradients, sums=3 * 6 * LAYER)
