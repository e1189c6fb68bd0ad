"""What a training starts from: a draft, with the target's embedding and head, or the checkpoint that it resumes.

It resumes within the epoch where the checkpoint stopped, on any number of processes.
"""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import lightning
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

from poss_lightning.draft.config import DraftConfig, DraftOptions
from poss_lightning.draft.kinds import Eagle3, load_draft, make_draft
from poss_lightning.draft.specialists import DraftModel
from poss_lightning.features.datamodule import data_of
from poss_lightning.features.source import SampleSource
from poss_lightning.target_model.spec import EmbedHead
from poss_lightning.training.optimizers import restore_fused


def check_reach(config: DraftConfig, anchors: int | None = None) -> None:
    """Raise ValueError for an unroll too shallow to train every specialist, or anchors where there are no blocks."""
    if anchors is not None and not config.one_pass:
        raise ValueError(f"anchors is {anchors}, and the passes of a draft of kind {config.kind} are over all slots")
    least = sum(config.allocation[:-1]) + 1  # the first position of the last specialist
    if config.depth < least:
        raise ValueError(
            f"depth is {config.depth}, which never reaches every specialist of {list(config.allocation)}: "
            f"give at least {least}"
        )


def choose_vocabulary(features: SampleSource, size: int | None, start: DraftModel | None) -> Tensor | None:
    """(V,) token ids to propose; None for all.

    A draft's own head keeps its trained rows, as published: SPEED keeps the vocabulary of its EAGLE-3 draft.
    """
    same_target = start is not None and start.config.target.vocab_size == features.target.vocab_size
    if start and same_target and start.config.own_head and size in (None, start.config.vocabulary_size):
        return start.vocabulary
    return None if size is None else features.common_tokens(size)


def begin_draft(
    source: SampleSource, options: DraftOptions, start_from: str | None, normalise: bool, anchors: int | None
) -> tuple[DraftModel, EmbedHead]:
    """Return specialists with the weights of a draft or random ones, and the target's embedding and head for them.

    With `normalise`, a draft with random weights scales its input to a mean square of 1.
    """
    start = load_draft(start_from) if start_from else None
    vocabulary = choose_vocabulary(source, options.vocabulary_size, start)
    size = None if vocabulary is None else len(vocabulary)
    inherited = {}  # of which there are no options
    if start and start.config.kind == options.kind:
        inherited = {name: getattr(start.config, name) for name in ("inner_layers", "mask_token", "norm_eps")}
    config = options.config_for(source.target, vocabulary_size=size, **inherited)
    check_reach(config, anchors)
    features = source.select(config.aux_layers)
    draft, full = make_draft(config, vocabulary), features.embed_head()
    embed_head = full.restrict(vocabulary)
    draft.init_head(embed_head)
    if start:
        draft.start_from(start)
        if isinstance(draft, Eagle3) and config.fc_norm and not start.config.fc_norm:
            draft.init_fc_norm(features.root_mean_square())
    elif normalise:
        embedded, inputs = full.embedding.float().square().mean().sqrt(), features.root_mean_square()
        draft.normalise(embedded.to(inputs.device).expand(config.target.hidden_size), inputs)
    return draft, embed_head


# --- resuming ---


def resume(trainer: lightning.Trainer, checkpoint: dict[str, Any], options: Mapping[str, Any]) -> None:
    """Prepare a fit, and the checkpoint that Lightning is about to load, to resume with these options of `DraftModule`.

    Raises:
        ValueError: an option differs that the optimizer's state depends on, or the data are different.
    """
    before = checkpoint["hyper_parameters"]
    for name in ("optimizer", "betas", "weight_decay"):
        was, now = (list(v) if isinstance(v, tuple) else v for v in (before[name], options[name]))
        if was != now:
            raise ValueError(
                f"{name} is {now}, and this training began with {was}: leave it, or start a new training with "
                "--model.start_from"
            )
    restore_fused(checkpoint, trainer)
    restore_progress(trainer, checkpoint)


