"""Writing that is never half done, and why a download failed."""

import errno
import hashlib
import os
import re
from pathlib import Path

import huggingface_hub
import pytest
import torch
from safetensors.torch import save_file

from poss_lightning import files
from poss_lightning.files import (
    atomic,
    atomic_folder,
    fetch,
    public_name,
    read_json,
    sha256,
    without_secrets,
)
from poss_lightning.work import Work


def names(folder) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_file_appears_only_when_it_is_whole(tmp_path):
    path = tmp_path / "new" / "file"
    with atomic(path) as temporary:
        temporary.write_text("whole")
        assert temporary.parent.parent == path.parent and not path.exists()
    assert path.read_text() == "whole" and names(path.parent) == ["file"]


def test_a_failure_leaves_the_old_file_and_nothing_temporary(tmp_path):
    path = tmp_path / "file"
    path.write_text("old")
    with pytest.raises(RuntimeError), atomic(path) as temporary:
        temporary.write_text("half")
        raise RuntimeError
    assert path.read_text() == "old" and names(tmp_path) == ["file"]


def test_a_failure_before_anything_is_written(tmp_path):
    with pytest.raises(RuntimeError), atomic(tmp_path / "file"):
        raise RuntimeError
    assert names(tmp_path) == []


@pytest.mark.parametrize("write", [atomic, atomic_folder])
def test_what_a_killed_process_left_is_removed_by_the_next(tmp_path, monkeypatch, write):
    """And what lives is not, whose lock is held: of this process here, of another machine or container as well."""
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt), write(tmp_path / "first"):
        patch.setattr(files, "_remove", lambda folder: None)
        raise KeyboardInterrupt
    left = names(tmp_path)
    assert len(left) == 1
    with write(tmp_path / "second"):
        assert len(names(tmp_path)) == 1 and names(tmp_path) != left
        with atomic(tmp_path / "third"):
            assert len(names(tmp_path)) == 2
    assert names(tmp_path) == ["second", "third"]


def test_a_folder_that_another_removed_before_its_lock_was_held_is_made_anew(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "mkdtemp", lambda **options: str(tmp_path / f"{files.PREFIX}gone.tmp"))
    with atomic(tmp_path / "file") as path:
        path.write_text("whole")
    assert names(tmp_path) == ["file"]


@pytest.mark.parametrize("mask", [0o022, 0o077, 0o002])
def test_every_file_has_the_user_s_umask(tmp_path, mask):
    before = os.umask(mask)
    try:
        with atomic(tmp_path / "file") as path:
            save_file({"x": torch.ones(2)}, path)  # which leaves a file that only its user may read
        with atomic_folder(tmp_path / "folder") as folder:
            (folder / "inner").mkdir()
            save_file({"x": torch.ones(2)}, folder / "inner" / "file")
    finally:
        os.umask(before)
    for path in (tmp_path / "file", tmp_path / "folder" / "inner" / "file"):
        assert path.stat().st_mode & 0o777 == 0o666 & ~mask
    assert (tmp_path / "folder").stat().st_mode & 0o777 == 0o777 & ~mask


def test_what_was_written_is_on_disk_before_it_has_its_name(tmp_path, monkeypatch):
    """Else a power cut leaves the name of an empty file."""
    seen, sync, replace, rename = [], os.fsync, os.replace, Path.rename
    monkeypatch.setattr(os, "fsync", lambda number: seen.append(os.readlink(f"/proc/self/fd/{number}")) or sync(number))
    monkeypatch.setattr(os, "replace", lambda *paths: seen.append("renamed") or replace(*paths))
    monkeypatch.setattr(Path, "rename", lambda *paths: seen.append("renamed") or rename(*paths))
    with atomic(tmp_path / "file") as file:
        file.write_text("x")
    assert seen == [str(file), "renamed", str(tmp_path)]
    seen.clear()
    with atomic_folder(tmp_path / "folder") as folder:
        (folder / "file").write_text("x")
    assert seen == [str(folder / "file"), str(folder), "renamed", str(tmp_path)]


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "no space"), RuntimeError("unexpected pos 2304 vs 2198")])
def test_a_full_disk_is_named_whatever_the_writer_says(tmp_path, monkeypatch, error):
    def refuse(self, *args, **options):
        raise OSError(errno.ENOSPC, "no space")

    with pytest.raises(OSError, match=rf"No space left on device: '{tmp_path}/file'"), atomic(tmp_path / "file"):
        monkeypatch.setattr(Path, "open", refuse)
        raise error
    assert names(tmp_path) == []


def test_another_error_of_a_writer_stays_what_it_is(tmp_path):
    for error in (RuntimeError("odd"), OSError(errno.EACCES, "not yours")):
        with pytest.raises(type(error)) as caught, atomic(tmp_path / "file"):
            raise error
        assert caught.value is error
    assert names(tmp_path) == []


