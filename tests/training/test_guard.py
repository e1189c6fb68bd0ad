"""A gradient that is not finite stops the training and is located; checkpoints are from before it."""

import re
import signal

import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback, ModelCheckpoint

from poss_lightning.training.callbacks import DraftFolders
from poss_lightning.training.strategies import DeepSpeed
from tests.support.processes import forked, needs_deepspeed
from tests.support.training import fit


def spoil(trainer, module, batch, batch_idx) -> None:
    """A feature of a conversation, and of those beside it, is not a number."""
    if "7" in batch.ids:
        batch.draft_input[:, 0] = torch.nan


@pytest.fixture
def spoilt(store, tmp_path):
    def run(callbacks=(), **options) -> None:
        try:
            fit(
                store,
                tmp_path,
                LambdaCallback(on_train_batch_start=spoil),
                *callbacks,
                max_epochs=1,
                limit_val_batches=0,
                **options,
            )
        finally:  # Lightning leaves its handlers where saving on an exception raises, too
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    return run


@pytest.mark.parametrize("accumulate", [1, 3])
def test_step_and_conversations_are_named_and_checkpoints_are_from_before(spoilt, tmp_path, accumulate):
    kept = ModelCheckpoint(tmp_path, every_n_train_steps=1, save_last=True, save_on_exception=True)
    options = {"accumulate_grad_batches": accumulate}
    with pytest.raises(ValueError, match=r"step (\d+): the norm of the gradient is nan, in ") as error:
        spoilt([kept], **options)
    step, ids = re.match(r"step (\d+): .* in ([\d, ]+)", str(error.value)).groups()
    assert "7" in ids.split(", ")
    if int(step):
        stored = torch.load(tmp_path / "last.ckpt", weights_only=True)
        assert stored["global_step"] == int(step)
        assert all(value.isfinite().all() for value in stored["state_dict"].values())
    assert not list(tmp_path.glob("*exception*"))
    for ends in ({"max_steps": int(step) + 1}, {}):  # later steps are bad, too, as the weights are lost by then
        with pytest.raises(ValueError, match=f"step {step}: the norm of the gradient is nan"):
            spoilt([DraftFolders()], **options, **ends)
    assert not (tmp_path / "draft-last").exists()


def test_the_next_logged_step_notices_it(spoilt):
    """Not only the end of the training, which may be days away."""
    left: list[int] = []  # batches of the epoch after each that began

    def watch(trainer, *_) -> None:
        left.append(trainer.num_training_batches - len(left) - 1)

    with pytest.raises(ValueError, match=r"step \d+: the norm of the gradient is nan") as error:
        spoilt([LambdaCallback(on_train_batch_start=watch)], log_every_n_steps=2)
    step = int(re.findall(r"^step (\d+)", str(error.value))[0])
    assert step < len(left) <= step + 2 and left[-1] > 1


def overflow(store, folder):
    def setup(trainer, module, stage) -> None:
        module.draft.layers[1].q_proj.weight.register_hook(lambda gradient: gradient * torch.inf)

    for stage in (2, 3):
        with pytest.raises(ValueError, match="step 0: the norm of the gradient is inf"):
            fit(store, folder, LambdaCallback(setup=setup), strategy=DeepSpeed(stage), max_epochs=1)


@pytest.mark.nightly
@needs_deepspeed
def test_a_step_that_deepspeed_skips_is_reported(store, tmp_path):
    forked(1, overflow, store, tmp_path)
