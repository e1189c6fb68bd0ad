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
import yaml
from safetensors.torch import load_file, save_file

from poss_lightning.corpus.readers import Conversation
from poss_lightning.draft.specialists import Specialists
from poss_lightning.extract import extract
from poss_lightning.features.datamodule import FeatureData
from poss_lightning.features.manifest import StoreError, verify_files
from poss_lightning.features.schedule import stable_number
from poss_lightning.features.store import FeatureStore
from poss_lightning.features.texts import first_of_each
from poss_lightning.features.writing import write_store
from poss_lightning.files import sha256
from tests.support.command import run_in
from tests.support.stores import SIZES, make_conversations
from tests.support.tiny import tiny_target


@pytest.fixture
def folder(finished, tmp_path) -> Path:
    """A copy to damage."""
    return Path(shutil.copytree(finished, tmp_path / "store"))


def edit_manifest(folder: Path, change) -> None:
    """Change the fields of a manifest."""
    path = folder / "manifest.json"
    fields = json.loads(path.read_text())
    change(fields)
    path.write_text(json.dumps(fields))


@pytest.mark.parametrize("name", ["ends.safetensors", "shard-00002.arrow"])
def test_verify_names_the_file_with_a_flipped_byte(folder, name):
    """Schema, offsets, ids, features, the end: all by digest, so that nothing damaged is parsed."""
    data = (folder / name).read_bytes()
    for place in (0, 8, len(data) // 2, len(data) - 1):
        changed = bytearray(data)
        changed[place] ^= 1
        (folder / name).write_bytes(changed)
        with pytest.raises(StoreError, match=f"{name} was changed since it was written"):
            verify_files(folder)
    (folder / name).write_bytes(data)
    verify_files(folder)


def test_opening_names_a_shard_that_cannot_be_parsed(folder):
    path = folder / "shard-00001.arrow"
    path.write_bytes(bytes(path.stat().st_size))
    with pytest.raises(StoreError, match=r"shard-00001\.arrow cannot be read"):
        FeatureStore(folder)


@pytest.mark.parametrize("name", ["ends.safetensors", "shard-00001.arrow"])
def test_opening_names_a_truncated_or_missing_file(folder, name):
    data = (folder / name).read_bytes()
    (folder / name).write_bytes(data[:-1])
    with pytest.raises(StoreError, match=f"{name} has {len(data) - 1} bytes, the manifest says {len(data)}"):
        FeatureStore(folder)
    (folder / name).unlink()
    with pytest.raises(StoreError, match=f"{name} is missing"):
        FeatureStore(folder)


@pytest.mark.parametrize(
    "text",
    ["{", '{"target": 3}', *({field: "int3"} for field in ("dtype", "stored", "colour"))],
    ids=str,
)
def test_a_malformed_manifest_is_refused(folder, text):
    path = folder / "manifest.json"
    text = text if isinstance(text, str) else json.dumps(json.loads(path.read_text()) | text)
    path.write_text(text)
    with pytest.raises(StoreError, match=r"manifest\.json is not a manifest this version reads: .*"):
        FeatureStore(folder)


def test_shards_with_other_columns_are_refused(folder):
    edit_manifest(folder, lambda fields: fields.update(layers=[1]))
    with pytest.raises(StoreError, match=r"shard-00000\.arrow cannot be read \(its columns are id, conversation, len"):
        FeatureStore(folder)


def rewrite(folder: Path, change, shard: int = 1) -> None:
    """Change the table of a shard, and put its new size and digest into the manifest, as if it had been so."""
    path = folder / f"shard-{shard:05d}.arrow"
    with path.open("rb") as file:
        table = change(pa.ipc.open_stream(file.read()).read_all().combine_chunks())
    with pa.ipc.new_stream(path, table.schema) as writer:
        writer.write_table(table)
    entry = {"bytes": path.stat().st_size, "sha256": sha256(path)}
    edit_manifest(folder, lambda fields: fields["shards"][shard].update(entry))


def put(table: pa.Table, name: str, change) -> pa.Table:
    """The table with other values in a column."""
    values = change(table[name].to_pylist())
    return table.set_column(table.column_names.index(name), name, pa.array(values, table.schema.field(name).type))


DAMAGE = {
    "cut between samples": lambda table: table.slice(0, table.num_rows - 1),
    "a length": lambda table: put(table, "length", lambda lengths: [lengths[0] + 1, *lengths[1:]]),
    "a text without tokens": lambda table: put(table, "tokens", lambda texts: [[], *texts[1:]]),
    "a token beyond": lambda table: put(table, "tokens", lambda texts: [[320, *texts[0][1:]], *texts[1:]]),
    "a token below": lambda table: put(table, "greedy", lambda texts: [[-2, *texts[0][1:]], *texts[1:]]),
    "features of another": lambda table: put(table, "features", lambda blobs: [blobs[0][:-4], *blobs[1:]]),
    "null features": lambda table: put(table, "features", lambda blobs: [None, *blobs[1:]]),
    "spans beyond": lambda table: put(table, "spans", lambda spans: [[0, 61], *spans[1:]]),
    "half a span": lambda table: put(table, "spans", lambda spans: [spans[0][:1], *spans[1:]]),
    "a repeated id": lambda table: put(table, "id", lambda ids: [ids[1], *ids[1:]]),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_inconsistent_samples_are_refused_though_every_digest_is_right(folder, damage):
    """By opening and by `poss extract --verify true`."""
    rewrite(folder, damage)
    verify_files(folder)
    for use in (lambda: FeatureStore(folder), lambda: extract("", str(folder), verify=True)):
        with pytest.raises(StoreError, match=str(folder)):
            use()


@pytest.mark.parametrize(("name", "kind"), [("tokens", np.int32), ("features", np.int64)])
@pytest.mark.parametrize("last", [2**30, -1])
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


def test_a_repeated_shard_is_refused(folder):
    """Also where the manifest counts its samples twice."""
    shutil.copyfile(folder / "shard-00000.arrow", folder / "shard-00001.arrow")
    with (folder / "shard-00000.arrow").open("rb") as file:
        lengths = pa.ipc.open_stream(file.read()).read_all()["length"].to_pylist()
    for counts in ({}, {"samples": 2 * len(lengths), "tokens": 2 * sum(lengths)}):
        first = json.loads((folder / "manifest.json").read_text())["shards"][0]
        shards = [first, first | {"name": "shard-00001.arrow"}]
        edit_manifest(folder, lambda fields, new={"shards": shards} | counts: fields.update(new))
        with pytest.raises(StoreError, match=r"samples of \d+ ids" if counts else r"samples, its manifest says \d+"):
            FeatureStore(folder)


@pytest.mark.parametrize("change", ["int8", "narrow", "nameless"])
def test_an_embedding_of_another_kind_is_refused(folder, change):
    path = folder / "ends.safetensors"
    state = load_file(path)
    state = {
        "int8": {name: value.to(torch.int8) for name, value in state.items()},
        "narrow": {name: value[:, :5].clone() for name, value in state.items()},
        "nameless": {"head": state["head"]},
    }[change]
    save_file(state, path)
    edit_manifest(folder, lambda fields: fields["ends"].update(bytes=path.stat().st_size))
    with pytest.raises(StoreError, match=r"ends\.safetensors (has|cannot be read)"):
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


@pytest.mark.parametrize("count", [pytest.param(1, marks=pytest.mark.nightly), 2])
def test_a_training_takes_one_store_or_several(two, tmp_path, count):
    """On the command line as [a,b]; the draft then knows the texts of both."""
    stores = two[:count]
    given = f"[{','.join(stores)}]" if count > 1 else stores[0]
    trainer = {"max_steps": 1, "logger": False, "accelerator": "cpu", "precision": "32-true"}
    options = [f"--trainer.{name}={value}" for name, value in {**trainer, "enable_progress_bar": False}.items()]
    result = run_in(tmp_path, "fit", "--data.store", given, "--model.allocation=[1]", "--data.validation=0.3", *options)
    assert result.code is None
    config = yaml.safe_load((tmp_path / "config.yaml").read_text())
    assert config["data"]["store"] == (stores if count > 1 else stores[0])
    trained_on = Specialists.from_pretrained(tmp_path / "draft-last").trained_on
    own = FeatureStore(two[1])
    assert any(own.digest(i) in trained_on for i in range(len(own)) if own.ids[i].startswith("b")) is (count > 1)


def test_stores_that_do_not_belong_together_are_refused(two, tmp_path):
    conversations = make_conversations(6)
    write_store(tmp_path / "other", tiny_target(1), conversations, **SIZES)
    write_store(tmp_path / "float8", tiny_target(0), conversations, **SIZES, stored="float8")
    for stores, words in (
        ([*two, tmp_path / "other"], "other and .* are of different targets: fingerprint"),
        ([*two, tmp_path / "float8"], "differ in stored: float8 and exact"),
        ([*two, tmp_path / "nowhere"], r"has no manifest\.json \(`poss extract` writes one\)"),
        ([], "store is"),
    ):
        with pytest.raises(StoreError, match=words):
            FeatureStore(stores)


def test_duplicates_of_a_conversation_are_on_one_side_of_the_split(two, caplog):
    """Whichever store is named first."""
    sides = {}
    for stores in (two, two[::-1]):
        data = FeatureData(stores, validation=0.5)
        texts = [tuple(sample.tokens.tolist()) for sample in data.source]
        train, held = ({texts[i] for i in side} for side in (data.train, data.held_out))
        assert not train & held and len(train | held) == len(texts) - 4
        sides[stores[0]] = train, held
    assert len({str(sorted(train)) for train, _ in sides.values()}) == 1
    assert "4 of 28 texts are there more than once" in caplog.text


def test_without_duplicates_the_split_goes_by_ids(finished):
    store, data = FeatureStore(finished), FeatureData(str(finished), validation=0.3)
    assert store.origins == store.ids
    assert data.held_out == [i for i, name in enumerate(store.ids) if stable_number(f"0/{name}") / 2**63 < 0.3]


def test_conversations_that_share_a_text_with_a_third_are_one():
    assert first_of_each(["d", "c", "b", "a"], ["1", "2", "2", ""], ["x", "x", "y", "z"]) == ["b", "b", "b", "a"]
    assert first_of_each(["d", "c"], ["", ""], ["x", "y"]) == ["d", "c"]


# --- what a store says of its samples ---


def test_the_root_mean_square_is_that_of_all_features(finished):
    store = FeatureStore(finished)
    expected = torch.cat([sample.features for sample in store]).double().square().mean(0).sqrt()
    torch.testing.assert_close(store.root_mean_square().double(), expected)


def test_writing_to_a_sample_leaves_the_store_unchanged(finished):
    store = FeatureStore(finished)
    sample = store[2]
    sample.features.zero_(), sample.tokens.zero_()
    assert store[2].features.any() and store[2].tokens.any()
    verify_files(finished)


def test_common_tokens_are_counted_in_answers_only(finished):
    store = FeatureStore(finished)
    counts = Counter(
        int(token) for i in range(len(store)) for span in store[i].spans for token in store[i].tokens[slice(*span)]
    )
    chosen = store.common_tokens(10).tolist()
    assert chosen == sorted(chosen) and len(set(chosen)) == 10
    assert min(counts[token] for token in chosen) >= max(n for token, n in counts.items() if token not in chosen)
