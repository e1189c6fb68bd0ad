"""Conversations that the target writes: seeded, killed and resumed, refused where they cannot be."""

import dataclasses
import gzip
import json
from pathlib import Path

import pytest
import torch

from poss_lightning import synthesize as module
from poss_lightning.corpus.readers import read_conversations
from poss_lightning.evaluation.stored import find_answers
from poss_lightning.evaluation.suites import Question
from poss_lightning.features.store import FeatureStore
from poss_lightning.features.writing import write_store
from poss_lightning.sampling import GREEDY, Sampling
from poss_lightning.synthesize import synthesize
from poss_lightning.target_model.generation import PlainDecoder
from tests.support.stores import contents, dies_after
from tests.support.tiny import tiny_target

SIZES = {"conversations": 12, "turns": 2, "batch_size": 4, "user_tokens": 6, "answer_tokens": 8, "dtype": "float32"}


@pytest.fixture(autouse=True)
def own(monkeypatch):
    """Two tiny targets, loaded from memory by their names; the first one is returned."""
    targets = {"tiny": tiny_target(0), "other": tiny_target(1)}
    monkeypatch.setattr(module.TargetOptions, "load", lambda options: targets[options.target])
    return targets["tiny"]


def talked(record: dict) -> int:
    """The number of a conversation's turns."""
    return len(record["messages"]) // 2


def write(out: Path, **changes) -> list[dict]:
    synthesize(str(out), **{"target": "tiny", **SIZES, **changes})
    data = out.read_bytes()
    return [json.loads(line) for line in (gzip.decompress(data) if out.suffix == ".gz" else data).splitlines()]


def test_conversations_are_as_requested_and_the_reader_takes_them(tmp_path, own):
    """Each answer is the target's own, greedy, after the very text that is written down."""
    records = write(tmp_path / "corpus.jsonl")
    assert [record["id"] for record in records] == [f"0-{i:06d}" for i in range(12)]
    for record in records:
        assert [message["role"] for message in record["messages"]] == ["user", "assistant"] * talked(record)
        assert all(message["content"].strip() for message in record["messages"])
        for place in range(1, len(record["messages"]), 2):
            tokens = PlainDecoder(own).generate([own.chat.prompt(record["messages"][:place])], 8, own.chat.stops)[0]
            assert record["messages"][place] == own.chat.message(tokens)
    assert len({record["messages"][0]["content"] for record in records}) == 12
    assert {*map(talked, records)} == {1, 2}  # the others' second message has special tokens inside, or is empty
    read = read_conversations(str(tmp_path / "corpus.jsonl"))
    assert [conversation.messages for conversation in read] == [record["messages"] for record in records]
    assert sorted(contents(tmp_path)) == ["corpus.jsonl"]


def test_a_sampled_answer_can_be_drawn_again_from_the_store(tmp_path, own):
    """Token for token, from features, head and draw; a store of greedy answers has no draws."""
    for temperature in (1.0, 0.0):
        write(tmp_path / f"{temperature}.jsonl", temperature=temperature, top_p=0.9)
        corpus = read_conversations(str(tmp_path / f"{temperature}.jsonl"))
        write_store(tmp_path / str(temperature), own, corpus, batch_tokens=64)
        samples = list(FeatureStore(tmp_path / str(temperature)))
        answers = [answer for sample in samples for answer in find_answers(sample, own.embed_head)]
        assert len(answers) > 20 and all(one.choices.equal(one.tokens[one.start :]) for one in answers)
        assert {answer.sampling for answer in answers} == {Sampling(1.0, top_p=0.9) if temperature else GREEDY}
        assert len({answer.draw.seed for answer in answers if answer.draw}) == (len(answers) if temperature else 0)


def test_first_messages_continue_the_openings_and_later_ones_do_not(tmp_path, own):
    (tmp_path / "openings.txt").write_text("Write a poem\n\nHow many legs has a\n")
    records = write(tmp_path / "corpus.jsonl", openings=str(tmp_path / "openings.txt"))
    firsts = [record["messages"][0]["content"] for record in records]
    assert {first[:12] for first in firsts} == {"Write a poem", "How many leg"}
    later = [message["content"] for record in records for message in record["messages"][2::2]]
    assert later and not any(text.startswith(("Write a", "How many")) for text in later)
    tokens = own.tokenizer("How many legs has a", add_special_tokens=False).input_ids
    assert any(own.tokenizer(first).input_ids[: len(tokens)] == tokens for first in firsts)


