"""A training that a signal stops, in one process or two, saves and resumes as if nothing had happened."""

import os
import signal
from types import SimpleNamespace

import lightning
import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.utilities.exceptions import SIGTERMException

from poss_lightning.training import stopping
from poss_lightning.training.callbacks import LastCheckpoint
from poss_lightning.training.strategies import gather_state
from tests.support.processes import forked, needs_deepspeed
from tests.support.ranks import STRATEGIES
from tests.support.resuming import LAST, fit, same_weights

pytestmark = pytest.mark.usefixtures("short_replays")


@pytest.fixture(autouse=True)
def hear_sigint():
    """A job that a shell runs in the background ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def stop(store, folder, number, batch, *, every=1000, times=1, hook="on_train_batch_start", **options) -> int:
    """Train until a signal in a batch of training or its validation, which leaves no handler; return the step saved."""

    def send(trainer, *rest):
        if trainer.fit_loop.epoch_loop.total_batch_idx + 1 == batch:
            for _ in range(times):
                signal.raise_signal(number)

    with pytest.raises(SystemExit) as ended:
        fit(store, folder, callbacks=[LambdaCallback(**{hook: send}), LastCheckpoint(every)], **options)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert isinstance(ended.value, SIGTERMException) == (number == signal.SIGTERM)
    return torch.load(folder / LAST, weights_only=True)["global_step"]


@pytest.mark.parametrize(
    ("number", "accumulated"),
    [(signal.SIGTERM, 2), pytest.param(signal.SIGINT, 1, marks=pytest.mark.nightly)],
)
def test_stopped_by_a_signal_it_resumes_after_that_step(store, tmp_path, number, accumulated):
    options = {"limit_val_batches": 0, "accumulate_grad_batches": accumulated}
    whole, trainer, _ = fit(store, tmp_path / "whole", **options)
    batches = trainer.num_training_batches
    for batch in (1, 2, 3, batches, batches + 1):  # the first, of the first step or not; an epoch's last, and first
        folder = tmp_path / str(batch)
        epochs, rest = divmod(batch, batches)
        steps = epochs * -(-batches // accumulated) + -(-rest // accumulated)
        assert stop(store, folder, number, batch, **options) == steps
        again, _, _ = fit(store, folder, resume=LAST, **options)
        assert same_weights(whole, again)


@pytest.mark.parametrize(("pause", "step"), [(0.0, 4), (1.1, 3)], ids=["repeated", "second"])
def test_a_second_signal_writes_nothing(store, tmp_path, monkeypatch, pause, step):
    """Within a step there is no state to resume from. A launcher may forward what the system has sent to all."""
    clock = iter([10.0, 10.0 + pause])
    monkeypatch.setattr(stopping, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    assert stop(store, tmp_path, signal.SIGINT, 4, every=3, times=2) == step


@pytest.mark.parametrize("hook", ["on_train_batch_start", "on_validation_epoch_start"])
def test_a_signal_waits_for_the_validation_of_its_step(store, tmp_path, hook):
    """Else the training would resume without it, or from an earlier step."""
    options = {"val_check_interval": 4, "check_val_every_n_epoch": None}
    whole, _, _ = fit(store, tmp_path / "whole", **options)
    assert stop(store, tmp_path / "stopped", signal.SIGTERM, 4, every=3, hook=hook, **options) == 4
    again, _, _ = fit(store, tmp_path / "stopped", resume=LAST, **options)
    assert same_weights(whole, again)


def test_a_signal_in_the_last_step_is_raised_after_it(store, tmp_path):
    """Else the sweep that it is part of would continue."""
    for name, ends in {"steps": {"max_steps": 3}, "epochs": {"max_epochs": 1, "limit_train_batches": 3}}.items():
        assert stop(store, tmp_path / name, signal.SIGINT, 3, limit_val_batches=0, **ends) == 3


# --- two processes ---

WHERE = ("forward", "backward", "validation", "saving")
CASES = [(where, ranks) for where in WHERE for ranks in ((1,), (0, 1))]
STEPS = {"devices": 2, "max_steps": 6, "max_epochs": -1, "val_check_interval": 3, "check_val_every_n_epoch": None}
STEPS |= {"log_every_n_steps": 2}


class Send(lightning.Callback):
    """Sends a signal to these processes in the middle of the fourth step, or of the validation or checkpoint before it.

    Args:
        where: one of `WHERE`.
        ranks: of the processes.
    """

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
        options = STEPS | {"callbacks": [*callbacks], "strategy": STRATEGIES[strategy](), "accelerator": "cpu"}
        module, *_ = fit(store, folder / place, **options, **more)
        return gather_state(module.draft)

    whole = run("whole", LastCheckpoint(1))
    for where, ranks in CASES:
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
