"""The LightningDataModule over a feature store, or over conversations that the target reads as they are needed."""

import lightning
from lightning.pytorch.utilities import rank_zero_warn

from poss_lightning.features.online import OnlineFeatures
from poss_lightning.features.schedule import Schedule, split, stable_number
from poss_lightning.features.store import FeatureStore
from poss_lightning.features.stream import Batch, Loader, add_noise


class FeatureData(lightning.LightningDataModule):
    """Batches of features: packed rows, noise in training, a seeded split by conversation.

    Give `store`, or `corpus` for online features: then the target stays in the process, and nothing is on disk.

    Args:
        store: folder written by `poss extract`, or any address of one that fsspec reads, which is copied once.
        corpus: file or hub id of conversations, as `poss extract` takes it.
        target: of online features: "embedded", a local folder or a hub id.
        max_length: of online features: tokens a conversation is cut at.
        dtype: of online features, of the target and the features: auto (what the device multiplies fastest), bfloat16,
            float16 or float32.
        batch_tokens: tokens of a batch of one process, padding included.
        packed: several conversations in one row, seen by themselves alone; else one a row, with others of like length.
        noise: strength of the uniform feature noise in training, times 512 / T; 0 for none.
        validation: fraction of conversations held out.
        seed: of the order and the noise.
        split_seed: of the split, so that trainings with other seeds hold out the same conversations.
        limit: use only that many conversations of the split's training side, drawn by the seed; None for all.
        workers: processes that load; 0 loads in the trainer's own (the store is memory-mapped).
    """

    def __init__(
        self,
        store: str | None = None,
        corpus: str | None = None,
        target: str = "embedded",
        max_length: int = 2048,
        dtype: str = "auto",
        batch_tokens: int = 4096,
        packed: bool = True,
        noise: float = 0.2,
        validation: float = 0.05,
        seed: int = 0,
        split_seed: int = 0,
        limit: int | None = None,
        workers: int = 0,
    ):
        super().__init__()
        if (store is None) == (corpus is None):
            raise ValueError(f"--data.store is {store!r} and --data.corpus {corpus!r}; give one of them")
        if batch_tokens < 1:
            raise ValueError(f"batch_tokens is {batch_tokens}; it must be at least 1")
        if noise < 0:
            raise ValueError(f"noise is {noise}; it must be at least 0")
        if limit is not None and limit < 1:
            raise ValueError(f"limit is {limit}; it must be at least 1")
        self.source = FeatureStore(store) if store else OnlineFeatures.read(corpus, target, max_length, dtype)
        self.batch_tokens, self.packed, self.noise = batch_tokens, packed, noise
        self.seed, self.split_seed, self.workers = seed, split_seed, workers
        train, self.held_out = split(self.source.ids, validation, split_seed)
        self.train = sorted(train, key=lambda i: stable_number(f"limit {seed}/{self.source.ids[i]}"))[:limit]
        self.schedule: Schedule | None = None  # of training
        self.resumed: dict[str, int] | None = None

    def train_dataloader(self) -> Loader:
        self.schedule = self._schedule(self.train, training=True)
        if self.resumed:
            self.schedule.load_state_dict(self.resumed)
        return Loader(self._read(), self.schedule, self.workers)

    def val_dataloader(self) -> Loader:
        return Loader(self._read(), self._schedule(self.held_out, training=False), self.workers)

    test_dataloader = val_dataloader

    def on_after_batch_transfer(self, batch: Batch, dataloader_idx: int) -> Batch:
        """Online features are made, and noise is drawn, on the device; noise anew for every conversation and epoch."""
        if isinstance(self.source, OnlineFeatures):
            batch = self._read().fill(batch)
        if not (self.noise and self.trainer.training):
            return batch
        epoch = self.trainer.current_epoch
        seeds = [stable_number(f"{self.seed}/{epoch}/{name}") for name in batch.ids]
        return batch._replace(inputs=add_noise(batch, self.noise, seeds))

    def teardown(self, stage: str) -> None:
        self.schedule = self.resumed = None

    def go_on(self, fit_loop: dict) -> float:
        """Go on within the epoch that a checkpoint stopped in, on whatever number of processes there is now.

        Lightning itself would restore the loader only if nobody had asked for its length before, as the learning rate's
        schedule does.

        Args:
            fit_loop: Lightning's state of its loop, with the loader's; its progress becomes that of these processes.

        Returns:
            How many steps an epoch has now, for every one it had.
        """
        (state,) = fit_loop["state_dict"].get("combined_loader") or [None]
        if state is None:
            return 1.0
        schedule = self.schedule or self._schedule(self.train, training=True)
        schedule.load_state_dict(state)
        if state["share"] != schedule.share:
            rank_zero_warn(
                f"the run goes on with {schedule.share} batches a step (processes x accumulated) where it had "
                f"{state['share']}: each sample of the epoch is still shown once, but steps take others together"
            )
        if 0 < state["done"] < state["total"]:
            self.resumed = state
            progress = fit_loop["epoch_loop.batch_progress"]["current"]
            taken, unfinished = len(schedule) - schedule.left(), progress["ready"] - progress["completed"]
            progress.update(ready=taken, started=taken, processed=taken, completed=taken - unfinished)
        return -(-state["total"] // schedule.share) / -(-state["total"] // state["share"])

    def _read(self) -> FeatureStore | OnlineFeatures:
        """The source, with the inner layers that the draft in training reads and no others."""
        draft = getattr(getattr(self.trainer, "lightning_module", None), "draft", None)
        return self.source if draft is None else self.source.select(draft.config.layers)

    def _schedule(self, indices: list[int], training: bool) -> Schedule:
        rank, world, accumulate = 0, 1, 1
        if self.trainer:
            rank, world = self.trainer.global_rank, self.trainer.world_size
            accumulate = self.trainer.accumulate_grad_batches if training else 1
            connector = self.trainer._accelerator_connector  # Lightning asks it, and would put a sampler over ours
            if connector.is_distributed and connector.use_distributed_sampler:
                raise ValueError("use_distributed_sampler is true; give Trainer(use_distributed_sampler=False)")
            limit = self.trainer.limit_train_batches
            if accumulate > 1 and limit not in (None, 1.0) and (isinstance(limit, float) or limit % accumulate):
                raise ValueError(
                    f"limit_train_batches is {limit}; it must be a multiple of accumulate_grad_batches, {accumulate}: "
                    "a step's mean is over all its batches"
                )
        seed = self.seed if training else self.split_seed  # all trainings are validated on the same batches
        shown = self.source.lengths, self.source.spans, self.batch_tokens, seed, self.packed
        return Schedule(indices, *shown, training, rank, world, accumulate)
