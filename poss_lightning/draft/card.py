"""The model card of a draft on the Hugging Face hub."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from huggingface_hub import ModelCard, ModelCardData
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id

from poss_lightning.draft.config import SWITCHES
from poss_lightning.files import public_name

if TYPE_CHECKING:
    from poss_lightning.draft.specialists import Specialists

TEMPLATE = """---
{{ card_data }}
---

# {{ repo_id }}

A draft for speculative decoding with `{{ target }}`: it proposes tokens and the target verifies them, so the text stays
the target's own. Trained with poss_lightning.

| | |
|---|---|
{% for name, value in facts.items() if value %}| {{ name }} | {{ value }} |
{% endfor %}
## Use

    poss generate "Why is the sky blue?" --target {{ address }} --draft {{ repo_id }}
    poss convert {{ repo_id }} served --output_format vllm --target {{ address }}
{% if address == "TARGET" %}
TARGET is {{ target }}, in a folder of yours or on the hub; its fingerprint is compared.
{% endif %}{% if measured %}
## Measured

{{ measured }}
{% endif %}"""


def model_card(draft: Specialists, repo_id: str, license: str | None = None, measured: str = "") -> ModelCard:
    """The card of a draft.

    Args:
        draft: as it is uploaded.
        repo_id: OWNER/NAME of the repository.
        license: as the hub calls it, e.g. apache-2.0.
        measured: Markdown under the heading "Measured", for example a table of `poss compare`.
    """
    config, total = draft.config, draft.config.target.vocab_size
    hub_id = config.target.name if is_hub_id(config.target.name) else None
    facts = {
        "fingerprint of the target": config.target.fingerprint,
        "kind": f"{config.kind}, reads {f'layers {list(config.layers)}' if config.layers else 'the last features'}",
        "positions of each specialist": list(config.allocation),
        "layers": config.layer_count,
        "keys and values": config.kv,
        "switches": ", ".join(name for name in SWITCHES if getattr(config, name)),
        "trained to depth": config.depth,
        "vocabulary": f"{config.vocabulary_size or total:,} of {total:,} tokens",
        "parameters": f"{sum(parameter.numel() for parameter in draft.parameters()):,}",
    }
    data = ModelCardData(
        library_name="poss_lightning",
        license=license,
        base_model=hub_id,
        tags=["speculative-decoding", "draft-model", config.kind],
    )
    fields = {"target": public_target(config.target.name), "address": hub_id or "TARGET", "facts": facts}
    return ModelCard.from_template(data, template_str=TEMPLATE, repo_id=repo_id, measured=measured, **fields)


def is_hub_id(name: str) -> bool:
    """Whether a target's name may be an OWNER/NAME of the hub; a local folder takes precedence."""
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return name.count("/") == 1 and not name.startswith((".", "~")) and not Path(name).exists()


def public_target(name: str) -> str:
    """A target's name as strangers may read it: a hub id, or the last part of a path."""
    return name if is_hub_id(name) else Path(public_name(name)).name
