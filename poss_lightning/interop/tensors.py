"""Rename the tensors of a published draft to ours, and ours to theirs; dtypes stay."""

from typing import NamedTuple

import torch
from torch import Tensor

from poss_lightning.draft.config import DraftConfig
from poss_lightning.draft.folder import check_state
from poss_lightning.draft.kinds import make_draft
from poss_lightning.interop.layouts import BIAS, EMBEDDING, HEAD, TO_DRAFT, TO_TARGET, Layout, refuse
from poss_lightning.target.spec import EmbedHead


class Draft(NamedTuple):
    """The content of a folder of ours, each tensor in its stored dtype."""

    config: DraftConfig
    state: dict[str, Tensor]


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
        chunks = zip(theirs.split(4096), ours.split(4096), strict=True)  # to save memory in float32
        if not all(a.float().isclose(b.float(), rtol=relative, atol=absolute).all() for a, b in chunks):
            raise ValueError(
                f"{name} is not the target's: they differ by more than the rounding of {theirs.dtype}, {ours.dtype}; "
                "is it of another target, or of another --input_format?"
            )


def find_vocabulary(tensors: dict[str, Tensor], layout: Layout, total: int) -> Tensor:
    """Find the target's token ids, of `total`, that a published draft proposes, ascending: (V,).

    Most EAGLE-3 files state them twice: draft id i is the target's i + d2t[i], and t2d marks them among the target's
    ids. Engines ignore t2d, so it may be missing, or mark nothing.
    """
    rows = len(tensors.get(HEAD, range(total)))
    if layout.vocabulary != "d2t" or (rows == total and not tensors.keys() & {TO_TARGET, TO_DRAFT}):
        return torch.arange(total)
    refuse((TO_TARGET not in tensors, f"{TO_TARGET} is missing, and {HEAD} has {rows} rows for {total} tokens"))
    offsets, marks = tensors[TO_TARGET], tensors.get(TO_DRAFT)
    ids = offsets.flatten() + torch.arange(offsets.numel())
    whole = offsets.ndim == 1 and offsets.dtype in (torch.int32, torch.int64)
    words = (
        f"{TO_TARGET} is {offsets.dtype} {list(offsets.shape)}; it must lead to ascending ids of the target's {total}"
    )
    refuse((not (whole and (ids.diff() > 0).all() and ((ids >= 0) & (ids < total)).all()), words))
    marked = marks is None or not marks.any() or marks.tolist() == _make_maps(ids, total)[TO_DRAFT].tolist()
    words = f"{TO_DRAFT} does not mark the {len(ids)} of the target's {total} ids that {TO_TARGET} gives"
    refuse((not marked, words))
    return ids


def to_ours(
    tensors: dict[str, Tensor], config: DraftConfig, layout: Layout, ids: Tensor, embed_head: EmbedHead
) -> Draft:
    """Rename a published file's tensors; the target's own are left out.

    A draft of all tokens without a head has the target's, as engines lend it; without a bias it has zeros.

    Args:
        ids: the token ids that it proposes, from `find_vocabulary`.
    """
    names, kept = layout.number_names(config), ids if config.vocabulary_size else None
    lent = {BIAS} if config.vocabulary_size else {BIAS, HEAD}
    maps = {TO_TARGET, TO_DRAFT} if layout.vocabulary == "d2t" else set()
    missing = sorted({*names.values()} - tensors.keys() - lent)
    unknown = sorted(tensors.keys() - names.values() - {EMBEDDING, HEAD} - maps)
    for found, words in ((missing, "is missing"), (unknown, "has no place in this layout")):
        if found:
            others = f" (and {len(found) - 1} more)" if found[1:] else ""
            raise ValueError(f"{found[0]} {words}{others}: is it of another --input_format?")
    with torch.device("meta"):
        shapes = {name: tensor.shape for name, tensor in make_draft(config, kept).state_dict().items()}
    dtype = tensors["fc.weight"].dtype
    defaults = {
        "scale": torch.ones(shapes["scale"]),
        "vocabulary": ids,
        "mask": embed_head.embedding[config.mask_row].to(dtype),
        BIAS: torch.zeros(config.target.hidden_size, dtype=dtype),
        HEAD: embed_head.head,
    }
    state = {ours: tensors[names[ours]] if names.get(ours) in tensors else defaults[ours] for ours in shapes}
    for ours, tensor in state.items():
        if tensor.shape != shapes[ours]:
            raise ValueError(
                f"{names[ours]} is {tensor.dtype} {list(tensor.shape)}; it must be floats {list(shapes[ours])}"
            )
    check_state(state)
    return Draft(config, state)


def to_theirs(draft: Draft, layout: Layout, embed_head: EmbedHead) -> dict[str, Tensor]:
    """Make the tensors of a published file.

    The scale of fc's input is multiplied into its weights. Where their dtype cannot hold the products, which it can
    for powers of two, they are in float32, which is exact for weights and a scale of 16 bits.
    """
    config, state = draft
    weight = state["fc.weight"]
    state = state | {"fc.weight": _hold(weight.double() * state["scale"].double(), weight.dtype)}
    names = layout.number_names(config)
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
    """Turn fc's bias b into biases of the first layer's attention, for code whose fc has none.

    There is no norm between them: for queries, keys and values W (z + b) = W z + W b, and for the residual
    (z + b) + o = z + (o + b).
    """
    bias = state[BIAS]
    exact = {name: state[f"layers.0.{name}.weight"].double() @ bias.double() for name in ("q_proj", "k_proj", "v_proj")}
    exact["o_proj"] = bias.double()
    return {f"layers.0.self_attn.{name}.bias": _hold(value, bias.dtype) for name, value in exact.items()}


def _hold(exact: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a tensor in its dtype if that holds it, else in float32."""
    rounded = exact.to(dtype)
    return rounded if torch.equal(rounded.double(), exact) else exact.float()
