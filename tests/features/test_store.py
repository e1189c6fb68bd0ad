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
import yaml
from safetensors.torch import load_file, save_file

from poss_lightning.corpus.readers import Conversation
from poss_lightning.draft.specialists import Specialists
from poss_lightning.extract import extract
from poss_lightning.features.datamodule import FeatureData
from poss_lightning.features.manifest import StoreError, verify_files
from poss_lightning.features.schedule import split, stable_number
from poss_lightning.features.store import FeatureStore
from poss_lightning.features.texts import first_of_each
from poss_lightning.features.writing import write_store
from poss_lightning.files import sha256
from tests.support.command import run_in
from tests.support.stores import SIZES, make_conversations
from tests.support.tiny import tiny_target


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


@pytest.mark.parametrize("name", ["ends.safetensors", "shard-00001.arrow"])
def test_a_truncated_or_missing_file_is_found_on_open(folder, name):
    data = (folder / name).read_bytes()
    (folder / name).write_bytes(data[:-1])
    with pytest.raises(StoreError, match=f"{name} has {len(data) - 1} bytes, the manifest says {len(data)}"):
        FeatureStore(folder)
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


def test_shards_of_other_columns_are_refused(folder):
    path = folder / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"layers": [1]}))
    with pytest.raises(
        StoreError, match=r"shard-00000\.arrow cannot be read \(its columns are id, conversation, length"
    ):
        FeatureStore(folder)


@pytest.mark.parametrize("field", ["dtype", "stored", "samples", "shards", "colour"])
def test_a_field_of_another_kind_is_refused(folder, field):
    path = folder / "manifest.json"
    stored = json.loads(path.read_text())
    stored |= {field: "int3" if field != "shards" else [stored["shards"][0] | {"bytes": "1"}]}
    path.write_text(json.dumps(stored))
    with pytest.raises(StoreError, match=r"manifest\.json is not a manifest this version reads: .*"):
        FeatureStore(folder)


def rewrite(folder: Path, change, shard: int = 1) -> None:
    """Write a shard anew, its table changed, and its size and digest into the manifest, as if it had been so."""
    path, manifest = folder / f"shard-{shard:05d}.arrow", folder / "manifest.json"
    with path.open("rb") as file:
        table = change(pa.ipc.open_stream(file.read()).read_all().combine_chunks())
    with pa.ipc.new_stream(path, table.schema) as writer:
        writer.write_table(table)
    stored = json.loads(manifest.read_text())
    stored["shards"][shard] |= {"bytes": path.stat().st_size, "sha256": sha256(path)}
    manifest.write_text(json.dumps(stored))


def put(table: pa.Table, name: str, change) -> pa.Table:
    """The table with other values in a column."""
    values = change(table[name].to_pylist())
    return table.set_column(table.column_names.index(name), name, pa.array(values, table.schema.field(name).type))


DAMAGE = {
    "cut at the border of a sample": lambda table: table.slice(0, table.num_rows - 1),
    "a length": lambda table: put(table, "length", lambda lengths: [lengths[0] + 1, *lengths[1:]]),
    "a text without tokens": lambda table: put(table, "tokens", lambda texts: [[], *texts[1:]]),
    "a token beyond": lambda table: put(table, "tokens", lambda texts: [[320, *texts[0][1:]], *texts[1:]]),
    "a token below": lambda table: put(table, "greedy", lambda texts: [[-2, *texts[0][1:]], *texts[1:]]),
    "features of another": lambda table: put(table, "features", lambda blobs: [blobs[0][:-4], *blobs[1:]]),
    "no features": lambda table: put(table, "features", lambda blobs: [None, *blobs[1:]]),
    "spans beyond": lambda table: put(table, "spans", lambda spans: [[0, 61], *spans[1:]]),
    "half a span": lambda table: put(table, "spans", lambda spans: [spans[0][:1], *spans[1:]]),
    "an id twice": lambda table: put(table, "id", lambda ids: [ids[1], *ids[1:]]),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_samples_that_are_not_whole_are_refused_though_every_byte_is_as_it_was_written(folder, damage):
    """By opening and by `poss extract --verify true`; a wrong offset would end the process by SIGBUS."""
    rewrite(folder, damage)
    verify_files(folder)
    for use in (lambda: FeatureStore(folder), lambda: extract("", str(folder), verify=True)):
        with pytest.raises(StoreError, match=str(folder)):
            use()


@pytest.mark.parametrize(("name", "kind"), [("tokens", np.int32), ("spans", np.int32), ("features", np.int64)])
@pytest.mark.parametrize("last", [2**30, 0, -1])
def test_an_offset_that_leads_elsewhere_is_refused(folder, name, kind, last):
    """Where it leads beyond the file, to follow it ends the process by SIGBUS."""
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


def test_a_shard_that_is_there_twice_is_refused(folder):
    """Also where the manifest counts its samples twice."""
    shutil.copyfile(folder / "shard-00000.arrow", folder / "shard-00001.arrow")
    with (folder / "shard-00000.arrow").open("rb") as file:
        lengths = pa.ipc.open_stream(file.read()).read_all()["length"].to_pylist()
    for counts in ({}, {"samples": 2 * len(lengths), "tokens": 2 * sum(lengths)}):
        stored = json.loads((folder / "manifest.json").read_text())
        shards = [stored["shards"][0], stored["shards"][0] | {"name": "shard-00001.arrow"}]
        (folder / "manifest.json").write_text(json.dumps(stored | {"shards": shards} | counts))
        with pytest.raises(StoreError, match=r"samples of \d+ ids" if counts else r"samples, its manifest says \d+"):
            FeatureStore(folder)


@pytest.mark.parametrize("change", ["int8", "narrow", "nameless"])
def test_ends_of_another_kind_are_refused(folder, change):
    path, manifest = folder / "ends.safetensors", folder / "manifest.json"
    state = load_file(path)
    state = {
        "int8": {name: value.to(torch.int8) for name, value in state.items()},
        "narrow": {name: value[:, :5].clone() for name, value in state.items()},
        "nameless": {"head": state["head"]},
    }[change]
    save_file(state, path)
    stored = json.loads(manifest.read_text())
    stored["ends"] |= {"bytes": path.stat().st_size}
    manifest.write_text(json.dumps(stored))
    with pytest.raises(StoreError, match=r"ends\.safetensors (has|cannot be read)"):
        FeatureStore(folder).embed_head()


def test_a_store_of_the_first_version_is_read(folder, whole):
    """It has no digests of conversations, no layers, and one way to store."""
    for number in range(len(FeatureStore(whole).manifest.shards)):
        rewrite(folder, lambda table: table.drop_columns("conversation"), number)
    path = folder / "manifest.json"
    stored = json.loads(path.read_text())
    del stored["stored"], stored["layers"], stored["chat_template_kwargs"]
    path.write_text(json.dumps(stored))
    old, new = FeatureStore(folder), FeatureStore(whole)
    assert old.ids == new.ids == old.origins == new.origins
    assert all(a.features.equal(b.features) and a.tokens.equal(b.tokens) for a, b in zip(old, new, strict=True))


# --- several as one ---


@pytest.fixture(scope="module")
def two(target, tmp_path_factory) -> list[str]:
    """Stores of other conversations, but for four that are in both under other ids."""
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
    assert pickle.loads(pickle.dumps(both))[20].tokens.equal(both[20].tokens)
    counts = [store.common_tokens(320 - 1) for store in (both, *own)]
    assert len(counts[0]) == 319


@pytest.mark.parametrize("count", [pytest.param(1, marks=pytest.mark.nightly), 2])
def test_a_training_takes_one_store_or_several(two, tmp_path, count):
    """On the command line as [a,b]; what is trained on both has met the texts of both."""
    stores = two[:count]
    given = f"[{','.join(stores)}]" if count > 1 else stores[0]
    trainer = {
        "max_steps": 1,
        "logger": False,
        "accelerator": "cpu",
        "precision": "32-true",
        "enable_progress_bar": False,
    }
    options = [f"--trainer.{name}={value}" for name, value in trainer.items()]
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
        ([*two, tmp_path / "nowhere"], "not a finished feature store"),
        ([], "store is"),
    ):
        with pytest.raises(StoreError, match=words):
            FeatureStore(stores)


