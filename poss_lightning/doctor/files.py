"""A draft's files as they are: the reading that `poss convert` would take, and what they say beside the target."""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from math import isclose
from typing import Any, NamedTuple

import torch
from torch import Tensor

from poss_lightning.doctor.readings import Reading
from poss_lightning.draft.kinds import load_draft
from poss_lightning.interop import settings
from poss_lightning.interop.convert import parse_published, read_published
from poss_lightning.interop.layouts import EMBEDDING, HEAD, TO_DRAFT, TO_TARGET, find_layout
from poss_lightning.target.fingerprints import same_weights
from poss_lightning.target.model import Target

KEY, LAYERS, SIZES = "config.json: ", "layers of the target", 5
Said = dict[str, Any]
Tensors = dict[str, Tensor]


class ForeignDraft(ValueError):
    """A draft whose sizes are of a different target."""


class Draft(NamedTuple):
    """A draft as it was found."""

    reading: Reading
    said: Said  # its config.json, on one level
    refused: list[str]  # what `poss convert` refuses


def _drop(said: Said, *names: str) -> None:
    for own in (said, *(value for value in said.values() if isinstance(value, dict))):
        for name in names:
            own.pop(name, None)


def _offsets(ids: Tensor) -> Tensor:
    return ids - torch.arange(len(ids))


# What `poss convert` refuses, by how its words begin: what is done instead, with config.json or with the tensors.
# fmt: off
REPAIRS: dict[str, tuple[str, Callable[[Said, Tensors], Any]]] = {
    TO_TARGET: ("read as ids", lambda _, own: own.update({TO_TARGET: _offsets(own[TO_TARGET])})),
    TO_DRAFT: ("ignored", lambda _, own: own.pop(TO_DRAFT)),
    EMBEDDING: ("the target's is read", lambda _, own: own.pop(EMBEDDING)),
    HEAD: ("the target's is read", lambda _, own: own.pop(HEAD)),
    "fc_norm": ("read with fc_norm", lambda said, _: said.update(fc_norm=True)),
    "input_norm": ("read with norm_before_fc", lambda said, _: said.update(norm_before_fc=True)),
    KEY + settings.LAYER_IDS: ("ignored", lambda said, _: _drop(said, settings.LAYER_IDS)),
    KEY + "mask_token_id": ("read as the last", lambda said, _: said.update(mask_token_id=said["vocab_size"] - 1)),
    KEY + "partial_rotary_factor": ("ignored", lambda said, _: _drop(said, "partial_rotary_factor")),
    KEY + "rope_scaling": ("ignored", lambda said, _: _drop(said, "rope_type", "type")),
}
# fmt: on


def load(source: str, input_format: str, allocation: list[int] | None, target: Target) -> Draft:
    """Read a draft of any format as it is; raises ForeignDraft, or the errors of `poss convert`."""
    refused, frozen = [], {}
    if input_format == "ours":
        draft = load_draft(source)
        config, state = draft.config, draft.state_dict()
        said = settings.publish(config, find_layout("vllm", config), state, target.embed_head.tied)
        _check_sizes(said | {LAYERS: config.target.layers}, target)
    else:
        said, tensors, layout, runs = read_published(source, input_format, allocation)
        _check_sizes(said, target)
        read, kept, config = deepcopy(said), dict(tensors), None
        while config is None:
            try:
                config, state = parse_published(read, kept, layout, runs, target)
            except ValueError as error:
                words, repair = next((REPAIRS[each] for each in REPAIRS if str(error).startswith(each)), ("", None))
                if repair is None or f"{error}: {words}" in refused:
                    raise
                refused.append(f"{error}: {words}")
                repair(read, kept)
        frozen = {name: tensors[name] for name in (EMBEDDING, HEAD) if name in tensors and name not in kept}
    if config.vocabulary_size is None:
        state.pop("vocabulary", None)

    def loaded(own: Tensors) -> Tensors:
        return {
            name: each.to(target.device, target.dtype if each.is_floating_point() else None)
            for name, each in own.items()
        }

    sources = config.aux_layers or (target.spec.layers + 1,)
    return Draft(Reading(target, config, loaded(state), loaded(frozen), target.embed_head, sources), said, refused)


def _own(target: Target) -> Said:
    """The target's values of a draft's config.json: first the sizes without which no draft is of this target."""
    spec, rope = target.spec, getattr(target.config, "rope_parameters", None) or {}
    return {
        "hidden_size": spec.hidden_size,
        "vocab_size": spec.vocab_size,
        "num_attention_heads": spec.heads,
        "num_key_value_heads": spec.kv_heads,
        LAYERS: spec.layers,
        "rope_theta": spec.rope_theta,
        "rope_type": rope.get("rope_type", "default"),
        "partial_rotary_factor": rope.get("partial_rotary_factor", 1.0),
        "rms_norm_eps": spec.norm_eps,
        "max_position_embeddings": spec.context,
        "torch_dtype": target.dtype_name,
    }


def _check_sizes(said: Said, target: Target) -> None:
    for name, own in [*_own(target).items()][:SIZES]:
        if said.get(name, own) not in (None, own):
            raise ForeignDraft(f"{name} is {said[name]}, and {target.spec.name} has {own}")


def facts(draft: Draft) -> list[str]:
    """A table of the draft's config beside the target's, and what `poss convert` refuses."""
    config, target = draft.reading.config, draft.reading.target
    said = draft.said | settings.mapping(draft.said, "rope_parameters") | settings.mapping(draft.said, "rope_scaling")
    usual = replace(config, inner_layers=None).aux_layers or "the feature"
    pairs = {name: (said.get(name), own) for name, own in _own(target).items()}
    pairs["template"] = config.target.template, target.spec.template
    theirs, own = config.target.fingerprint, target.spec.fingerprint
    pairs["fingerprint"] = theirs, theirs if same_weights(theirs, own) else own
    pairs |= {"layers, from 1": (config.aux_layers or usual, usual), "allocation": (config.allocation, "")}
    lines = [f"{name:24} {theirs!s:>34} {own!s:>34}  {_verdict(theirs, own)}" for name, (theirs, own) in pairs.items()]
    return [f"{'':24} {'draft':>34} {'target, or usual':>34}", *lines, *draft.refused]


def _verdict(theirs: Any, own: Any) -> str:
    same = theirs == own or (isinstance(theirs, float) and isclose(theirs, own, rel_tol=1e-6))
    return "not said" if theirs is None else "" if own == "" else "ok" if same else "differs"
