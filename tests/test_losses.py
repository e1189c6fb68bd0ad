"""The chunked loss compared with its definition."""

from functools import cache, partial

import pytest
import torch
from torch.nn.functional import pad

from poss_lightning.losses import chunks, passes
from poss_lightning.losses.chunks import Heads, Workspace, is_fused
from poss_lightning.losses.passes import CHUNK_BYTES, DEFAULT, LossSpec, slots_of_chunk
from poss_lightning.losses.slot_weights import draw_chains
from poss_lightning.losses.terms import acceptance
from tests.support import naive
from tests.support.steps import Largest
from tests.support.tolerance import close


def problem(count=9, vocabulary=50):
    generator = torch.Generator().manual_seed(0)
    predictions = [torch.randn(2, count, 16, generator=generator, requires_grad=True) for _ in range(3)]
    features = torch.randn(2, count, 16, generator=generator)
    counts = torch.randint(0, 5, (2, count), generator=generator).minimum(torch.arange(1, count + 1))
    return predictions, features, counts, torch.randn(vocabulary, 16, generator=generator)


def pass_losses(predictions, features, counts, head, draft_head=None, scale=1.0, cap=None, given=(), **spec):
    return passes.pass_losses(
        predictions, features, counts, Heads(head, draft_head, scale, cap), LossSpec(**spec), **dict(given)
    )


def test_drawn_chains_stand_for_all():
    begins = torch.rand(3, 40, generator=torch.Generator().manual_seed(0)) < 0.5
    begins[2] = False
    draws = torch.stack([draw_chains(begins, 6, seed) for seed in range(2000)])
    assert ((draws > 0).sum(-1) == torch.tensor([6, 6, 0])).all()
    assert close(draws.sum(-1), begins.sum(-1).expand(2000, -1).float())
    error = draws.std(0) / 2000**0.5
    assert ((draws.mean(0) - begins.float()).abs() <= 5 * error).all()
    assert torch.equal(draw_chains(begins, 40, 0), begins.float())


def test_a_small_share_of_the_loss_does_not_vanish_in_half_precision():
    """As with float16 features, a long batch, and a loss scaled up by the trainer."""
    predictions, features, counts, head = problem()
    own, found = torch.randn_like(head), []
    options = {"terms": {"token": 1.0}, "given": {"pass_weights": torch.tensor([1.0, 0.9, 0.81]) / 1e6}}
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        given = [x.detach().to(dtype).requires_grad_() for x in (*predictions, own)]
        rest = features.to(dtype), counts, head.to(dtype)
        losses = pass_losses(given[:3], *rest, draft_head=given[3].float(), **options)
        found.append(torch.autograd.grad(1e6 * losses.total, given[3])[0].float())
    assert all((other - found[0]).norm() < 0.03 * found[0].norm() for other in found[1:])


TERMS = {"token": 0.2, "topk": 2.0, "acceptance": 0.3}


@pytest.mark.parametrize(
    ("weights", "own"),
    [
        (TERMS | {"feature": 0.5}, False),
        ({"feature": 0.7}, False),
        (TERMS, True),
        *(({name: 0.7}, True) for name in TERMS),
    ],
    ids=str,
)
@pytest.mark.parametrize(
    ("chunk", "between"),
    [(4, {}), (None, {}), (4, {"scale": 0.3}), (None, {"cap": 3.0}), (4, {"scale": 0.3, "cap": 1.0})],
    ids=str,
)
@pytest.mark.parametrize("weigh", ["all alike", "dpace", "chains"])
def test_terms_and_their_gradients_are_the_definition_s_in_float64(weights, own, chunk, between, weigh):
    """And the rows that are said to be the draft's most likely are.

    Pass k of the chain that begins at slot t reads slot t + k - 1.
    """
    predictions, features, counts, head = problem()
    heads = [torch.randn(head.shape, generator=torch.Generator().manual_seed(1))] if own else []
    wide, head = [x.detach().double().requires_grad_() for x in (*predictions, *heads)], head.double()
    given, between = (wide[:3], features.double(), counts, head), between | {"draft_head": wide[3] if own else None}
    by, slot_weights, options = torch.tensor([1.0, 0.5, 2.0], dtype=torch.float64), None, {}
    near = partial(close, sums=3, dtype=torch.float32 if weigh == "dpace" else None)  # the chances are in float32
    spec = {"terms": weights, "chunk": chunk, "slot_weights": "dpace" if weigh == "dpace" else None}
    if weigh == "dpace":
        slot_weights = naive.dpace(*given, **between)
    elif weigh == "chains":
        chains = torch.rand(2, 9, generator=torch.Generator().manual_seed(3)) * (torch.arange(18).view(2, 9) % 3 > 0)
        slot_weights, options = [pad(chains, (k, 0))[:, :9] for k in range(3)], {"chains": chains}
    ours = pass_losses(*given, **between, **spec, given=options | {"pass_weights": by})
    twin = naive.pass_losses(weights, *given, **between, slot_weights=slot_weights)
    assert near(ours.weighted, twin)
    assert close(sum(weight * ours.by_term[name] for name, weight in weights.items()), ours.weighted)
    for a, b in zip(*(torch.autograd.grad(loss, wide) for loss in (ours.total, (twin * by).sum())), strict=True):
        assert near(a, b)
    assert ours.slots.tolist() == [int((counts >= k).sum()) for k in (1, 2, 3)]
    likeliest = (torch.stack(wide[:3]) @ (wide[3] if own else head).T).argmax(-1)
    assert torch.equal(ours.top_rows, likeliest.where(counts > 0, -1))


