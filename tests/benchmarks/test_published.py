"""The twin that `make bench-train` is held against computes the same loss and gradients."""

import pytest
import torch

from benchmarks import published, published_mask
from poss_lightning.draft import attention, unroll
from poss_lightning.draft.attention import Packing
from poss_lightning.losses.passes import pass_losses
from tests.support import naive
from tests.support.tiny import tiny_draft


@pytest.mark.parametrize("allocation", [[6], [3, 3], [1, 1, 4]], ids=str)
def test_the_published_step_has_the_same_loss_and_gradients(target, allocation):
    draft = tiny_draft(target, allocation)
    generator = torch.Generator().manual_seed(0)
    embedded, inputs, features = torch.randn(3, 2, 13, 32, generator=generator)
    counts = (torch.arange(13) + 1).clamp(max=9).expand(2, -1)

    def gradients(losses):
        losses.backward()
        found = [p.grad.clone() for p in draft.parameters()]
        draft.zero_grad()
        return found

    predictions, by = draft(embedded, inputs, 6), torch.arange(1.0, 7)
    ours = pass_losses(predictions, features, counts, target.embed_head.head, pass_weights=by)
    twins = torch.stack(published.step(draft, target.embed_head.head, embedded, inputs, features, counts))
    torch.testing.assert_close(ours.weighted, twins, rtol=1e-5, atol=1e-5)
    for a, b in zip(gradients(ours.total), gradients((twins * by).sum()), strict=True):
        assert (a - b).norm() <= 1e-5 * b.norm()


@pytest.mark.parametrize("k", [1, 2, 4])
def test_the_published_mask_is_its_definition(k):
    """Slot by slot: hidden keys have logit 0 and no value; what no pass counts is not looked at."""
    generator = torch.Generator().manual_seed(k)
    heads, shared, slots, size = 4, 2, 9, 8
    queries = torch.randn(1, heads, slots, size, generator=generator)
    sets = torch.randn(k, 2, 1, shared, slots, size, generator=generator)  # of z^0 ... z^{k-1}: keys and values
    diagonals = [(sets[k - 1 - i, 0], sets[k - 1 - i, 1]) for i in range(k - 1)]
    found = published_mask.attend(queries, tuple(sets[0]), diagonals, Packing.one_per_row(1, slots, queries.device))
    table = naive.visible_sets(k, slots)
    for t in range(k - 1, slots):
        for head in range(heads):
            keys, values = (
                torch.stack([sets[m, part, 0, head // 2, s] for s, m in enumerate(table[t]) if m is not None])
                for part in (0, 1)
            )
            scores = keys @ queries[0, head, t] * size**-0.5
            hidden = torch.zeros(slots - len(scores) if k > 1 else 0)
            weights = torch.cat([scores, hidden]).softmax(0)[: len(scores)]
            torch.testing.assert_close(found[0, head, t], weights @ values, rtol=1e-4, atol=1e-5)


def test_training_takes_the_published_mask_and_validation_the_exact_one(target):
    draft, inputs = tiny_draft(target, [2, 2]), torch.randn(2, 1, 9, 32)
    callback = published_mask.PublishedMask()
    callback.on_train_batch_start()
    assert unroll.attend is published_mask.attend
    published_outputs = draft(*inputs, 3)
    callback.on_train_batch_end()
    assert unroll.attend is attention.attend
    exact = draft(*inputs, 3)
    assert torch.equal(published_outputs[0], exact[0]) and not torch.allclose(published_outputs[1], exact[1])
