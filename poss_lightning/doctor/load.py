"""A draft's files as they are: the variant that `poss convert` would take."""

from dataclasses import replace
from typing import Any

from torch import Tensor

from poss_lightning.doctor.variants import Variant
from poss_lightning.draft.kinds import load_draft
from poss_lightning.interop.convert import parse_published, read_published
from poss_lightning.interop.facts import flatten
from poss_lightning.interop.layouts import find_layout, refuse
from poss_lightning.interop.problems import ForeignDraft, Problem
from poss_lightning.interop.settings import SIZES, publish
from poss_lightning.target_model.fingerprints import same_weights
from poss_lightning.target_model.model import Target


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
