"""Rename the tensors of a published draft to ours, and ours to theirs; dtypes stay."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from poss_lightning.draft.config import DraftConfig
from poss_lightning.draft.folder import check_state
from poss_lightning.draft.kinds import make_draft
from poss_lightning.draft.specialists import are_ids
from poss_lightning.interop.layouts import BIAS, EMBEDDING, HEAD, TO_DRAFT, TO_TARGET, Layout
from poss_lightning.interop.problems import Checks, Problem
from poss_lightning.target_model.spec import EmbedHead

SWITCH_OF = {"fc_norm.0.weight": "fc_norm", "input_norm.weight": "norm_before_fc"}  # by the tensor that needs it


class Draft(NamedTuple):
    """The content of a folder of ours, each tensor in its stored dtype.

    Of a published draft also what was wrong in its files, and the tensors in it that none of ours is made of.
    """

    config: DraftConfig
    state: dict[str, Tensor]
    problems: Sequence[Problem] = ()
    unread: Mapping[str, Tensor] = MappingProxyType({})


def strip_prefix(tensors: dict[str, Tensor], name: str, checks: Checks) -> dict[str, Tensor]:
    """Return the tensors without what a training framework put before their names, if it is before `name`."""
    prefixed = next((each for each in tensors if each.endswith(f".{name}")), name)
    prefix = prefixed.removesuffix(name)
    allowed = f"the file must have {name}: remove {prefix!r} from its names"
    checks.tensor(name in tensors or not prefix, prefixed, tensors.get(prefixed), allowed, f"read without {prefix!r}")
    return tensors if name in tensors else {key.removeprefix(prefix): value for key, value in tensors.items()}


def check_frozen(tensors: dict[str, Tensor], embed_head: EmbedHead, layout: Layout, checks: Checks) -> set[str]:
    """Return which of embedding and head in a file differ from the target's by more than rounding.

    Two files of one model may have been converted through different dtypes. The target's tensors are not copied from
    the file, so they need not be exact: rows may differ by the rounding of the coarser dtype.
    """
    frozen = {EMBEDDING: embed_head.embedding} | ({} if layout.kind == "eagle3" else {HEAD: embed_head.head})
    differing = set[str]()
    for name, ours in frozen.items():
        if (theirs := tensors.get(name)) is None:
            continue
        allowed = f"the target's is {list(ours.shape)}"
        is_alike = theirs.shape == ours.shape and theirs.is_floating_point()
        if is_alike:
            allowed = f"it is not the target's, which differs by more than the rounding of {theirs.dtype}, {ours.dtype}"
            is_alike = _is_near(theirs, ours)
        if not checks.tensor(is_alike, name, theirs, f"{allowed}: is it of another target?", "ignored"):
            differing.add(name)
    return differing


def _is_near(theirs: Tensor, ours: Tensor) -> bool:
    limits = [torch.finfo(tensor.dtype) for tensor in (theirs, ours)]
    relative = max(limit.eps for limit in limits)
    absolute = max(limit.smallest_normal * limit.eps for limit in limits)
    chunks = zip(theirs.split(4096), ours.split(4096), strict=True)  # to save memory in float32
    return all(bool(a.float().isclose(b.float(), rtol=relative, atol=absolute).all()) for a, b in chunks)


def find_vocabulary(tensors: dict[str, Tensor], layout: Layout, total: int, checks: Checks) -> Tensor:
    """Find the target's token ids, of `total`, that a published draft proposes, ascending: (V,).

    Most EAGLE-3 files state them twice: draft id i is the target's i + d2t[i], and t2d marks them among the target's
    ids. Engines ignore t2d, so it may be missing, or mark nothing.
    """
    rows = len(tensors.get(HEAD, range(total)))
    if layout.vocabulary != "d2t" or (rows == total and not tensors.keys() & {TO_TARGET, TO_DRAFT}):
        return torch.arange(total)
    offsets, marks = tensors.get(TO_TARGET), tensors.get(TO_DRAFT)
    if offsets is None:
        allowed, is_usable = f"{HEAD} has {rows} rows for {total} tokens", marks is not None and len(marks) == total
        checks.tensor(False, TO_TARGET, None, allowed, f"read as the ids that {TO_DRAFT} marks" * is_usable)
        return marks.nonzero()[:, 0]  # pyright: ignore[reportOptionalMemberAccess]
    ids = offsets.flatten() + torch.arange(offsets.numel())
    allowed = f"it must lead to ascending ids of the target's {total}"
    read_as_ids = "read as ids" if are_ids(offsets.flatten(), total) else ""
    is_whole = offsets.ndim == 1 and offsets.dtype in (torch.int32, torch.int64)
    if not checks.tensor(is_whole and are_ids(ids, total), TO_TARGET, offsets, allowed, read_as_ids):
        return offsets.long().flatten()
    is_marked = marks is None or not marks.any() or marks.tolist() == _make_maps(ids, total)[TO_DRAFT].tolist()
    allowed = f"it does not mark the {len(ids)} of the target's {total} ids that {TO_TARGET} gives"
    checks.tensor(is_marked, TO_DRAFT, marks, allowed, "ignored")
    return ids


def to_ours(
    tensors: dict[str, Tensor], config: DraftConfig, layout: Layout, ids: Tensor, embed_head: EmbedHead
) -> dict[str, Tensor]:
    """Rename a published file's tensors; the target's own are left out.

    A draft of all tokens without a head has the target's, as engines lend it; without a bias it has zeros.

    Args:
        ids: the token ids that it proposes, from `find_vocabulary`.
    """
    names, vocabulary = layout.number_names(config), ids if config.vocabulary_size else None
    with torch.device("meta"):
        shapes = {name: tensor.shape for name, tensor in make_draft(config, vocabulary).state_dict().items()}
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
        Checks().tensor(
            tensor.shape == shapes[ours], names.get(ours, ours), tensor, f"it must be floats {[*shapes[ours]]}"
        )
    check_state(state)
    return state


def check_names(tensors: dict[str, Tensor], config: DraftConfig, layout: Layout, checks: Checks) -> DraftConfig:
    """Check that a file has the tensors of a draft and no others; return its config, with switches that only they show.

    Raises:
        ValueError: a tensor is missing.
    """
    for name, switch in SWITCH_OF.items():
        allowed = f"{switch} is not set in config.json"
        if layout.kind == "eagle3" and name in tensors and not config.input_norms:
            checks.tensor(False, name, tensors[name], allowed, f"read with {switch}")
            config = replace(config, **{switch: True})
    names = layout.number_names(config).values()
    lent = {BIAS} if config.vocabulary_size else {BIAS, HEAD}
    maps = {TO_TARGET, TO_DRAFT} if layout.vocabulary == "d2t" else set()
    missing, unknown = {*names} - tensors.keys() - lent, tensors.keys() - {*names} - {EMBEDDING, HEAD} - maps
    for wrong, words, repair in ((missing, "this layout needs it", ""), (unknown, "it has no place here", "ignored")):
        others = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
        allowed = f"{words}{others}: is it of another --input_format?"
        for name in sorted(wrong)[:1]:
            checks.tensor(False, name, tensors.get(name), allowed, repair)
    return config


def sort_layers(draft: Draft) -> Draft:
    """Return a draft that reads its layers in ascending order, as published code does, and computes the same."""
    layers = draft.config.aux_layers
    order = sorted(range(len(layers)), key=layers.__getitem__)
    if order == sorted(order):
        return draft
    state, norms = dict(draft.state), draft.config.input_norms
    for name in ("fc.weight", "scale", *(["fc_norm.0.weight"] if norms == 1 else [])):
        state[name] = state[name].unflatten(-1, (len(order), -1))[..., order, :].flatten(-2)
    for new, old in enumerate(order if norms > 1 else ()):
        state[f"fc_norm.{new}.weight"] = draft.state[f"fc_norm.{old}.weight"]
    config = replace(draft.config, inner_layers=tuple(sorted(layers)))
    return draft._replace(config=config, state=state)


def to_theirs(draft: Draft, layout: Layout, embed_head: EmbedHead) -> dict[str, Tensor]:
    """Make the tensors of a published file.

    The scale of fc's input is multiplied into its weights. Where their dtype cannot hold the products, which it can
    for powers of two, they are in float32, which is exact for weights and a scale of 16 bits.
    """
    config, state, *_ = draft
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


def from_attention_biases(tensors: dict[str, Tensor], checks: Checks) -> dict[str, Tensor]:
    """Undo what `to_theirs` does to fc's bias for code whose fc has none."""
    names = {name: f"layers.0.self_attn.{name}.bias" for name in ("q_proj", "k_proj", "v_proj", "o_proj")}
    if not {*names.values()} <= tensors.keys():
        return tensors
    rest, bias = {name: each for name, each in tensors.items() if name not in names.values()}, tensors[names["o_proj"]]
    for name, bias_name in names.items():
        if name != "o_proj":
            expected = tensors[f"layers.0.self_attn.{name}.weight"].double() @ bias.double()
            near = torch.allclose(
                tensors[bias_name].double(), expected, rtol=1e-2, atol=1e-3 * float(expected.abs().max())
            )
            checks.tensor(
                near,
                bias_name,
                tensors[bias_name],
                "attention of ours has no bias, and fc's does not make it",
                "ignored",
            )
    return rest | {BIAS: bias}


def _hold(exact: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a tensor in its dtype if that holds it, else in float32."""
    rounded = exact.to(dtype)
    return rounded if torch.equal(rounded.double(), exact) else exact.float()
