"""A draft on the Hugging Face hub, with its model card."""

import copy
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from huggingface_hub import HfApi, ModelCard, ModelCardData
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id

from poss_lightning.draft.config import SWITCHES
from poss_lightning.draft.specialists import Specialists
from poss_lightning.files import public_name

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


def push_to_hub(
    draft: Specialists, repo_id: str, *, private: bool = False, license: str | None = None, measured: str = ""
) -> str:
    """Upload the draft to the Hugging Face hub with its model card; every command then takes its id as a draft.

    Log in first, with `hf auth login`. An existing repository gets a new commit.

    Args:
        repo_id: OWNER/NAME of the repository.
        private: make a new repository private.
        license, measured: see `model_card`.

    Returns:
        The address of the repository.

    Raises:
        HFValidationError, HfHubHTTPError: no such id, or the hub refuses.
    """
    api, uploaded = HfApi(), copy.copy(draft)
    target = replace(draft.config.target, name=public_target(draft.config.target.name))
    uploaded.config = replace(draft.config, target=target)
    with TemporaryDirectory() as folder:
        uploaded.save_pretrained(folder)
        model_card(draft, repo_id, license, measured).save(Path(folder) / "README.md")
        url = api.create_repo(repo_id, private=private, exist_ok=True)
        api.upload_folder(repo_id=url.repo_id, folder_path=folder, commit_message="Upload draft")
    return str(url)


def model_card(draft: Specialists, repo_id: str, license: str | None = None, measured: str = "") -> ModelCard:
    """Write the card of a draft.

    Args:
        draft: as it is uploaded.
        repo_id: OWNER/NAME of the repository.
        license: as the hub calls it, e.g. apache-2.0.
        measured: Markdown under the heading "Measured", for example a table of `poss compare`.
    """
    config, total = draft.config, draft.config.target.vocab_size
    hub_id = config.target.name if is_hub_id(config.target.name) else None
    read = f"layers {list(config.aux_layers)}" if config.aux_layers else "the last features"
    facts = {
        "fingerprint of the target": config.target.fingerprint,
        "kind": f"{config.kind}, reads {read}",
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
    """Return a target's name as strangers may read it: a hub id, or the last part of a path."""
    return name if is_hub_id(name) else Path(public_name(name)).name
