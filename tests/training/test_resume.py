"""A training that is killed, stopped or ended early, and resumed, ends with the bits of one that was not."""

import json
import os
import shutil
import signal
from contextlib import nullcontext
from itertools import product
from types import SimpleNamespace

import lightning
import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback, ModelCheckpoint
from lightning.pytorch.utilities.exceptions import SIGTERMException

from poss_lightning.training import stopping
from poss_lightning.training.callbacks import DraftFolders, LastCheckpoint
from poss_lightning.training.module import DraftModule
from poss_lightning.training.run_folder import folder_of
from poss_lightning.training.strategies import gather_state
from tests.support.command import unchanged
from tests.support.processes import forked, needs_deepspeed
from tests.support.ranks import STRATEGIES
from tests.support.tolerance import close
from tests.support.training import LAST, Killed, Watch, fit, same_weights

pytestmark = pytest.mark.usefixtures("short_replays")


@pytest.fixture(autouse=True)
def handlers_are_as_before():
    before = [signal.getsignal(number) for number in stopping.SIGNALS]
    yield
    assert before == [signal.getsignal(number) for number in stopping.SIGNALS]


# --- the same bits, wherever and however it ends ---


@pytest.fixture(scope="module", params=[2, pytest.param(1, marks=pytest.mark.nightly)])
def whole(request, store, tmp_path_factory):
    options = {"accumulate_grad_batches": request.param, "max_epochs": 2}
    run = fit(store, tmp_path_factory.mktemp("whole"), **options)
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
    "a validation": (0, "on_validation_batch_end"),
}
CUTS = [*product(("killed", "stopped"), PLACES), ("ended", "a step")]


@pytest.mark.parametrize(("how", "place"), CUTS)
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
        fit(store, tmp_path, LambdaCallback(**{hook: leave}), LastCheckpoint(1), **options)
    saved = torch.load(tmp_path / LAST, weights_only=True)["global_step"]
    assert saved - left[0] in {"killed": (-1, 0), "stopped": (0, 1), "ended": (0, 1)}[how]
    rest = fit(store, tmp_path, resume=LAST, **options)
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


class Kept(LastCheckpoint):
    """Keeps each checkpoint that it writes."""

    def _save(self, trainer):
        super()._save(trainer)
        shutil.copy(folder_of(trainer) / LAST, folder_of(trainer) / f"last-{trainer.global_step}.ckpt")


@pytest.mark.parametrize(
    ("before", "after", "validated"),
    [(1, 2, 0), *(pytest.param(*each, marks=pytest.mark.nightly) for each in ((2, 1, 1), (2, 3, 0), (3, 1, 1)))],
)
def test_from_every_checkpoint_every_epoch_shows_each_conversation_once(
    store, tmp_path, monkeypatch, before, after, validated
):
    """With other numbers of accumulated batches, whoever saved the checkpoint, and at an epoch's border, too."""
    monkeypatch.setattr("tests.support.training.DraftModule", Idle)
    options = {"limit_val_batches": validated, "max_epochs": 2}
    each = {"save_top_k": -1, "filename": "{step}"}
    steps = ModelCheckpoint(tmp_path / "steps", every_n_train_steps=1, save_on_train_epoch_end=False, **each)
    epochs = ModelCheckpoint(tmp_path / "epochs", save_on_train_epoch_end=True, **each)
    whole = fit(store, tmp_path, Kept(1), steps, epochs, accumulate_grad_batches=before, **options)
    files = [file for file in tmp_path.rglob("*.ckpt") if file.name != "last.ckpt"]
    assert len(files) > 2 * whole.trainer.num_training_batches / before
    for file in files:
        step = torch.load(file, weights_only=True)["global_step"]
        # no callback saves anything
        rest = fit(store, tmp_path / "again", LambdaCallback(), resume=file, accumulate_grad_batches=after, **options)
        shown = whole.seen[: step * before] + rest.seen
        first, second = ([name for e, ids in shown if e == epoch for name in ids] for epoch in range(2))
        assert sorted(first) == sorted(second) == sorted(set(first)), (file, step)
        steps = rest.trainer.lr_scheduler_configs[0].scheduler.last_epoch
        assert steps == rest.trainer.estimated_stepping_batches, (file, step)  # where the rate is 0


# --- with other options ---


def rates(store, folder, **options) -> dict[int, float]:
    """The learning rate of each step, by its number."""
    found = {}

    def look(trainer, *rest):
        found[trainer.global_step] = trainer.optimizers[0].param_groups[0]["lr"]

    trainer = fit(store, folder, LambdaCallback(on_train_batch_start=look), **options).trainer
    assert abs(trainer.lr_scheduler_configs[0].scheduler.last_epoch - trainer.estimated_stepping_batches) <= 1
    return found


