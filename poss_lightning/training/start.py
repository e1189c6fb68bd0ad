"""What a training starts from: a draft, with the target's embedding and head, or the checkpoint that it resumes.

It resumes within the epoch where the checkpoint stopped, on any number of processes.
"""

from collections.abc import Mapping
from dataclasses import fields
from math import inf
from typing import Any

import lightning
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

from poss_lightning.draft.config import DraftConfig, DraftOptions, Kind
from poss_lightning.draft.kinds import Eagle3, load_draft, make_draft
from poss_lightning.draft.specialists import Specialists
from poss_lightning.features.datamodule import FeatureData
from poss_lightning.features.online import OnlineFeatures
from poss_lightning.features.store import FeatureStore
from poss_lightning.target.spec import EmbedHead

Source = FeatureStore | OnlineFeatures


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


def choose_vocabulary(features: Source, size: int | None, start: Specialists | None) -> Tensor | None:
    """(V,) token ids to propose; None for all.

    A draft's own head keeps its trained rows, as published: SPEED keeps the vocabulary of its EAGLE-3 draft.
    """
    same_target = start is not None and start.config.target.vocab_size == features.target.vocab_size
    if start and same_target and start.config.own_head and size in (None, start.config.vocabulary_size):
        return start.vocabulary
    return None if size is None else features.common_tokens(size)


def inherited(start: Specialists | None, kind: Kind) -> dict[str, Any]:
    """Settings without an option that a draft takes over from the one it starts from, if that has the same kind."""
    if start is None or start.config.kind != kind:
        return {}
    return {name: getattr(start.config, name) for name in ("inner_layers", "mask_token", "norm_eps")}


def begin_draft(
    source: Source, options: DraftOptions, start_from: str | None, normalise: bool, anchors: int | None
) -> tuple[Specialists, EmbedHead]:
    """Return specialists with the weights of a draft or random ones, and the target's embedding and head for them.

    With `normalise`, a draft with random weights scales its input to a mean square of 1.
    """
    start = load_draft(start_from) if start_from else None
    vocabulary = choose_vocabulary(source, options.vocabulary_size, start)
    size = None if vocabulary is None else len(vocabulary)
    config = options.config_for(source.target, vocabulary_size=size, **inherited(start, options.kind))
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


def restore_schedule(trainer: lightning.Trainer, checkpoint: dict) -> None:
    """Set the schedule of a running fit to where `checkpoint` stopped, and its loops and learning rate accordingly.

    This changes `checkpoint`, from which Lightning restores the loops next. Lightning cannot restore the loader: its
    length has been read by then, for the schedule of the learning rate.
    """
    if not isinstance(data := getattr(trainer, "datamodule", None), FeatureData):
        return
    loop = checkpoint["loops"]["fit_loop"]
    (state,) = loop["state_dict"].get("combined_loader") or [None]
    if state is None:
        return
    schedule = data.training_schedule()
    schedule.load_state_dict(state)
    if state["share"] != schedule.step_batches:
        rank_zero_warn(
            f"the run continues with {schedule.step_batches} batches a step (processes x accumulated) where it had "
            f"{state['share']}: each sample of the epoch is still shown once, but in other steps"
        )
    if 0 < state["done"] < state["total"]:
        progress = loop["epoch_loop.batch_progress"]["current"]
        taken, running = len(schedule) - schedule.remaining(), progress["ready"] - progress["completed"]
        progress.update(ready=taken, started=taken, processed=taken, completed=taken - running)
        if taken < trainer.num_training_batches:  # Lightning counts an epoch that a stop cut short as processed
            for epochs in loop["epoch_progress"].values():
                epochs["processed"] = epochs["completed"] = epochs["started"] - 1
    if trainer.estimated_stepping_batches != trainer.max_steps:  # epochs end it, whose number of steps may have changed
        learning_rate, steps = checkpoint["lr_schedulers"][0], epoch_steps(trainer)
        before = checkpoint["epoch_steps"] or steps
        learning_rate["last_epoch"] = round(learning_rate["last_epoch"] * steps / before)


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


def check_same_optimizer(checkpoint: dict[str, Any], options: Mapping[str, Any]) -> None:
    """Raise ValueError where an option differs that the optimizer's state depends on."""
    before = checkpoint["hyper_parameters"]
    for name in ("optimizer", "betas", "weight_decay"):
        was, now = (list(v) if isinstance(v, tuple) else v for v in (before[name], options[name]))
        if was != now:
            raise ValueError(
                f"{name} is {now}, and this training began with {was}: leave it, or start a new training with "
                "--model.start_from"
            )


def continue_schedule(trainer: lightning.Trainer, maximum: float) -> None:
    """Set the rate of a resumed training to the one of its schedule, whose maximum or last step may have changed."""
    for schedule in (each.scheduler for each in trainer.lr_scheduler_configs):
        if not trainer.ckpt_path or not isinstance(schedule, LambdaLR):
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


def epoch_steps(trainer: lightning.Trainer) -> int:
    """Return optimizer steps of an epoch; 0 before there are data, as when `Tuner.lr_find` writes its checkpoint."""
    batches = trainer.num_training_batches
    return 0 if batches == inf else -(-int(batches) // trainer.accumulate_grad_batches)
