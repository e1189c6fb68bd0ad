"""Tensors of a published draft as ours, and ours as theirs: renamed, in the dtype they have."""

from typing import NamedTuple

import torch
from torch import Tensor

from poss_lightning.draft.specialists import DraftConfig, Specialists
from poss_lightning.interop.layouts import ABSENT, EMBEDDING, HEAD, TO_DRAFT, TO_TARGET, Layout
from poss_lightning.target.spec import EmbedHead


class Draft(NamedTuple):
    """What a folder of ours holds, every tensor in the dtype it was stored in."""

    config: DraftConfig
    state: dict[str, Tensor]


def check_names(tensors: dict[str, Tensor], layout: Layout, layers: int) -> None:
    """Raise ValueError where a file of so many layers lacks a tensor, or has one that is not of this layout."""
    names = layout.named(layers)
    elsewhere = {EMBEDDING, HEAD, *((TO_TARGET, TO_DRAFT) if layout.vocabulary == "d2t" else ())}
    if missing := [theirs for ours, theirs in names.items() if theirs not in tensors and ours not in ABSENT]:
        raise ValueError(f"{missing[0]} is missing" + _more(missing))
    if unknown := sorted(tensors.keys() - names.values() - elsewhere):
        raise ValueError(f"{unknown[0]} has no place in this layout" + _more(unknown))


def check_frozen(tensors: dict[str, Tensor], embed_head: EmbedHead, layout: Layout) -> None:
    """Raise ValueError where a file brings an embedding or a head that is not the target's, but for rounding."""
    frozen = {EMBEDDING: embed_head.embedding} | ({HEAD: embed_head.head} if layout.kind == "eagle2" else {})
    for name, own in frozen.items():
        if name not in tensors:
            continue
        theirs = tensors[name]
        if theirs.shape != own.shape or not theirs.is_floating_point():
            raise ValueError(f"{name} is {theirs.dtype} {list(theirs.shape)}; the target's is {list(own.shape)}")
        if differing := _differing(theirs, own):
            raise ValueError(
                f"{name} is not the target's: {differing} of {len(own)} rows differ by more than the rounding of "
                f"{theirs.dtype} and {own.dtype}; is it another target?"
            )


def _differing(theirs: Tensor, own: Tensor) -> int:
    """Rows of (V, D) that differ by more than the coarser of both dtypes may round.

    Two files of one model may have come by different dtypes; what is the target's is not kept, so it need not be exact.
    """
    limits = [torch.finfo(tensor.dtype) for tensor in (theirs, own)]
    relative, absolute = max(limit.eps for limit in limits), max(limit.smallest_normal * limit.eps for limit in limits)
    return sum(
        (~a.float().isclose(b.float(), rtol=relative, atol=absolute)).any(1).sum().item()
        for a, b in zip(theirs.split(4096), own.split(4096), strict=True)  # never all of it in float32
    )


def vocabulary(tensors: dict[str, Tensor], layout: Layout, total: int) -> Tensor:
    """The target's token ids that a published draft proposes, ascending: (V,).

    EAGLE-3's files mostly give them twice: draft id i is the target's i + d2t[i], and t2d marks those among the
    target's. Engines skip t2d, so it may be missing.

    Args:
        total: the target's tokens.

    Raises:
        ValueError: d2t is missing, or one of both is misshapen, not of its kind, or contradicts the other or the head.
    """
    if layout.vocabulary != "d2t":
        return torch.arange(total)
    head = list(tensors[HEAD].shape)
    if head[:1] == [total] and not tensors.keys() & {TO_TARGET, TO_DRAFT}:
        return torch.arange(total)
    if TO_TARGET not in tensors:
        raise ValueError(f"{TO_TARGET} is missing, and {HEAD} is {head} for the target's {total} tokens")
    offsets = tensors[TO_TARGET]
    if offsets.ndim != 1 or offsets.dtype != torch.int64 or not len(offsets):
        raise ValueError(
            f"{TO_TARGET} is {offsets.dtype} {list(offsets.shape)}; it must be torch.int64, one a draft id"
        )
    ids = offsets + torch.arange(len(offsets))
    if not ((ids >= 0) & (ids < total)).all() or not (ids.diff() > 0).all():
        raise ValueError(f"{TO_TARGET} does not lead to ascending ids of the target's {total}")
    own = torch.zeros(total, dtype=torch.bool).index_fill(0, ids, True)
    marks = tensors.get(TO_DRAFT, own)
    if marks.shape != own.shape or marks.dtype != own.dtype:
        raise ValueError(f"{TO_DRAFT} is {marks.dtype} {list(marks.shape)}; it must be torch.bool [{total}]")
    if differing := (own != marks).sum().item():
        raise ValueError(f"{TO_TARGET} and {TO_DRAFT} contradict each other in {differing} of {total} ids")
    return ids


