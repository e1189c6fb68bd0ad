"""Online features are those of a store, batch by batch, and train the same draft."""

import json
import pickle

import lightning
import pytest
import torch

from poss_lightning.extract import extract
from poss_lightning.features.datamodule import FeatureData
from poss_lightning.training.module import SpecialistTraining
from tests.support.stores import make_conversations
from tests.support.talks import EAGLE3
from tests.support.tiny import tiny_model, tiny_target, tiny_tokenizer


@pytest.fixture(scope="module")
def both(tmp_path_factory, tiny_folder) -> dict[str, dict]:
    """The same conversations on disk as features, and as text."""
    folder = tmp_path_factory.mktemp("online")
    corpus = folder / "corpus.jsonl"
    corpus.write_text("".join(json.dumps({"messages": c.messages}) + "\n" for c in make_conversations()))
    deep = folder / "deep"
    tiny_model(num_hidden_layers=7).save_pretrained(deep)
    tiny_tokenizer().save_pretrained(deep)
    found = {}
    for name, target, layers in (("", tiny_folder, None), ("-eagle3", str(deep), [2, 3, 4])):
        extract(str(corpus), str(folder / f"store{name}"), target, max_length=60, dtype="float32", layers=layers)
        found[f"online{name}"] = {"corpus": str(corpus), "target": target, "max_length": 60, "dtype": "float32"}
        found[f"store{name}"] = {"store": str(folder / f"store{name}")}
    return found


def fit(source: dict, packed: bool, **options) -> tuple[SpecialistTraining, list]:
    lightning.seed_everything(0)
    data = FeatureData(**source, batch_tokens=200, validation=0.2, packed=packed)
    module = SpecialistTraining(data.source, [1, 2], learning_rate=1e-3, vocabulary_size=60, **options)
    trainer = lightning.Trainer(
        accelerator="cpu",
        max_steps=3,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    seen, plain = [], data.on_after_batch_transfer

    def watch(batch, index):
        seen.append(plain(batch, index))
        return seen[-1]

    data.on_after_batch_transfer = watch
    trainer.fit(module, data)
    return module, seen


@pytest.mark.parametrize(
    "kind, packed", [("", True), pytest.param("", False, marks=pytest.mark.nightly), ("-eagle3", True)]
)
def test_online_is_the_store(both, packed, kind):
    options = EAGLE3 if kind else {}
    (stored, seen), (online, made) = (fit(both[name + kind], packed, **options) for name in ("store", "online"))
    assert len(seen) == len(made) > 3
    for ours, theirs in zip(seen, made, strict=True):
        assert ours.tokens.equal(theirs.tokens) and ours.counts.equal(theirs.counts)
        for a, b in ((ours.features, theirs.features), (ours.draft_input, theirs.draft_input)):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
        known = ours.counts[:, :-1] > 0  # where a guess is judged
        assert ours.greedy[:, 1:][known].equal(theirs.greedy[:, 1:][known]) and (ours.greedy[:, 1:][known] >= 0).all()
    assert online.draft.vocabulary.equal(stored.draft.vocabulary)
    for a, b in zip(stored.draft.parameters(), online.draft.parameters(), strict=True):
        assert (a - b).norm() <= 1e-4 * b.norm()


def test_workers_are_sent_no_target(both):
    """Where they are not forked, a loader pickles what they read."""
    online = FeatureData(**both["online-eagle3"], validation=0.2).source
    for features in (online, online.select((2, 3, 4))):
        sent = pickle.loads(pickle.dumps(features))
        assert not hasattr(sent, "model") and sent.layers == features.layers
        assert sent[0].tokens.equal(features[0].tokens)


def test_a_target_that_moved_has_one_embedding():
    target = tiny_target()
    target.model.double()  # takes other memory, as a GPU's would be
    target.move("cpu")
    assert target.embed_head.embedding.data_ptr() == target.model.get_input_embeddings().weight.data_ptr()
    target.move("meta")
    assert {device.type for device in target.layer_devices} == {target.embed_head.head.device.type} == {"meta"}


def test_a_store_or_a_corpus(both):
    with pytest.raises(ValueError, match="give one of them"):
        FeatureData()
    with pytest.raises(ValueError, match="give one of them"):
        FeatureData(**both["store"], corpus="x.jsonl")
    for name, value in {"target": "x", "max_length": 60, "dtype": "float32", "parallel": "layers"}.items():
        with pytest.raises(ValueError, match=f"{name} is {value!r}, but .* made already: leave {name} out"):
            FeatureData(**both["store"], **{name: value})
    FeatureData(
        **both["store"], target="embedded", max_length=2048, validation=0.2
    )  # the defaults, as a config.yaml has them