@pytest.mark.parametrize("apart", [8, 16, 24, 60])
def test_acceptance_in_float32_where_next_to_nothing_overlaps(apart):
    """Both are certain, of different tokens: value and slope depend on an overlap that 1 - (1 - overlap) rounds."""
    logits = torch.zeros(2, 1, 1000)
    logits[0, 0, 3] = logits[1, 0, 7] = apart
    found = []
    for dtype in (torch.float32, torch.float64):
        log_p, log_q = logits.to(dtype).log_softmax(-1)
        value = acceptance(log_p, log_q.requires_grad_())
        found.append((value.detach(), torch.autograd.grad(value.sum(), log_q)[0]))
    for narrow, wide in zip(*found, strict=True):
        assert close(narrow, wide, 1000, of=wide.abs())


def test_an_own_head_learns_beside_a_frozen_layer_and_not_in_validation():
    predictions, *given = problem(vocabulary=1000)
    own = torch.randn_like(given[-1]).requires_grad_()
    options = {"terms": {"token": 1.0}, "draft_head": own}
    frozen = [prediction.detach() for prediction in predictions]
    together, alone = (pass_losses(each, *given, **options) for each in (predictions, frozen))
    expected, found = (torch.autograd.grad(losses.total, own)[0] for losses in (together, alone))
    assert close(found, expected)
    with torch.no_grad(), Largest() as made:
        validated = pass_losses(predictions, *given, **options, chunk=1)
    assert close(validated.total, alone.total)
    assert made.largest < own.numel()


def test_no_tensor_of_slots_times_vocabulary_outlives_its_chunk():
    """Nor is one made, in forward or backward, with a head of the draft's own."""
    predictions, features, counts, head = problem(count=64, vocabulary=200)
    own = torch.randn_like(head).requires_grad_()
    with Largest() as watch:
        losses = pass_losses(predictions, features, counts, head, own, terms={"token": 1.0}, chunk=4)
        losses.total.backward()
    depth, slots = len(predictions), int((counts > 0).sum())
    assert watch.largest <= max((depth + 1) * 4 * 200, own.numel(), depth * slots * 16) < slots * 200


def test_no_slot_counts():
    predictions, features, counts, head = problem()
    losses = pass_losses(predictions, features, counts * 0, head)
    losses.total.backward()
    assert losses.weighted.tolist() == [0, 0, 0] and all((p.grad == 0).all() for p in predictions)


@pytest.mark.parametrize(("vocabulary", "loss", "slots"), [(128256, {"acceptance": 1.0}, 512), (128256, {}, 1024)])
def test_a_chunk_on_a_gpu_is_as_large_as_its_memory_allows(vocabulary, loss, slots):
    """Six passes at Llama-3-8B's sizes; what is compiled keeps no matrices in float32."""
    heads = Heads(torch.empty(vocabulary, 4096, dtype=torch.bfloat16, device="meta"))
    spec = LossSpec(terms=DEFAULT | loss)
    assert slots_of_chunk("cuda", 6, heads, spec) == slots and slots_of_chunk("cpu", 6, heads, spec) == 128
    fused = is_fused("cuda", heads, spec.computed)
    assert fused == (not loss)

    def taken(count):
        space = Workspace.make(6, count, heads.target, fused)
        return sum(matrix.nbytes for matrix in space) + fused * space.logits[0].nbytes  # a slope, a matrix of its own

    assert taken(slots) <= CHUNK_BYTES < taken(slots + 128)


@pytest.mark.parametrize("has_top", [True, False])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_pass_of_a_gpu_is_the_definition_s(monkeypatch, has_top, dtype):
    """In one compiled function, and eager as a CPU computes it: terms, and the slope as its dtype rounds."""
    eager = partial(torch.compile, backend="aot_eager", dynamic=True, fullgraph=True)  # traced, without a compiler
    monkeypatch.setattr("poss_lightning.losses.chunks.compiled", cache(eager))
    predictions, *given = (x if type(x) is list or x.dtype == torch.int64 else x.to(dtype) for x in problem())
    wide = [prediction.detach().to(dtype).requires_grad_() for prediction in predictions]
    spec, found = {"terms": {"token": 0.2, "topk": 2.0 * has_top}, "chunk": 4}, []
    for fused in (False, True):
        monkeypatch.setattr(chunks, "is_fused", lambda *_, fused=fused: fused)
        losses = pass_losses(wide, *given, **spec)
        found.append((losses.weighted, *torch.autograd.grad(losses.total, wide)))
    for eager, compiled in zip(*found, strict=True):
        assert close(compiled, eager, sums=3, of=eager.abs().amax(), dtype=None if dtype == torch.float64 else dtype)