def test_of_two_that_began_at_once_the_first_to_end_has_the_folder(tmp_path):
    path = tmp_path / "folder"
    with pytest.raises(FileExistsError, match="is there already"), atomic_folder(path):
        path.mkdir()
        (path / "file").write_text("theirs")
    assert names(tmp_path) == ["folder"] and (path / "file").read_text() == "theirs"


def test_of_two_writers_of_a_file_the_last_has_it(tmp_path):
    path = tmp_path / "file"
    with atomic(path) as ours:
        ours.write_text("ours")
        with atomic(path) as theirs:
            theirs.write_text("theirs")
        assert path.read_text() == "theirs"
    assert path.read_text() == "ours" and names(tmp_path) == ["file"]


def test_work_removes_its_own_files_alone(tmp_path):
    """Nor does it begin in a folder that somebody else has made."""
    work = Work(tmp_path / "unfinished")
    with work.part("first") as mine:
        assert mine
        work.write_receipt("first", {"a": 1})
    work.claim({"size": 1})
    (work.folder / "thesis.txt").write_text("mine")
    (work.folder / "first.json").write_text("mine")
    work.clear()
    assert names(work.folder) == ["first.json", "thesis.txt"]
    for use in (lambda: work.claim({}), lambda: work.exclusive().__enter__()):
        with pytest.raises(ValueError, match=r"unfinished has files of others, and .* needs that name"):
            use()
    work.clear()
    assert names(work.folder) == ["first.json", "thesis.txt"]


def test_work_that_was_half_cleared_is_still_refused_to_other_settings(tmp_path, monkeypatch):
    work = Work(tmp_path / "unfinished")
    work.claim({"size": 1})
    work.write_receipt("first", 1)
    unlink, removed = Path.unlink, []
    monkeypatch.setattr(Path, "unlink", lambda path, **options: removed.append(path.name) or unlink(path, **options))
    work.clear()
    assert removed == ["first.part.json", "settings.json", "work.lock"] and not work.folder.exists()


def test_sha256(tmp_path):
    (tmp_path / "file").write_bytes(b"abc")
    assert sha256(tmp_path / "file") == hashlib.sha256(b"abc").hexdigest()


def test_why_the_hub_refused_is_said_in_one_line(monkeypatch):
    class Gated(OSError):
        pass

    def refuse(*args, **options):
        raise Gated("401 Client Error.\n\nAccess is restricted.")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    with pytest.raises(FileNotFoundError) as caught:
        fetch("a/draft", "draft", ["*"], ", nor a friend's")
    assert str(caught.value) == (
        "draft 'a/draft' is neither a local folder nor a hub id that can be reached (Gated: 401 Client Error.), "
        "nor a friend's"
    )


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"{oops", "is not JSON: Expecting property name"),
        ("{'größe'}".encode("latin-1"), "is not JSON: 'utf-8' codec can't decode"),
        (b"[]", "is a list; it must be a JSON object"),
        (b"", "is not JSON: Expecting value"),
    ],
)
def test_a_file_that_is_no_json_object_is_named(tmp_path, content, words):
    (tmp_path / "run.json").write_bytes(content)
    with pytest.raises(ValueError, match=re.escape(f"{tmp_path}/run.json {words}")):
        read_json(tmp_path / "run.json")


def test_a_json_object_is_read_with_a_mark_of_its_encoding_too(tmp_path):
    for mark in (b"", b"\xef\xbb\xbf"):
        (tmp_path / "a.json").write_bytes(mark + '{"größe": 1}'.encode())
        assert read_json(tmp_path / "a.json") == {"größe": 1}


@pytest.mark.parametrize(
    ("address", "public"),
    [
        ("s3://KEY:SECRET@bucket/a/store", "s3://bucket/a/store"),
        ("s3://KEY:SEC/RE@T@bucket/store", "s3://bucket/store"),
        ("sftp://me@host:22/store", "sftp://host:22/store"),
        ("https://host:8080/a?sig=SECRET#x", "https://host:8080/a"),
        ("simplecache::ftp://me:SECRET@host/a", "simplecache::ftp://host/a"),
        ("hf://datasets/owner/name@main/store", "hf://datasets/owner/name@main/store"),
        ("file:///home/SECRET/store", "store"),
        ("/home/SECRET/store/", "store"),
        ("~/SECRET/store", "store"),
        ("../SECRET/store", "store"),
        (r"C:\Users\SECRET\store", "store"),
        (r"\\SECRET\share\store", "store"),
        ("..", "folder"),
        ("~", "folder"),
        ("runs/./store", "runs/store"),
        (Path.cwd() / "runs" / "store", "runs/store"),
        ("owner/name", "owner/name"),
    ],
)
def test_what_is_written_down_of_an_address_has_no_secret_and_no_home(address, public):
    assert public_name(address) == public


def test_an_error_s_text_keeps_no_secret():
    text = "'s3://KEY:SECRET@b/x' cannot be reached: https://me:SECRET@h/y?token=SECRET; see https://h/docs"
    assert without_secrets(text) == "'s3://b/x' cannot be reached: https://h/y see https://h/docs"
