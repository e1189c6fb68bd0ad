"""A store from an address: copied once, file by file, each checked on arrival."""

import json
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import fsspec
import pytest

from poss_lightning.features import remote
from poss_lightning.features.manifest import StoreError
from poss_lightning.features.store import FeatureStore
from tests.support.command import run_in
from tests.support.stores import contents, dies_after

ADDRESS, MANIFEST = "memory://bucket/store", "/bucket/store/manifest.json"


@pytest.fixture
def bucket(finished, tmp_path, monkeypatch):
    """The store in memory, and an empty user cache."""
    monkeypatch.setenv("POSS_CACHE", str(tmp_path / "cache"))
    files = fsspec.filesystem("memory")
    for path in finished.iterdir():
        files.pipe_file(f"/bucket/store/{path.name}", path.read_bytes())
    yield files
    files.rm("/bucket", recursive=True)


@pytest.fixture
def copied(monkeypatch) -> list[str]:
    """Names of the files that are copied from now on."""
    entry, names = remote.FileEntry.of, []
    monkeypatch.setattr(remote.FileEntry, "of", lambda path, name: names.append(name) or entry(path, name))
    return names


def test_a_copy_is_the_store_made_once_and_again_when_that_changes(finished, bucket, copied):
    """The digest of its manifest names the copy, from wherever it comes."""
    (folder,) = FeatureStore(ADDRESS).folders
    files = sorted(set(contents(finished)) - {"manifest.json"})
    assert contents(folder) == contents(finished) and sorted(copied) == files
    assert FeatureStore([ADDRESS, f"file://{finished}"]).folders == [folder] * 2 and len(copied) == len(files)
    manifest = json.loads(bucket.cat_file(MANIFEST))
    bucket.pipe_file(MANIFEST, json.dumps(manifest | {"corpus": "another"}).encode())
    assert FeatureStore(ADDRESS).folders != [folder] and len(copied) == 2 * len(files)


def test_a_killed_copy_resumes_with_the_missing_file_and_a_truncated_one_is_repaired(finished, bucket, copied):
    with dies_after(remote, "atomic", 2):
        FeatureStore(ADDRESS)
    (folder,) = FeatureStore(ADDRESS).folders
    assert len(copied) == len(set(copied)) > 2 and contents(folder) == contents(finished)
    copied.clear()
    (folder / "shard-00001.arrow").write_bytes(b"cut")
    assert contents(FeatureStore(ADDRESS).folders[0]) == contents(finished) and copied == ["shard-00001.arrow"]


def test_several_processes_make_one_copy(bucket, copied, monkeypatch):
    """Threads here: the lock is the operating system's, and holds between open files."""
    cache, together = remote.user_cache(), Barrier(4)
    monkeypatch.setattr(remote, "user_cache", lambda: together.wait(5) >= 0 and cache)  # all at the lock at once
    with ThreadPoolExecutor(4) as threads:
        folders = set(threads.map(remote.local_copy, [ADDRESS] * 4))
    assert len(folders) == 1 and len(copied) == len(set(copied)) > 2


def test_a_file_that_arrives_changed_is_named_and_not_kept(bucket):
    data = bytearray(bucket.cat_file("/bucket/store/shard-00001.arrow"))
    data[len(data) // 2] ^= 1
    bucket.pipe_file("/bucket/store/shard-00001.arrow", bytes(data))
    with pytest.raises(StoreError, match=f"^{ADDRESS}/shard-00001.arrow arrived changed"):
        FeatureStore(ADDRESS)
    assert not list(remote.user_cache().rglob("*shard-00001.arrow*"))


def test_an_address_without_a_store_is_named_without_its_password(bucket, monkeypatch):
    def failing(*arguments):
        raise RuntimeError("no credentials in memory://me:SECRET@bucket")

    address, name = "memory://me:SECRET@bucket/nothing", "memory://bucket/nothing/manifest.json"
    with pytest.raises(StoreError, match=f"^{name}: no such file, so there is no finished feature store"):
        FeatureStore(address)
    monkeypatch.setattr(type(bucket), "cat_file", failing)
    with pytest.raises(StoreError, match=f"^{name} cannot be read: no credentials in memory://bucket$"):
        FeatureStore(address)
    assert not remote.user_cache().exists()


def test_a_password_in_an_address_is_written_down_nowhere(finished, bucket, inputs, tmp_path, monkeypatch):
    """Neither in run.json, nor in what is printed; and the same command resumes."""
    secret = "memory://KEY:SECRET@bucket/store"
    for path in finished.iterdir():
        bucket.pipe_file(f"/KEY:SECRET@bucket/store/{path.name}", path.read_bytes())
    command = ("replay", secret, "out", "--drafts.d", inputs / "draft", "--dtype", "float32", "--device", "cpu")
    results = [run_in(tmp_path, *given) for given in (command, command, ("extract", "x", secret, "--verify"))]
    assert [result.code for result in results] == [None] * 3
    bucket.rm("/KEY:SECRET@bucket", recursive=True)
    monkeypatch.setenv("POSS_CACHE", str(tmp_path / "empty"))
    results.append(run_in(tmp_path, *command))
    assert "memory://bucket/store" in str(results[3].code) and "SECRET" not in str(results)
    assert json.loads((tmp_path / "out" / "run.json").read_text())["config"]["store"] == "memory://bucket/store"
    assert not [path for path in (tmp_path / "out").rglob("*") if b"SECRET" in path.read_bytes()]
