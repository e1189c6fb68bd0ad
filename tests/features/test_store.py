"""The feature store: what is damaged is found and named; what is read is what was written."""

import json
import pickle
import shutil
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pytest
import torch

from poss_lightning.corpus.readers import Conversation
from poss_lightning.features.datamodule import FeatureData
from poss_lightning.features.extract import write_store
from poss_lightning.features.manifest import StoreError, verify_files
from poss_lightning.features.schedule import split
from poss_lightning.features.store import FeatureStore
from tests.support.stores import SIZES, make_conversations


@pytest.fixture(scope="module")
def whole(target, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("store") / "store"
    write_store(folder, target, make_conversations(), **SIZES)
    return folder


@pytest.fixture
def folder(whole, tmp_path) -> Path:
    """A copy to damage."""
    return Path(shutil.copytree(whole, tmp_path / "store"))


def flip(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


def test_a_whole_store_verifies(whole):
    verify_files(whole)


@pytest.mark.parametrize("name", ["ends.safetensors", "shard-00000.arrow", "shard-00002.arrow"])
def test_a_flipped_byte_is_found_wherever_it_is_and_the_file_named(folder, name):
    """Schema, offsets, ids, features, the end: all by digest, so that nothing damaged is parsed."""
    size = (folder / name).stat().st_size
    for place in [0, 8, size // 2, size - 1, *np.random.default_rng(0).integers(0, size, 12)]:
        flip(folder / name, place)
        with pytest.raises(StoreError, match=f"{name} was changed since it was written"):
            verify_files(folder)
        flip(folder / name, place)
    verify_files(folder)


def test_a_shard_that_cannot_be_parsed_is_named_on_open(folder):
    path = folder / "shard-00001.arrow"
    path.write_bytes(bytes(path.stat().st_size))
    with pytest.raises(StoreError, match=r"shard-00001\.arrow cannot be read"):
        FeatureStore(folder)


def test_ends_that_cannot_be_parsed_are_named(folder):
    path = folder / "ends.safetensors"
    path.write_bytes(bytes(path.stat().st_size))
    with pytest.raises(StoreError, match=r"ends\.safetensors cannot be read"):
        FeatureStore(folder).embed_head()


@pytest.mark.parametrize("name", ["ends.safetensors", "shard-00001.arrow"])
def test_a_truncated_file_is_found_on_open(folder, name):
    data = (folder / name).read_bytes()
    (folder / name).write_bytes(data[:-1])
    with pytest.raises(StoreError, match=f"{name} has {len(data) - 1} bytes, the manifest says {len(data)}"):
        FeatureStore(folder)


@pytest.mark.parametrize("name", ["ends.safetensors", "shard-00001.arrow"])
def test_a_missing_file_is_found_on_open(folder, name):
    (folder / name).unlink()
    with pytest.raises(StoreError, match=f"{name} is missing"):
        FeatureStore(folder)


def test_no_store_at_all(tmp_path):
    for folder in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(StoreError, match=r"has no manifest\.json \(`poss extract` writes one\)"):
            FeatureStore(folder)


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"target": 3}', "\xff"])
def test_what_is_no_manifest_is_named(folder, text):
    (folder / "manifest.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(StoreError, match=r"manifest\.json is not a manifest"):
        FeatureStore(folder)


def test_a_manifest_of_unknown_fields_is_refused(folder):
    path = folder / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"colour": "red"}))
    with pytest.raises(StoreError, match="colour"):
        FeatureStore(folder)


def test_the_manifest_says_what_the_store_is(whole, target):
    manifest = FeatureStore(whole).manifest
    assert manifest.target == target.spec
    assert (manifest.dtype, manifest.max_length, manifest.samples) == ("float32", 60, 24)


def test_a_store_of_before_there_were_layers_is_read(folder, whole):
    path = folder / "manifest.json"
    stored = json.loads(path.read_text())
    del stored["stored"], stored["layers"]
    path.write_text(json.dumps(stored))
    assert FeatureStore(folder).manifest == FeatureStore(whole).manifest


