"""A training that is killed, stopped or ended early, and resumed, ends with the bits of one that was not."""

import json
import os
import shutil
import signal
from contextlib import nullcontext
from types import SimpleNamespace

import lightning
import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback, ModelCheckpoint
from lightning.pytorch.utilities.exceptions import SIGTERMException

from poss_lightning.features.datamodule import FeatureDataModule
from poss_lightning.training import stopping
from poss_lightning.training.callbacks import DraftFolders, LastCheckpoint
from poss_lightning.training.module import DraftModule
from poss_lightning.training.run_folder import folder_of
from poss_lightning.training.strategies import gather_state
from tests.support.processes import forked, needs_deepspeed
from tests.support.ranks import QUIET, STRATEGIES
from tests.support.resuming import LAST, Kill, Killed, fit, same_weights
from tests.support.stores import contents
from tests.support.tiny import tiny_target
from tests.support.tolerance import close

pytestmark = pytest.mark.usefixtures("short_replays")


@pytest.fixture(autouse=True)
def hear_sigint():
    """A job that a shell runs in the background ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    signal.signal(signal.SIGINT, before)


# --- the same bits, wherever and however it ends ---


def train(store, folder, *callbacks, resume=None, **options) -> SimpleNamespace:
    """Train with a checkpoint after each step; the conversations of its batches, and the steps of its validations."""
    validated: list[int] = []
    watch, see = Kill(), LambdaCallback(on_validation_end=lambda trainer, _: validated.append(trainer.global_step))
    options = {"max_epochs": 2, "callbacks": [watch, see, *callbacks, LastCheckpoint(1)], "resume": resume} | options
    module, trainer, _ = fit(store, folder, watch, **options)
    return SimpleNamespace(module=module, seen=watch.seen, validated=validated, trainer=trainer)


@pytest.fixture(scope="module", params=[2, pytest.param(1, marks=pytest.mark.nightly)])
def whole(request, store, tmp_path_factory):
    options = {"accumulate_grad_batches": request.param}
    run = train(store, tmp_path_factory.mktemp("whole"), **options)
    run.options, run.batches = options, run.trainer.num_training_batches
    first, second = ([name for e, names in run.seen if e == epoch for name in names] for epoch in range(2))
    assert run.batches >= 5 and first != second and sorted(first) == sorted(second) == sorted(set(first))
    return run


def kill(trainer) -> None:
    raise Killed


def end(trainer) -> None:
    trainer.should_stop = True  # as early stopping and a time limit do


ENDS = {"killed": kill, "stopped": lambda trainer: signal.raise_signal(signal.SIGTERM), "ended": end}
PLACES = {  # in which batch, counted from the first epoch's last; or in which hook of its validation
    "a step": (-2, "on_train_batch_start"),
    "an epoch's last step": (0, "on_train_batch_end"),
    "an epoch's first step": (1, "on_train_batch_start"),
    "a validation": (0, "on_validation_batch_end"),
    "after a validation": (0, "on_validation_end"),
}


@pytest.mark.parametrize(
    ("how", "place"),
    [(how, place) for how in ENDS for place in PLACES if how != "ended" or "validation" not in place],
)
def test_wherever_a_training_ends_it_resumes_with_the_same_bits(store, tmp_path, whole, how, place):
    """It shows no conversation twice or never, and repeats a validation as a whole that did not end."""
    (number, hook), left = PLACES[place], []

    def leave(trainer, *_):
        if trainer.fit_loop.epoch_loop.total_batch_idx + 1 == whole.batches + number and not left:
            left.append(trainer.global_step)
            ENDS[how](trainer)

    options = whole.options | {"limit_val_batches": 0 if how == "ended" else 1.0}  # an early end adds a validation
    raised = {"killed": pytest.raises(Killed), "stopped": pytest.raises(SIGTERMException)}
    with raised.get(how, nullcontext()):
        train(store, tmp_path, LambdaCallback(**{hook: leave}), **options)
    saved = torch.load(tmp_path / LAST, weights_only=True)["global_step"]
    assert saved - left[0] in {"killed": (-1, 0), "stopped": (0, 1), "ended": (0, 1)}[how]
    rest = train(store, tmp_path, resume=LAST, **options)
    assert same_weights(whole.module, rest.module)
    assert 0 < len(rest.seen) < len(whole.seen) and whole.seen[-len(rest.seen) :] == rest.seen
    cut_short = how == "stopped"  # the only way to leave a checkpoint in a validation
    validated = [step for step in whole.validated if step > saved or (step == saved and cut_short)]
    assert rest.validated == (validated if how != "ended" else [])


# --- with other batches a step ---


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
    [(1, 2, 0), *(pytest.param(*each, marks=pytest.mark.nightly) for each in ((2, 1, 1), (2, 3, 0), (3, 1, 1)))],
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


# --- with other options ---


def die(store, folder, after: int, **options) -> None:
    """Train until the process is killed after a batch."""
    with pytest.raises(Killed):
        fit(store, folder, Kill(after), **options)


def rates(store, folder, **options) -> dict[int, float]:
    """The learning rate of each step, by its number."""
    found = {}

    def look(trainer, *rest):
        found[trainer.global_step] = trainer.optimizers[0].param_groups[0]["lr"]

    _, trainer, _ = fit(store, folder, callbacks=[LambdaCallback(on_train_batch_start=look)], **options)
    assert abs(trainer.lr_scheduler_configs[0].scheduler.last_epoch - trainer.estimated_stepping_batches) <= 1
    return found


SHORT, LONG = ({"max_steps": steps, "max_epochs": -1} for steps in (4, 8))


@pytest.mark.parametrize(
    ("first", "step", "then"),
    [
        ({}, 5, {"model": {"learning_rate": 3e-4}}),
        (SHORT, 3, LONG),
        (SHORT, 4, LONG),  # it had ended, where the rate is 0
        ({"accumulate_grad_batches": 2}, 2, {"max_steps": 9}),  # from then on twice as many steps an epoch
    ],
    ids=["lower", "longer", "finished", "other steps"],
)
def test_the_rate_follows_the_schedule_of_the_new_options(store, tmp_path, first, step, then):
    if first == SHORT and step == 4:
        fit(store, tmp_path, **first)
    else:
        die(store, tmp_path, (step + 1) * first.get("accumulate_grad_batches", 1), **first)
    with pytest.warns(UserWarning, match=rf"the learning rate continues at step {step} of \d+: the rate is "):
        again = rates(store, tmp_path, resume="last.ckpt", **then)
    whole = rates(store, tmp_path, **then)
    assert min(again) == step and close(again, {number: whole[number] for number in again})


def test_what_cannot_resume_is_refused(store, make_store, tmp_path):
    """Other settings of the optimizer, and a different target, even with the same conversations."""
    die(store, tmp_path, 2)
    with pytest.raises(ValueError, match=r"betas is \[0.9, 0.999\], and this training began with \[0.9, 0.95\]"):
        fit(store, tmp_path, resume="last.ckpt", model={"betas": (0.9, 0.999)})
    fit(store, tmp_path, resume="last.ckpt", model={"depth": 2}, max_steps=3)
    with pytest.raises(ValueError, match="draft is for a different target than these features: fingerprint"):
        fit(make_store(tiny_target(1)), tmp_path, resume="last.ckpt")


def test_no_trainer_overwrites_a_different_training(store, tmp_path):
    one, other = tmp_path / "one", tmp_path / "other"
    for folder in (one, other):
        fit(store, folder, callbacks=[LastCheckpoint()], max_steps=1)
    before, different = contents(other / "checkpoints"), "a training already, and not that of .*one/checkpoints/last"
    for callback, resume, words in ((LastCheckpoint, one / LAST, different), (DraftFolders, None, "a training")):
        with pytest.raises(FileExistsError, match=f"other holds {words}"):
            fit(store, other, resume=resume, callbacks=[callback()], max_steps=2)
    assert contents(other / "checkpoints") == before and not (other / "draft-last").exists()


# --- signals ---


def stop(store, folder, number, batch, *, times=1, **options) -> int:
    """Train until signals in a batch; return the step that was saved."""

    def send(trainer, *rest):
        if trainer.fit_loop.epoch_loop.total_batch_idx + 1 == batch:
            for _ in range(times):
                signal.raise_signal(number)

    callbacks = [LambdaCallback(on_train_batch_start=send), LastCheckpoint(3)]
    with pytest.raises(KeyboardInterrupt if number == signal.SIGINT else SystemExit):
        fit(store, folder, callbacks=callbacks, limit_val_batches=0, **options)
    return torch.load(folder / LAST, weights_only=True)["global_step"]


@pytest.mark.parametrize(("pause", "step"), [(0.0, 4), (1.1, 3)], ids=["repeated", "second"])
def test_a_second_signal_writes_nothing(store, tmp_path, monkeypatch, pause, step):
    """Within a step there is no state to resume from. A launcher may forward what the system has sent to all."""
    clock = iter([10.0, 10.0 + pause])
    monkeypatch.setattr(stopping, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    assert stop(store, tmp_path, signal.SIGTERM, 4, times=2) == step


def test_a_signal_in_the_last_step_is_raised_after_it(store, tmp_path):
    """Else the sweep that it is part of would continue."""
    for name, ends in {"steps": {"max_steps": 3}, "epochs": {"max_epochs": 1, "limit_train_batches": 3}}.items():
        assert stop(store, tmp_path / name, signal.SIGTERM, 3, **ends) == 3


# --- several processes ---


def die_on_two(store, folder, afters):
    for after in afters:
        die(store, folder / str(after), after + 1, devices=2, strategy="ddp")


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


WHERE = ("forward", "backward", "validation", "saving")
STEPS = {"devices": 2, "max_steps": 6, "max_epochs": -1, "val_check_interval": 3, "check_val_every_n_epoch": None}
STEPS |= {"log_every_n_steps": 2, "accelerator": "cpu"}


class Send(lightning.Callback):
    """Sends a signal to these ranks in the middle of the fourth step, or of the validation or checkpoint before it."""

    def __init__(self, where: str, ranks: tuple[int, ...]):
        self.where, self.ranks = where, ranks

    def setup(self, trainer, pl_module, stage):
        self.trainer = trainer
        pl_module.draft.register_forward_pre_hook(lambda *_: self.send("forward", pl_module.training))
        pl_module.draft.fc.weight.register_hook(lambda *_: self.send("backward"))

    def on_validation_batch_start(self, *_):
        self.send("validation")

    def on_save_checkpoint(self, *_):
        self.send("saving")

    def send(self, where: str, now: bool = True) -> None:
        if where == self.where and now and self.trainer.global_step == 3 and self.trainer.global_rank in self.ranks:
            self.where = "sent"
            os.kill(os.getpid(), signal.SIGTERM)


def stop_and_resume(store, folder, strategy: str) -> None:
    """One of two processes."""

    def run(place, *callbacks, **more):
        options = STEPS | {"callbacks": [*callbacks], "strategy": STRATEGIES[strategy]()}
        module, *_ = fit(store, folder / place, **options, **more)
        return gather_state(module.draft)

    whole = run("whole", LastCheckpoint(1))
    for where, ranks in ((where, ranks) for where in WHERE for ranks in ((1,), (0, 1))):
        place = f"{where}-{len(ranks)}"
        with pytest.raises(SystemExit) as ended:
            run(place, Send(where, ranks), LastCheckpoint(1 if where == "saving" else 100))
        assert ended.value.code == (0 if os.environ["RANK"] == "1" else 128 + signal.SIGTERM)
        step = torch.load(folder / place / LAST, weights_only=True)["global_step"]
        assert step == (3 if where == "validation" else 4), (where, ranks, step)  # the next that is logged
        again = run(place, LastCheckpoint(), resume=LAST)
        assert all(torch.equal(value, again[name]) for name, value in whole.items()), (where, ranks)


@pytest.mark.nightly
@pytest.mark.parametrize("strategy", ["ddp", *(pytest.param(f"zero{k}", marks=needs_deepspeed) for k in (1, 2, 3))])
def test_processes_stop_after_the_same_step_and_resume(store, tmp_path, strategy):
    forked(2, stop_and_resume, store, tmp_path, strategy)
