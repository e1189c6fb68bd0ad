"""Files that are written completely or not at all, work that resumes, and names that strangers may read."""

import errno
import os
import re
from pathlib import Path
from unittest.mock import Mock

import huggingface_hub
import pytest
import torch
from safetensors.torch import save_file

from poss_lightning import files
from poss_lightning.files import atomic, atomic_folder, fetch, public_name
from poss_lightning.work import Work


def test_a_file_appears_only_when_it_is_complete(tmp_path):
    path = tmp_path / "new" / "file"
    with atomic(path) as temporary:
        temporary.write_text("complete")
        assert temporary.parent == path.parent and not path.exists()
    for error in (RuntimeError("odd"), OSError(errno.EACCES, "not yours")):
        with pytest.raises(type(error)) as caught, atomic(path) as temporary:
            temporary.write_text("half")
            raise error
        assert caught.value is error
    assert path.read_text() == "complete" and os.listdir(path.parent) == ["file"]


@pytest.mark.parametrize("write", [atomic, atomic_folder])
def test_a_killed_process_leaves_one_temporary_name_that_hinders_nobody(tmp_path, monkeypatch, write):
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt), write(tmp_path / "first"):
        patch.setattr(files, "_discard", lambda temporary: None)
        raise KeyboardInterrupt
    (left,) = os.listdir(tmp_path)
    assert re.fullmatch(r"\.poss\.\w{8}\.first\.tmp", left)
    files.check_folder(tmp_path)  # as if it were empty
    with write(tmp_path / "first") as temporary:
        assert temporary.name != left
    assert sorted(os.listdir(tmp_path)) == sorted([left, "first"])


def test_every_file_has_the_user_s_umask(tmp_path):
    before = os.umask(mask := 0o027)
    try:
        with atomic(tmp_path / "file") as path:
            save_file({"x": torch.ones(2)}, path)  # leaves a file that only its user may read
        with atomic_folder(tmp_path / "folder") as folder:
            (folder / "inner").mkdir()
            save_file({"x": torch.ones(2)}, folder / "inner" / "file")
    finally:
        os.umask(before)
    for path in (tmp_path / "file", tmp_path / "folder" / "inner" / "file"):
        assert path.stat().st_mode & 0o777 == 0o666 & ~mask
    assert (tmp_path / "folder").stat().st_mode & 0o777 == 0o777 & ~mask


def test_content_is_on_disk_before_the_file_has_its_name(tmp_path, monkeypatch):
    """Otherwise a power cut leaves the name of an empty file."""
    events, sync, replace, rename = [], os.fsync, os.replace, Path.rename
    monkeypatch.setattr(os, "fsync", lambda file: events.append(os.readlink(f"/proc/self/fd/{file}")) or sync(file))
    monkeypatch.setattr(os, "replace", lambda *paths: events.append("renamed") or replace(*paths))
    monkeypatch.setattr(Path, "rename", lambda *paths: events.append("renamed") or rename(*paths))
    with atomic(tmp_path / "file") as file:
        file.write_text("x")
    assert events == [str(file), "renamed", str(tmp_path)]
    events.clear()
    with atomic_folder(tmp_path / "folder") as folder:
        (folder / "file").write_text("x")
    assert events == [str(folder / "file"), str(folder), "renamed", str(tmp_path)]


def test_a_full_disk_is_named_whatever_the_writer_raises(tmp_path, monkeypatch):
    with pytest.raises(OSError, match=rf"No space left on device: '{tmp_path}/file'"), atomic(tmp_path / "file"):
        monkeypatch.setattr(Path, "open", Mock(side_effect=OSError(errno.ENOSPC, "no space")))
        raise RuntimeError("unexpected pos 2304 vs 2198")
    assert os.listdir(tmp_path) == []


def test_a_folder_of_another_user_is_named_before_any_work(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda place, mode: place != tmp_path)
    with pytest.raises(PermissionError, match=rf"^{tmp_path}/a/b cannot be written: {tmp_path} is not yours to write"):
        files.check_new(tmp_path / "a" / "b")


def test_of_two_writers_the_first_has_the_folder_and_the_last_the_file(tmp_path):
    folder, file = tmp_path / "folder", tmp_path / "file"
    with pytest.raises(FileExistsError, match="already exists"), atomic_folder(folder):
        folder.mkdir()
        (folder / "file").write_text("theirs")
    assert (folder / "file").read_text() == "theirs"
    with atomic(file) as ours:
        ours.write_text("ours")
        with atomic(file) as theirs:
            theirs.write_text("theirs")
        assert file.read_text() == "theirs"
    assert file.read_text() == "ours" and sorted(os.listdir(tmp_path)) == ["file", "folder"]


def test_work_removes_its_own_files_alone(tmp_path):
    """What a kill left of one, too. And it does not begin in a folder that somebody else has made."""
    work = Work(tmp_path / "unfinished", {"size": 1})
    with work.exclusive(), work.part("first") as mine:
        assert mine
        work.write_receipt("first", {"a": 1})
    for half in ("first.part.json", "settings.json"):
        (work.folder / f".poss.12345678.{half}.tmp").touch()
    (work.folder / "thesis.txt").write_text("mine")
    (work.folder / "first.json").write_text("mine")
    work.clear()
    assert sorted(os.listdir(work.folder)) == ["first.json", "thesis.txt"]
    with pytest.raises(ValueError, match=r"unfinished has unknown files, and .* needs that name"), work.exclusive():
        pass
    work.clear()
    assert sorted(os.listdir(work.folder)) == ["first.json", "thesis.txt"]


def test_half_cleared_work_still_refuses_different_settings(tmp_path, monkeypatch):
    work = Work(tmp_path / "unfinished", {"size": 1})
    with work.exclusive():
        work.write_receipt("first", 1)
    unlink, removed = Path.unlink, []
    monkeypatch.setattr(Path, "unlink", lambda path, **options: removed.append(path.name) or unlink(path, **options))
    work.clear()
    assert removed == ["first.part.json", "settings.json", "work.lock"] and not work.folder.exists()


def test_the_hub_s_reason_is_given_in_one_line(monkeypatch):
    refuse = Mock(side_effect=OSError("401 Client Error.\n\nAccess is restricted."))
    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    words = r"^draft 'a/draft' is neither .* hub id .* \(OSError: 401 Client Error\.\), nor a friend's$"
    with pytest.raises(FileNotFoundError, match=words):
        fetch("a/draft", "draft", ["*"], ", nor a friend's")


def test_a_public_name_has_no_home(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {"runs/./store": "runs/store", tmp_path / "runs": "runs", "/home/SECRET/store/": "store", "a/b": "a/b"}
    assert {public_name(path) for path in names} == set(names.values())