def test_shards_of_other_columns_are_refused(folder):
    path = folder / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"layers": [1]}))
    with pytest.raises(
        StoreError, match=r"shard-00000\.arrow cannot be read \(its columns are id, conversation, length"
    ):
        FeatureStore(folder)


def test_a_store_is_a_sequence(whole):
    store = FeatureStore(whole)
    assert [sample.id for sample in store] == store.ids and store[-1].id == store.ids[-1]
    assert [len(sample.tokens) for sample in store] == store.lengths.tolist()
    with pytest.raises(IndexError):
        store[len(store)]


def test_spans_are_known_without_reading_samples(whole):
    store = FeatureStore(whole)
    assert [[tuple(span) for span in spans.tolist()] for spans in store.spans] == [sample.spans for sample in store]
    assert max(map(len, store.spans)) == 2  # so the law above has met both kinds


def test_a_store_travels_to_another_process_as_its_folder(whole):
    store = FeatureStore(whole)
    sent = pickle.dumps(store)
    assert len(sent) < 500 and pickle.loads(sent)[5].features.equal(store[5].features)


@pytest.mark.parametrize("change", ["truncated", "written over", "replaced", "removed"])
def test_a_store_that_changes_while_it_is_read_is_noticed(folder, change):
    store, path = FeatureStore(folder), folder / "shard-00001.arrow"
    sent, data = pickle.dumps(store), path.read_bytes()
    if change in ("replaced", "removed"):
        path.unlink()
    if change != "removed":
        path.write_bytes(data[: len(data) // 2] if change == "truncated" else data)
    for read in (lambda: [*store], store.check_unchanged, lambda: pickle.loads(sent)):
        with pytest.raises(StoreError, match=r"shard-00001\.arrow (was changed or removed|is missing|has \d+ bytes)"):
            read()


def test_a_sample_may_be_written_to_and_the_store_stays(whole):
    store = FeatureStore(whole)
    sample = store[2]
    sample.features.zero_(), sample.tokens.zero_()
    assert store[2].features.any() and store[2].tokens.any()
    verify_files(whole)


def test_reading_a_store_writes_nothing(whole):
    before = sorted(path.name for path in whole.iterdir())
    store = FeatureStore(whole)
    store[0], store.common_tokens(3), store.embed_head()
    assert sorted(path.name for path in whole.iterdir()) == before


def test_ends_are_the_targets(whole, target):
    embed_head = FeatureStore(whole).embed_head()
    feature, tokens = torch.randn(3, 32), torch.arange(5)[None]
    torch.testing.assert_close(embed_head.logits(feature), target.embed_head.logits(feature))
    torch.testing.assert_close(embed_head.embed(tokens), target.embed_head.embed(tokens))


def test_common_tokens_are_counted_in_answers_only(whole):
    store = FeatureStore(whole)
    counts = Counter(
        int(token) for i in range(len(store)) for span in store[i].spans for token in store[i].tokens[slice(*span)]
    )
    chosen = store.common_tokens(10).tolist()
    assert chosen == sorted(chosen) and len(set(chosen)) == 10
    assert min(counts[token] for token in chosen) >= max(n for token, n in counts.items() if token not in chosen)


def test_a_vocabulary_size_outside_the_targets_is_refused(whole):
    for size in (0, 321):
        with pytest.raises(ValueError, match=f"vocabulary_size is {size}"):
            FeatureStore(whole).common_tokens(size)


# --- the DataModule over it ---


def make_data(whole: Path, epoch: int = 0, training: bool = True, **changes) -> FeatureData:
    data = FeatureData(str(whole), **{"batch_tokens": 200, "validation": 0.3, **changes})
    data.trainer = SimpleNamespace(
        overfit_batches=0,
        limit_train_batches=1.0,
        training=training,
        current_epoch=epoch,
        global_rank=0,
        world_size=1,
        accumulate_grad_batches=1,
    )
    return data


def test_every_conversation_is_on_one_side_once(whole):
    data = make_data(whole)
    train, held = ([name for batch in loader for name in batch.ids] for loader in loaders(data))
    assert sorted(train + held) == sorted(data.source.ids) and train and held
    assert all(batch.tokens.numel() <= 200 for loader in loaders(data) for batch in loader)


def loaders(data: FeatureData):
    return data.train_dataloader(), data.val_dataloader()


def test_seeds_shuffle_what_is_trained_on_and_nothing_of_what_is_validated(whole):
    """Another seed's first validation batches would be other conversations, and their scores another question's."""
    orders = [[[batch.ids for batch in loader] for loader in loaders(make_data(whole, seed=seed))] for seed in (0, 1)]
    assert orders[0][0] != orders[1][0] and orders[0][1] == orders[1][1]


def test_batches_hold_the_stored_features(whole):
    data = make_data(whole)
    by_name = {sample.id: sample for sample in (data.source[i] for i in range(len(data.source)))}
    for batch in data.train_dataloader():
        for part, name in zip(batch.parts(), batch.ids, strict=True):
            assert batch.tokens[part].equal(by_name[name].tokens)
            assert batch.features[part].equal(by_name[name].features)


def test_a_limit_takes_the_first_of_the_training_side_only(whole):
    data, limited = make_data(whole), make_data(whole, limit=3)
    assert limited.train == data.train[:3] and limited.held_out == data.held_out


def noise(whole: Path, batch, **changes) -> torch.Tensor:
    return make_data(whole, **changes).on_after_batch_transfer(batch, 0).draft_input - batch.features


def test_noise_is_for_training_and_new_in_every_epoch(whole):
    batch = next(iter(make_data(whole).train_dataloader()))
    drawn = noise(whole, batch)
    assert drawn.any() and drawn.equal(noise(whole, batch))
    assert not drawn.equal(noise(whole, batch, epoch=1)) and not drawn.equal(noise(whole, batch, seed=1))
    assert not noise(whole, batch, training=False).any() and not noise(whole, batch, noise=0.0).any()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"batch_tokens": 0}, "batch_tokens is 0"),
        ({"noise": -0.1}, r"noise is -0\.1"),
        ({"limit": 0}, "limit is 0"),
        ({"validation": 1.0}, r"validation is 1\.0"),
    ],
)
def test_numbers_that_cannot_be(whole, change, words):
    with pytest.raises(ValueError, match=words):
        make_data(whole, **change)


