"""Rename the tensors of a published draft to ours, and ours to theirs; dtypes stay."""

from typing import NamedTuple

import torch
from torch import Tensor

from poss_lightning.draft.specialists import DraftConfig, Specialists
from poss_lightning.interop.layouts import BIAS, EMBEDDING, HEAD, TO_DRAFT, TO_TARGET, Layout, refuse
from poss_lightning.target.spec import EmbedHead


class Draft(NamedTuple):
    """The content of a folder of ours, each tensor in its stored dtype."""

    config: DraftConfig
    state: dict[str, Tensor]


def complete(
    tensors: dict[str, Tensor], layout: Layout, config: DraftConfig, embed_head: EmbedHead
) -> dict[str, Tensor]:
    """A file's tensors, and the target's head if an EAGLE-3 draft of all tokens has none, as engines lend it.

    Raises:
        ValueError: the file lacks a tensor, or has one that the layout does not have.
    """
    if config.own_head and config.vocabulary_size is None and not tensors.keys() & {HEAD, TO_TARGET}:
        tensors = tensors | {HEAD: embed_head.head.clone()}
    names = set(layout.number_names(config.layer_count, config.input_norms).values())
    elsewhere = {EMBEDDING, HEAD, *((TO_TARGET, TO_DRAFT) if layout.vocabulary == "d2t" else ())}
    missing = sorted(names - tensors.keys() - {BIAS})
    unknown = sorted(tensors.keys() - names - elsewhere)
    for found, words in ((missing, "is missing"), (unknown, "has no place in this layout")):
        if found:
            others = f" (and {len(found) - 1} more)" if found[1:] else ""
            raise ValueError(f"{found[0]} {words}{others}")
    return tensors


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
            random = f", or an export whose {name} is random and may be removed" if layout.kind == "eagle3" else ""
            raise ValueError(
                f"{name} is not the target's: {differing} of {len(ours)} rows differ by more than the rounding of "
                f"{theirs.dtype} and {ours.dtype}; is it a different target{random}?"
            )


def find_vocabulary(tensors: dict[str, Tensor], layout: Layout, config: DraftConfig) -> Tensor:
    """The target's token ids that a published draft proposes, ascending: (V,).

    Most EAGLE-3 files state them twice: draft id i is the target's i + d2t[i], and t2d marks them among the target's
    ids. Engines ignore t2d, so it may be missing, or mark nothing.

    Raises:
        ValueError: d2t is missing, or has a wrong shape or dtype, or contradicts t2d or the config.
    """
    total = config.target.vocab_size
    ids, size = torch.arange(total), config.vocabulary_size or total
    if layout.vocabulary == "d2t":
        head = list(tensors[HEAD].shape)
        if tensors.keys() & {TO_TARGET, TO_DRAFT} or head[:1] != [total]:
            refuse((TO_TARGET not in tensors, f"{TO_TARGET} is missing, and {HEAD} is {head} for {total} tokens"))
            ids = _add_offsets(tensors[TO_TARGET], total)
    marks, given = _make_maps(ids, total)[TO_DRAFT], tensors.get(TO_DRAFT)
    refuse(
        (
            given is not None and bool(given.any()) and given.tolist() != marks.tolist(),
            f"{TO_DRAFT} does not mark the {len(ids)} of the target's {total} ids that {TO_TARGET} gives",
        ),
        (len(ids) != size, f"config.json: draft_vocab_size is {size}; the draft proposes {len(ids)} tokens"),
    )
    return ids


def _add_offsets(offsets: Tensor, total: int) -> Tensor:
    words = f"{TO_TARGET} is {offsets.dtype} {list(offsets.shape)}; it must be torch.int64 or int32, one per draft id"
    refuse((offsets.ndim != 1 or offsets.dtype not in (torch.int32, torch.int64) or not len(offsets), words))
    ids = offsets + torch.arange(len(offsets))
    ascending = bool((ids.diff() > 0).all() and ids[0] >= 0 and ids[-1] < total)
    refuse((not ascending, f"{TO_TARGET} does not lead to ascending ids of the target's {total}"))
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
    if BIAS in expected:
        defaults[BIAS] = torch.zeros(expected[BIAS].shape, dtype=state["fc.weight"].dtype)
    return Draft(config, defaults | state)


def to_theirs(draft: Draft, layout: Layout, embed_head: EmbedHead) -> dict[str, Tensor]:
    """The tensors of a published file.

    The scale of fc's input is multiplied into its weights. Where their dtype cannot hold the products, which it can
    for powers of two, they are in float32, which is exact for weights and a scale of 16 bits.
    """
    config, state = draft
    weight = state["fc.weight"]
    state = state | {"fc.weight": _hold(weight.double() * state["scale"].double(), weight.dtype)}
    names = layout.number_names(config.layer_count, config.input_norms)
    names.pop(BIAS, None)
    tensors = {theirs: state[ours] for ours, theirs in names.items()}
    if BIAS in state and (layout.bias == "always" or state[BIAS].any()):
        tensors |= _to_attention_biases(state) if layout.bias == "attention" else {BIAS: state[BIAS]}
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
    bias = state[BIAS]
    exact = {name: state[f"layers.0.{name}.weight"].double() @ bias.double() for name in ("q_proj", "k_proj", "v_proj")}
    exact["o_proj"] = bias.double()
    return {f"layers.0.self_attn.{name}.bias": _hold(value, bias.dtype) for name, value in exact.items()}


def _hold(exact: Tensor, dtype: torch.dtype) -> Tensor:
    """A tensor in its dtype if that holds it, else in float32."""
    rounded = exact.to(dtype)
    return rounded if torch.equal(rounded.double(), exact) else exact.float()
