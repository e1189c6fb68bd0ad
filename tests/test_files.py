"""Writing that is never half done, and why a download failed."""

import errno
import hashlib
import os
import re
from pathlib import Path

import huggingface_hub
import pytest

from poss_lightning import files
from poss_lightning.files import (
    Hashed,
    atomic,
    atomic_folder,
    fetch,
    public_name,
    read_json,
    sha256,
    temporary_path,
    without_secrets,
)


def names(folder) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_file_appears_only_when_it_is_whole(tmp_path):
    path = tmp_path / "new" / "file"
    with atomic(path) as temporary:
        temporary.write_text("whole")
        assert temporary.parent == path.parent and not path.exists()
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


def test_what_a_killed_process_left_is_overwritten(tmp_path):
    with pytest.raises(RuntimeError), atomic(tmp_path / "file") as temporary:
        raise RuntimeError
    temporary.write_text("half")
    with atomic(tmp_path / "file") as temporary:
        temporary.write_text("whole")
    assert names(tmp_path) == ["file"] and (tmp_path / "file").read_text() == "whole"


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


def test_two_processes_do_not_write_one_folder(tmp_path):
    path = tmp_path / "folder"
    theirs = temporary_path(path, os.getppid())
    theirs.mkdir()
    with pytest.raises(ValueError, match="folder: another process writes there"), atomic_folder(path):
        raise AssertionError
    theirs.rename(temporary_path(path, 2**30))  # no process has that number: it was killed
    with atomic_folder(path) as ours:
        (ours / "file").write_text("ours")
    assert names(tmp_path) == ["folder"] and names(path) == ["file"]


def test_of_two_that_began_at_once_the_first_to_end_has_the_folder(tmp_path):
    path = tmp_path / "folder"
    with pytest.raises(FileExistsError, match="is there already"), atomic_folder(path):
        path.mkdir()
        (path / "file").write_text("theirs")
    assert names(tmp_path) == ["folder"] and (path / "file").read_text() == "theirs"


def test_machines_that_cannot_lock_each_other_out_write_beside_each_other(tmp_path, monkeypatch):
    path = tmp_path / "file"
    with atomic(path) as ours:
        ours.write_text("ours")
        monkeypatch.setattr(files, "HOST", "another")
        with atomic(path) as theirs:
            theirs.write_text("theirs")
        assert path.read_text() == "theirs"
    assert path.read_text() == "ours" and names(tmp_path) == ["file"]


def test_sha256(tmp_path):
    (tmp_path / "file").write_bytes(b"abc")
    assert sha256(tmp_path / "file") == hashlib.sha256(b"abc").hexdigest()


def test_a_digest_known_while_writing_is_that_of_the_file(tmp_path):
    pieces = [b"", b"abc", memoryview(os.urandom(100_000)), bytearray(b"d")]
    with Hashed(tmp_path / "file") as file:
        for piece in pieces:
            assert file.write(piece) == len(piece)
        assert file.tell() == sum(map(len, pieces))
        known = file.sha256()
    assert known == sha256(tmp_path / "file") and (tmp_path / "file").read_bytes() == b"".join(pieces)


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
