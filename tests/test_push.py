"""`poss push`: what is uploaded is a draft that loads, with a card of its own config and records; no network."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub import ModelCard, RepoUrl
from huggingface_hub.errors import HfHubHTTPError
from markdown_it import MarkdownIt

from poss_lightning.draft.specialists import Specialists
from poss_lightning.evaluation.provenance import describe
from poss_lightning.evaluation.records import read_records
from poss_lightning.push import write_folder
from poss_lightning.reports.card import plain
from poss_lightning.reports.summary import by_method, summarise
from tests.support.command import run_in
from tests.support.tiny import tiny_draft

REPO = "OWNER/draft"
EVIL = "</td>`<script>alert(1)</script> [a](http://b.c) *c* | _d_ # ![e](f) & ~g~ $h$\n# i"


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A hub in a folder: each upload is a folder of the repository's name."""
    place = tmp_path / "hub"

    class Api:
        def create_repo(self, repo_id: str, *, private: bool, exist_ok: bool) -> RepoUrl:
            assert private and exist_ok
            return RepoUrl(f"https://huggingface.co/{repo_id}")

        def upload_folder(self, *, repo_id: str, folder_path: str, commit_message: str) -> None:
            shutil.copytree(folder_path, place / repo_id)

    monkeypatch.setattr(huggingface_hub, "HfApi", Api)
    return place


def rendered(folder: Path) -> str:
    """The card's text as a page would show it."""
    return MarkdownIt("commonmark", {"html": True}).enable("table").render(ModelCard.load(folder / "README.md").text)


def test_what_is_uploaded_loads_and_its_card_says_what_was_measured(hub, inputs, tmp_path):
    options = ("--records", inputs / "records", "--license", "mit", "--private")
    result = run_in(tmp_path, "push", inputs / "draft", REPO, *options)
    assert result.out == f"https://huggingface.co/{REPO}: poss generate … --draft {REPO}\n"
    uploaded = hub / REPO
    assert {path.name for path in uploaded.iterdir()} == {"README.md", "config.json", "model.safetensors"}
    for name in ("config.json", "model.safetensors"):
        assert (uploaded / name).read_bytes() == (inputs / "draft" / name).read_bytes()
    draft = Specialists.from_pretrained(uploaded)
    card = ModelCard.load(uploaded / "README.md")
    assert (card.data.license, card.data.library_name, card.data.base_model) == ("mit", "poss_lightning", None)
    assert card.data.tags == ["speculative-decoding", "draft-model", draft.config.kind]
    own = next(row for row in summarise(by_method(read_records(inputs / "records"))) if row.method == "d")
    assert (
        f"| all | d | {own.prompts} | {own.values['tau_micro'].with_interval()} |" in card.text
        and "× plain decoding" in card.text
    )
    assert "2 specialists for 2 positions" in card.text and "| [1, 1] |" in card.text
    assert f"--draft {REPO}" in card.text and "<table>" in rendered(uploaded)


def test_without_records_no_figures_are_claimed(inputs, tmp_path):
    write_folder(str(inputs / "draft"), REPO, tmp_path)
    assert "Measured" not in ModelCard.load(tmp_path / "README.md").text


def test_names_stay_text(target, inputs, tmp_path):
    """In the page, and in the block of metadata above it."""
    draft = tiny_draft(target, [1, 1])
    draft.config = replace(draft.config, target=replace(target.spec, name=EVIL))
    draft.save_pretrained(tmp_path / "draft")
    shutil.copytree(inputs / "records", tmp_path / "records")
    file = tmp_path / "records" / "records.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    file.write_text("".join(json.dumps(line | {"suite": EVIL + str(line["id"] % 2)}) + "\n" for line in lines))
    (tmp_path / "out").mkdir()
    license = "mit\n---\n<b>"
    write_folder(str(tmp_path / "draft"), REPO, tmp_path / "out", [str(tmp_path / "records")], license)
    page = rendered(tmp_path / "out")
    for tag in ("<script", "<a ", "<em>", "<img", "</td>`", "<h1># i"):
        assert tag not in page
    assert page.count("<h1>") == 1
    shown = " ".join(EVIL.split()).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    assert f"<td>{shown}</td>" in page
    assert ModelCard.load(tmp_path / "out" / "README.md").data.license == license


@pytest.mark.parametrize("name", ["a_b", "a*b*", "www.a.b", "<b>", "a|b", "\\", "`", "http://a.b", "a@b.c"])
def test_a_plain_text_is_rendered_as_it_is(name):
    page = MarkdownIt("commonmark", {"html": True}).enable("table").render(f"x {plain(name)}")
    assert page == f"<p>x {name.replace('<', '&lt;').replace('>', '&gt;')}</p>\n"


