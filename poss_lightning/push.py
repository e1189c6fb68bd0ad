"""`poss push`: a draft and its model card to the hub, where every command finds it by its id."""

import shutil
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from poss_lightning.draft.config import check_draft
from poss_lightning.draft.specialists import CONFIG, WEIGHTS, Specialists, find_draft
from poss_lightning.reports.card import public_name, write_card

CARD = "README.md"


def push(
    draft: str,
    repo: str,
    records: list[str] | str | None = None,
    private: bool = False,
    license: str | None = None,
) -> None:
    """Upload a draft to the Hugging Face hub, with a model card made from its config and its records.

    Log in first, with `hf auth login`. A repository that is there already gets a new commit.

    Args:
        draft: folder, or a shipped draft.
        repo: where to, OWNER/NAME; commands then take this as a draft.
        records: of a benchmark or replay of this draft, for the figures of the card: files or folders.
        private: make a new repository private.
        license: as the hub calls it, e.g. apache-2.0; for the card.

    Raises:
        FileNotFoundError: no such draft or records.
        ValueError: `repo` is no id of the hub, or the records are of other drafts.
        ConnectionError: the hub cannot be reached.
        OSError: it refuses; the message has its reason.
    """
    from huggingface_hub import HfApi  # `poss --help` need not wait for it
    from huggingface_hub.errors import (
        HfHubHTTPError,
        HFValidationError,
        HTTPError,  # pyright: ignore[reportPrivateImportUsage]
    )
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(repo)
    except HFValidationError as error:
        raise ValueError(f"repo is {repo!r}; it must be OWNER/NAME, of letters, digits, '-', '_' and '.'") from error
    with TemporaryDirectory() as place:
        write_folder(draft, repo, Path(place), records, license)
        api = HfApi()
        try:
            url = api.create_repo(repo, private=private, exist_ok=True)
            api.upload_folder(repo_id=url.repo_id, folder_path=place, commit_message=f"Upload {CONFIG} and {WEIGHTS}")
        except HfHubHTTPError as error:
            raise PermissionError(f"repo {repo!r} is not written: {error} (hf auth login tells who you are)") from error
        except HTTPError as error:
            raise ConnectionError(f"repo {repo!r}: the hub cannot be reached ({error})") from error
    print(f"{url}: poss generate … --draft {url.repo_id}")


def write_folder(
    draft: str, repo: str, folder: Path, records: list[str] | str | None = None, license: str | None = None
) -> None:
    """Write what is uploaded: the draft's weights as they are, its config without a path of here, and its card.

    Args and errors are those of `push`.
    """
    check_draft(draft)
    source = find_draft(draft)
    read = Specialists.from_pretrained(source)
    card = write_card(read, repo, records, license)
    shutil.copyfile(source / WEIGHTS, folder / WEIGHTS)
    public = replace(read.config, target=replace(read.config.target, name=public_name(read.config)))
    (folder / CONFIG).write_text(public.to_json())
    (folder / CARD).write_text(card, encoding="utf-8")
