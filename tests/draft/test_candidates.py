"""A head of low rank with candidates: exact where it should be, the best of its rank, and found by `poss export`."""

import pytest
import torch
from torch.nn.functional import linear

from poss_lightning.decoding.blocks import make_drafter
from poss_lightning.decoding.plans import Plan
from poss_lightning.draft.candidates import CandidateHead, low_rank
from poss_lightning.draft.kinds import load_draft
from poss_lightning.features.writing import write_store
from poss_lightning.training.export import export
from tests.support.stores import SIZES, make_conversations
from tests.support.tiny import tiny_draft


@pytest.fixture
def given():
    """A head (V, D), and vectors (n, D) that lie near a plane of few dimensions."""
    torch.manual_seed(0)
    return torch.randn(300, 24), torch.randn(200, 6) @ torch.randn(6, 24) + 0.1 * torch.randn(200, 24)


def head_of(head, vectors, rank, rows):
    return CandidateHead(head, *low_rank(head, vectors.T @ vectors / len(vectors), rank), rows)


@pytest.mark.parametrize(("rank", "rows"), [(24, 1), (2, 300), (2, 1000)])
def test_with_the_whole_rank_or_all_rows_it_is_the_head(given, rank, rows):
    torch.testing.assert_close(head_of(*given, rank, rows)(given[1]), linear(given[1], given[0]), rtol=1e-3, atol=1e-3)


def test_candidates_are_exact_and_the_rest_is_the_best_of_its_rank(given):
    """That is the SVD of the logits themselves, cut to the rank."""
    head, vectors = given
    logits, found = linear(vectors, head), head_of(head, vectors, 6, 20)(vectors)
    exact = (found - logits).abs() < 1e-4
    low = head_of(head, vectors, 6, 1).low_rank(linear(vectors, low_rank(head, vectors.T @ vectors / 200, 6)[1]))
    assert exact.gather(1, low.topk(20).indices).all() and exact.float().mean() < 0.5
    tail = torch.linalg.svdvals(logits)[6:].square().sum()
    assert (low - logits).square().sum() == pytest.approx(float(tail), rel=1e-3)


@pytest.mark.parametrize("kind", ["eagle2", "eagle3", "block"])
def test_an_exported_draft_proposes_as_before_where_the_rank_is_whole(deep, tmp_path, kind):
    draft, store = tiny_draft(deep, [3], kind=kind, vocabulary=torch.arange(0, 320, 2)), str(tmp_path / "store")
    write_store(tmp_path / "store", deep, make_conversations(), **SIZES, layers=draft.config.aux_layers)
    draft.save_pretrained(tmp_path / "draft")
    for rank in (32, 4):
        export(str(tmp_path / "draft"), str(tmp_path / f"rank-{rank}"), head_rank=rank, head_rows=8, store=store)
    whole, low = (make_drafter(load_draft(tmp_path / f"rank-{rank}"), deep.embed_head, Plan()) for rank in (32, 4))
    exact, predicted = make_drafter(draft, deep.embed_head, Plan()), torch.randn(1, 5, 32)
    logits = [each.specialists.logits(predicted, each.embed_head, each.head_product) for each in (exact, whole, low)]
    torch.testing.assert_close(logits[1], logits[0], rtol=1e-3, atol=1e-3)
    assert low.specialists.config.head_rank == 4 and not torch.allclose(logits[2], logits[0], atol=0.1)
    with pytest.raises(ValueError, match="head_rank is 33; it must be at most 32"):
        export(str(tmp_path / "draft"), str(tmp_path / "wide"), head_rank=33, store=store)
    with pytest.raises(ValueError, match="give a --store"):
        export(str(tmp_path / "draft"), str(tmp_path / "none"), head_rank=3)
