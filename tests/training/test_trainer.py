"""Module and data with a user's own Trainer; docs/extending.md has the rest."""

import re
from pathlib import Path

import lightning
import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback

from poss_lightning.evaluation.probe import Replay
from poss_lightning.features.datamodule import FeatureDataModule
from poss_lightning.features.store import FeatureStore
from poss_lightning.features.stream import collate
from poss_lightning.target_model.model import Target
from poss_lightning.training.module import DraftModule
from poss_lightning.training.unrolled import unrolled_losses
from tests.support.tolerance import LAYER, close
from tests.support.training import quiet_trainer, train

PAGE = Path(__file__).parents[2] / "docs" / "extending.md"


@pytest.mark.usefixtures("short_replays")
def test_the_page_runs(store, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "features").symlink_to(store)
    section = PAGE.read_text().partition("## Your own Trainer")[2].partition("\n## ")[0]
    code = "\n".join(re.findall(r"```python\n(.+?)```", section, re.DOTALL))
    exec(compile(code, str(PAGE), "exec"), {"__name__": "page"})
    assert (tmp_path / "runs/mine/draft/model.safetensors").is_file()


def test_without_a_store_a_module_begins_with_that_of_the_data(store):
    begun = []
    for module_store in (store, None):
        lightning.seed_everything(0)
        module = DraftModule([1, 2], module_store)
        train(module, FeatureDataModule(store, batch_tokens=256, validation=0.2), max_steps=1, limit_val_batches=0)
        begun.append(module)
    assert begun[0].hparams == begun[1].hparams and begun[1].hparams["store"] == [store]
    assert all(map(torch.equal, *(module.draft.parameters() for module in begun)))


def test_a_replay_of_the_trainer_is_not_replaced(store):
    module, callbacks = DraftModule([1], store), [Replay(answers=3)]
    trainer = train(module, max_steps=1, callbacks=callbacks, limit_val_batches=2)
    trainer.validate(trainer.lightning_module, trainer.datamodule, verbose=False)
    assert [each.answers for each in trainer.callbacks if isinstance(each, Replay)] == [3]
    assert trainer.callback_metrics["val/tau_tree"] >= 1


def test_a_validation_or_test_store_is_measured_whole_as_it_is_replayed(store, make_store, tiny_folder):
    own = make_store(Target.load(tiny_folder, "float32"), limit=12)
    data = FeatureDataModule(store, validation=0.0, validation_store=own, test_store=own, batch_tokens=256)
    assert len(data.train) == 40 and not isinstance(data.held_out, range)
    module = DraftModule([1, 1], store, gamma=0.7)
    with pytest.warns(UserWarning, match="the draft was trained on 12 of these 12 conversations"):
        trainer = train(module, data, max_steps=1, val_check_interval=1, callbacks=[Replay(answers=1000)])
    found = {name: float(value) for name, value in trainer.callback_metrics.items() if name.startswith("val")}
    samples = FeatureStore(own)
    with torch.no_grad():
        losses, _ = unrolled_losses(
            module.draft, module.embed_head, collate([[sample] for sample in samples]), 2, module.loss
        )
    means = losses.weighted / losses.slots
    assert close(found["val/loss"], means[0] + 0.7 * means[1], sums=2 * LAYER)
    with pytest.warns(UserWarning, match="trained on 12 of these 12"):
        (tested,) = trainer.test(module, data, verbose=False)
    assert close(tested, {name.replace("val", "test", 1): value for name, value in found.items()}, dtype=torch.float32)


def test_overfitting_sees_the_same_batches_in_every_epoch(store):
    ids: list[list[str]] = []
    sees = LambdaCallback(on_train_batch_start=lambda trainer, module, batch, _: ids.append(batch.ids))
    for options in ({"overfit_batches": 2, "max_epochs": 2}, {"limit_train_batches": 2}):
        train(DraftModule([1], store), max_steps=4, limit_val_batches=0, callbacks=[sees], **options)
    assert ids[:2] == ids[2:4] and ids[0] != ids[1]
    assert ids[4:6] != ids[6:]


class Own(DraftModule):
    """A loss of the features' own length, and a hyperparameter."""

    def __init__(self, allocation, strength: float = 2.0, **options):
        super().__init__(allocation, **options)

    def extra_losses(self, predictions, batch):
        counts = batch.mask.passes
        sums = [(each.square().sum(-1) * (counts >= k)).sum() for k, each in enumerate(predictions, 1)]
        return self.hparams["strength"] * torch.stack(sums)


class Half(DraftModule):
    """An option by the name of one of its base's, which passes on a different value."""

    def __init__(self, allocation, gamma: float = 0.8, **options):
        super().__init__(allocation, gamma=gamma / 2, **options)


def test_what_a_subclass_passes_on_counts_and_not_its_own_option_of_that_name(store):
    assert Half([1], store=store).loss.gamma == 0.4


@pytest.mark.parametrize("accumulate", [1, 3])
def test_extra_losses_are_averaged_over_the_step_as_the_loss_is(store, accumulate):
    """The gradient of the whole step does not depend on its batches."""
    options = {"allocation": [1, 1], "gamma": 0.7}
    own, plain = Own(store=store, strength=0.5, **options), DraftModule(store=store, **options)
    plain.load_state_dict(own.state_dict())
    data = FeatureDataModule(store, validation=0.2, batch_tokens=2048 // accumulate, noise=0.0)
    data.trainer = quiet_trainer(accumulate_grad_batches=accumulate)
    batches = [batch for batch, _ in zip(data.train_dataloader(), range(accumulate), strict=False)]

    def gradient(module, losses):
        return torch.autograd.grad(sum(losses), module.draft.fc.weight)[0]

    found = []
    for module in (own, plain):
        module._trainer = data.trainer
        module.log = module.log_dict = lambda *_, **__: None
        found.append(gradient(module, [module.training_step(batch) / accumulate for batch in batches]))
    slots = sum(torch.stack([(batch.mask.passes >= k).sum() for k in (1, 2)]) for batch in batches)
    extra = [
        own.extra_losses(unrolled_losses(own.draft, own.embed_head, batch, 2, own.loss)[1], batch) for batch in batches
    ]
    expected = gradient(own, [(torch.tensor([1, 0.7]) / slots * each).sum() for each in extra])  # by the definition
    assert expected.norm() > 0
    assert close(found[0] - found[1], expected, sums=3 * 2 * LAYER, of=found[0].abs().max())
