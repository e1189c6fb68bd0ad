"""A store from an address: copied once, file by file, each checked while it is read."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import fsspec
import pytest

from poss_lightning.features import remote
from poss_lightning.features.manifest import StoreError, verify_files
from poss_lightning.features.store import FeatureStore
from poss_lightning.features.writing import write_store
from tests.support.command import run_in
from tests.support.stores import SIZES, make_conversations

ADDRESS = "memory://bucket/store"


@pytest.fixture(scope="module")
def whole(target, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("remote") / "store"
    write_store(folder, target, make_conversations(), **SIZES)
    return folder


@pytest.fixture
def bucket(whole, tmp_path, monkeypatch):
    """The store in memory, and an empty user cache."""
    monkeypatch.setenv("POSS_CACHE", str(tmp_path / "cache"))
    files = fsspec.filesystem("memory")
    for path in whole.iterdir():
        files.pipe_file(f"/bucket/store/{path.name}", path.read_bytes())
    yield files
    files.rm("/bucket", recursive=True)


@pytest.fixture
def copied(monkeypatch) -> list[str]:
    """Names of the files that are copied from now on."""
    entry, names = remote.FileEntry.of, []
    monkeypatch.setattr(remote.FileEntry, "of", lambda path: names.append(path.name) or entry(path))
    return names


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("scheme", ["memory", "file"])
def test_a_copy_is_the_store(whole, bucket, copied, scheme):
    address = ADDRESS if scheme == "memory" else f"file://{whole}"
    store = FeatureStore(address)
    verify_files(store.folders[0])
    assert contents(store.folders[0]) == contents(whole)
    assert sorted(copied) == sorted(set(contents(whole)) - {"manifest.json"})
    assert store[3].features.equal(FeatureStore(whole)[3].features)


def test_it_is_copied_once_and_anew_when_it_is_another(bucket, copied):
    first = FeatureStore(ADDRESS).folders
    files = len(copied)
    assert FeatureStore(ADDRESS).folders == first and len(copied) == files
    manifest = json.loads(bucket.cat_file("/bucket/store/manifest.json"))
    bucket.pipe_file("/bucket/store/manifest.json", json.dumps(manifest | {"corpus": "another"}).encode())
    assert FeatureStore(ADDRESS).folders != first and len(copied) == 2 * files


def test_a_killed_copy_goes_on_with_the_file_that_is_not_there(whole, bucket, copied, monkeypatch):
    replace, done = remote.atomic, []

    def dying(path):
        if len(done) == 2:
            raise KeyboardInterrupt
        done.append(path)
        return replace(path)

    monkeypatch.setattr(remote, "atomic", dying)
    with pytest.raises(KeyboardInterrupt):
        FeatureStore(ADDRESS)
    monkeypatch.setattr(remote, "atomic", replace)
    begun = copied[:2]
    copied.clear()
    store = FeatureStore(ADDRESS)
    assert not set(begun) & set(copied) and contents(store.folders[0]) == contents(whole)


def test_a_copy_that_was_cut_is_mended(whole, bucket, copied):
    (folder,) = FeatureStore(ADDRESS).folders
    copied.clear()
    (folder / "shard-00001.arrow").write_bytes(b"cut")
    assert contents(FeatureStore(ADDRESS).folders[0]) == contents(whole) and copied == ["shard-00001.arrow"]


def test_several_processes_make_one_copy(bucket, copied, monkeypatch):
    """Threads here: the lock is the operating system's, and holds between open files."""
    cache, together = remote.user_cache(), Barrier(4)
    monkeypatch.setattr(remote, "user_cache", lambda: together.wait(5) >= 0 and cache)  # all at the lock at once
    with ThreadPoolExecutor(4) as threads:
        folders = set(threads.map(remote.local_copy, [ADDRESS] * 4))
    assert len(folders) == 1 and len(copied) == len(set(copied)) > 2


@pytest.mark.parametrize("name", ["ends.safetensors", "shard-00001.arrow"])
def test_a_file_that_arrives_changed_is_named_and_not_kept(bucket, name):
    data = bytearray(bucket.cat_file(f"/bucket/store/{name}"))
    data[len(data) // 2] ^= 1
    bucket.pipe_file(f"/bucket/store/{name}", bytes(data))
    with pytest.raises(StoreError, match=f"^{ADDRESS}/{name} is not as it was written"):
        FeatureStore(ADDRESS)
    assert not list(remote.user_cache().rglob(f"*{name}*"))


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("memory://bucket/nothing", "memory://bucket/nothing/manifest.json: no such file, so there is no finished"),
        ("file:///nowhere/at/all", "file:///nowhere/at/all/manifest.json: no such file"),
        ("carrier-pigeon://me:SECRET@roof", "carrier-pigeon://roof/manifest.json cannot be read: Protocol not known"),
    ],
)
def test_an_address_without_a_store_is_named(bucket, address, words):
    with pytest.raises(StoreError, match=words):
        FeatureStore(address)
    assert not remote.user_cache().exists()


def test_an_address_that_fails_is_named_without_its_password(bucket, monkeypatch):
    def failing(*arguments):
        raise RuntimeError("no credentials in memory://me:SECRET@bucket")

    monkeypatch.setattr(type(bucket), "cat_file", failing)
    with pytest.raises(
        StoreError, match=r"bucket/store/manifest\.json cannot be read: no credentials in memory://bucket$"
    ):
        FeatureStore(ADDRESS)


def test_a_manifest_must_not_write_outside_its_folder(whole, bucket):
    manifest = json.loads((whole / "manifest.json").read_text())
    manifest["shards"][0]["name"] = "../../elsewhere"
    bucket.pipe_file("/bucket/store/manifest.json", json.dumps(manifest).encode())
    with pytest.raises(StoreError, match=f"^{ADDRESS}/manifest.json is not a manifest.*'../../elsewhere'"):
        FeatureStore(ADDRESS)


def test_a_password_in_an_address_is_written_down_nowhere(whole, bucket, inputs, tmp_path, capsys, monkeypatch):
    """Neither in run.json, nor in what is printed; and the same command goes on with what it left."""
    secret = "memory://KEY:SECRET@bucket/store"
    for path in whole.iterdir():
        bucket.pipe_file(f"/KEY:SECRET@bucket/store/{path.name}", path.read_bytes())
    command = ("replay", secret, "out", "--drafts.d", inputs / "draft", "--dtype", "float32", "--device", "cpu")
    results = [
        run_in(tmp_path, *command),
        run_in(tmp_path, *command),
        run_in(tmp_path, "extract", "x", secret, "--verify"),
    ]
    bucket.rm("/KEY:SECRET@bucket", recursive=True)
    monkeypatch.setenv("POSS_CACHE", str(tmp_path / "empty"))
    results.append(run_in(tmp_path, *command))
    assert [result.code for result in results[:3]] == [None, None, None] and "memory://bucket/store" in str(
        results[3].code
    )
    assert "SECRET" not in str(results)
    assert json.loads((tmp_path / "out" / "run.json").read_text())["config"]["store"] == "memory://bucket/store"
    assert not [path for path in (tmp_path / "out").rglob("*") if b"SECRET" in path.read_bytes()]
