"""The model card of a draft: what it is, from its config; how to use it; and what records say of it."""

import re
import shlex
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import ModelCardData
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id

from poss_lightning.draft.specialists import DraftConfig, Specialists
from poss_lightning.evaluation.provenance import describe
from poss_lightning.evaluation.records import (
    as_object,
    by_folder,
    check_drafts,
    check_targets,
    find_depths,
    has_auto_trees,
    has_seconds,
    read_sources,
)
from poss_lightning.reports.findings import AUTO
from poss_lightning.reports.summary import MethodSummary, by_method, summarise

MARKS = re.compile(r"([\\`*_\[\]<>&|~$@]|:(?=//)|(?<=www)\.)")  # what means something within a line of Markdown
NESTED = re.compile(r"[\w.-]+(/[\w.-]+){2,}/?")  # a folder in a folder: an id of the hub is OWNER/NAME
PLAIN = "autoregressive"


def write_card(
    draft: Specialists, repo: str, records: Iterable[str | Path] | str | None = None, license: str | None = None
) -> str:
    """The README.md of a draft on the hub.

    Args:
        draft: as it is uploaded.
        repo: where to, OWNER/NAME.
        records: of a benchmark or a replay with this draft, as `read_sources` takes them; None for no figures.
        license: as the hub calls it, e.g. apache-2.0.

    Raises:
        FileNotFoundError, ValueError: as `read_sources` and `summarise`; or the records are of other drafts.
    """
    config = draft.config
    data = ModelCardData(
        library_name="poss_lightning",
        license=license,
        base_model=config.target.name if is_hub_id(config.target.name) else None,
        tags=["speculative-decoding", "draft-model", config.kind],
    )
    parts = [f"---\n{data.to_yaml()}\n---", f"# {plain(repo)}", *_describe(draft), *_usage(config, repo)]
    if records is not None:
        parts += _figures(draft, records)
    return "\n\n".join(parts) + "\n"


def is_hub_id(name: str) -> bool:
    """Whether a target's name may be an OWNER/NAME of the hub; a folder of that name goes before."""
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return name.count("/") == 1 and not name.startswith(".") and not Path(name).exists()


def _is_folder(name: str) -> bool:
    """Whether a target's name is of a folder, here or on the machine that trained: no reader of the card has it."""
    return name.startswith(("/", ".", "~")) or bool(NESTED.fullmatch(name)) or Path(name).exists()


def public_name(config: DraftConfig) -> str:
    """The target's name, of a folder the last part alone."""
    name = config.target.name
    return Path(name).resolve().name if _is_folder(name) else name


def plain(text: str) -> str:
    """The text in one line of Markdown, where none of its characters means anything."""
    return MARKS.sub(r"\\\1", " ".join(text.split()))


def _describe(draft: Specialists) -> list[str]:
    config, facts = draft.config, describe(draft)
    each = "one layer" if config.layers_per_specialist == 1 else f"{config.layers_per_specialist} layers"
    layers = each if len(config.allocation) == 1 else f"{len(config.allocation)} specialists"
    reads = f"outputs of its layers {list(config.layers)}" if config.layers else "its last features"
    rows = {
        "target": plain(public_name(config)),
        "fingerprint of the target": plain(config.target.fingerprint),
        "kind": f"{plain(config.kind)}, reads {reads}",
        "allocation (positions of each specialist)": str(list(config.allocation)),
        "order": "" if config.order is None else str(list(config.order)),
        "layers of each specialist": str(config.layers_per_specialist) if config.layers_per_specialist > 1 else "",
        "keys and values": plain(config.kv),
        "switches": ", ".join(name for name in ("fc_norm", "norm_output") if getattr(config, name)),
        "trained to depth": str(config.depth),
        "vocabulary": f"{config.vocabulary_size or config.target.vocab_size:,} of {config.target.vocab_size:,} tokens",
        "parameters": f"{facts['parameters']:,}",
        "digest of the weights, in float32": facts["weights"],
    }
    return [
        f"A draft for speculative decoding with {plain(public_name(config))}: {layers} for "
        f"{sum(config.allocation)} positions. It proposes tokens and the target verifies them, so what is written "
        "stays the target's. Trained with poss_lightning.",
        _table(("", ""), [(name, value) for name, value in rows.items() if value]),
    ]


