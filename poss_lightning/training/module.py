"""The LightningModule around the unroll, the loss and the metrics."""

import zlib
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import lightning
import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from poss_lightning.draft.config import DraftOptions
from poss_lightning.draft.folder import TRAINED_ON, decode_digests, encode_digests
from poss_lightning.features.datamodule import data_of
from poss_lightning.features.source import SampleSource, warn_of_training
from poss_lightning.features.store import FeatureStore
from poss_lightning.features.stream import Batch
from poss_lightning.losses.chunks import ENTROPIES
from poss_lightning.losses.passes import DEFAULT, LossSpec, PassLosses
from poss_lightning.losses.slot_weights import draw_chains
from poss_lightning.machine import check_kernel_tools
from poss_lightning.metrics import UnrollAcceptance
from poss_lightning.ranges import (
    Count,
    Decay,
    Fraction,
    Position,
    PositiveFloat,
    Weight,
    refuse_numbers,
    refuse_unknown,
)
from poss_lightning.training.checks import check_precision, check_target, check_trainer
from poss_lightning.training.optimizers import NormGuard, make_optimizer, schedule_rate
from poss_lightning.training.start import begin_draft, check_same_draft, continue_schedule, resume
from poss_lightning.training.strategies import DeepSpeed
from poss_lightning.training.unrolled import ValidationMetrics, acceptance_inputs, unrolled_losses


