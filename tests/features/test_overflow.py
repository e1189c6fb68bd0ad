"""Texts whose features leave the range of their dtype: left out, counted and named, whoever computes them."""

import json

import lightning
import pytest
import torch

from poss_lightning.features.datamodule import FeatureDataModule
from poss_lightning.features.online import OnlineFeatures
from poss_lightning.features.shards import TargetReader
from poss_lightning.features.store import FeatureStore
from poss_lightning.features.stream import collate
from poss_lightning.features.writing import CorpusError, tokenize, write_store
from poss_lightning.ranks import Rank
from poss_lightning.target_model.model import Target
from poss_lightning.training.module import DraftModule
from tests.support.ranks import QUIET
from tests.support.stores import SIZES, contents, make_conversations
from tests.support.tiny import tiny_model, tiny_tokenizer
from tests.support.tolerance import LAYER, close

MARK = tiny_tokenizer().convert_tokens_to_ids("Z")  # in the texts that overflow


def with_marks(numbers) -> list:
    """Conversations, some of which say `MARK`."""
    talks = make_conversations()
    for i in numbers:
        talks[i].messages[0]["content"] = "Z"
    return talks


@pytest.fixture(scope="module")
def half() -> Target:
    """A target whose MLP overflows in float16 where it reads MARK, as Gemma-3's does for some tokens."""
    model = tiny_model()
    with torch.no_grad():
        model.model.embed_tokens.weight[MARK] = torch.zeros(32).index_fill(0, torch.tensor([5]), 30.0)
        for linear in (model.model.layers[0].mlp.gate_proj, model.model.layers[0].mlp.up_proj):
            linear.weight[:, 5] = 50.0
    return Target(model.half(), tiny_tokenizer(), "tiny")


class Planted(TargetReader):
    """Of texts with MARK it computes too large a number, at one place only."""

    place = ""

    def read(self, texts):
        found = super().read(texts)
        marked = torch.tensor([MARK in text for text in texts for _ in text])
        if self.place == "logits":
            found.features[marked] = 6e4 * self.target.embed_head.head[7].sign()
        else:
            getattr(found, self.place)[marked, ..., 3] = torch.inf
        return found


@pytest.mark.parametrize(("place", "stored"), [("features", "exact"), ("layers", "float8"), ("logits", "exact")])
def test_a_store_leaves_out_counts_and_names_them(tmp_path, caplog, monkeypatch, place, stored):
    target = Target(tiny_model().half(), tiny_tokenizer(), "tiny")
    monkeypatch.setattr(Planted, "place", place)
    options = SIZES | {"layers": (1,), "stored": stored, "reader": Planted}
    for rank in (1, 0):  # which of two writes a text makes no difference
        write_store(tmp_path / "two", target, with_marks([3, 8, 20]), **options, rank=Rank(rank, 2))
    write_store(tmp_path / "store", target, with_marks([3, 8, 20]), **options)
    assert contents(tmp_path / "store") == contents(tmp_path / "two")
    store, whole = FeatureStore(tmp_path / "store"), with_marks([])
    assert set(store.ids) == {talk.id for talk in whole} - {"c3", "c8", "c20"} == {sample.id for sample in store}
    assert set(store.manifest.left_out) == {"c3", "c8", "c20"} and store.manifest.tokens == store.lengths.sum()
    assert caplog.text.count("left out 3 of 24 texts whose features are not finite in float16: c") == 2
    assert "use --dtype bfloat16" in caplog.text
    with pytest.raises(CorpusError, match="3 of 24 texts"):
        write_store(tmp_path / "strict", target, with_marks([3, 8, 20]), **options, strict=True)
    with pytest.raises(CorpusError, match=r"24 of 24 texts .* and 16 more; use"):
        write_store(tmp_path / "none", target, with_marks(range(24)), **options)


def fit(data: FeatureDataModule) -> DraftModule:
    module = DraftModule([1, 2], data.source, learning_rate=1e-3)
    trainer = lightning.Trainer(accelerator="cpu", max_epochs=1, enable_checkpointing=False, **QUIET)
    trainer.fit(module, data)
    assert trainer.callback_metrics["val/loss"].isfinite() and trainer.global_step > 3
    assert all(value.isfinite().all() for value in [*module.draft.parameters(), *module.draft.buffers()])
    return module


def test_a_training_continues_without_them(half, tmp_path, caplog):
    numbers = range(0, 24, 2)  # also those that set the scale of the input
    write_store(tmp_path / "store", half, with_marks(numbers), **SIZES)
    assert len(FeatureStore(tmp_path / "store")) == 24 - len(numbers)
    fit(FeatureDataModule(str(tmp_path / "store"), batch_tokens=100, validation=0.2))
    half.model.save_pretrained(tmp_path / "target")
    half.tokenizer.save_pretrained(tmp_path / "target")
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text("".join(json.dumps({"id": c.id, "messages": c.messages}) + "\n" for c in with_marks(numbers)))
    caplog.clear()
    named = {"corpus": str(corpus), "target": str(tmp_path / "target"), "dtype": "float16"}
    fit(FeatureDataModule(**named, batch_tokens=100, validation=0.2))
    assert "left out of the loss " in caplog.text and "not finite in float16: c" in caplog.text


def test_online_features_count_nothing_in_them_and_leave_the_others_as_they_are(half):
    online = OnlineFeatures(half, tokenize(half, with_marks([4]), 60))
    whole = collate([[online[i] for i in range(12)], [online[i] for i in range(12, 24)]])
    filled = online.fill(whole)
    assert filled.features.isfinite().all()
    for name, part in zip(whole.ids, whole.parts(), strict=True):
        expected = half.text_features(whole.tokens[part][None])[0]
        assert filled.mask.passes[part].equal(whole.mask.passes[part] * (name != "c4"))
        if name != "c4":
            assert close(filled.features[part], expected, sums=2 * LAYER)
