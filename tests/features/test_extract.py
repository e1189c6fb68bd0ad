"""`poss extract`: which texts it takes, and what it stores of them."""

import datasets
import pytest
import torch

from poss_lightning.corpus.readers import Conversation, CorpusError
from poss_lightning.features.manifest import decode, encode
from poss_lightning.features.store import FeatureStore
from poss_lightning.features.writing import plan_shards, tokenize, write_store
from poss_lightning.target_model.generation import pad_right
from poss_lightning.target_model.model import Target
from tests.support.stores import SIZES, contents, make_conversations
from tests.support.templates import MISTRAL
from tests.support.tiny import CHATML, tiny_model, tiny_target, tiny_tokenizer
from tests.support.tolerance import LAYER, close


def test_a_store_has_shards_of_bounded_size_and_no_other_files(finished):
    store = FeatureStore(finished)
    shards = [entry.name for entry in store.manifest.shards]
    assert sorted(contents(finished)) == ["ends.safetensors", "manifest.json", *shards] and len(shards) > 2
    for name in shards:
        tokens = sum(datasets.Dataset.from_file(str(finished / name))["length"])  # `datasets` reads a shard, too
        assert 4 * 32 * tokens <= SIZES["shard_bytes"] + 4 * 32 * SIZES["batch_tokens"]


def test_samples_are_the_target_reading_each_alone(finished, target):
    store = FeatureStore(finished)
    by_name = {conversation.id: conversation for conversation in make_conversations()}
    assert sorted(store.ids) == sorted(by_name) and store.manifest.tokens == store.lengths.sum()
    for sample in store:
        (rendered,) = target.chat.texts(by_name[sample.id].messages)
        tokens = rendered.tokens[:60]
        assert sample.tokens.tolist() == tokens
        assert sample.spans == [(start, min(stop, 60)) for start, stop in rendered.spans if start < 60]
        features = target.text_features(torch.tensor([tokens]))[0]
        assert close(sample.features, features, sums=2 * LAYER)
        logits = target.model(torch.tensor([tokens])).logits[0]
        for t, greedy in enumerate(sample.greedy.tolist()):
            followed = any(start <= t + 1 < stop for start, stop in sample.spans)  # by an assistant's token
            assert greedy == (logits[t].argmax() if followed else -1)


def test_a_text_is_cut_at_the_context_of_the_target_which_is_said(tmp_path, caplog):
    target = tiny_target(max_position_embeddings=40)
    write_store(tmp_path, target, make_conversations(), **SIZES | {"max_length": 2048})
    assert "max_length is lowered to 40, all that tiny reads" in caplog.text
    store = FeatureStore(tmp_path)
    assert store.lengths.max() == 40 == store.manifest.max_length


def conversation(name: str, *turns: str) -> Conversation:
    roles = ("user", "assistant")
    return Conversation(name, [{"role": roles[i % 2], "content": text} for i, text in enumerate(turns)])


def test_an_answer_that_the_template_rewrites_later_is_a_text_of_its_own(caplog):
    later = "{{ message['content'][(1 if message['role'] == 'assistant' and not loop.last else 0):] }}"
    target = Target(tiny_model(), tiny_tokenizer(CHATML.replace("{{ message['content'] }}", later)), "tiny")
    talks = [conversation("b/2", "hi", "a cat sat"), conversation("b", "so", "blue", "so", "red")]
    texts = tokenize(target, talks, 500)
    assert {text.id: len(text.spans) for text in texts} == {"b/2": 1, "b/1": 1, "b/2#2": 1} and not caplog.text
    by_id = {text.id: text.conversation for text in texts}
    assert by_id["b/1"] == by_id["b/2#2"] != by_id["b/2"]


def test_texts_left_out_are_logged(caplog):
    """Those without room, and those that the template refuses, with the reason."""
    target = Target(tiny_model(), tiny_tokenizer(MISTRAL), "tiny")
    talks = [conversation(str(i), "hi", f"a cat sat {i}") for i in range(20)]
    refused = Conversation("x", [{"role": "system", "content": "s"}, *talks[0].messages])
    length = tokenize(target, talks[:1], 500)[0].spans[0][0]
    long = conversation("long", "hi " * 30, "no room")
    assert len(tokenize(target, [*talks, refused, long], length + 4)) == 20
    assert "1 of 22 conversations that the target cannot read\n  conversation x: " in caplog.text
    assert f"left out 1 texts without two tokens of an answer for the loss among the first {length + 4}" in caplog.text
    with pytest.raises(CorpusError, match="conversation x: the chat template refuses"):
        tokenize(target, [*talks, refused], 500, strict=True)


@pytest.mark.parametrize("layers", [(), (1, 3)])
@pytest.mark.parametrize("stored", ["exact", "float8"])
def test_features_and_layers_are_the_targets_as_stored(tmp_path, stored, layers):
    target = Target(tiny_model(num_hidden_layers=4).to(torch.bfloat16), tiny_tokenizer(), "tiny")
    write_store(tmp_path, target, make_conversations(), **SIZES, stored=stored, layers=layers)
    store = FeatureStore(tmp_path)
    assert (store.manifest.stored, store.manifest.layers) == (stored, layers)
    batches = plan_shards(tokenize(target, make_conversations(), 60), 200, 10**9)[0]
    samples = iter(store)
    for batch in batches:
        tokens = pad_right([text.tokens for text in batch], "cpu")
        features, outputs = target.text_layers(tokens, layers)
        for row, text in enumerate(batch):
            sample, here = next(samples), slice(0, len(text.tokens))
            assert sample.id == text.id
            assert sample.features.equal(as_stored(features[row, here], stored))
            assert sample.layers.equal(as_stored(outputs[row, here], stored))


def as_stored(x: torch.Tensor, stored: str) -> torch.Tensor:
    return decode(encode(x, stored), stored, x.dtype) if stored == "float8" and x.numel() else x