# --- the same conversation twice ---


def test_the_same_conversation_under_other_ids_is_on_one_side(tmp_path, target, caplog):
    talks = make_conversations()
    copies = [Conversation(f"again-{talk.id}", talk.messages) for talk in talks]
    write_store(tmp_path / "store", target, [*talks, *copies], **SIZES)
    assert f"{len(talks)} conversations are there more than once" in caplog.text
    store = FeatureStore(tmp_path / "store")
    assert len(store.ids) == 2 * len(set(store.origins))
    train, held_out = (
        {store.ids[i].removeprefix("again-") for i in side} for side in split(store.origins, 0.3, seed=0)
    )
    assert train and held_out and not train & held_out


def test_a_store_without_digests_of_conversations_knows_them_by_their_tokens(whole, tmp_path):
    """As the first stores are."""
    shutil.copytree(whole, tmp_path / "old")
    for path in (tmp_path / "old").glob("*.arrow"):
        table = pa.ipc.open_stream(str(path)).read_all().drop_columns(["conversation"])
        with pa.ipc.new_stream(f"{path}.new", table.schema) as writer:
            writer.write_table(table)
        Path(f"{path}.new").replace(path)
    manifest = json.loads((tmp_path / "old" / "manifest.json").read_text())
    for entry in manifest["shards"]:
        entry["bytes"] = (tmp_path / "old" / entry["name"]).stat().st_size
    (tmp_path / "old" / "manifest.json").write_text(json.dumps(manifest))
    old = FeatureStore(tmp_path / "old")
    texts = [tuple(sample.tokens.tolist()) for sample in old]
    assert old.ids == FeatureStore(whole).ids
    assert old.origins == [old.ids[texts.index(text)] for text in texts]
