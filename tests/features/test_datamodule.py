"""The DataModule: who is trained on, in which order, with which noise."""

from pathlib import Path
from types import SimpleNamespace

import torch

from poss_lightning.features.datamodule import FeatureDataModule


def make_data(store: Path, **changes) -> FeatureDataModule:
    return FeatureDataModule(str(store), **{"batch_tokens": 200, "validation": 0.3, **changes})


def test_a_seed_shuffles_the_training_and_not_the_validation(finished):
    """With another seed, the first validation batches would be other conversations, and their scores incomparable."""
    one, other = make_data(finished, seed=0), make_data(finished, seed=1)
    assert one.train_dataloader().schedule.batches() != other.train_dataloader().schedule.batches()
    assert one.val_dataloader().schedule.batches() == other.val_dataloader().schedule.batches()


def test_a_limit_takes_the_first_of_the_training_side_only(finished):
    data, limited = make_data(finished), make_data(finished, limit=3)
    assert limited.train == data.train[:3] and limited.held_out == data.held_out


def test_noise_is_for_training_and_new_in_every_epoch(finished):
    batch = next(iter(make_data(finished).train_dataloader()))

    def noise(epoch: int = 0, training: bool = True, **changes) -> torch.Tensor:
        data = make_data(finished, **changes)
        data.trainer = SimpleNamespace(training=training, current_epoch=epoch)
        return data.on_after_batch_transfer(batch, 0).draft_input - batch.features

    drawn = noise()
    assert drawn.any() and drawn.equal(noise())
    assert not drawn.equal(noise(epoch=1)) and not drawn.equal(noise(seed=1))
    assert not noise(training=False).any() and not noise(noise=0.0).any()
