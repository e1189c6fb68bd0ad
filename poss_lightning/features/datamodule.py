"""The LightningDataModule over a feature store."""

import lightning
from torch.utils.data import DataLoader

from poss_lightning.features.store import FeatureStore
from poss_lightning.features.stream import Batch, Buckets, add_noise, collate, split, stable_number


class FeatureData(lightning.LightningDataModule):
    """Batches of a feature store: buckets of like length, noise in training, a seeded split by conversation.

    Args:
        store: folder written by `poss extract`.
        batch_tokens: slots of a batch, padding included.
        noise: strength of the uniform feature noise in training, times 512 / T; 0 for none.
        validation: fraction of conversations held out.
        seed: of the split, the order and the noise.
        limit: use only that many conversations of the split's training side, drawn by the seed; None for all.
        workers: processes that load; 0 loads in the trainer's own (the store is memory-mapped).
    """

    def __init__(
        self,
        store: str,
        batch_tokens: int = 4096,
        noise: float = 0.2,
        validation: float = 0.05,
        seed: int = 0,
        limit: int | None = None,
        workers: int = 0,
    ):
        super().__init__()
        if batch_tokens < 1:
            raise ValueError(f"batch_tokens is {batch_tokens}; it must be at least 1")
        if noise < 0:
            raise ValueError(f"noise is {noise}; it must be at least 0")
        if limit is not None and limit < 1:
            raise ValueError(f"limit is {limit}; it must be at least 1")
        self.store = FeatureStore(store)
        self.batch_tokens, self.noise, self.seed, self.workers = batch_tokens, noise, seed, workers
        train, self.held_out = split(self.store.ids, validation, seed)
        self.train = sorted(train, key=lambda i: stable_number(f"limit {seed}/{self.store.ids[i]}"))[:limit]

    def train_dataloader(self) -> DataLoader:
        return self._loader(self.train, training=True)

    def val_dataloader(self) -> DataLoader:
        return self._loader(self.held_out, training=False)

    test_dataloader = val_dataloader

    def on_after_batch_transfer(self, batch: Batch, dataloader_idx: int) -> Batch:
        """Noise is drawn on the device, anew for every sample and epoch."""
        if not (self.noise and self.trainer.training):
            return batch
        seeds = [stable_number(f"{self.seed}/{self.trainer.current_epoch}/{name}") for name in batch.ids]
        return batch._replace(inputs=add_noise(batch.features, batch.lengths, self.noise, seeds))

    def _loader(self, indices: list[int], training: bool) -> DataLoader:
        rank, world = (self.trainer.global_rank, self.trainer.world_size) if self.trainer else (0, 1)
        batches = Buckets(indices, self.store.lengths, self.batch_tokens, self.seed, training, rank, world)
        return DataLoader(self.store, batch_sampler=batches, collate_fn=collate, num_workers=self.workers)