def _usage(config: DraftConfig, repo: str) -> list[str]:
    is_folder = _is_folder(config.target.name)
    target = "TARGET" if is_folder else " ".join(config.target.name.split())  # a line end would end the block
    named = f"TARGET is {plain(public_name(config))}, in a folder of yours or on the hub; the fingerprint is compared."
    return [
        "## Use",
        *([named] if is_folder else []),
        f"    poss generate 'Why is the sky blue?' --target {shlex.quote(target)} --draft {shlex.quote(repo)}",
        "In Python:",
        "    from poss_lightning import load\n\n"
        f"    model = load({target!r}, draft={repo!r})\n"
        '    prompt = model.tokenizer("The sky is blue because", return_tensors="pt")\n'
        "    model.generate(prompt.input_ids, max_new_tokens=64)",
        "For vLLM:",
        f"    poss convert {shlex.quote(repo)} served --output_format vllm --target {shlex.quote(target)}",
    ]


def _figures(draft: Specialists, records: Iterable[str | Path] | str) -> list[str]:
    """Tokens a round, and speed where it was measured, with 95 % intervals."""
    sources = read_sources(records)
    runs = by_folder(sources)
    check_targets(runs)
    check_drafts(runs)
    own = _find_own(draft, runs)
    answers = [record for source in sources for record in source.records]
    timed = has_seconds(answers)
    summaries = summarise(by_method(answers), baseline=PLAIN if timed else None, depths=find_depths(runs))
    heads = ["questions", "method", "prompts", "τ over rounds", "τ by prompt", *(["× plain decoding"] if timed else [])]
    rows = [(plain(row.suite), plain(row.method), *_cells(row, timed)) for row in summaries if row.method in own]
    return [
        "## Measured",
        "τ is tokens a round, bonus counted. In brackets stand 95 % intervals for other prompts."
        + (f" {AUTO}" if has_auto_trees(runs) else ""),
        _table(heads, rows),
        *(
            f"Settings of {plain(name)}: {_settings(run, facts)}."
            for run in runs.values()
            for name, facts in _methods(run).items()
            if name in own
        ),
    ]


def _find_own(draft: Specialists, runs: dict[str, dict[str, Any]]) -> set[str]:
    """The methods of the runs that drafted with this draft: those with its weights, in the dtype of the run."""
    others = {name: facts["weights"] for run in runs.values() for name, facts in _methods(run).items()}
    digests = [describe(_cast(draft, dtype))["weights"] for dtype in (torch.float32, torch.bfloat16, torch.float16)]
    own = {name for name, weights in others.items() if weights in digests}
    if not own:
        known = ", ".join(f"{name} {weights}" for name, weights in others.items()) or "no run.json names any"
        raise ValueError(f"the records are of other drafts: weights {known}; those of this draft are {digests[0]}")
    return own


def _cast(draft: Specialists, dtype: torch.dtype) -> Specialists:
    cast = Specialists(draft.config, draft.vocabulary)
    cast.load_state_dict(draft.state_dict())
    return cast.to(dtype)


def _methods(run: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The drafts of a run.json."""
    methods = as_object(run.get("methods"))
    return {name: facts for name, facts in methods.items() if isinstance(facts, dict) and "weights" in facts}


def _cells(row: MethodSummary, timed: bool) -> list[str]:
    values = [row.values[name] for name in ("tau_micro", "tau_macro", *(["speed_up"] if timed else []))]
    return [str(row.prompts), *(value.with_interval() for value in values)]


def _settings(run: dict[str, Any], method: dict[str, Any]) -> str:
    """How a method was measured, and where, in a line."""
    config = as_object(run.get("config"))
    named = [(method, name) for name in ("tree", "depth", "nodes", "tree_width")]
    named += [(config, name) for name in ("temperature", "max_new_tokens", "dtype")]
    named += [(run, name) for name in ("machine", "device", "started", "git")]
    return ", ".join(f"{name} {plain(str(facts[name]))}" for facts, name in named if name in facts)


def _table(heads: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    heads = list(heads)
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
