"""Online features are those of a store, batch by batch, and train the same draft."""

import json

import lightning
import pytest
import torch
from test_extract import make_conversations

from poss_lightning.features.datamodule import FeatureData
from poss_lightning.features.extract import extract
from poss_lightning.training.module import SpecialistTraining


@pytest.fixture(scope="module")
def both(tmp_path_factory, tiny_folder) -> dict[str, dict]:
    """The same conversations on disk as features, and as text."""
    folder = tmp_path_factory.mktemp("online")
    corpus = folder / "corpus.jsonl"
    corpus.write_text("".join(json.dumps({"messages": c.messages}) + "\n" for c in make_conversations()))
    extract(str(corpus), str(folder / "store"), tiny_folder, max_length=60, dtype="float32")
    online = {"corpus": str(corpus), "target": tiny_folder, "max_length": 60, "dtype": "float32"}
    return {"store": {"store": str(folder / "store")}, "online": online}


def fit(source: dict, packed: bool) -> tuple[SpecialistTraining, list]:
    lightning.seed_everything(0)
    data = FeatureData(**source, batch_tokens=200, validation=0.2, packed=packed)
    module = SpecialistTraining(data.source, [1, 2], learning_rate=1e-3, vocabulary_size=60)
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


@pytest.mark.parametrize("packed", [True, False])
def test_online_is_the_store(both, packed):
    (stored, seen), (online, made) = (fit(both[name], packed) for name in ("store", "online"))
    assert len(seen) == len(made) > 3
    for ours, theirs in zip(seen, made, strict=True):
        assert ours.tokens.equal(theirs.tokens) and ours.counts.equal(theirs.counts)
        for a, b in ((ours.features, theirs.features), (ours.inputs, theirs.inputs)):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
        known = ours.counts[:, :-1] > 0  # where a guess is judged
        assert ours.greedy[:, 1:][known].equal(theirs.greedy[:, 1:][known]) and (ours.greedy[:, 1:][known] >= 0).all()
    assert online.draft.vocabulary.equal(stored.draft.vocabulary)
    for a, b in zip(stored.draft.parameters(), online.draft.parameters(), strict=True):
        assert (a - b).norm() <= 1e-4 * b.norm()


def test_a_store_or_a_corpus(both):
    with pytest.raises(ValueError, match="give one of them"):
        FeatureData()
    with pytest.raises(ValueError, match="give one of them"):
        FeatureData(**both["store"], corpus="x.jsonl")
