"""Ways to read a draft's files: a variant is all that stands between files and proposals.

At slot t a draft joins the token x_{t+1} with what it reads of the target there, and proposes x_{t+2}. With `tokens`,
`features` or `labels` 1 it is the one of the next slot.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property, reduce
from typing import Any, Literal
from zlib import crc32

import torch
from torch import Tensor

from poss_lightning.doctor.answers import ANSWERS
from poss_lightning.draft.kinds import KINDS
from poss_lightning.draft.layer import Rope, rope_at
from poss_lightning.draft.specialists import DraftConfig, DraftModel, are_ids
from poss_lightning.ranges import MAX_POSITIONS
from poss_lightning.target_model.model import Target
from poss_lightning.target_model.spec import EmbedHead
from poss_lightning.work import flat

Changes = dict[str, Any]  # fields of a draft's config, or of a variant; {} where there is no such variant
CONFIG_FIELDS = {each.name for each in fields(DraftConfig)}


class DraftView(DraftModel):
    """A draft of any kind as a variant reads it: by its rotary angles, and with its input of the head."""

    def __init__(self, variant: "Variant"):
        super().__init__(variant.config, variant.state.get("vocabulary"))
        self.variant = variant

    def rope_at(self, positions: Tensor) -> Rope:
        config, variant = self.config, self.variant
        if positions.shape[-1] != config.depth + 1:  # of the context; a block has one place more than positions
            positions = positions + variant.context_shift
        positions = positions.clamp(max=(variant.max_positions or 2**31) - 1)

        def spread(frequencies: Tensor) -> Tensor:  # those of the dimensions that rotate are further apart
            share = variant.rotary_share
            rotates = torch.arange(len(frequencies), device=positions.device) < int(len(frequencies) * share)
            spread = frequencies ** (1 / share) * rotates
            return config.rope_scaling(spread) if config.rope_scaling else spread

        sizes: Any = config.target.head_dim, config.rope_theta or config.target.rope_theta, spread
        return rope_at(positions, *sizes)

    def head_input(self, predicted: Tensor) -> Tensor:
        if self.variant.head_norm == "target":
            return self.variant.target.model.base_model.norm(predicted)  # pyright: ignore[reportCallIssue]
        return predicted if self.variant.head_norm == "none" else super().head_input(predicted)


VIEWS: dict[str, Any] = {name: type(f"{kind.__name__}View", (DraftView, kind), {}) for name, kind in KINDS.items()}


@dataclass(frozen=True)
class Variant:
    """One way to read a draft's files.

    Attributes:
        stated: their config.json on one level, with the fingerprint and the template of the target that they name.
        unread: an embedding, a head and a vocabulary in the files that the draft does not read, by their names there.
        sources: the target's decoder layers whose outputs it reads, from 1; L + 1 is the feature, after the last norm.
        scale: factor of embeddings.
        head_norm: the norm before the head: its own, none, or the target's last one.
        rotary_share: share of the dimensions of a head that rotate.
        context_shift: slots by which the context of a block is placed too late.
        max_positions: later positions have the angles of the last of so many; None for no limit.
        texts: those that it is measured on, a form of `Answers`.
        description: what was changed, step by step.
    """

    target: Target
    config: DraftConfig
    state: dict[str, Tensor] = field(compare=False)
    stated: dict[str, Any] = field(compare=False)
    unread: Mapping[str, Tensor] = field(compare=False)
    embed_head: EmbedHead
    sources: tuple[int, ...]
    tokens: int = 0
    features: int = 0
    labels: int = 0
    scale: float = 1.0
    head_norm: Literal["own", "none", "target"] = "own"
    rotary_share: float = 1.0
    context_shift: int = 0
    max_positions: int | None = None
    texts: str = ANSWERS
    description: tuple[str, ...] = field(default=(), compare=False)

    @property
    def depth(self) -> int:
        """Positions drafted."""
        return sum(self.config.allocation)

    @property
    def digest(self) -> int:
        """A checksum of its tensors."""
        bytes_of = (self.state[name].cpu().contiguous().view(torch.uint8).numpy() for name in sorted(self.state))
        return reduce(lambda before, tensor: crc32(tensor.data, before), bytes_of, 0)

    @cached_property
    def draft(self) -> DraftModel:
        """The draft as it is read."""
        with torch.device("meta"):
            draft: DraftModel = VIEWS[self.config.kind](self)
        draft.load_state_dict(self.state, assign=True)
        return draft.requires_grad_(False).eval()

    def with_changes(self, **values: Any) -> "Variant":
        """Change fields of the variant, of the draft's config, or tensors of its `state`."""
        if sources := tuple(values.get("sources", ())):
            is_inner = self.config.aux_layers and max(sources) < self.target.spec.layers
            values |= {"sources": sources} | ({"inner_layers": sources} if is_inner else {})
        config = {name: values.pop(name) for name in [*values] if name in CONFIG_FIELDS}
        values["state"] = self.state | values.get("state", {})
        return replace(self, config=replace(self.config, **config), **values)

    def describe(self, other: "Variant", words: str) -> "Variant":
        """Return another variant described as this one with one more difference."""
        old, new = (asdict(each.config) | {"inner_layers": [*each.sources]} for each in (self, other))
        return replace(other, description=(*self.description, ", ".join([words, *differences(old, new)])))

    def can_have(self, changes: Changes) -> bool:
        """Return whether there are such layers, tokens, positions and windows; no changes are no variant."""
        layers, ids = changes.get("sources", self.sources), changes.get("state", {}).get("vocabulary", torch.zeros(1))
        positions = sum(changes.get("allocation", self.config.allocation))
        seen = changes.get("window", self.config.window) or MAX_POSITIONS
        return (
            bool(changes)
            and len(layers) == len(self.sources)
            and {*layers} <= {*range(1, self.target.spec.layers + 2)}
            and are_ids(ids, self.target.spec.vocab_size)
            and 0 < positions <= MAX_POSITIONS
            and max(positions, changes.get("depth", self.config.depth)) <= seen
        )

    def proposing(self, tokens: Tensor) -> "Variant":
        """Let it propose these tokens alone."""
        rows = self.state.get("vocabulary", torch.arange(self.target.spec.vocab_size, device=tokens.device))
        is_kept = torch.isin(rows, tokens).index_fill(0, torch.tensor([0], device=tokens.device), True)  # never none
        cut = {name: self.state[name][is_kept] for name in ("lm_head.weight",) if name in self.state}
        return self.with_changes(state=cut | {"vocabulary": rows[is_kept]}, vocabulary_size=int(is_kept.sum()))

    def is_written(self) -> bool:
        """Return whether config and weights of a draft can say all of it."""
        named = self.config.aux_layers or (self.target.spec.layers + 1,)
        rest = self.state, self.stated, self.unread, self.target.embed_head, named
        return self == Variant(self.target, self.config, *rest) and len({*named}) == len(named)


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Describe values that differ, with dots between nested names."""
    old, new = flat(old), flat(new)
    return [f"{name} {old.get(name)} → {value}" for name, value in new.items() if old.get(name) != value]
