"""Prepacked products: those of `linear`, the same texts with and without, and a model in hand that stays as it is."""

import copy
import logging

import pytest
import torch
from torch import nn
from torch.nn.functional import linear

from poss_lightning import prepack
from poss_lightning.decoding.baselines import Autoregressive, Generate
from poss_lightning.target_model.model import Target
from tests.support.decoders import speculate, tokens_of
from tests.support.tiny import tiny_draft, tiny_model, tiny_target, tiny_tokenizer
from tests.support.tolerance import close

here = pytest.mark.skipif(not prepack.can_prepack(torch.float32), reason="this torch or CPU has no prepacked weights")


@pytest.fixture(autouse=True)
def any_size(monkeypatch):
    """Prepack the tiny weights of tests, too."""
    monkeypatch.setattr(prepack, "SMALLEST", 0)


@pytest.fixture
def without(monkeypatch):
    """A function that makes this a machine that cannot prepack."""
    return lambda: monkeypatch.setattr(prepack, "can_prepack", lambda dtype: False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("shape", [(1,), (2, 3), (1, 40), (0, 5)], ids=str)
@pytest.mark.parametrize("biased", [False, True])
def test_products_are_those_of_linear(shape, dtype, biased):
    """For a part of a larger tensor too, and where torch has no layout of the dtype."""
    torch.manual_seed(0)
    weight, bias = torch.randn(50, 24).to(dtype)[3:], torch.randn(47).to(dtype) if biased else None
    x = torch.randn(*shape, 48).to(dtype)[..., ::2]
    with torch.inference_mode():
        summed = linear(*(None if part is None else part.double().abs() for part in (x, weight, bias)))
        assert close(prepack.product_with(weight, bias)(x), linear(x, weight, bias), 24, 1 + biased, of=summed)


class OtherOrder:
    """A machine that sums a product of `few` rows or fewer from its other end, and rounds otherwise."""

    def __init__(self, weight, bias, few):
        self.weight, self.bias, self.few = weight, bias, few

    def __call__(self, x):
        if x.shape[:-1].numel() > self.few:
            return linear(x, self.weight, self.bias)
        parts = zip(x.split(8, -1), self.weight.split(8, -1), strict=True)
        found = sum(linear(*part) for part in [*parts][::-1])
        return found if self.bias is None else found + self.bias


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(48, 32), (192, 576), (576, 1536), (47, 25)], ids=str)
@pytest.mark.parametrize("few", [None, 0, 2, 16])
def test_a_row_of_a_steady_product_has_the_same_bits_among_any_number_of_rows(dtype, shape, few, monkeypatch):
    """From `rows` on; on this machine, and on one that multiplies few rows in another order."""
    if few is not None:
        monkeypatch.setattr(prepack, "_multiply", lambda weight, bias, layout: OtherOrder(weight, bias, few))
        prepack.steadiest.cache_clear()
    torch.manual_seed(0)
    weight, x, bias = (
        torch.randn(shape).to(dtype),
        torch.randn(100, shape[1]).to(dtype),
        torch.randn(shape[0]).to(dtype),
    )
    counts = 1, 2, 3, 7, 17, 30, 34, 60, 64
    with torch.no_grad():
        for pack in (True, False):
            steady = prepack.Steady(weight, bias if pack else None, pack)
            many = steady(x)
            assert steady.rows > (few or 0)
            assert all(steady(x[:rows]).equal(many[:rows]) for rows in (*counts, steady.rows) if rows >= steady.rows)
            of = linear(x.abs(), weight.abs(), bias.abs() if pack else None)
            assert close(many, linear(x, weight, bias if pack else None), shape[1], of=of)
            assert steady(x[None, None, :1]).shape == (1, 1, 1, shape[0])
        usual = prepack._multiply(weight, bias, None)
        assert few != 16 or not all(usual(x[:rows]).equal(usual(x)[:rows]) for rows in counts)
    prepack.steadiest.cache_clear()


def test_more_rows_are_multiplied_only_where_that_takes_less_time(monkeypatch):
    for fewest, seconds, expected in ((2, {2: 2.0, 6: 1.0}, 6), (2, {2: 1.0, 6: 2.0}, 2), (16, {}, 16)):
        monkeypatch.setattr(prepack, "best_seconds", lambda works, seconds=seconds: seconds)
        assert prepack.quickest.__wrapped__(fewest, torch.float32, None, 1) == expected