def to_ours(tensors: dict[str, Tensor], config: DraftConfig, layout: Layout, ids: Tensor) -> Draft:
    """Rename a published file's tensors, all of which are there; what is the target's is left out.

    Args:
        ids: that it proposes, of `vocabulary`.

    Raises:
        ValueError: a tensor is misshapen or not of floats; the message names it.
    """
    names = layout.named(len(config.allocation))
    kept = ids if config.vocabulary_size else None
    with torch.device("meta"):
        empty = Specialists(config, kept)
    expected = empty.state_dict()
    state = {ours: tensors[theirs] for ours, theirs in names.items() if theirs in tensors}
    for ours, tensor in state.items():
        if tensor.shape != expected[ours].shape or not tensor.is_floating_point():
            raise ValueError(
                f"{names[ours]} is {tensor.dtype} {list(tensor.shape)}; it must be floats {list(expected[ours].shape)}"
            )
    made = {"scale": torch.ones(empty.scale.shape)} | ({} if kept is None else {"vocabulary": kept})
    if empty.fc.bias is not None:
        made["fc.bias"] = torch.zeros(empty.fc.bias.shape, dtype=state["fc.weight"].dtype)
    return Draft(config, made | state)


def to_theirs(draft: Draft, layout: Layout, embed_head: EmbedHead) -> dict[str, Tensor]:
    """A published file's tensors.

    The scale of fc's inputs goes into its weights, each product rounded once to their dtype: exact where the scale is a
    power of two, and so where it is 1; else drafts differ by that rounding.
    """
    config, state = draft
    weight = state["fc.weight"]
    state = state | {"fc.weight": (weight.float() * state["scale"].float()).to(weight.dtype)}
    biased = "fc.bias" in state and (layout.bias == "always" or bool(state["fc.bias"].any()))
    moved = biased and layout.bias == "attention"
    names = layout.named(len(config.allocation))
    tensors = {theirs: state[ours] for ours, theirs in names.items() if ours != "fc.bias" or (biased and not moved)}
    if moved:
        tensors |= attention_biases(state)
    if layout.embedding:
        tensors[EMBEDDING] = embed_head.embedding.to(weight.dtype)
    if layout.vocabulary == "d2t" and "vocabulary" in state:
        tensors |= _maps(state["vocabulary"], config.target.vocab_size)
    return tensors


def _maps(ids: Tensor, total: int) -> dict[str, Tensor]:
    marks = torch.zeros(total, dtype=torch.bool)
    return {TO_TARGET: ids - torch.arange(len(ids)), TO_DRAFT: marks.index_fill(0, ids, True)}


def attention_biases(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """fc's bias b as biases of the first layer's attention, for readers whose fc has none.

    No norm stands between: for queries, keys, values W (z + b) = W z + W b; for the residual (z + b) + o = z + (o + b).
    """
    bias = state["fc.bias"]
    made = {name: state[f"layers.0.{name}.weight"].double() @ bias.double() for name in ("q_proj", "k_proj", "v_proj")}
    return {
        f"layers.0.self_attn.{name}.bias": value.to(bias.dtype) for name, value in (made | {"o_proj": bias}).items()
    }


def _more(names: list[str]) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""
