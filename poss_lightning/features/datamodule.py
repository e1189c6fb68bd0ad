"""The LightningDataModule over a feature store or online features."""

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import lightning

from poss_lightning.features.schedule import Loader, Schedule, split, stable_number
from poss_lightning.features.source import SampleSource
from poss_lightning.features.store import FeatureStore
from poss_lightning.features.stream import Batch, add_noise
from poss_lightning.ranges import BatchTokens, Count, Fraction, Seed, Tokens, Weight, Workers, check_numbers
from poss_lightning.target_model.loading import Parallel

if TYPE_CHECKING:
    from poss_lightning.features.online import OnlineFeatures


def data_of(trainer: lightning.Trainer | None) -> "FeatureDataModule | None":
    """Return the data of a trainer, if they are a `FeatureDataModule`."""
    data = getattr(trainer, "datamodule", None)
    return data if isinstance(data, FeatureDataModule) else None


class FeatureDataModule(lightning.LightningDataModule):
    """Batches of features: packed rows, noise in training, a seeded split by conversation.

    Give `store`, or `corpus` for online features: then the target stays in the process, and nothing is on disk.

    Args:
        store: folder written by `poss extract`, or several of one target, as [a,b].
        corpus: conversations for online features: a file or hub id, as `poss extract` takes it.
        target: target of online features: "embedded", a local folder or a hub id.
        max_length: tokens at which online features cut a conversation.
        dtype: type of the online target and its features: auto (what the device multiplies fastest), bfloat16, float16
            or float32.
        parallel: place of the online target: none, where it fits one device; layers spreads it over the other GPUs of
            this process.
        chat_template_kwargs: variables of the online target's chat template.
        batch_tokens: tokens of a batch of one process: a row of conversations, each of which sees only itself.
        noise: strength of the uniform feature noise in training, times 512 / T; 0 for none.
        validation: fraction of conversations held out; of few conversations at least one. With a `validation_store`
            none are, and this has no effect.
        validation_store: store, or several, whose conversations are validated on in place of held-out ones.
        test_store: store, or several, that `trainer.test` measures.
        seed: seed of the order and the noise.
        split_seed: seed of the split, so that trainings with other seeds hold out the same conversations.
        limit: use only that many conversations of the split's training side, drawn by the seed; None for all.
        workers: processes that load batches; 0 loads in the trainer's own (the store is memory-mapped).
    """

    @check_numbers
    def __init__(
        self,
        store: list[str] | str | None = None,
        corpus: str | None = None,
        target: str = "embedded",
        max_length: Tokens = 2048,
        dtype: str = "auto",
        parallel: Parallel = "none",
        chat_template_kwargs: dict[str, Any] | None = None,
        batch_tokens: BatchTokens = 4096,
        noise: Weight = 0.2,
        validation: Fraction = 0.05,
        validation_store: list[str] | str | None = None,
        test_store: list[str] | str | None = None,
        seed: Seed = 0,
        split_seed: Seed = 0,
        limit: Count | None = None,
        workers: Workers = 0,
    ):
        super().__init__()
        if store is not None and corpus is None:
            if target != "embedded":
                raise ValueError(f"target is {target!r}, and store {store!r} has its own: leave target out")
            self.source: FeatureStore | OnlineFeatures = FeatureStore(store)
        elif corpus is not None and store is None:
            from poss_lightning.features import online  # which imports all that a target needs

            self.source = online.OnlineFeatures.load(corpus, target, max_length, dtype, parallel, chat_template_kwargs)
        else:
            raise ValueError(f"store is {store!r} and corpus {corpus!r}; give one of them")
        self.batch_tokens, self.noise = batch_tokens, noise
        self.seed, self.split_seed, self.workers = seed, split_seed, workers
        self.other_stores = {
            stage: self._open(f"{stage}_store", given)
            for stage, given in (("validation", validation_store), ("test", test_store))
            if given is not None
        }
        if "validation" in self.other_stores:
            train, self.held_out = range(len(self.source)), [*range(len(self.other_stores["validation"]))]
        elif not 0 < validation < 1:
            raise ValueError(
                f"validation is {validation}, so there would be no conversation to train or to validate on: "
                "it must lie between 0 and 1, or give a validation_store"
            )
        else:
            train, self.held_out = split(self.source.origins, validation, split_seed)
        self.train = sorted(train, key=lambda i: stable_number(f"limit {seed}/{self.source.ids[i]}"))[:limit]
        self.schedule: Schedule | None = None  # of training

    def setup(self, stage: str) -> None:
        """Let batches carry the inner layers that the module in training reads, and no others."""
        self.schedule = None  # of an earlier fit
        layers = getattr(self.trainer and self.trainer.lightning_module, "aux_layers", ())
        self.source = self.source.select(layers)
        self.other_stores = {stage: store.select(layers) for stage, store in self.other_stores.items()}

    def train_dataloader(self) -> Loader:
        return Loader(self.source, self.training_schedule(), self.workers)

    def evaluated(self, stage: str) -> tuple[SampleSource, list[int]]:
        """Return the source and the samples of a "val" or "test"; ValueError if there are none to test on."""
        if stage == "val":
            return self.other_stores.get("validation", self.source), self.held_out
        if (store := self.other_stores.get("test")) is None:
            raise ValueError("there is nothing to test on: give a test_store")
        return store, [*range(len(store))]

    def val_dataloader(self) -> Loader:
        return self._evaluation_loader("val")

    def test_dataloader(self) -> Loader:
        return self._evaluation_loader("test")

    def _evaluation_loader(self, stage: str) -> Loader:
        source, samples = self.evaluated(stage)
        return Loader(source, self._schedule(samples, source), self.workers)

    def training_schedule(self) -> Schedule:
        """Return the schedule of the running fit; a resumed run sets it to where it stopped."""
        if self.schedule is None:
            self.schedule = self._schedule(self.train, self.source, training=True)
        return self.schedule

    def teardown(self, stage: str) -> None:
        """Log the texts that online features left out since their last report."""
        if not isinstance(self.source, FeatureStore):
            self.source.report()

    def on_after_batch_transfer(self, batch: Batch, dataloader_idx: int) -> Batch:
        """Compute online features and draw noise on the device, seeded by conversation and epoch."""
        if not isinstance(self.source, FeatureStore) and not batch.features.shape[-1]:
            batch = self.source.fill(batch)
        if not (self.noise and self.trainer and self.trainer.training):
            return batch
        epoch = self.trainer.current_epoch
        seeds = [stable_number(f"{self.seed}/{epoch}/{name}") for name in batch.ids]
        return replace(batch, draft_input=add_noise(batch, self.noise, seeds))

    def _open(self, name: str, address: list[str] | str) -> FeatureStore:
        """Open a further store; ValueError if it is of a different target."""
        store = FeatureStore(address)
        if difference := self.source.target.difference(store.target):
            raise ValueError(f"{name} {address} is of a different target than what is trained on: {difference}")
        return store

    def _schedule(self, indices: list[int], source: SampleSource, training: bool = False) -> Schedule:
        rank, world, accumulate, reorders = 0, 1, 1, True
        if self.trainer:
            rank, world = self.trainer.global_rank, self.trainer.world_size
            accumulate = self.trainer.accumulate_grad_batches if training else 1
            reorders = not self.trainer.overfit_batches  # pyright: ignore[reportAttributeAccessIssue]
            limit = self.trainer.limit_train_batches
            if accumulate > 1 and limit not in (None, 1.0) and (isinstance(limit, float) or limit % accumulate):
                raise ValueError(
                    f"limit_train_batches is {limit}; it must be a multiple of accumulate_grad_batches, {accumulate}: "
                    "a step's mean is over all its batches"
                )
        return Schedule(
            indices,
            source.lengths,
            source.spans,
            batch_tokens=self.batch_tokens,
            seed=self.seed if training else self.split_seed,  # all trainings are validated on the same batches
            training=training and reorders,
            rank=rank,
            world=world,
            accumulate=accumulate,
        )
