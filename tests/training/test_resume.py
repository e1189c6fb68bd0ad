"""A training that was killed and resumed ends with the weights of one that was not."""

import json
import shutil

import lightning
import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback, ModelCheckpoint

from poss_lightning.features.datamodule import FeatureDataModule
from poss_lightning.training.callbacks import DraftFolders, LastCheckpoint
from poss_lightning.training.module import DraftModule
from poss_lightning.training.run_folder import folder_of
from tests.support.processes import forked
from tests.support.ranks import QUIET
from tests.support.resuming import LAST, Kill, Killed, Left, fit, same_weights
from tests.support.stores import contents
from tests.support.tiny import tiny_target
from tests.support.tolerance import close

pytestmark = pytest.mark.usefixtures("short_replays")


def kill(store, folder, after: int, **options) -> None:
    """Train until the process is killed after a batch."""
    with pytest.raises(Killed):
        fit(store, folder, Kill(after), **options)


@pytest.mark.parametrize(
    ("every", "options"),
    [
        (2, {"accumulate_grad_batches": 2}),
        pytest.param(3, {"max_epochs": -1, "max_steps": 17}, marks=pytest.mark.nightly),
    ],
    ids=str,
)
def test_killed_after_any_batch_it_ends_with_the_same_bits(store, tmp_path, every, options):
    whole, trainer, seen = fit(store, tmp_path, Left(), every=every, **options)
    batches = trainer.num_training_batches
    assert batches >= 5
    first, second = ([name for epoch, names in seen if epoch == number for name in names] for number in (0, 1))
    assert first != second and sorted(first) == sorted(second) == sorted(set(first))
    for after in [batches - 2, batches - 1, batches, batches + 1, 2 * batches]:
        again, other, rest = fit(store, tmp_path, resume=f"{after}.ckpt", every=every, **options)
        assert other.global_step == trainer.global_step
        assert 0 < len(rest) < len(seen) and seen[-len(rest) :] == rest  # at the exact sample
        assert same_weights(whole, again), after


@pytest.mark.parametrize(
    "options",
    [{}, pytest.param({"val_check_interval": 2, "check_val_every_n_epoch": None}, marks=pytest.mark.nightly)],
    ids=str,
)
@pytest.mark.parametrize("after", [False, True], ids=["in it", "after it"])
def test_a_validation_is_repeated_only_if_it_was_killed(store, tmp_path, options, after):
    def run(folder, killed_at=None, resume=None):
        def die(trainer, *rest):
            if trainer.global_step == killed_at:
                raise Killed

        dies = {"on_train_batch_start" if after else "on_validation_batch_end": die}
        steps: list[int] = []
        seen = LambdaCallback(on_validation_end=lambda trainer, _: steps.append(trainer.global_step), **dies)
        callbacks = [seen, LastCheckpoint(every_n_train_steps=1)]
        return fit(store, tmp_path / folder, resume=resume, callbacks=callbacks, **options)[0], steps

    whole, steps = run("whole")
    assert len(steps) >= 3
    for number, step in enumerate(steps[:-1] if after else steps):
        with pytest.raises(Killed):
            run(str(step), killed_at=step)
        again, rest = run(str(step), resume=LAST)
        assert rest == steps[number + after :]
        assert same_weights(whole, again)