def test_a_conversation_ends_where_the_context_is_full(tmp_path, monkeypatch, own):
    """What an opening and the template take is not known ahead: an answer is cut, or has no room and is left out."""
    (tmp_path / "openings.txt").write_text("Why \n" + "ab " * 20 + "\n" + "ab " * 80 + "\n")
    options = {"openings": str(tmp_path / "openings.txt")}
    complete = write(tmp_path / "complete.jsonl", **options)
    monkeypatch.setattr(own, "spec", dataclasses.replace(own.spec, context=100))
    short = [record["messages"] for record in write(tmp_path / "short.jsonl", **options)]
    assert max(len(own.chat.prompt(talk[:-1])) + len(talk[-1]["tokens"]) for talk in short) == 100
    assert {len(talk) for talk in short} == {2, 4}
    assert any(record["messages"][:2] == talk for record in complete for talk in short)


def test_the_seed_determines_the_file(tmp_path):
    names = {"a.jsonl": 0, "b.jsonl": 0, "c.jsonl": 1, "d.jsonl.gz": 0, "e.jsonl.gz": 0}
    records = {name: write(tmp_path / name, seed=seed) for name, seed in names.items()}
    files = contents(tmp_path)
    assert files["a.jsonl"] == files["b.jsonl"] and files["d.jsonl.gz"] == files["e.jsonl.gz"]
    assert records["a.jsonl"] == records["d.jsonl.gz"] != records["c.jsonl"]
    assert write(tmp_path / "f.jsonl", conversations=5) == records["a.jsonl"][:5]


def test_a_killed_run_resumes_after_its_last_batch_with_the_same_settings_alone(tmp_path):
    """A batch generates four times: two turns of two roles."""
    with dies_after(PlainDecoder, "steps", 6):
        write(tmp_path / "killed.jsonl")
    assert not (tmp_path / "killed.jsonl").exists()
    before = contents(tmp_path / "killed.jsonl.parts")
    assert sum(name.startswith("0") for name in before) == 1
    with pytest.raises(ValueError, match=r"begun with other settings .*target 'tiny', now 'other'; .*seed 0, now 1"):
        write(tmp_path / "killed.jsonl", seed=1, target="other")
    assert contents(tmp_path / "killed.jsonl.parts") == before
    write(tmp_path / "killed.jsonl")
    write(tmp_path / "complete.jsonl")
    files = contents(tmp_path)
    assert sorted(files) == ["complete.jsonl", "killed.jsonl"] and files["killed.jsonl"] == files["complete.jsonl"]


def test_a_conversation_ends_before_an_empty_message_and_where_special_tokens_stand_inside(own, monkeypatch):
    """A user's message begins as its question says; an answer with special tokens stays, as it was written."""
    stop, hello = min(own.chat.stops), own.tokenizer("Hello ").input_ids
    good, empty, odd = [*hello, stop], [stop], [*hello, 0, *hello]
    loop, question = PlainDecoder(own), Question("", 0, "", ["Oh ", ""])
    for written, ends in (
        ([good, hello, good, good], [("Oh Hello", hello), ("Hello", good)]),
        ([good, good, empty], [("Oh Hello", good)]),
        ([good, good, odd], [("Oh Hello", good)]),
        ([good, good, good, empty], [("Oh Hello", good)]),
        ([good, odd], [("Oh Hello", odd)]),
        ([odd], []),
        ([good, empty], []),
    ):
        texts = iter(written)
        monkeypatch.setattr(loop, "generate", lambda *given, texts=texts: [next(texts)])
        talks = module._write_batch(loop, [question], (GREEDY, 9), (GREEDY, 9), 1, torch.Generator())
        expected = [({"role": "user", "content": text}, own.chat.message(tokens)) for text, tokens in ends]
        assert talks == [[message for pair in expected for message in pair]] and not [*texts]


def test_numbers_that_give_no_conversations_are_refused_and_nothing_is_left(tmp_path):
    for change, words in (
        ({"user_temperature": 0.0}, "user_temperature is 0"),
        ({"answer_tokens": 600}, "do not fit the 512 that tiny reads"),
        ({"top_p": 1e-6}, "no new conversation in 10 batches, after 1 of them"),  # as sampling is greedy then
    ):
        with pytest.raises(ValueError, match=words):
            write(tmp_path / "corpus.jsonl", **change)
        assert contents(tmp_path) == {}