@pytest.mark.parametrize(("name", "base"), [("meta-llama/Llama-3.1-8B", True), ("/models/a", False), ("tiny", False)])
def test_a_target_of_the_hub_is_the_base_model(target, tmp_path, name, base):
    draft = tiny_draft(target, [1])
    draft.config = replace(draft.config, target=replace(target.spec, name=name))
    draft.save_pretrained(tmp_path / "draft")
    write_folder(str(tmp_path / "draft"), REPO, tmp_path)
    assert ModelCard.load(tmp_path / "README.md").data.base_model == (name if base else None)


@pytest.mark.parametrize("name", ["{here}/models/llama", "/models/llama", "./llama", "~/llama", "runs/models/llama"])
def test_a_folder_of_the_target_is_not_published(target, tmp_path, name):
    """A reader of the card has no such folder."""
    (tmp_path / "models" / "llama").mkdir(parents=True)
    draft, name = tiny_draft(target, [1]), name.format(here=tmp_path)
    draft.config = replace(draft.config, target=replace(target.spec, name=name))
    draft.save_pretrained(tmp_path / "draft")
    write_folder(str(tmp_path / "draft"), REPO, tmp_path)
    assert Specialists.from_pretrained(tmp_path).config.target == replace(target.spec, name="llama")
    card = (tmp_path / "README.md").read_text(encoding="utf-8")
    assert name not in card and "speculative decoding with llama:" in card and "| target | llama |" in card
    assert "--target TARGET --draft" in card and "load('TARGET', draft=" in card and "TARGET is llama" in card


def test_records_of_a_draft_in_another_dtype_are_its_own(target, inputs, tmp_path):
    """A benchmark in bfloat16 records the digest of weights that were rounded to it."""
    draft = Specialists.from_pretrained(inputs / "draft")
    shutil.copytree(inputs / "records", tmp_path / "records")
    run = json.loads((tmp_path / "records" / "run.json").read_text())
    run["methods"]["d"]["weights"] = describe(draft.bfloat16())["weights"]
    (tmp_path / "records" / "run.json").write_text(json.dumps(run))
    write_folder(str(inputs / "draft"), REPO, tmp_path, [str(tmp_path / "records")])
    assert "## Measured" in (tmp_path / "README.md").read_text()


def test_records_of_two_targets_make_no_card(inputs, tmp_path):
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        shutil.copytree(inputs / "records", folder)
        run = json.loads((folder / "run.json").read_text())
        run["config"]["fingerprint"] = folder.name
        (folder / "run.json").write_text(json.dumps(run))
    with pytest.raises(ValueError, match="was measured on another target"):
        write_folder(str(inputs / "draft"), REPO, tmp_path, [str(folder) for folder in folders])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("{inputs}/draft", "a b"), "repo is 'a b'; it must be OWNER/NAME"),
        (("{inputs}/draft", ""), "repo is ''; it must be OWNER/NAME"),
        (("nowhere", REPO), "draft 'nowhere' is neither a local folder nor a hub id"),
        (("other", REPO, "--records", "{inputs}/records"), "the records are of other drafts: "),
        (("{inputs}/draft", REPO, "--records", "{inputs}/suite.jsonl"), "lacks accepted"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_uploaded(hub, target, inputs, tmp_path, arguments, words):
    tiny_draft(target, [1, 1], seed=1).save_pretrained(tmp_path / "other")
    result = run_in(tmp_path, "push", *(text.replace("{inputs}", str(inputs)) for text in arguments))
    assert result.code.startswith("poss push: ") and words in result.code and "\n" not in result.code
    assert not hub.exists()


def test_what_the_hub_refuses_is_said_in_a_line(hub, inputs, tmp_path, monkeypatch):
    def refuse(*_, **__):
        response = huggingface_hub.errors.HTTPError  # the client's own module, httpx or httpx2
        http = __import__(response.__module__.partition(".")[0])
        request = http.Request("POST", "https://huggingface.co/api/repos/create")
        raise HfHubHTTPError("401 Unauthorized\n\nInvalid user", response=http.Response(401, request=request))

    monkeypatch.setattr(huggingface_hub.HfApi, "create_repo", refuse)
    result = run_in(tmp_path, "push", inputs / "draft", REPO)
    assert result.code.startswith(f"poss push: repo '{REPO}' is not written: 401 Unauthorized; Invalid user")
    assert "hf auth login" in result.code
