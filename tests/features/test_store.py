"""The feature store: damage is found and named; what is read is what was written."""

import json
import pickle
import shutil
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch

from poss_lightning.corpus.readers import Conversation
from poss_lightning.draft.kinds import load_draft
from poss_lightning.features.datamodule import FeatureDataModule
from poss_lightning.features.manifest import StoreError, verify_files
from poss_lightning.features.source import first_of_each
from poss_lightning.features.store import FeatureStore
from poss_lightning.features.writing import write_store
from tests.support.command import run_in
from tests.support.stores import SIZES, make_conversations
from tests.support.tiny import tiny_target
from tests.support.tolerance import close


@pytest.fixture
def folder(finished, tmp_path) -> Path:
    """A copy to damage."""
    return Path(shutil.copytree(finished, tmp_path / "store"))


def test_opening_names_a_missing_a_truncated_and_an_unreadable_shard(folder):
    path = folder / "shard-00001.arrow"
    size = path.stat().st_size
    for data, words in (
        (bytes(size), "cannot be read"),
        (bytes(size - 1), f"has {size - 1} bytes, the manifest says {size}"),
        (None, "is missing"),
    ):
        path.unlink()
        if data is not None:
            path.write_bytes(data)
        with pytest.raises(StoreError, match=f"shard-00001.arrow {words}"):
            FeatureStore(folder)


def test_a_manifest_that_is_malformed_or_of_other_columns_is_refused(folder):
    path, malformed = folder / "manifest.json", r"manifest\.json is not a manifest this version reads: "
    fields = json.loads(path.read_text())
    for changed, words in (
        ({"stored": "int3"}, malformed),
        ({"colour": "red"}, malformed),
        ({"layers": [1]}, r"shard-00000\.arrow cannot be read \(its columns are id, conversation, len"),
    ):
        path.write_text(json.dumps(fields | changed))
        with pytest.raises(StoreError, match=words):
            FeatureStore(folder)


@pytest.mark.parametrize(("name", "kind", "last"), [("tokens", np.int32, -1), ("features", np.int64, 2**30)])
def test_a_wrong_offset_is_refused(folder, name, kind, last):
    """Following one that leads beyond the file would end the process by SIGBUS."""
    path = folder / "shard-00001.arrow"
    data = bytearray(path.read_bytes())
    column = pa.ipc.open_stream(bytes(data)).read_all()[name].chunk(0)
    offsets = np.frombuffer(column.buffers()[1], kind)[: len(column) + 1].copy()
    place = data.find(offsets.tobytes())
    offsets[-1] = last
    data[place : place + offsets.nbytes] = offsets.tobytes()
    path.write_bytes(data)
    with pytest.raises(StoreError, match=r"shard-00001\.arrow cannot be read"):
        FeatureStore(folder)


def test_an_unreadable_embedding_is_named(folder):
    path = folder / "ends.safetensors"
    path.write_bytes(bytes(path.stat().st_size))
    with pytest.raises(StoreError, match=r"ends\.safetensors cannot be read"):
        FeatureStore(folder).embed_head()


# --- several as one ---


@pytest.fixture(scope="module")
def two(target, tmp_path_factory) -> list[str]:
    """Stores of different conversations, except four that are in both under other ids."""
    folder, (first, second) = tmp_path_factory.mktemp("two"), (make_conversations(12, seed) for seed in (0, 1))
    again = [Conversation(f"again-{chat.id}", chat.messages) for chat in first[:4]]
    write_store(folder / "a", target, first, **SIZES)
    write_store(folder / "b", target, [Conversation(f"b{chat.id}", chat.messages) for chat in second] + again, **SIZES)
    return [str(folder / "a"), str(folder / "b")]


def test_several_stores_are_one_with_all_their_samples(two):
    both, own = FeatureStore(two), [FeatureStore(folder) for folder in two]
    assert both.ids == own[0].ids + own[1].ids and both.lengths.tolist() == [*own[0].lengths, *own[1].lengths]
    assert both[len(own[0])].features.equal(own[1][0].features) and both[-1].tokens.equal(own[1][-1].tokens)
    assert both.embed_head().head.equal(own[0].embed_head().head)
    sent = pickle.dumps(both)  # as its folders
    assert len(sent) < 1000 and pickle.loads(sent)[20].features.equal(both[20].features)


def test_a_training_takes_several_stores(two, tmp_path):
    """On the command line as [a,b]; the draft then knows the texts of both."""
    stores, sizes = f"--data.store=[{','.join(two)}]", ("--model.allocation=[1]", "--data.validation=0.3")
    short = ("accelerator=cpu", "precision=32-true", "max_steps=1", "logger=false")
    assert run_in(tmp_path, "fit", stores, *sizes, *(f"--trainer.{option}" for option in short)).code is None
    trained_on = load_draft(tmp_path / "draft-last").trained_on
    own = FeatureStore(two[1])
    assert any(own.digest(i) in trained_on for i in range(len(own)) if own.ids[i].startswith("b"))


def test_stores_that_do_not_belong_together_are_refused(two, tmp_path):
    conversations = make_conversations(6)
    write_store(tmp_path / "other", tiny_target(1), conversations, **SIZES)
    write_store(tmp_path / "float8", tiny_target(0), conversations, **SIZES, stored="float8")
    for stores, words in (
        ([*two, tmp_path / "other"], "other and .* are of different targets: fingerprint"),
        ([*two, tmp_path / "float8"], "differ in stored: float8 and exact"),
        ([*two, tmp_path / "nowhere"], "nowhere is not a finished feature store"),
        ([], "store is"),
    ):
        with pytest.raises(StoreError, match=words):
            FeatureStore(stores)


def test_duplicates_of_a_conversation_are_on_one_side_of_the_split(two, caplog):
    """Whichever store is named first."""
    sides = []
    for stores in (two, two[::-1]):
        data = FeatureDataModule(stores, validation=0.5)
        texts = [tuple(sample.tokens.tolist()) for sample in data.source]
        train, held = ({texts[i] for i in side} for side in (data.train, data.held_out))
        assert not train & held and len(train | held) == len(texts) - 4
        sides.append(sorted(train))
    assert sides[0] == sides[1]
    assert "4 of 28 texts appear more than once" in caplog.text


def test_conversations_that_share_a_text_with_a_third_are_one():
    assert first_of_each(["d", "c", "b", "a"], ["1", "2", "2", ""], ["x", "x", "y", "z"]) == ["b", "b", "b", "a"]
    assert first_of_each(["d", "c"], ["", ""], ["x", "y"]) == ["d", "c"]


# --- what a store says of its samples ---


def test_the_root_mean_square_is_that_of_all_features(finished):
    store = FeatureStore(finished)
    expected = torch.cat([sample.features for sample in store]).double().square().mean(0).sqrt()
    assert close(store.root_mean_square(), expected, terms=int(store.lengths.sum()))


def test_writing_to_a_sample_leaves_the_store_unchanged(finished):
    store = FeatureStore(finished)
    sample = store[2]
    sample.features.zero_(), sample.tokens.zero_()
    assert store[2].features.any() and store[2].tokens.any()
    verify_files(finished)


def test_common_tokens_are_counted_in_answers_only(finished):
    store = FeatureStore(finished)
    counts = Counter(torch.cat([sample.tokens[slice(*span)] for sample in store for span in sample.spans]).tolist())
    expected = sorted(counts, key=lambda token: (-counts[token], token))[:10]
    assert store.common_tokens(10).tolist() == sorted(expected)
