"""A draft on the hub: what is uploaded loads, and its card has nothing of this machine; no network."""

import shutil
from dataclasses import replace

import pytest
import torch
from huggingface_hub import ModelCard, RepoUrl
from safetensors.torch import load_file

from poss_lightning.draft import specialists
from poss_lightning.draft.card import model_card
from poss_lightning.draft.specialists import Specialists
from tests.support.tiny import tiny_draft

REPO = "OWNER/draft"


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A hub in a folder: each upload is a folder of the repository's name."""

    class Api:
        def create_repo(self, repo_id: str, *, private: bool, exist_ok: bool) -> RepoUrl:
            assert private and exist_ok
            return RepoUrl(f"https://huggingface.co/{repo_id}")

        def upload_folder(self, *, repo_id: str, folder_path: str, commit_message: str) -> None:
            shutil.copytree(folder_path, tmp_path / "hub" / repo_id)

    monkeypatch.setattr(specialists, "HfApi", Api)
    return tmp_path / "hub"


def for_target(target, name: str) -> Specialists:
    draft = tiny_draft(target, [1, 1], vocabulary=torch.arange(40))
    draft.config = replace(draft.config, target=replace(target.spec, name=name))
    draft.trained_on = frozenset({5, 2**32 - 1})
    return draft


def test_what_is_uploaded_is_the_draft(hub, target):
    draft = for_target(target, "/home/me/models/llama")
    url = draft.push_to_hub(REPO, private=True, license="mit", measured="| τ |\n|---|\n| 3.7 |")
    assert url == f"https://huggingface.co/{REPO}"
    assert {path.name for path in (hub / REPO).iterdir()} == {"README.md", "config.json", "model.safetensors"}
    back, state = Specialists.from_pretrained(hub / REPO), draft.state_dict()
    assert all(torch.equal(state[name], value) for name, value in load_file(hub / REPO / "model.safetensors").items())
    assert back.config == replace(draft.config, target=replace(draft.config.target, name="llama"))
    assert back.trained_on == draft.trained_on
    card = ModelCard.load(hub / REPO / "README.md")
    assert (card.data.license, card.data.library_name, card.data.base_model) == ("mit", "poss_lightning", None)
    assert "/home/me" not in card.content and "TARGET is llama" in card.text and "| 3.7 |" in card.text
    assert (
        f"--target TARGET --draft {REPO}" in card.text
        and "| [1, 1] |" in card.text
        and "| 40 of 320 tokens |" in card.text
    )


@pytest.mark.parametrize(
    "name", ["{here}/models/llama", "/models/llama", "./llama", "~/llama", "models/llama", "llama"]
)
def test_only_a_hub_id_is_the_base_model(target, tmp_path, monkeypatch, name):
    (tmp_path / "models" / "llama").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    card = model_card(for_target(target, name.format(here=tmp_path)), REPO)
    assert card.data.base_model is None and "with `llama`" in card.text and str(tmp_path) not in card.content
    card = model_card(for_target(target, "meta-llama/Llama-3.1-8B"), REPO)
    assert card.data.base_model == "meta-llama/Llama-3.1-8B" and "--target meta-llama/Llama-3.1-8B" in card.text
    assert "Measured" not in card.text and "TARGET" not in card.text
