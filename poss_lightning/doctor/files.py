"""A draft's files as they are: the reading that `poss convert` would take, and what they say beside the target."""

from dataclasses import replace
from math import isclose
from typing import Any

from poss_lightning.doctor.readings import Reading
from poss_lightning.draft.kinds import load_draft
from poss_lightning.interop import settings
from poss_lightning.interop.convert import parse_published, read_published
from poss_lightning.interop.layouts import find_layout, refuse
from poss_lightning.interop.problems import ForeignDraft
from poss_lightning.target_model.fingerprints import same_weights
from poss_lightning.target_model.model import Target

Said = dict[str, Any]


def load(source: str, input_format: str, allocation: list[int] | None, target: Target) -> tuple[Reading, Said]:
    """Read a draft of any format as it is, and its config.json on one level.

    The words of the reading are what `poss convert` refuses in it.

    Raises:
        ForeignDraft: its sizes are of a different target.
        ValueError: one of `poss convert`'s.
    """
    refused, frozen = list[str](), {}
    if input_format == "ours":
        refuse((allocation is not None, f"allocation is {allocation}; a draft of ours states its own: leave it out"))
        draft = load_draft(source)
        config, state = draft.config, draft.state_dict()
        said = settings.publish(config, find_layout("vllm", config), state, target.embed_head.tied)
        for key, field in settings.SIZES.items():
            if key != "head_dim" and (value := getattr(config.target, field)) != getattr(target.spec, field):
                raise ForeignDraft(f"{key} is {value}, and {target.spec.name} has {getattr(target.spec, field)}")
    else:
        published = read_published(source, input_format, allocation)
        said = published.config
        try:
            config, state, problems, frozen = parse_published(published, target)
        except ForeignDraft:
            raise
        except ValueError as error:
            raise ValueError(f"{source} as {input_format}: {error}") from error
        refused += [f"{problem}: {problem.repair}" for problem in problems]
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
