"""Training on a device: attention, losses and gradients are those of the CPU, and a training can be resumed."""

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

from poss_lightning.draft import attention
from poss_lightning.draft.attention import causal_block, flex_block
from poss_lightning.features.datamodule import FeatureDataModule
from poss_lightning.training.module import DraftModule
from poss_lightning.training.unrolled import unrolled_losses
from tests.support.talks import EAGLE3
from tests.support.tiny import spread, tiny_draft
from tests.support.tolerance import LAYER, close, tolerance_of_adamw
from tests.support.training import fit
from tests.support.unrolling import KINDS, packed, packed_padded_alone, unroll_what_is_drafted

pytestmark = pytest.mark.gpu
SHAPES = [  # heads, heads of keys, and their width
    pytest.param(6, 2, 64, torch.float32, marks=pytest.mark.nightly),
    (4, 1, 128, torch.float32),
    pytest.param(4, 2, 128, torch.bfloat16, marks=pytest.mark.nightly),
]


def distance(found: Tensor, expected: Tensor) -> float:
    """Relative distance of the whole tensors."""
    found, expected = found.detach().cpu().double(), expected.detach().cpu().double()
    return float((found - expected).norm() / expected.norm())


# --- attention ---


@pytest.mark.parametrize("heads, kv_heads, width, dtype", SHAPES)
def test_flex_attention_is_causal_attention_with_its_norm_and_gradients(
    device, monkeypatch, heads, kv_heads, width, dtype
):
    """Compared with our own block in float64 on the CPU, where FlexAttention runs eagerly and has no backward."""
    if device.type == "cpu":
        monkeypatch.setattr("torch.nn.attention.flex_attention._validate_device", lambda *tensors: None)
        monkeypatch.setattr(attention, "compiled", lambda function: function)
    count = 40 if device.type == "cpu" else 300
    generator = torch.Generator().manual_seed(0)
    drawn = [torch.randn(2, n, count, width, generator=generator).to(dtype) for n in (heads, kv_heads, kv_heads)]
    weights = torch.randn(2, heads, count, width + 1, generator=generator)
    rows = [[count // 3, count // 2], [count + 1]]  # the first ends in padding; a last token is not a slot
    weights[0, :, sum(rows[0]) :] = 0

    def run(block, place: torch.device, dtype: torch.dtype, skip: int) -> list[Tensor]:
        leaves = [x.to(place, dtype).requires_grad_() for x in drawn]
        out, norm = block(*leaves, skip, packed(rows, count, place))
        seen = torch.cat([out, norm[..., None].to(dtype)], dim=-1) * weights.to(place, dtype)
        return [seen, *torch.autograd.grad(seen.sum(), leaves)]

    for skip in (0, 1, 3):
        exact = run(causal_block, torch.device("cpu"), torch.float64, skip)
        for found, expected in zip(run(flex_block, device, dtype, skip), exact, strict=True):
            assert close(found, expected, terms=300, sums=3 * 3, dtype=dtype)


@pytest.mark.nightly
@pytest.mark.parametrize("allocation, config", KINDS)
def test_unroll_is_what_the_cached_drafter_drafts(target, allocation, config):
    draft = tiny_draft(target, allocation, **config).to(target.device)
    unrolled, drafted, agree = unroll_what_is_drafted(target, draft)
    assert close(unrolled, drafted, sums=6 * LAYER) and agree


@pytest.mark.nightly
@pytest.mark.parametrize("allocation, config", [KINDS[4], KINDS[-1], ([6], {"kind": "block", "block_layers": 2})])
def test_packed_is_padded_is_alone(target, allocation, config):
    draft = tiny_draft(target, allocation, **config).to(target.device)
    together, rows, alone = packed_padded_alone(target, draft)
    assert close(together, alone, sums=3 * 6 * LAYER) and close(rows, alone, sums=3 * 6 * LAYER)


# --- a step, and a resumed training ---


@pytest.mark.parametrize("options", [{}, EAGLE3 | {"vocabulary_size": 200}], ids=["eagle2", "eagle3"])
def test_a_step_s_losses_and_gradients_are_those_of_the_cpu(store, device, options):
    found, expected = (losses_and_gradients(store, place, options) for place in (device, torch.device("cpu")))
    assert close(found, expected, sums=3 * 3 * LAYER)


def losses_and_gradients(store: str, device: torch.device, options: dict) -> list[Tensor]:
    """The losses of the passes (K,) of one batch, and the gradient of every parameter."""
    torch.manual_seed(0)
    module = DraftModule([1, 2], store, **options)
    spread(module.draft)
    data = FeatureDataModule(store, batch_tokens=256)
    data.source = data.source.select(module.aux_layers)
    batch = data.transfer_batch_to_device(next(iter(data.train_dataloader())), device, 0)
    module.to(device)
    losses, _ = unrolled_losses(module.draft, module.embed_head, batch, 3, module.loss)
    losses.total.backward()
    return [losses.weighted, *(parameter.grad for parameter in module.draft.parameters())]


def test_a_resumed_training_ends_where_an_unbroken_one_does(store, device, tmp_path):
    """Bitwise on a CPU. On CUDA products may be summed in a different order, and Adam divides by what is left."""
    options = {"accelerator": device.type, "devices": 1, "max_epochs": -1, "max_steps": 6}
    keep = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=3, save_top_k=-1)
    whole = fit(store, tmp_path, keep, **options)
    again = fit(store, tmp_path / "again", resume=tmp_path / "step=3.ckpt", **options)
    assert whole.seen[-len(again.seen) :] == again.seen and len(again.seen) < len(whole.seen)
    start = torch.load(tmp_path / "step=3.ckpt", "cpu", weights_only=True)["state_dict"]
    changed = [
        torch.cat([(value.detach().cpu() - start[f"draft.{name}"]).flatten() for name, value in draft])
        for draft in (again.module.draft.named_parameters(), whole.module.draft.named_parameters())
    ]
    assert distance(*changed) <= (0 if device.type == "cpu" else tolerance_of_adamw(sums=3 * 3 * LAYER))