@here
def test_siblings_are_one_product_and_give_what_each_alone_gives():
    torch.manual_seed(0)
    parent = nn.Module()
    for name, size in (("q_proj", 40), ("k_proj", 24), ("v_proj", 24)):
        parent.register_module(name, nn.Linear(32, size, bias=False))
    alone = copy.deepcopy(parent)
    prepack.make_steady(parent, pack=True)
    for layer in alone.children():
        layer.forward = prepack.Steady(layer.weight)
    with torch.no_grad():
        for x in (torch.randn(1, 31, 32), torch.randn(2, 65, 32)):
            for layer, twin in zip(parent.children(), alone.children(), strict=True):
                assert layer(x).equal(twin(x))
        assert parent.k_proj(x).equal(parent.k_proj(x.clone()))  # asked for out of turn


@here
def test_gradients_are_those_of_linear():
    layer = nn.Linear(24, 47)
    x, twin = torch.randn(2, 3, 24, requires_grad=True), copy.deepcopy(layer)
    prepack.prepack(layer)
    found = torch.autograd.grad(layer(x).square().sum(), [x, *layer.parameters()])
    for ours, theirs in zip(found, torch.autograd.grad(twin(x).square().sum(), [x, *twin.parameters()]), strict=True):
        assert ours.equal(theirs)


@here
def test_a_model_in_hand_stays_as_it_is_and_shares_its_weights():
    model, tokens = tiny_model().train(), torch.randint(0, 320, (2, 9))
    state = {name: value.clone() for name, value in model.state_dict().items()}
    config, logits = model.config.to_dict(), model(tokens).logits
    target = Target(model, tiny_tokenizer(), "tiny")
    assert "forward" in vars(target.backbone.layers[0].mlp.up_proj)
    tokens_of(speculate(target, tiny_draft(target, [2])), limit=9)
    assert not any("forward" in vars(module) for module in model.modules())
    assert model.training and model.config.to_dict() == config and model.state_dict().keys() == state.keys()
    assert all(value.equal(state[name]) for name, value in model.state_dict().items())
    assert model(tokens).logits.equal(logits)
    theirs = dict(model.model.named_parameters())
    assert all(weight is theirs[name] for name, weight in target.backbone.named_parameters())


@here
@pytest.mark.parametrize("kind", [{}, {"vocabulary": torch.arange(0, 320, 3)}, {"kind": "eagle3"}], ids=str)
def test_texts_are_those_of_generate_with_and_without(kind, without):
    def texts() -> list[list[list[int]]]:
        target = tiny_target(num_hidden_layers=7)
        draft = tiny_draft(target, [1, 2], **kind)
        engines = [speculate(target, own, lookup=lookup) for own, lookup in ((draft, 0), (draft, 4), (None, 4))]
        return [tokens_of(decoder, limit=12) for decoder in (Generate(target), Autoregressive(target), *engines)]

    generated, *ours = texts()
    assert ours == [generated] * 4
    without()
    assert texts() == [generated] * 5


def test_a_torch_that_cannot_is_said_once_and_multiplies_by_the_weight(monkeypatch, caplog):
    def missing(weight, rows):
        raise RuntimeError("mkldnn_reorder_linear_weight: needs the cpu support\nand a trace")

    monkeypatch.setattr(torch.ops.mkldnn, "_reorder_linear_weight", missing)
    prepack.can_prepack.cache_clear()
    weight, x = torch.randn(3, 5), torch.randn(2, 5)
    with caplog.at_level(logging.INFO, logger="poss_lightning"):
        products = [prepack.product_with(weight)(x) for _ in range(2)]
    prepack.can_prepack.cache_clear()
    assert all(product.equal(linear(x, weight)) for product in products)
    (line,) = [record.getMessage() for record in caplog.records]
    assert line == "weights in torch.float32 are not prepacked: mkldnn_reorder_linear_weight: needs the cpu support"


def test_weights_elsewhere_are_multiplied_as_they_are():
    assert not isinstance(prepack.product_with(torch.zeros(8, 32, device="meta")), prepack.Prepacked)