SHORT, LONG = ({"max_steps": steps, "max_epochs": -1} for steps in (4, 8))


@pytest.mark.parametrize(
    ("first", "step", "then"),
    [
        ({}, 5, {"model": {"learning_rate": 3e-4, "depth": 2}}),
        (SHORT, 4, LONG),  # it had ended, where the rate is 0
        ({"accumulate_grad_batches": 2}, 2, {"max_steps": 9}),  # from then on twice as many steps an epoch
    ],
    ids=["lower", "longer", "other steps"],
)
def test_the_rate_follows_the_schedule_of_the_new_options(store, tmp_path, first, step, then):
    dies = nullcontext() if first == SHORT else pytest.raises(Killed)
    with dies:
        fit(store, tmp_path, watch=Watch((step + 1) * first.get("accumulate_grad_batches", 1)), **first)
    with pytest.warns(UserWarning, match=rf"the learning rate continues at step {step} of \d+: the rate is "):
        again = rates(store, tmp_path, resume=LAST, **then)
    whole = rates(store, tmp_path, **then)
    assert min(again) == step and close(again, {number: whole[number] for number in again})


def test_no_trainer_overwrites_a_different_training(store, tmp_path):
    one, other = tmp_path / "one", tmp_path / "other"
    for folder in (one, other):
        fit(store, folder, max_steps=1)
    different = "a training already, and not that of .*one/checkpoints/last"
    for callback, resume, words in ((LastCheckpoint, one / LAST, different), (DraftFolders, None, "a training")):
        with unchanged(other), pytest.raises(FileExistsError, match=f"other holds {words}"):
            fit(store, other, callback(), resume=resume, max_steps=2)


# --- signals ---


def stop(store, folder, batch, *, times=1, **options) -> int:
    """Train until SIGTERM in a batch; return the step that was saved."""

    def send(trainer, *rest):
        if trainer.fit_loop.epoch_loop.total_batch_idx + 1 == batch:
            for _ in range(times):
                signal.raise_signal(signal.SIGTERM)

    with pytest.raises(SIGTERMException):
        fit(store, folder, LambdaCallback(on_train_batch_start=send), LastCheckpoint(3), limit_val_batches=0, **options)
    return torch.load(folder / LAST, weights_only=True)["global_step"]


@pytest.mark.parametrize(("pause", "step"), [(0.0, 4), (1.1, 3)], ids=["repeated", "second"])
def test_a_second_signal_writes_nothing(store, tmp_path, monkeypatch, pause, step):
    """Within a step there is no state to resume from. A launcher may forward what the system has sent to all."""
    clock = iter([10.0, 10.0 + pause])
    monkeypatch.setattr(stopping, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    assert stop(store, tmp_path, 4, times=2) == step


@pytest.mark.parametrize("ends", [{"max_steps": 3}, {"max_epochs": 1, "limit_train_batches": 3}], ids=str)
def test_a_signal_in_the_last_step_is_raised_after_it(store, tmp_path, ends):
    """Else the sweep that it is part of would continue."""
    assert stop(store, tmp_path, 3, **ends) == 3


# --- several processes ---


def die_on_two(store, folder, after):
    watch = Watch(after + 1)
    with pytest.raises(Killed):
        fit(store, folder, watch=watch, devices=2, strategy="ddp")
    (folder / f"seen-{os.environ['RANK']}.json").write_text(json.dumps(watch.seen))


@pytest.mark.nightly
@pytest.mark.parametrize("after", [1, 3])
def test_with_fewer_processes_no_sample_is_lost_or_doubled(store, tmp_path, after):
    forked(2, die_on_two, store, tmp_path, after)
    seen = [json.loads((tmp_path / f"seen-{rank}.json").read_text()) for rank in range(2)]
    taken = [name for rank in seen for _, ids in rank[:after] for name in ids]
    with pytest.warns(UserWarning, match="the run continues with 1 batches a step .* where it had 2"):
        rest = fit(store, tmp_path, resume=LAST, max_epochs=2)
    first, second = ([name for epoch, ids in rest.seen if epoch == e for name in ids] for e in range(2))
    assert sorted(taken + first) == sorted(second) and taken and first
    assert rest.trainer.current_epoch == 2


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
        run = fit(store, folder / place, *callbacks, **STEPS, strategy=STRATEGIES[strategy](), **more)
        return gather_state(run.module.draft)

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