def restore_progress(trainer: lightning.Trainer, checkpoint: dict) -> None:
    """Restore schedule, loops and learning rate of a running fit where `checkpoint` stopped.

    Lightning counts the batches of a process in an epoch, of which there are others with other numbers of processes or
    accumulated batches. So its counters follow the schedule, which knows how many of the epoch's batches are done. It
    has no public way to set them: this edits `checkpoint["loops"]`, as a checkpoint of the same place would have it.
    """
    saved, loop = checkpoint["loops"]["fit_loop"], trainer.fit_loop
    epochs: Any
    (state,) = saved["state_dict"].get("combined_loader") or [None]
    if state is None or not (data := data_of(trainer)):
        return
    (schedule := data.training_schedule()).load_state_dict(state)
    if state["share"] != schedule.step_batches:
        rank_zero_warn(
            f"the run continues with {schedule.step_batches} batches a step (processes x accumulated) where it had "
            f"{state['share']}: each sample of the epoch is still shown once, but in other steps"
        )
    if trainer.train_dataloader is None:
        loop.setup_data()
    batches = int(trainer.num_training_batches)  # of this process in an epoch
    epoch, done = state["epoch"], min(len(schedule) - schedule.remaining(), batches)
    if done == 0:  # where the epoch before has ended
        epoch, done = epoch - 1, batches
    del checkpoint["loops"]  # which Lightning would load next
    if epoch < 0:
        return
    loop.load_state_dict(saved)
    _count_batches(loop.epoch_loop, done, is_last=done == batches)
    for epochs in (loop.epoch_progress.total, loop.epoch_progress.current):
        epochs.ready = epochs.started = epoch + 1
        epochs.processed = epochs.completed = epoch
    loop.restarting = True  # which loading sets by the counters of the checkpoint
    if trainer.estimated_stepping_batches != trainer.max_steps:  # epochs end it, whose number of steps may have changed
        steps = (epoch * batches + done) // trainer.accumulate_grad_batches
        checkpoint["lr_schedulers"][0]["last_epoch"] = steps


def _count_batches(loop: Any, done: int, is_last: bool) -> None:
    """Let Lightning's loop over an epoch resume after `done` batches, or in the validation that follows them.

    It then stands where a checkpoint is saved at the end of a batch; or in the first batch of a validation that was cut
    short, which is repeated as a whole.
    """
    batches, validation = loop.batch_progress, loop.val_loop.batch_progress
    repeats = validation.current.ready > validation.current.completed
    batches.is_last_batch = is_last
    batches.total.ready += done - batches.current.ready
    batches.current.ready = done
    for counted in (batches.total, batches.current):
        counted.started = counted.processed = counted.ready
        counted.completed = counted.ready - (not repeats)
    if repeats:
        validation.total.completed -= validation.current.completed
        validation.current.completed = 0
        for counted in (validation.total, validation.current):
            counted.processed = counted.completed
            counted.ready = counted.started = counted.completed + 1
    loop.on_load_checkpoint({"_batches_that_stepped": loop.global_step - 1})


def check_same_draft(checkpoint: Mapping[str, Any], config: DraftConfig) -> None:
    """Raise ValueError where a checkpoint has a different draft, or one for a different target; depths may differ."""
    stored = DraftConfig.from_json(checkpoint["draft"], "the checkpoint's draft")
    if changed := stored.target.difference(config.target):
        raise ValueError(f"the checkpoint's draft is for a different target than these features: {changed}")
    for field in fields(DraftConfig):
        before, now = getattr(stored, field.name), getattr(config, field.name)
        if before != now and field.name not in ("target", "depth"):
            raise ValueError(
                f"{field.name} is {now!r}, and the checkpoint's draft has {before!r}: give the options of its "
                "training, which its config.yaml has"
            )


def continue_schedule(trainer: lightning.Trainer, maximum: float) -> None:
    """Set the rate to that of its schedule, whose maximum or last step may have changed since that was made or saved.

    As in a training that resumes, or by Lightning's `LearningRateFinder`.
    """
    for schedule in (each.scheduler for each in trainer.lr_scheduler_configs):
        if not isinstance(schedule, LambdaLR):
            continue
        step, before = schedule.last_epoch, schedule.get_last_lr()
        schedule.base_lrs = [maximum] * len(before)
        schedule._last_lr = [maximum * share(step) for share in schedule.lr_lambdas]
        for group, rate in zip(schedule.optimizer.param_groups, schedule._last_lr, strict=True):
            group["lr"] = rate
        if schedule._last_lr != before:
            rank_zero_warn(
                f"the schedule of the learning rate continues at step {step} of {trainer.estimated_stepping_batches}: "
                f"the rate is {schedule._last_lr[0]:.3g} from here, it was {before[0]:.3g}"
            )
