"""Module and data with a user's own Trainer; docs/extending.md has the rest."""

import re
from pathlib import Path

import lightning
import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy

from poss_lightning.evaluation.probe import Replay
from poss_lightning.features.datamodule import FeatureData
from poss_lightning.features.schedule import split
from poss_lightning.training.module import SpecialistTraining
from tests.support.processes import forked, printed
from tests.support.ranks import QUIET

PAGE = Path(__file__).parents[2] / "docs" / "extending.md"
OFF = {"enable_checkpointing": False, **QUIET}
CPU = {"accelerator": "cpu", "devices": 1, "num_sanity_val_steps": 0, **OFF}


def test_the_page_runs(store, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "features").symlink_to(store)
    section = PAGE.read_text().partition("## Your own Trainer")[2].partition("\n## ")[0]
    code = "\n".join(re.findall(r"```python\n(.+?)```", section, re.DOTALL))
    exec(compile(code, str(PAGE), "exec"), {"__name__": "page"})
    assert (tmp_path / "runs/mine/draft/model.safetensors").is_file()


def test_a_replay_of_the_trainer_is_not_replaced(store):
    module = SpecialistTraining(store, [1])
    trainer = lightning.Trainer(max_steps=1, callbacks=[Replay(answers=3)], limit_val_batches=2, **CPU)
    trainer.fit(module, data := FeatureData(store, validation=0.2))
    trainer.validate(module, data)
    assert [each.answers for each in trainer.callbacks if isinstance(each, Replay)] == [3]
    assert trainer.callback_metrics["val/tau_tree"] >= 1


def conversations(store, batches: int, **options) -> list[list[str]]:
    """The conversations of every batch."""
    ids = []

    class Sees(SpecialistTraining):
        def training_step(self, batch, batch_idx):
            ids.append(batch.ids)
            return super().training_step(batch, batch_idx)

    data = FeatureData(store, validation=0.2, batch_tokens=128)
    lightning.Trainer(max_steps=batches, limit_val_batches=0, **CPU, **options).fit(Sees(store, [1]), data)
    return ids


def test_overfitting_sees_the_same_batches_in_every_epoch(store):
    first, second, third, fourth = conversations(store, 4, overfit_batches=2, max_epochs=2)
    assert [first, second] == [third, fourth] and first != second
    every = conversations(store, 4, limit_train_batches=2)
    assert every[:2] != every[2:]


def two_processes(store, folder):
    module = SpecialistTraining(store, [1])
    trainer = lightning.Trainer(
        max_steps=2, accelerator="cpu", devices=2, strategy=DDPStrategy(), limit_val_batches=1, **OFF
    )
    data = FeatureData(store, validation=0.2, batch_tokens=128)
    trainer.fit(module, data)
    ids = [data.source.ids[i] for batch in data.train_dataloader().schedule for i in batch.samples]
    (folder / f"{trainer.global_rank}.txt").write_text("\n".join(ids))


def test_ddp_needs_no_flag_and_shows_every_conversation_once(store, tmp_path):
    assert forked(tmp_path / "log", 2, two_processes, store, tmp_path) == [0, 0], printed(tmp_path / "log")
    shown = [(tmp_path / f"{rank}.txt").read_text().split() for rank in (0, 1)]
    train, _ = split(FeatureData(store, validation=0.2).source.ids, 0.2, 0)
    assert sorted({*shown[0], *shown[1]}) == sorted(FeatureData(store).source.ids[i] for i in train)
    assert len({*shown[0]} & {*shown[1]}) <= 1  # what fills up the last step


class Own(SpecialistTraining):
    """A loss of the features' own length, and a hyperparameter."""

    def __init__(self, store, allocation, strength: float = 2.0, **options):
        super().__init__(store, allocation, **options)

    def extra_losses(self, predictions, batch):
        counts = batch.counts[:, :-1]
        sums = [(each.square().sum(-1) * (counts >= k)).sum() for k, each in enumerate(predictions, 1)]
        return self.hparams["strength"] * torch.stack(sums)


@pytest.mark.parametrize("accumulate", [1, 3])
def test_extra_losses_are_averaged_over_the_step_as_the_loss_is(store, accumulate):
    """The gradient of the whole step does not depend on its batches."""
    torch.manual_seed(0)
    modules = [Own(store, [1, 1], strength=0.5, gamma=0.7) for _ in range(2)]
    modules[1].load_state_dict(modules[0].state_dict())
    plain = SpecialistTraining(store, [1, 1], gamma=0.7)
    plain.load_state_dict(modules[0].state_dict())
    data = FeatureData(store, validation=0.2, batch_tokens=2048 // accumulate, noise=0.0)
    data.trainer = lightning.Trainer(accumulate_grad_batches=accumulate, **CPU)
    batches = [batch for batch, _ in zip(data.train_dataloader(), range(accumulate), strict=False)]
    for module in (modules[0], plain):
        module._trainer = data.trainer
        module.log = module.log_dict = lambda *_, **__: None
        for batch in batches:
            (module.training_step(batch, 0) / accumulate).backward()
    slots = sum(torch.stack([(batch.counts[:, :-1] >= k).sum() for k in (1, 2)]) for batch in batches)
    for batch in batches:  # by the definition
        _, predictions = modules[1]._losses(batch, 2)
        (torch.tensor([1, 0.7]) / slots * modules[1].extra_losses(predictions, batch)).sum().backward()
    for name, parameter in modules[0].draft.named_parameters():
        rest = dict(plain.draft.named_parameters())[name].grad
        expected = dict(modules[1].draft.named_parameters())[name].grad
        if expected is None:
            continue
        torch.testing.assert_close(parameter.grad - (0 if rest is None else rest), expected, rtol=1e-3, atol=1e-6)


class Rarely(Own):
    """A loss of every other batch that is trained on."""

    def extra_losses(self, predictions, batch):
        return super().extra_losses(predictions, batch) if self.training and self.global_step % 2 else None


def test_a_batch_without_extra_losses_has_none(store):
    trainer = lightning.Trainer(max_steps=2, log_every_n_steps=1, limit_val_batches=1, val_check_interval=1, **CPU)
    losses = []
    module = Rarely(store, [1])
    module.log_by_depth = lambda name, values: losses.append(values.item()) if "extra" in name else None
    trainer.fit(module, FeatureData(store, validation=0.2, batch_tokens=128))
    assert [bool(loss) for loss in losses] == [False, False, True, False]  # training, validation, training, …


def test_a_subclass_keeps_its_own_hyperparameters(store, tmp_path):
    module = Own(store, [2], strength=3.0, gamma=0.5)
    assert (module.hparams["strength"], module.hparams["gamma"], module.hparams["allocation"]) == (3.0, 0.5, [2])
    trainer = lightning.Trainer(max_steps=1, limit_val_batches=0, **CPU)
    trainer.fit(module, FeatureData(store, validation=0.2))
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    loaded = Own.load_from_checkpoint(tmp_path / "a.ckpt")
    assert loaded.hparams == module.hparams
    assert all(value.equal(module.state_dict()[name]) for name, value in loaded.state_dict().items())
    with pytest.raises(FileNotFoundError):
        Own.load_from_checkpoint(tmp_path / "gone.ckpt")