@pytest.mark.parametrize("by", ["max_steps", "should_stop"])
@pytest.mark.parametrize("accumulate", [1, pytest.param(2, marks=pytest.mark.nightly)])
def test_an_epoch_that_a_stop_cut_short_is_continued(store, tmp_path, by, accumulate):
    """By its number of steps, or as early stopping and a time limit do."""
    options = {"accumulate_grad_batches": accumulate, "limit_val_batches": 0}
    _, trainer, seen = fit(store, tmp_path / "whole", **options)
    steps = -(-trainer.num_training_batches // accumulate)

    def end(trainer, *rest):
        trainer.should_stop = by == "should_stop" and trainer.global_step == step

    for step in (1, steps - 1, steps, steps + 2):
        watch, folder = Kill(), tmp_path / str(step)
        ends = {"max_steps": step} if by == "max_steps" else {}
        callbacks = [watch, LambdaCallback(on_train_batch_end=end), LastCheckpoint()]
        fit(store, folder, watch, callbacks=callbacks, **options, **ends)
        _, other, rest = fit(store, folder, resume=LAST, **options)
        assert watch.seen + rest == seen and other.global_step == trainer.global_step


class Idle(DraftModule):
    """Is shown batches, and learns nothing from them."""

    def training_step(self, batch, batch_idx=0):
        return 0 * self.draft.fc.weight.sum()


class EpochEnds(ModelCheckpoint):
    """Of a class of its own, as Lightning keeps the state of one callback of a class."""


class Kept(LastCheckpoint):
    """Keeps each checkpoint that it writes."""

    def _save(self, trainer):
        super()._save(trainer)
        shutil.copy(folder_of(trainer) / LAST, folder_of(trainer) / f"last-{trainer.global_step}.ckpt")


@pytest.mark.parametrize(
    ("before", "after", "validated"),
    [(1, 2, 0), (2, 1, 1), *(pytest.param(*each, marks=pytest.mark.nightly) for each in ((2, 3, 0), (3, 1, 1)))],
)
def test_from_every_checkpoint_every_epoch_shows_each_conversation_once(store, tmp_path, before, after, validated):
    """With other numbers of accumulated batches, whoever saved the checkpoint, and at an epoch's border, too."""

    def run(folder, accumulate, *savers, resume=None):
        torch.manual_seed(0)
        seen: list[tuple[int, int, list[str]]] = []  # epoch, step and conversations of each batch
        see = LambdaCallback(
            on_train_batch_start=lambda trainer, module, batch, _: seen.append(
                (trainer.current_epoch, trainer.global_step, [] if batch.mask.is_empty else batch.ids)
            )
        )
        options = {"accumulate_grad_batches": accumulate, "limit_val_batches": validated, "num_sanity_val_steps": 0}
        trainer = lightning.Trainer(
            max_epochs=2, callbacks=[see, *savers], default_root_dir=folder, accelerator="cpu", **options | QUIET
        )
        data = FeatureDataModule(store, batch_tokens=256, validation=0.2)
        trainer.fit(Idle([1], store), data, ckpt_path=resume)
        return seen, trainer

    by_step = {"save_top_k": -1, "every_n_train_steps": 1, "save_on_train_epoch_end": False}
    savers = [
        Kept(1),
        ModelCheckpoint(tmp_path / "steps", **by_step),
        EpochEnds(tmp_path / "epochs", save_top_k=-1, save_on_train_epoch_end=True),
    ]
    whole, _ = run(tmp_path, before, *savers)
    border = max(step for epoch, step, _ in whole if epoch == 0) + 1
    files = [file for file in tmp_path.rglob("*.ckpt") if file.name != "last.ckpt"]
    assert len(files) > 2 * border
    for file in files:
        step = torch.load(file, weights_only=True)["global_step"]
        rest, trainer = run(tmp_path / "again", after, resume=file)
        shown = [batch for batch in whole if batch[1] < step] + rest
        first, second = ([name for e, _, ids in shown if e == epoch for name in ids] for epoch in range(2))
        assert sorted(first) == sorted(second) == sorted(set(first)), (file.name, step, border)
        steps = trainer.lr_scheduler_configs[0].scheduler.last_epoch
        assert steps == trainer.estimated_stepping_batches, (file.name, step)  # where the rate is 0


@pytest.mark.parametrize("callback", [LastCheckpoint, DraftFolders])
def test_no_trainer_overwrites_a_different_training(store, tmp_path, callback):
    one, other = tmp_path / "one", tmp_path / "other"
    for folder in (one, other):
        fit(store, folder, callbacks=[LastCheckpoint()], max_steps=1)
    before = contents(other / "checkpoints")
    for resume, words in (
        (one / LAST, "a training already, and not that of .*one/checkpoints/last"),
        (None, "a training"),
    ):
        with pytest.raises(FileExistsError, match=f"other holds {words}"):
            fit(store, other, resume=resume, callbacks=[callback()], max_steps=2)
    assert contents(other / "checkpoints") == before and not (other / "draft-last").exists()


def die_on_two(store, folder, afters):
    for after in afters:
        kill(store, folder / str(after), after + 1, devices=2, strategy="ddp")


@pytest.mark.parametrize("ends", [{}, {"max_steps": 9}], ids=str)
def test_the_rate_falls_to_0_at_the_end_with_other_steps(store, tmp_path, ends):
    """Half as many batches a step from then on: epochs have twice as many steps, and `max_steps` stays what it is."""
    kill(store, tmp_path, 6, accumulate_grad_batches=2, **ends)
    with pytest.warns(UserWarning, match="the run continues with 1 batches a step"):
        _, trainer, _ = fit(store, tmp_path, resume="last.ckpt", **ends)
    steps = trainer.lr_scheduler_configs[0].scheduler.last_epoch
    assert abs(steps - trainer.estimated_stepping_batches) <= 1


@pytest.mark.nightly
def test_with_fewer_processes_no_sample_is_lost_or_doubled(store, tmp_path):
    afters = (1, 3)
    forked(2, die_on_two, store, tmp_path, afters)
    for after in afters:
        folder = tmp_path / str(after)
        seen = [json.loads((folder / f"seen-{rank}.json").read_text()) for rank in range(2)]
        taken = [name for rank in seen for _, ids in rank[:after] for name in ids]
        with pytest.warns(UserWarning, match="the run continues with 1 batches a step .* where it had 2"):
            _, trainer, rest = fit(store, folder, resume="last.ckpt", max_epochs=2)
        first, second = ([name for epoch, ids in rest if epoch == e for name in ids] for e in range(2))
        assert sorted(taken + first) == sorted(second) and taken and first
        assert trainer.current_epoch == 2


def rates(store, folder, **options) -> dict[int, float]:
    """The learning rate of each step, by its number."""
    found = {}

    def look(trainer, *rest):
        found[trainer.global_step] = trainer.optimizers[0].param_groups[0]["lr"]

    fit(store, folder, callbacks=[LambdaCallback(on_train_batch_start=look)], **options)
    return found


def test_a_lower_rate_applies_after_resuming(store, tmp_path):
    kill(store, tmp_path, 6)
    with pytest.warns(UserWarning, match=r"rate continues at step 5 of \d+: the rate is 0\.000\d+ from here, it was"):
        again = rates(store, tmp_path, resume="last.ckpt", model={"learning_rate": 3e-4})
    whole = rates(store, tmp_path)
    assert close(again, {step: whole[step] / 10 for step in again})
    assert min(again) == 5 and again.keys() < whole.keys()


@pytest.mark.parametrize("after", [3, 4], ids=["killed", "finished"])
def test_a_longer_training_follows_the_longer_schedule(store, tmp_path, after):
    """Its first step had a rate of 0."""
    short, long = ({"max_steps": steps, "max_epochs": -1} for steps in (4, 8))
    fit(store, tmp_path, **short) if after == 4 else kill(store, tmp_path, after + 1, **short)
    with pytest.warns(UserWarning, match=f"the schedule of the learning rate continues at step {after} of 8: the rate"):
        again = rates(store, tmp_path, resume="last.ckpt", **long)
    whole = rates(store, tmp_path, **long)
    assert again == {step: whole[step] for step in range(after, 8)}


def test_different_settings_of_the_optimizer_or_a_different_target_cannot_resume(store, make_store, tmp_path):
    """The target even with the same conversations."""
    kill(store, tmp_path, 2)
    with pytest.raises(ValueError, match=r"betas is \[0.9, 0.999\], and this training began with \[0.9, 0.95\]"):
        fit(store, tmp_path, resume="last.ckpt", model={"betas": (0.9, 0.999)})
    fit(store, tmp_path, resume="last.ckpt", model={"depth": 2}, max_steps=3)
    with pytest.raises(ValueError, match="draft is for a different target than these features: fingerprint"):
        fit(make_store(tiny_target(1)), tmp_path, resume="last.ckpt")
