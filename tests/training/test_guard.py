"""A loss or gradient that is not finite: who is blamed, what is left behind, and that training stops or goes on."""

from importlib.util import find_spec

import lightning
import pytest
import torch

from poss_lightning.draft.specialists import Specialists
from poss_lightning.features.datamodule import FeatureData
from poss_lightning.features.store import FeatureStore
from poss_lightning.features.stream import collate
from poss_lightning.training.guard import NotFinite, load_batch, save_batches
from poss_lightning.training.module import SpecialistTraining
from poss_lightning.training.strategies import DeepSpeed
from tests.support.processes import forked, printed


class Sick(FeatureData):
    """One conversation has a feature that is not a number."""

    def on_after_batch_transfer(self, batch, dataloader_idx):
        batch = super().on_after_batch_transfer(batch, dataloader_idx)
        inputs = batch.draft_input.clone()
        for (row, here), name in zip(batch.parts(), batch.ids, strict=True):
            if name == "7" and self.trainer.training:
                inputs[row, here.stop - 1 - 5] = torch.nan  # read by pass 1, five slots before the end
        return batch._replace(draft_input=inputs)


def fit(data, module, tmp_path, **options):
    trainer = lightning.Trainer(
        accelerator="cpu",
        max_epochs=1,
        limit_val_batches=0,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        logger=False,
        default_root_dir=tmp_path,
        gradient_clip_val=0.5,
        **options,
    )
    trainer.fit(module, data)
    return trainer


def test_a_batch_whose_draft_input_is_its_features_is_saved_and_read(store, tmp_path):
    """As on a CPU without noise."""
    source = FeatureStore(store)
    batch = collate([[source[0], source[1]]])
    assert batch.draft_input is batch.features
    save_batches(tmp_path, [batch], "found")
    again = load_batch(tmp_path)
    assert torch.equal(again.draft_input, batch.draft_input) and torch.equal(again.features, batch.features)


@pytest.mark.parametrize("accumulate", [1, 3])
def test_pass_specialist_and_conversation_are_named_and_the_batch_reproduces_it(store, tmp_path, accumulate):
    module = SpecialistTraining(store, [1, 2], learning_rate=1e-3)
    data = Sick(store, batch_tokens=256, validation=0.2)
    with pytest.raises(
        NotFinite, match=r"the loss of pass 1.* is not finite: the features of 7 are not either"
    ) as error:
        fit(data, module, tmp_path, accumulate_grad_batches=accumulate)
    (folder,) = tmp_path.glob("not-finite-*")
    assert str(folder) in str(error.value)
    saved = [load_batch(folder / "rank-0", i) for i in range(len(list((folder / "rank-0").glob("*.json"))))]
    (batch,) = [one for one in saved if "7" in one.ids]
    module.draft = Specialists.from_pretrained(folder)
    losses, _ = module._losses(batch, 3)
    assert not losses.weighted.isfinite().all()
    well = [module._losses(one, 3)[0].weighted for one in saved if one is not batch]
    assert all(one.isfinite().all() for one in well)


def test_a_step_can_be_skipped(store, tmp_path):
    module = SpecialistTraining(store, [1, 2], learning_rate=1e-3, not_finite="skip")
    before = [p.clone() for p in module.draft.parameters()]
    with pytest.warns(UserWarning, match=r"the step is skipped"):
        trainer = fit(Sick(store, batch_tokens=256, validation=0.2), module, tmp_path)
    assert all(p.isfinite().all() for p in module.draft.parameters())
    assert any((p != q).any() for p, q in zip(module.draft.parameters(), before, strict=True))
    assert trainer.optimizers[0].state[module.draft.fc.weight]["step"] == trainer.num_training_batches - 1


def test_a_gradient_is_blamed_on_its_specialist(store, tmp_path):
    module = SpecialistTraining(store, [1, 2], learning_rate=1e-3)
    module.draft.layers[1].q_proj.weight.register_hook(lambda gradient: gradient * torch.inf)
    with pytest.raises(
        NotFinite, match=r"the gradient of specialist 2 \(pass 2, 3\) is not finite, though the losses are"
    ):
        fit(FeatureData(store, batch_tokens=256, validation=0.2), module, tmp_path)
    assert (next(tmp_path.glob("not-finite-0")) / "rank-0" / "0-batch.safetensors").is_file()


def test_a_limit_that_cuts_a_step_is_refused(store, tmp_path):
    with pytest.raises(
        ValueError, match="limit_train_batches is 3; it must be a multiple of accumulate_grad_batches, 2"
    ):
        module = SpecialistTraining(store, [1])
        fit(FeatureData(store, validation=0.2), module, tmp_path, accumulate_grad_batches=2, limit_train_batches=3)


def overflow(store, folder, stages):
    for stage in stages:
        module = SpecialistTraining(store, [1, 2], learning_rate=1e-3)
        module.draft.layers[1].q_proj.weight.register_hook(lambda gradient: gradient * torch.inf)
        data = FeatureData(store, batch_tokens=256, validation=0.2)
        with pytest.raises(NotFinite, match="step 0: the gradient of"):
            fit(data, module, folder / str(stage), strategy=DeepSpeed(stage))


@pytest.mark.skipif(find_spec("deepspeed") is None, reason="DeepSpeed is not installed; see `make setup`")
def test_deepspeed_s_own_skipping_is_not_silent(store, tmp_path):
    stages, log = (2, 3), tmp_path / "log"
    assert forked(log, 1, overflow, store, tmp_path, stages) == [0], printed(log)
    for stage in stages:
        assert list((tmp_path / str(stage)).glob("not-finite-*/rank-0/0-batch.safetensors"))
