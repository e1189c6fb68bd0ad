"""Rename the tensors of a published draft to ours, and ours to theirs; dtypes stay."""

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from poss_lightning.draft.specialists import DraftConfig, Specialists
from poss_lightning.interop.layouts import EMBEDDING, HEAD, OPTIONAL, TO_DRAFT, TO_TARGET, Layout
from poss_lightning.target.spec import EmbedHead


class Draft(NamedTuple):
    """The content of a folder of ours, each tensor in its stored dtype."""

    config: DraftConfig
    state: dict[str, Tensor]


def check_names(tensors: dict[str, Tensor], layout: Layout, layers: int, input_norms: int = 0) -> None:
    """Raise ValueError where a file lacks a tensor, or has one that the layout does not have.

    Args:
        layers: that it has.
        input_norms: of what it reads of the target.
    """
    names = layout.number_names(layers, input_norms)
    elsewhere = {EMBEDDING, HEAD, *((TO_TARGET, TO_DRAFT) if layout.vocabulary == "d2t" else ())}
    if missing := [theirs for ours, theirs in names.items() if theirs not in tensors and ours not in OPTIONAL]:
        raise ValueError(f"{missing[0]} is missing" + _count_others(missing))
    if unknown := sorted(tensors.keys() - names.values() - elsewhere):
        raise ValueError(f"{unknown[0]} has no place in this layout" + _count_others(unknown))


def check_frozen(tensors: dict[str, Tensor], embed_head: EmbedHead, layout: Layout) -> None:
    """Raise ValueError where a file has an embedding or a head that differs from the target's by more than rounding.

    Two files of one model may have been converted through different dtypes. The target's tensors are not copied from
    the file, so they need not be exact: rows may differ by the rounding of the coarser dtype.
    """
    frozen = {EMBEDDING: embed_head.embedding} | ({} if layout.kind == "eagle3" else {HEAD: embed_head.head})
    for name, ours in frozen.items():
        if (theirs := tensors.get(name)) is None:
            continue
        if theirs.shape != ours.shape or not theirs.is_floating_point():
            raise ValueError(f"{name} is {theirs.dtype} {list(theirs.shape)}; the target's is {list(ours.shape)}")
        limits = [torch.finfo(tensor.dtype) for tensor in (theirs, ours)]
        relative = max(limit.eps for limit in limits)
        absolute = max(limit.smallest_normal * limit.eps for limit in limits)
        differing = sum(
            int((~a.float().isclose(b.float(), rtol=relative, atol=absolute)).any(1).sum())
            for a, b in zip(theirs.split(4096), ours.split(4096), strict=True)  # chunks, to save memory in float32
        )
        if differing:
            raise ValueError(
                f"{name} is not the target's: {differing} of {len(ours)} rows differ by more than the rounding of "
                f"{theirs.dtype} and {ours.dtype}; is it another target?"
            )


def find_vocabulary(tensors: dict[str, Tensor], layout: Layout, total: int) -> Tensor:
    """The target's token ids that a published draft proposes, ascending: (V,).

    Most EAGLE-3 files state them twice: draft id i is the target's i + d2t[i], and t2d marks them among the target's
    ids. Engines ignore t2d, so it may be missing.

    Args:
        total: number of the target's tokens.

    Raises:
        ValueError: d2t is missing, or has a wrong shape or dtype, or contradicts t2d or the head.
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
    expected = _make_maps(ids, total)[TO_DRAFT]
    if tensors.get(TO_DRAFT, expected).tolist() != expected.tolist():
        raise ValueError(f"{TO_DRAFT} does not mark the {len(ids)} of the target's {total} ids that {TO_TARGET} gives")
    return ids


def to_ours(tensors: dict[str, Tensor], config: DraftConfig, layout: Layout, ids: Tensor) -> Draft:
    """Rename a published file's tensors, none of which is missing; the target's own are left out.

    Args:
        ids: the token ids that it proposes, from `find_vocabulary`.

    Raises:
        ValueError: a tensor has a wrong shape, or no floats; the message names it.
    """
    names = layout.number_names(config.layer_count, config.input_norms)
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
    defaults = {"scale": torch.ones(empty.scale.shape)} | ({} if kept is None else {"vocabulary": kept})
    if empty.fc.bias is not None:
        defaults["fc.bias"] = torch.zeros(empty.fc.bias.shape, dtype=state["fc.weight"].dtype)
    return Draft(config, defaults | state)


def to_theirs(draft: Draft, layout: Layout, embed_head: EmbedHead) -> dict[str, Tensor]:
    """The tensors of a published file.

    The scale of fc's input is multiplied into its weights. Where their dtype does not hold the products, as it holds
    those with powers of two, they are in float32, which is exact for weights and a scale of 16 bits.
    """
    config, state = draft
    weight = state["fc.weight"]
    state = state | {"fc.weight": _hold(weight.double() * state["scale"].double(), weight.dtype)}
    biased = "fc.bias" in state and (layout.bias == "always" or bool(state["fc.bias"].any()))
    in_attention = biased and layout.bias == "attention"
    names = layout.number_names(config.layer_count, config.input_norms)
    tensors = {
        theirs: state[ours] for ours, theirs in names.items() if ours != "fc.bias" or (biased and not in_attention)
    }
    if in_attention:
        tensors |= _to_attention_biases(state)
    if layout.embedding:
        tensors[EMBEDDING] = embed_head.embedding.to(weight.dtype)
    if layout.vocabulary == "d2t" and "vocabulary" in state:
        tensors |= _make_maps(state["vocabulary"], config.target.vocab_size)
        if not config.own_head:  # the target's rows, so that an engine need not compute the others
            tensors[HEAD] = embed_head.head[state["vocabulary"]].to(weight.dtype)
    return tensors


def _make_maps(ids: Tensor, total: int) -> dict[str, Tensor]:
    marks = torch.zeros(total, dtype=torch.bool)
    return {TO_TARGET: ids - torch.arange(len(ids)), TO_DRAFT: marks.index_fill(0, ids, True)}


def _to_attention_biases(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """fc's bias b as biases of the first layer's attention, for code whose fc has none.

    There is no norm between them: for queries, keys and values W (z + b) = W z + W b, and for the residual
    (z + b) + o = z + (o + b).
    """
    bias = state["fc.bias"]
    exact = {name: state[f"layers.0.{name}.weight"].double() @ bias.double() for name in ("q_proj", "k_proj", "v_proj")}
    exact["o_proj"] = bias.double()
    return {f"layers.0.self_attn.{name}.bias": _hold(value, bias.dtype) for name, value in exact.items()}


def _hold(exact: Tensor, dtype: torch.dtype) -> Tensor:
    """A tensor in its dtype if that holds it, else in float32."""
    rounded = exact.to(dtype)
    return rounded if torch.equal(rounded.double(), exact) else exact.float()


def _count_others(names: Iterable[str]) -> str:
    return f" (and {more} more)" if (more := len([*names]) - 1) else ""