class DraftModule(lightning.LightningModule):
    """Trains the specialists of one allocation on a feature store.

    Examples:
        >>> module = DraftModule([2, 2, 2])
        >>> lightning.Trainer(max_epochs=1).fit(module, FeatureDataModule("store"))
        >>> module.draft.save_pretrained("draft")

    Args:
        allocation: positions served by each specialist, e.g. [2, 2, 2]; the last also serves all that follow.
        store: path of a store, or several, or the `source` of a `FeatureDataModule`, with the target's sizes, embedding
            and head. None for that of the trainer's `FeatureDataModule`: then there is no draft before a trainer runs.
        anchors: maximum number of blocks per row, drawn again in each step; None for one at each slot that counts.
        start_from: draft folder, hub id or shipped draft whose layers to start from; None for random weights.
        normalise: scale the input of a draft with random weights, per dimension, to a mean square of 1. With start_from
            the scale is that of the other draft.
        loss: weights by term: `feature` (smooth-L1), `token` (cross-entropy), `topk` (cross-entropy over the target's
            ten most likely tokens), `acceptance` (negative logarithm of the chance of acceptance). None is
            {feature: 1, token: 0.1, topk: 1}, or {token: 1} for kinds that predict no feature.
        slot_weights: "dpace" weighs a slot by what its chain of positions can still gain there; None weighs all alike.
            Only in training.
        gamma: weight of a pass relative to the one before.
        optimizer: "adamw"; or "muon" for all matrices but a head, with AdamW for the rest. Muon needs fewer steps to
            the same loss, and whole matrices in each process.
        learning_rate: maximum, at the end of warm-up.
        betas: of AdamW.
        weight_decay: of both optimizers.
        warmup: fraction of the steps over which the learning rate rises; then it falls linearly to 0.
        mean_over: average the loss over the "slots" that count in an optimizer step, or over all its "tokens".
        chunk: slots whose (depth + 1, chunk, V) logits exist at once; None for what 2 GiB hold on a GPU, and 128 on a
            CPU.
        draft: other options of the draft, see `DraftOptions`.

    Attributes:
        draft: the specialists.
        aux_layers: the target's layers that the draft reads, which `FeatureDataModule` puts into its batches.

    Raises:
        ValueError: a value out of its range, or a depth that never reaches every specialist.
    """

    def __init__(
        self,
        allocation: tuple[Position, ...] | list[Position] = (2, 2, 2),
        store: str | list[str] | SampleSource | None = None,
        *,
        anchors: Count | None = None,
        start_from: str | None = None,
        normalise: bool = True,
        loss: dict[str, Weight] | None = None,
        slot_weights: Literal["dpace"] | None = None,
        gamma: PositiveFloat = 1.0,
        optimizer: Literal["adamw", "muon"] = "adamw",
        learning_rate: PositiveFloat = 3e-5,
        betas: tuple[Decay, Decay] = (0.9, 0.95),
        weight_decay: Weight = 0.0,
        warmup: Fraction = 0.01,
        mean_over: Literal["slots", "tokens"] = "slots",
        chunk: Count | None = None,
        **draft: Any,
    ):
        refuse_numbers(DraftModule, locals())
        refuse_unknown(draft, DraftOptions, DraftModule)
        super().__init__()
        self.options = DraftOptions(allocation=allocation, **draft)  # pyright: ignore[reportArgumentType] a list, too
        self._begin_with = start_from, normalise, anchors
        self._terms = loss
        self._make_loss = partial(LossSpec, gamma=gamma, slot_weights=slot_weights, chunk=chunk)
        self.save_hyperparameters(ignore="store")  # in this frame, so that it finds those of a subclass, too
        self.guard = NormGuard()
        if store is not None:
            self.begin(FeatureStore(store) if isinstance(store, str | list) else store)

    def begin(self, source: SampleSource) -> None:
        """Make the draft for the target of a source; a trainer calls this where no store was given."""
        if isinstance(source, FeatureStore):  # `load_from_checkpoint` needs no more than the file
            self.hparams["store"] = [str(folder) for folder in source.folders]
        self.draft, self.embed_head = begin_draft(source, self.options, *self._begin_with)
        config, self.aux_layers = self.draft.config, self.draft.config.aux_layers
        terms = dict(self._terms or (DEFAULT if config.predicts_feature else {"token": 1.0}))
        self.loss = self._make_loss(terms=terms)
        self.loss.check_kind(config.predicts_feature)
        # DDP would broadcast embedding and head, which never change, before every forward.
        self._ddp_params_and_buffers_to_ignore = [f"embed_head.{name}" for name, _ in self.embed_head.named_buffers()]
        self.eval_depth = max(config.depth, sum(config.allocation))  # as deep as decoding
        config.check_depth(self.eval_depth)
        weighted = [name for name, weight in terms.items() if weight]
        weighted += ["extra"] * (type(self).extra_losses is not DraftModule.extra_losses)
        self.logged_terms = tuple(dict.fromkeys([*ENTROPIES, *weighted]))
        self.val_metrics = ValidationMetrics(self.eval_depth, self.logged_terms, config.predicts_feature)

    # --- setup ---

    def configure_callbacks(self) -> list[lightning.Callback]:
        """Add none: this comes before the setup of callbacks and data, so it makes the draft and checks the trainer."""
        self._begin_once()
        check_precision(self.trainer.precision)
        if self.trainer.state.fn == "fit":
            check_trainer(self.trainer, self.hparams["optimizer"])
        return []

    def _begin_once(self) -> None:
        if hasattr(self, "draft"):
            return
        if not (data := data_of(self._trainer)):
            raise ValueError("store is None, and the trainer has no FeatureDataModule: give one of them")
        self.begin(data.source)

    def setup(self, stage: str) -> None:
        """Check device, data and precision; cast embedding and head to the dtype of the computation."""
        if self.trainer.strategy.root_device.type == "cuda":
            check_kernel_tools()
        check_target(self.draft.config.target, data_of(self.trainer))
        if (precision := self.trainer.precision) in ("bf16-mixed", "32-true"):
            self.embed_head.to(torch.bfloat16 if precision == "bf16-mixed" else torch.float32)

    def on_fit_start(self) -> None:
        if data := data_of(self.trainer):
            self.draft.trained_on |= {data.source.digest(index) for index in data.train}
            if "validation" in data.other_stores:
                self._warn_of_training()

    def on_train_start(self) -> None:
        continue_schedule(self.trainer, self.hparams["learning_rate"])

    def configure_optimizers(self):
        optimizer = make_optimizer(self.draft, self.hparams, self.trainer)
        schedule = schedule_rate(optimizer, self.hparams["warmup"], self.trainer)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    # --- a step of training ---

    def training_step(self, batch: Batch, batch_idx: int = 0) -> Tensor:
        depth, chains = self.draft.config.depth, self._draw_chains(batch)
        discounts = self.loss.discounts(depth, self.device)  # (K,)
        pass_weights = batch.mask.pass_weights(discounts, self.hparams["mean_over"])
        # To find the draft's top tokens takes time, and to read values waits for the device: not every step does it.
        losses, predictions = unrolled_losses(
            self.draft, self.embed_head, batch, depth, self.loss, pass_weights, chains, self._logs
        )
        losses = self._add_extra(losses, predictions, batch, pass_weights)
        self.guard.ids += batch.ids
        if self._logs:
            self._log_step(batch, losses, chains)
        return losses.total

    def _draw_chains(self, batch: Batch) -> Tensor | None:
        if (most := self.hparams["anchors"]) is None:
            return None
        seed = zlib.crc32(" ".join(batch.ids).encode()) + self.trainer.global_step  # the same in a resumed training
        return draw_chains(torch.from_numpy(batch.mask.host_passes) > 0, most, seed)

    def _log_step(self, batch: Batch, losses: PassLosses, chains: Tensor | None) -> None:
        if not batch.mask.is_empty:  # not one that only fills up the step
            # Of the host, as Lightning reads what the bar shows after every batch.
            means = losses.weighted / losses.slots.clamp(min=1)  # (K,)
            self.log("train/loss", self.loss.sum_passes(means).cpu(), prog_bar=True)
        self.log("train/learning_rate", self.trainer.optimizers[0].param_groups[0]["lr"])
        self.log_by_depth("train_loss", losses.weighted / losses.slots)
        for name in self.logged_terms:
            self.log_by_depth(f"train_{name}_loss", losses.by_term[name] / losses.slots)
        acceptance = UnrollAcceptance(self.draft.config.depth, sync_on_compute=False).to(self.device)  # of this process
        acceptance.update(**acceptance_inputs(self.draft, batch, losses, chains))
        self.log_by_depth("train_pos_acc_unroll", acceptance.compute())

    def extra_losses(self, predictions: list[Tensor], batch: Batch) -> Tensor:
        """Return a subclass's own loss of each pass (K,), summed over slots.

        It is added to `loss`, and weighted over passes and averaged over the optimizer step as that is.

        Args:
            predictions: of each pass k, (B, T-1, D); slot t predicts the target's `batch.features[:, t + 1]`. With
                `anchors`, 0 where no block was drawn.
            batch: pass k counts at slot t where k <= `batch.mask.passes[:, t]`.
        """
        raise NotImplementedError

    def _add_extra(
        self, losses: PassLosses, predictions: list[Tensor], batch: Batch, pass_weights: Tensor | None = None
    ) -> PassLosses:
        if "extra" not in self.logged_terms:
            return losses
        return losses.plus(self.extra_losses(predictions, batch), pass_weights)

    def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None) -> None:
        """Clip the gradient, as Lightning does not with a fused AdamW, and keep its norm for the guard."""
        if isinstance(self.trainer.strategy, DeepSpeed):  # it clips by itself
            return
        parameters = list(self.draft.parameters())
        norm = torch.nn.utils.get_total_norm([each.grad for each in parameters if each.grad is not None])
        self.guard.end_step(norm, self.trainer.global_step)
        if gradient_clip_val and gradient_clip_algorithm == "value":
            torch.nn.utils.clip_grad_value_(parameters, gradient_clip_val)
        elif gradient_clip_val:
            torch.nn.utils.clip_grads_with_norm_(parameters, gradient_clip_val, norm)

    def optimizer_step(self, *step: Any) -> None:
        if self._logs:  # which waits for the device in any case
            self.guard.check()
        super().optimizer_step(*step)
        if isinstance(self.trainer.strategy, DeepSpeed):
            norm = torch.tensor(torch.inf if self.trainer.strategy.overflowed else 0.0)
            self.guard.end_step(norm, self.trainer.global_step)

    def on_train_end(self) -> None:
        self.guard.check()

    @property
    def _logs(self) -> bool:  # the current step
        every = self.trainer.log_every_n_steps  # pyright: ignore[reportAttributeAccessIssue]
        return every > 0 and (self.trainer.global_step + 1) % every == 0

    # --- validation ---

    def validation_step(self, batch: Batch, batch_idx: int = 0) -> None:
        loss = replace(self.loss, slot_weights=None)
        losses, predictions = unrolled_losses(self.draft, self.embed_head, batch, self.eval_depth, loss)
        losses = self._add_extra(losses, predictions, batch)
        self.val_metrics.update(losses, predictions, batch, acceptance_inputs(self.draft, batch, losses))

    def on_validation_start(self) -> None:
        self.guard.check()
        if self.trainer.state.fn == "validate":
            self._warn_of_training()

    def on_validation_epoch_end(self) -> None:
        losses, means = self.val_metrics.compute()
        depth = self.draft.config.depth  # which may be less than that of decoding
        self.log_shared(f"{self.stage}/loss", self.loss.sum_passes(losses[:depth]), prog_bar=True)
        for name, values in means.items():
            self.log_by_depth(f"{self.stage}_{name}", values)
        self.val_metrics.reset()

    def on_test_start(self) -> None:
        self._warn_of_training()

    test_step, on_test_epoch_end = validation_step, on_validation_epoch_end

    @property
    def stage(self) -> str:
        """Return what the names of logged values begin with: val, or test in `trainer.test`."""
        return "test" if self.trainer.testing else "val"

    def _warn_of_training(self) -> None:
        data, trained_on = data_of(self.trainer), self.draft.trained_on
        if data and (warning := warn_of_training("the draft", trained_on, *data.evaluated(self.stage))):
            rank_zero_warn(warning)

    # --- checkpoints ---

    def on_save_checkpoint(self, checkpoint: dict) -> None:
        """Add the draft's config, so that `load_draft` needs nothing but the checkpoint."""
        self.guard.check()
        checkpoint["draft"] = self.draft.config.to_json()
        checkpoint[TRAINED_ON] = encode_digests(self.draft.trained_on)

    def on_load_checkpoint(self, checkpoint: dict) -> None:
        self._begin_once()
        check_same_draft(checkpoint, self.draft.config)
        self.draft.trained_on |= decode_digests(checkpoint.get(TRAINED_ON, ""))
        if self._trainer is not None and self.trainer.state.fn == "fit":
            resume(self.trainer, checkpoint, self.hparams)

    # --- shared by training and validation ---

    def log_by_depth(self, name: str, values: Tensor) -> None:
        """Log values (K,) as `name/depth_k`, and their mean as `name/mean`: TensorBoard groups by `name`.

        A depth without any slot, as no answer is that long, is nan: neither logged nor part of the mean.
        """
        values = values.cpu()
        named = {f"depth_{k}": value for k, value in enumerate(torch.atleast_1d(values), 1)}
        named["mean"] = values.nanmean()
        for suffix, value in named.items():
            if not value.isnan():
                self.log_shared(f"{name}/{suffix}", value)

    def log_shared(self, name: str, value: Tensor, **options: Any) -> None:
        """Log a value that all processes have alike, which Lightning need not average."""
        self.log(name, value, sync_dist=True, rank_zero_only=True, **options)
