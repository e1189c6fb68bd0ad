"""Tensors of a published draft as ours, and ours as theirs: renamed, in the dtype they have."""

from typing import NamedTuple

import torch
from torch import Tensor

from poss_lightning.draft.specialists import DraftConfig, Specialists
from poss_lightning.interop.layouts import ABSENT, EMBEDDING, HEAD, TO_DRAFT, TO_TARGET, Layout
from poss_lightning.target.spec import Ends


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


def check_frozen(tensors: dict[str, Tensor], ends: Ends, layout: Layout) -> None:
    """Raise ValueError where a file brings an embedding or a head that is not the target's, in the file's dtype."""
    frozen = {EMBEDDING: ends.embedding} | ({HEAD: ends.head} if layout.kind == "eagle2" else {})
    for name, own in frozen.items():
        if name not in tensors:
            continue
        if tensors[name].shape != own.shape:
            raise ValueError(f"{name} is {list(tensors[name].shape)}; the target's is {list(own.shape)}")
        if differing := (tensors[name] != own.to(tensors[name].dtype)).any(1).sum().item():
            raise ValueError(
                f"{name} is not the target's: {differing} of {len(own)} rows differ; is it another target?"
            )


def vocabulary(tensors: dict[str, Tensor], layout: Layout, total: int) -> Tensor:
    """The target's token ids that a published draft proposes, ascending: (V,).

    EAGLE-3's files give them twice: draft id i is the target's i + d2t[i], and t2d marks those among the target's.

    Args:
        total: the target's tokens.

    Raises:
        ValueError: one of both is missing, misshapen or not of its kind, or they contradict each other or the head.
    """
    if layout.vocabulary != "d2t":
        return torch.arange(total)
    head = list(tensors[HEAD].shape)
    if head[:1] == [total] and not tensors.keys() & {TO_TARGET, TO_DRAFT}:
        return torch.arange(total)
    for name in (TO_TARGET, TO_DRAFT):
        if name not in tensors:
            raise ValueError(f"{name} is missing, and {HEAD} is {head} for the target's {total} tokens")
    offsets, marks = tensors[TO_TARGET], tensors[TO_DRAFT]
    if offsets.ndim != 1 or offsets.dtype != torch.int64 or not len(offsets):
        raise ValueError(
            f"{TO_TARGET} is {offsets.dtype} {list(offsets.shape)}; it must be torch.int64, one a draft id"
        )
    if marks.shape != (total,) or marks.dtype != torch.bool:
        raise ValueError(f"{TO_DRAFT} is {marks.dtype} {list(marks.shape)}; it must be torch.bool [{total}]")
    ids = offsets + torch.arange(len(offsets))
    if not ((ids >= 0) & (ids < total)).all() or not (ids.diff() > 0).all():
        raise ValueError(f"{TO_TARGET} does not lead to ascending ids of the target's {total}")
    if differing := (torch.zeros_like(marks).index_fill(0, ids, True) != marks).sum().item():
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


def to_theirs(draft: Draft, layout: Layout, ends: Ends) -> tuple[dict[str, Tensor], str | None]:
    """A published file's tensors, and where it has biases: in "fc", in "attention", or None for nowhere.

    The scale of fc's inputs goes into its weights, each product rounded once to their dtype: exact where the scale is a
    power of two, and so where it is 1; else drafts differ by that rounding.
    """
    config, state = draft
    weight = state["fc.weight"]
    state = state | {"fc.weight": (weight.float() * state["scale"].float()).to(weight.dtype)}
    biased = "fc.bias" in state and (layout.bias == "always" or bool(state["fc.bias"].any()))
    place = None if not biased else "attention" if layout.bias == "attention" else "fc"
    names = layout.named(len(config.allocation))
    tensors = {theirs: state[ours] for ours, theirs in names.items() if ours != "fc.bias" or place == "fc"}
    if place == "attention":
        tensors |= attention_biases(state)
    if layout.embedding:
        tensors[EMBEDDING] = ends.embedding.to(weight.dtype)
    if layout.vocabulary == "d2t" and "vocabulary" in state:
        tensors |= _maps(state["vocabulary"], config.target.vocab_size)
    return tensors, place


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
