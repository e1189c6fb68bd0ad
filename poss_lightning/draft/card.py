"""A draft on the Hugging Face hub: what its model card says, and whose id is written there."""

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
        repo_id: where to, OWNER/NAME.
        license: as the hub calls it, e.g. apache-2.0.
        measured: Markdown under the heading "Measured", a table of `poss compare` for example.
    """
    config, target = draft.config, public_target(draft.config.target.name)
    hub_id = target if is_hub_id(config.target.name) else None
    data = ModelCardData(
        library_name="poss_lightning",
        license=license,
        base_model=hub_id,
        tags=["speculative-decoding", "draft-model", config.kind],
    )
    total = config.target.vocab_size
    facts = {
        "fingerprint of the target": config.target.fingerprint,
        "kind": f"{config.kind}, reads {f'layers {list(config.layers)}' if config.layers else 'the last features'}",
        "positions of each specialist": str(list(config.allocation)),
        "layers": str(config.layer_count),
        "keys and values": config.kv,
        "switches": ", ".join(name for name in SWITCHES if getattr(config, name)),
        "trained to depth": str(config.depth),
        "vocabulary": f"{config.vocabulary_size or total:,} of {total:,} tokens",
        "parameters": f"{sum(parameter.numel() for parameter in draft.parameters()):,}",
    }
    fields = {"target": target, "address": hub_id or "TARGET", "facts": facts, "measured": measured}
    return ModelCard.from_template(data, template_str=TEMPLATE, repo_id=repo_id, **fields)


def is_hub_id(name: str) -> bool:
    """Whether a target's name may be an OWNER/NAME of the hub; a folder of that name goes before."""
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return name.count("/") == 1 and not name.startswith((".", "~")) and not Path(name).exists()


def public_target(name: str) -> str:
    """A target's name as strangers may read it: a hub id, or of a path the last part."""
    return name if is_hub_id(name) else Path(public_name(name)).name
