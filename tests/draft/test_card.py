"""A draft on the hub: what is uploaded loads, and its card has nothing of this machine; no network."""

import shutil
from dataclasses import replace
from unittest.mock import create_autospec

import pytest
import torch
from huggingface_hub import HfApi, ModelCard, RepoUrl

from poss_lightning.draft import card as cards
from poss_lightning.draft.card import model_card, push_to_hub
from poss_lightning.draft.kinds import load_draft
from poss_lightning.draft.specialists import Specialists
from tests.support.tiny import tiny_draft

REPO = "OWNER/draft"


def for_target(target, name: str) -> Specialists:
    draft = tiny_draft(target, [1, 1], vocabulary=torch.arange(40))
    draft.config = replace(draft.config, target=replace(target.spec, name=name))
    draft.trained_on = frozenset({5, 2**64 - 1})
    return draft


def test_what_is_uploaded_is_the_draft(target, tmp_path, monkeypatch):
    """To a hub that is a folder."""
    hub, api = tmp_path / "hub", create_autospec(HfApi, instance=True)
    api.create_repo.side_effect = lambda repo_id, **_: RepoUrl(f"https://huggingface.co/{repo_id}")
    api.upload_folder.side_effect = lambda folder_path, **_: shutil.copytree(folder_path, hub)
    monkeypatch.setattr(cards, "HfApi", lambda: api)
    draft = for_target(target, "/home/me/models/llama")
    url = push_to_hub(draft, REPO, private=True, license="mit", measured="| τ |\n|---|\n| 3.7 |")
    assert url == f"https://huggingface.co/{REPO}"
    api.create_repo.assert_called_once_with(REPO, private=True, exist_ok=True)
    assert {path.name for path in hub.iterdir()} == {"README.md", "config.json", "model.safetensors"}
    back = load_draft(hub)
    torch.testing.assert_close(back.state_dict(), draft.state_dict(), rtol=0, atol=0)
    assert back.config == replace(draft.config, target=replace(draft.config.target, name="llama"))
    assert back.trained_on == draft.trained_on
    card = ModelCard.load(hub / "README.md")
    assert (card.data.license, card.data.library_name, card.data.base_model) == ("mit", "poss_lightning", None)
    assert "/home/me" not in card.content
    for part in ("TARGET is llama", f"--target TARGET --draft {REPO}", "[1, 1]", "40 of 320 tokens", "| 3.7 |"):
        assert part in card.text


@pytest.mark.parametrize("name", ["/models/llama", "./llama", "~/llama", "models/llama", "llama"])
def test_only_a_hub_id_is_the_base_model(target, tmp_path, monkeypatch, name):
    (tmp_path / "models" / "llama").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    card = model_card(for_target(target, name), REPO)
    assert card.data.base_model is None and "with `llama`" in card.text and "/llama" not in card.content
    card = model_card(for_target(target, "meta-llama/Llama-3.1-8B"), REPO)
    assert card.data.base_model == "meta-llama/Llama-3.1-8B" and "--target meta-llama/Llama-3.1-8B" in card.text
    assert "Measured" not in card.text and "TARGET" not in card.text
