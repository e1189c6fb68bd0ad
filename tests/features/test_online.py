"""Online features are those of a store, batch by batch, and train the same draft."""

import json
import pickle

import lightning
import pytest

from poss_lightning.extraction import extract
from poss_lightning.features.datamodule import FeatureDataModule
from poss_lightning.training.module import DraftModule
from tests.support.ranks import QUIET
from tests.support.stores import make_conversations
from tests.support.talks import EAGLE3
from tests.support.tiny import tiny_target
from tests.support.tolerance import LAYER, close, tolerance_of_adamw


@pytest.fixture(scope="module")
def both(tmp_path_factory, tiny_folder, deep_folder) -> dict[str, dict]:
    """The same conversations as a store and as text."""
    folder = tmp_path_factory.mktemp("online")
    corpus = folder / "corpus.jsonl"
    corpus.write_text("".join(json.dumps({"messages": c.messages}) + "\n" for c in make_conversations()))
    found = {}
    for name, target, layers in (("", tiny_folder, None), ("-eagle3", deep_folder, [2, 4, 5])):
        extract(str(corpus), str(folder / f"store{name}"), target=target, max_length=60, dtype="float32", layers=layers)
        found[f"online{name}"] = {"corpus": str(corpus), "target": target, "max_length": 60, "dtype": "float32"}
        found[f"store{name}"] = {"store": str(folder / f"store{name}")}
    return found


def fit(source: dict, **options) -> tuple[DraftModule, list]:
    lightning.seed_everything(0)
    data = FeatureDataModule(**source, batch_tokens=200, validation=0.2)
    module = DraftModule([1, 2], data.source, learning_rate=1e-3, vocabulary_size=60, **options)
    batches, transferred = [], data.on_after_batch_transfer
    data.on_after_batch_transfer = lambda *given: batches.append(transferred(*given)) or batches[-1]
    lightning.Trainer(accelerator="cpu", max_steps=3, enable_checkpointing=False, **QUIET).fit(module, data)
    return module, batches


@pytest.mark.parametrize("kind", ["", "-eagle3"])
def test_online_features_train_as_those_of_a_store(both, kind):
    options = EAGLE3 if kind else {}
    (stored, expected), (online, found) = (fit(both[name + kind], **options) for name in ("store", "online"))
    assert len(expected) == len(found) > 3
    for ours, theirs in zip(expected, found, strict=True):
        assert ours.tokens.equal(theirs.tokens) and ours.mask.passes.equal(theirs.mask.passes)
        for a, b in ((ours.features, theirs.features), (ours.draft_input, theirs.draft_input)):
            assert close(a, b, sums=8 * LAYER)
        known = ours.mask.passes > 0  # where a guess is judged
        guesses = [each.target_argmax[:, 1:][known] for each in (ours, theirs)]
        assert guesses[0].equal(guesses[1]) and (guesses[0] >= 0).all()
    assert online.draft.vocabulary.equal(stored.draft.vocabulary)
    near = tolerance_of_adamw(sums=3 * 3 * LAYER) * 3 * 1e-3  # of three steps at that rate
    for a, b in zip(stored.draft.parameters(), online.draft.parameters(), strict=True):
        assert (a - b).norm() <= near * b.numel() ** 0.5


def test_a_pickled_source_has_no_target(both):
    """Loader processes that are not forked get one."""
    online = FeatureDataModule(**both["online-eagle3"], validation=0.2).source
    for features in (online, online.select((2, 4, 5))):
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
