"""What a draft's config.json says beside its target. A difference need not be a fault."""

from collections.abc import Mapping
from dataclasses import replace
from math import isclose
from typing import Any, NamedTuple

from poss_lightning.draft.config import DraftConfig
from poss_lightning.interop.settings import CONFIG_KEY, SIZES, mapping
from poss_lightning.target_model.fingerprints import same_weights
from poss_lightning.target_model.model import Target

CONTEXT = "max_position_embeddings"
LAYERS, THETA, SCALING, SHARE = "layers, from 1", "rope_theta", "rope_type", "partial_rotary_factor"
EPS, TIED, DTYPE = "rms_norm_eps", "tie_word_embeddings", "torch_dtype"


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