@pytest.mark.parametrize("forget", [False, True], ids=["as written", "without digests of conversations"])
def test_a_conversation_that_is_there_twice_is_on_one_side(two, tmp_path, caplog, forget):
    """In one store or in two, of which one may be of before there were digests; whichever is named first."""
    folder = Path(shutil.copytree(two[0], tmp_path / "a"))
    if forget:
        for number in range(len(FeatureStore(folder).manifest.shards)):
            rewrite(folder, lambda table: table.drop_columns("conversation"), number)
    sides = {}
    for stores in ([str(folder), two[1]], [two[1], str(folder)]):
        data = make_data(stores, validation=0.5)
        texts = [tuple(sample.tokens.tolist()) for sample in data.source]
        train, held = ({texts[i] for i in side} for side in (data.train, data.held_out))
        assert not train & held and len(train | held) == len(texts) - 4
        sides[stores[0]] = train, held
    assert len({str(sorted(train)) for train, _ in sides.values()}) == 1
    assert "4 of 28 texts are there more than once" in caplog.text


def test_where_nothing_is_there_twice_the_split_goes_by_ids_as_ever(whole):
    store, data = FeatureStore(whole), make_data(whole)
    assert store.origins == store.ids
    assert data.held_out == [i for i, name in enumerate(store.ids) if stable_number(f"0/{name}") / 2**63 < 0.3]


def test_conversations_are_one_where_they_share_a_text_with_a_third():
    assert first_of_each(["d", "c", "b", "a"], ["1", "2", "2", ""], ["x", "x", "y", "z"]) == ["b", "b", "b", "a"]
    assert first_of_each(["d", "c"], ["", ""], ["x", "y"]) == ["d", "c"]


def test_the_root_mean_square_is_summed_sample_by_sample(whole, monkeypatch):
    store = FeatureStore(whole)
    expected = torch.cat([sample.features for sample in store]).double().square().mean(0).sqrt()
    monkeypatch.setattr(torch, "cat", lambda *tensors: pytest.fail("all samples at once"))
    torch.testing.assert_close(store.root_mean_square().double(), expected)


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


def test_a_sample_may_be_written_to_and_the_store_stays(whole):
    store = FeatureStore(whole)
    sample = store[2]
    sample.features.zero_(), sample.tokens.zero_()
    assert store[2].features.any() and store[2].tokens.any()
    verify_files(whole)


def test_common_tokens_are_counted_in_answers_only(whole):
    store = FeatureStore(whole)
    counts = Counter(
        int(token) for i in range(len(store)) for span in store[i].spans for token in store[i].tokens[slice(*span)]
    )
    chosen = store.common_tokens(10).tolist()
    assert chosen == sorted(chosen) and len(set(chosen)) == 10
    assert min(counts[token] for token in chosen) >= max(n for token, n in counts.items() if token not in chosen)


# --- the DataModule over it ---


def make_data(whole: Path | list[str], epoch: int = 0, training: bool = True, **changes) -> FeatureData:
    data = FeatureData(
        whole if isinstance(whole, list) else str(whole), **{"batch_tokens": 200, "validation": 0.3, **changes}
    )
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
