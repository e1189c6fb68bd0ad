"""A draft's files as they are: the reading that `poss convert` would take, and what they say beside the target."""

from copy import deepcopy
from dataclasses import replace
from math import isclose
from typing import Any

import torch
from torch import Tensor

from poss_lightning.doctor.readings import Reading
from poss_lightning.draft.kinds import load_draft
from poss_lightning.interop import settings
from poss_lightning.interop.convert import parse_published, read_published
from poss_lightning.interop.layouts import EMBEDDING, HEAD, TO_DRAFT, TO_TARGET, find_layout, refuse
from poss_lightning.target.fingerprints import same_weights
from poss_lightning.target.model import Target

SIZES = "hidden_size", "vocab_size", "num_target_layers"  # those of a draft are its target's
HEADS = "num_attention_heads", "num_key_value_heads"  # so are those of ours
LAYERS = settings.LAYER_IDS, "target_layer_ids"  # keys that number the target's layers
SWITCH_OF = {"fc_norm.0.weight": "fc_norm", "input_norm.weight": "norm_before_fc"}  # by the tensor that needs it
Said = dict[str, Any]
Tensors = dict[str, Tensor]


class ForeignDraft(ValueError):
    """A draft whose sizes are of a different target."""


def _repair(name: str, said: Said, own: Tensors, target: Target) -> str | None:
    """Change what `poss convert` refuses, a key or a tensor by its name, and say how it is read; None if unknown."""
    if name == TO_TARGET and own.keys() & {TO_TARGET, TO_DRAFT}:
        is_lost = name not in own
        ids = own[TO_DRAFT].nonzero()[:, 0] if is_lost else own[name].long().flatten()
        own[name] = ids - torch.arange(len(ids))
        return f"ids are those of {TO_DRAFT}" if is_lost else "read as ids"
    if name in own and name in SWITCH_OF:
        said["eagle_config"] = settings.mapping(said, "eagle_config") | {SWITCH_OF[name]: True}
        return f"read with {SWITCH_OF[name]}"
    if own.pop(name, None) is not None:
        return "ignored"
    found, names = [], {"rope_scaling": ("rope_type", "type"), "it": LAYERS}.get(name, (name,))  # "it fuses layers …"
    for level in (said, *(value for value in said.values() if isinstance(value, dict))):
        for key in level.keys() & {*names}:
            ids, level[key] = level[key], None
            if name == "it":
                level[key] = sorted(ids or [])
            elif key in LAYERS and isinstance(ids, list) and all(type(i) is int for i in ids):
                first = int(key == settings.LAYER_IDS and level is said)  # from 0 for from 1, or the other way
                inside = {*range(first, target.spec.layers - 1 + first)}
                level[key] = next((each for n in (-1, 1) if inside.issuperset(each := [i + n for i in ids])), None)
            found.append(f"read as {level[key]}" if level[key] else "ignored")
    return found[0] if found else None


def load(source: str, input_format: str, allocation: list[int] | None, target: Target) -> tuple[Reading, Said]:
    """Read a draft of any format as it is, and its config.json on one level.

    The words of the reading are what `poss convert` refuses in it.

    Raises:
        ForeignDraft: its sizes are of a different target.
        ValueError: one of `poss convert`'s.
    """
    refused, frozen = [], {}
    if input_format == "ours":
        refuse((allocation is not None, f"allocation is {allocation}; a draft of ours states its own: leave it out"))
        draft = load_draft(source)
        config, state = draft.config, draft.state_dict()
        said = settings.publish(config, find_layout("vllm", config), state, target.embed_head.tied)
        _check_sizes(said | {SIZES[-1]: config.target.layers}, target, *HEADS)
    else:
        said, tensors, layout, runs = read_published(source, input_format, allocation)
        _check_sizes(said, target)
        read, kept, config, errors = deepcopy(said), dict(tensors), None, dict[str, ValueError]()
        while config is None:
            try:
                config, state = parse_published(read, kept, layout, runs, target)
            except ValueError as error:
                name = str(error).removeprefix("config.json: ").split()[0]  # errors begin with it
                first, words = errors.setdefault(name, error), _repair(name, read, kept, target)
                if words is None or first is not error:
                    raise ValueError(f"{source} as {input_format}: {first}") from error
                refused.append(f"{error}: {words}")
        frozen = {name: tensors[name] for name in (EMBEDDING, HEAD, TO_DRAFT) if name in tensors and name not in kept}
    if not same_weights(config.target.fingerprint, target.spec.fingerprint):
        refused.append(f"its config.json has the fingerprint of other weights than those of {target.spec.name}")
    if config.target.template not in ("", target.spec.template):
        refused.append(f"its config.json has the digest of another chat template than that of {target.spec.name}")
    if config.vocabulary_size is None:
        state.pop("vocabulary", None)
    state, frozen = (
        {name: each.to(target.device, target.dtype if each.is_floating_point() else None) for name, each in own.items()}
        for own in (state, frozen)
    )
    theta, mask = config.rope_theta or target.spec.rope_theta, config.mask_row if config.one_pass else None
    stated = {"rope_theta": theta, "norm_eps": config.eps, "mask_token": mask}
    config = replace(config, **stated, inner_layers=config.aux_layers or None)
    sources = config.aux_layers or (target.spec.layers + 1,)
    return Reading(target, config, state, frozen, target.embed_head, sources, words=tuple(refused)), said


def _check_sizes(said: Said, target: Target, *others: str) -> None:
    own = _own(target)
    for name in (*SIZES, *others):
        if said.get(name) not in (None, own[name]):
            raise ForeignDraft(f"{name} is {said[name]}, and {target.spec.name} has {own[name]}")


def _own(target: Target) -> Said:
    """The target's values of a draft's config.json."""
    spec, rope = target.spec, getattr(target.config, "rope_parameters", None) or {}
    return {
        "hidden_size": spec.hidden_size,
        "vocab_size": spec.vocab_size,
        "num_target_layers": spec.layers,
        "num_attention_heads": spec.heads,
        "num_key_value_heads": spec.kv_heads,
        "rope_theta": spec.rope_theta,
        "rope_type": rope.get("rope_type", "default"),
        "partial_rotary_factor": rope.get("partial_rotary_factor", 1.0),
        "rms_norm_eps": spec.norm_eps,
        "max_position_embeddings": spec.context,
        "torch_dtype": target.dtype_name,
    }


def facts(reading: Reading, said: Said) -> list[str]:
    """Tabulate a draft's config.json beside the target's."""
    config, target = reading.config, reading.target
    said = said | settings.mapping(said, "rope_parameters") | settings.mapping(said, "rope_scaling")
    usual = replace(config, inner_layers=None).aux_layers or "the feature"
    theirs, own = config.target.fingerprint, target.spec.fingerprint
    pairs = {name: (said.get(name), own) for name, own in _own(target).items()} | {
        "fingerprint": (theirs, theirs if same_weights(theirs, own) else own),
        "template": (config.target.template, target.spec.template),
        "layers, from 1": (config.aux_layers or usual, usual),
        "allocation": (config.allocation, ""),
    }
    lines = [f"{name:24} {theirs!s:>34} {own!s:>34}  {_verdict(theirs, own)}" for name, (theirs, own) in pairs.items()]
    return [f"{'':24} {'draft':>34} {'target, or usual':>34}", *lines]


def _verdict(theirs: Any, own: Any) -> str:
    same = theirs == own or (isinstance(theirs, float) and isclose(theirs, own, rel_tol=1e-6))
    return "not said" if theirs is None else "" if own == "" else "ok" if same else "differs"
