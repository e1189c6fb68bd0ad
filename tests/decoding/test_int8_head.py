"""A head in 8 bits: exact sums of rounded numbers, near the head's own logits. test_engine.py sees that texts stay."""

import pytest
import torch
from torch.nn.functional import linear

from poss_lightning.decoding.drafting import Drafter
from poss_lightning.decoding.int8_head import LEVELS, WEIGHT_LEVELS, Int8Head, choose_product, exact_levels
from tests.support.tiny import tiny_draft, tiny_target

here = pytest.mark.skipif(exact_levels() is None, reason="on this CPU no head is read in 8 bits")


@pytest.fixture(params=[(1, 40, 32), (7, 320, 32), (33, 5000, 576)], ids=str)
def case(request) -> tuple[torch.Tensor, torch.Tensor]:
    """Features (n, D) and a head (V, D); rows of all sizes, among them one of zeros each."""
    rows, vocabulary, width = request.param
    generator = torch.Generator().manual_seed(rows)
    features, head = (
        torch.randn(n, width, generator=generator) * 10 ** torch.randn(n, 1, generator=generator)
        for n in (rows, vocabulary)
    )
    features[rows // 2 + 1 :][:1] = head[vocabulary // 2] = 0
    return features.bfloat16(), head.bfloat16()


def naive(rows: torch.Tensor, levels: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Each row as whole numbers up to `levels`, one by one, and its scale."""
    scales = torch.tensor([max(row.abs().max().item(), 1e-30) / levels for row in rows.float()])
    return torch.stack([(row / scale).round() for row, scale in zip(rows.float(), scales, strict=True)]), scales


@here
@pytest.mark.parametrize("levels", [levels for levels in WEIGHT_LEVELS if levels <= (exact_levels() or 0)])
def test_sums_are_exact_and_rows_stand_alone(case, levels):
    features, head = case
    logits = Int8Head(head, levels)(features, head)
    (left, scale), (right, scales) = naive(features, LEVELS), naive(head, levels)
    exact = left.double() @ right.double().t() * scale[:, None] * scales
    torch.testing.assert_close(logits.double(), exact, rtol=1e-6, atol=0)
    alone = [Int8Head(head, levels)(row[None, None], head)[0, 0] for row in features]
    assert torch.equal(logits, torch.stack(alone))


@here
def test_a_head_of_the_drafts_own_is_what_is_quantized():
    deep, read = tiny_target(num_hidden_layers=7), torch.randn(1, 3, 32)
    draft = tiny_draft(deep, [2, 2], kind="eagle3")
    drafter = Drafter(draft, deep.embed_head, 4, 5, int8_head=True)
    assert not drafter.product.scale.requires_grad
    near, own = draft.logits(read, drafter.embed_head, drafter.product), draft.logits(read, drafter.embed_head)
    torch.testing.assert_close(near, own, rtol=0, atol=0.03 * own.abs().max().item())


def test_it_is_taken_where_it_is_faster_or_asked_for(target, monkeypatch):
    draft = tiny_draft(target, [2, 2])
    assert Drafter(draft, target.embed_head, 4, 5).product is linear  # nobody asked
    assert choose_product(torch.zeros(8, 32, device="meta"), None) is linear
    taken = isinstance(Drafter(draft, target.embed_head, 4, 5, int8_head=None).product, Int8Head)
    assert taken <= (exact_levels() is not None)  # which of them is faster is this CPU's to say
    monkeypatch.setattr("poss_lightning.decoding.int8_head.exact_levels", lambda: None)
    with pytest.raises(ValueError, match="int8_head is true; it is for CPUs with exact products of bytes"):
        Drafter(draft, target.embed_head, 4, 5, int8_head=True)
