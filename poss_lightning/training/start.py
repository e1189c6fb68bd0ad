"""What a training starts from: the draft's vocabulary and weights, and the target's embedding and head for it."""

from typing import Any

from torch import Tensor

from poss_lightning.draft.config import DraftConfig, Kind
from poss_lightning.draft.kinds import Eagle3, make_draft
from poss_lightning.draft.specialists import Specialists
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
    config: DraftConfig, features: Source, vocabulary: Tensor | None, start: Specialists | None, normalise: bool
) -> tuple[Specialists, EmbedHead]:
    """Specialists with the weights of `start` or random ones, and the target's embedding and head for the vocabulary.

    With `normalise`, a draft with random weights scales its input to a mean square of 1.
    """
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
