"""A draft's files as they are: the variant that `poss convert` would take, and what they say beside the target.

A difference need not be a fault.
"""

from collections.abc import Mapping
from dataclasses import replace
from math import isclose
from typing import Any, NamedTuple

from torch import Tensor

from poss_lightning.doctor.variants import Variant
from poss_lightning.draft.config import DraftConfig
from poss_lightning.draft.kinds import load_draft
from poss_lightning.interop.convert import parse_published, read_published
from poss_lightning.interop.layouts import find_layout, refuse
from poss_lightning.interop.problems import ForeignDraft, Problem
from poss_lightning.interop.settings import CONFIG_KEY, SIZES, mapping, publish
from poss_lightning.target_model.fingerprints import same_weights
from poss_lightning.target_model.model import Target

CONTEXT = "max_position_embeddings"
LAYERS, THETA, SCALING, SHARE = "layers, from 1", "rope_theta", "rope_type", "partial_rotary_factor"
EPS, TIED, DTYPE = "rms_norm_eps", "tie_word_embeddings", "torch_dtype"


def load(source: str, input_format: str, allocation: list[int] | None, target: Target) -> Variant:
    """Load a draft of any format as it is; the description is what `poss convert` refuses in it.

    Raises:
        ForeignDraft: its sizes are of a different target.
        ValueError: one of `poss convert`'s.
    """
    problems, unread, names = list[Problem](), dict[str, Tensor](), dict[str, Any]()
    if input_format == "ours":
        refuse((allocation is not None, f"allocation is {allocation}; a draft of ours states its own: leave it out"))
        draft = load_draft(source)
        config, state, spec = draft.config, draft.state_dict(), draft.config.target
        for key, field in SIZES.items():
            if key != "head_dim" and (value := getattr(spec, field)) != (expected := getattr(target.spec, field)):
                raise ForeignDraft(Problem(key, value, f"a draft for {target.spec.name} has {expected}"))
        published = publish(config, find_layout("vllm", config), state, target.embed_head.tied)
        names = {"fingerprint": spec.fingerprint or None, "template": spec.template or None}
    else:
        files = read_published(source, input_format, allocation)
        try:
            config, state, problems, unread = parse_published(files, target)
        except ForeignDraft:
            raise
        except ValueError as error:
            raise ValueError(f"{source} as {input_format}: {error}") from error
        published = files.config
    stated = flatten(published) | names
    for name in ("fingerprint", "template"):
        if (value := stated[name]) and not same_weights(value, ours := getattr(target.spec, name)):
            problems = [*problems, Problem(f"target's {name}", value, f"{target.spec.name} has {ours}", "ignored")]
    state, unread = (
        {
            name: each.to(target.device, target.dtype if each.is_floating_point() else None)
            for name, each in tensors.items()
        }
        for tensors in (state, unread)
    )
    if config.vocabulary_size is None:
        state.pop("vocabulary", None)
    spelt_out: dict[str, Any] = {"rope_theta": config.rope_theta or target.spec.rope_theta, "norm_eps": config.eps}
    spelt_out |= {"mask_token": config.mask_row if config.one_pass else None, "inner_layers": config.aux_layers or None}
    lines = tuple(f"{problem}: {problem.repair}" for problem in problems)
    sources = config.aux_layers or (target.spec.layers + 1,)
    config = replace(config, **spelt_out)
    return Variant(target, config, state, stated, unread, target.embed_head, sources, description=lines)


class Fact(NamedTuple):
    """One thing that a draft's config.json says or leaves out, and what its target says or is usual."""

    name: str
    draft: Any
    target: Any
    verdict: str  # ok, differs, not said

    def __str__(self) -> str:
        return f"{self.name:24} {self.draft!s:>34} {self.target!s:>34}  {self.verdict}"


def flatten(published: Mapping[str, Any]) -> dict[str, Any]:
    """Put a config.json on one level: angles, and the fingerprint and template of the target, where it names them."""
    stated = {**published}
    target = mapping(mapping(stated, CONFIG_KEY), "target")
    named = {name: target.get(name) or None for name in ("fingerprint", "template")}
    return named | stated | mapping(stated, "rope_parameters") | mapping(stated, "rope_scaling")


def compare_facts(stated: Mapping[str, Any], config: DraftConfig, target: Target) -> list[Fact]:
    """Compare a config.json, as `flatten` gives it, with the target; `config` is that of the draft in it."""
    spec, rope = target.spec, getattr(target.config, "rope_parameters", None) or {}
    usual = replace(config, inner_layers=None).aux_layers or "the feature"
    expected = {key: getattr(spec, field) for key, field in SIZES.items() if key != "head_dim"}
    expected |= {THETA: spec.rope_theta, SCALING: rope.get(SCALING, "default"), SHARE: rope.get(SHARE, 1.0)}
    expected |= {EPS: spec.norm_eps, CONTEXT: spec.context, DTYPE: target.dtype_name}
    expected |= {TIED: target.embed_head.tied and not config.own_head}  # SGLang takes it for a draft's own head
    expected |= {"fingerprint": spec.fingerprint, "template": spec.template, LAYERS: usual}
    stated = {**stated, LAYERS: config.aux_layers or usual}
    return [Fact(name, stated.get(name), ours, _verdict(stated.get(name), ours)) for name, ours in expected.items()]


def _verdict(theirs: Any, ours: Any) -> str:
    if theirs is None:
        return "not said"
    both = theirs, ours
    is_close = all(isinstance(each, float) for each in both) and isclose(*both, rel_tol=1e-6)
    is_same = all(isinstance(each, str) for each in both) and same_weights(*both)  # of an older format, half as long
    return "ok" if theirs == ours or is_close or is_same else "differs"
