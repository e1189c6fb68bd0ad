"""The target writes its own conversations: seeded, killed and resumed, refused where it cannot be."""

import dataclasses
import gzip
import json
from pathlib import Path

import pytest
import torch

from poss_lightning.corpus import dialogues as module
from poss_lightning.corpus.readers import read_conversations
from poss_lightning.evaluation.stored import find_answers
from poss_lightning.features.store import FeatureStore
from poss_lightning.features.writing import write_store
from poss_lightning.sampling import GREEDY, Sampling
from poss_lightning.synthesize import synthesize
from poss_lightning.target.generation import PlainLoop
from tests.support.stores import contents, dies_at
from tests.support.tiny import tiny_target

SIZES = {"conversations": 12, "turns": 2, "batch_size": 4, "user_tokens": 6, "answer_tokens": 8, "dtype": "float32"}


@pytest.fixture(autouse=True)
def loads_at_once(monkeypatch):
    """Any name but one is a folder of the tiny target; it is loaded from memory."""
    targets = {"tiny": tiny_target(0), "other": tiny_target(1)}
    monkeypatch.setattr(module.Target, "load", lambda name, *rest, **options: targets[name])
    return targets["tiny"]


def write(out: Path, **changes) -> list[dict]:
    synthesize(str(out), **{"target": "tiny", **SIZES, **changes})
    data = out.read_bytes()
    return [json.loads(line) for line in (gzip.decompress(data) if out.suffix == ".gz" else data).splitlines()]


def test_conversations_are_as_asked_and_the_reader_takes_them(tmp_path):
    records = write(tmp_path / "corpus.jsonl")
    assert [record["id"] for record in records] == [f"0-{i:06d}" for i in range(12)]
    for record in records:
        assert [message["role"] for message in record["messages"]] == ["user", "assistant"] * 2
        assert all(message["content"].strip() for message in record["messages"])
        assert all("tokens" in message for message in record["messages"][1::2])
    assert len({record["messages"][0]["content"] for record in records}) == 12
    read = read_conversations(str(tmp_path / "corpus.jsonl"))
    assert [conversation.messages for conversation in read] == [record["messages"] for record in records]
    assert sorted(contents(tmp_path)) == ["corpus.jsonl"]


def test_answers_are_the_targets_own(tmp_path, loads_at_once):
    """Greedy, after the very text that is written down."""
    chat = loads_at_once.chat
    for record in write(tmp_path / "corpus.jsonl", turns=1):
        question, answer = record["messages"]
        tokens = PlainLoop(loads_at_once).generate([chat.prompt([question])], 8, chat.stops)[0]
        assert answer == chat.message(tokens)


def test_answers_are_sampled_where_that_is_asked(tmp_path):
    """A law near temperature 0 is greedy again."""
    greedy, cold, warm = (
        write(tmp_path / f"{t}.jsonl", turns=1, answer_temperature=t, top_p=1.0) for t in (0.0, 1e-5, 5.0)
    )
    for record in cold:
        assert record["messages"][1].pop("drawn").keys() == {"seed", "temperature", "top_k", "top_p", "min_p"}
    assert [record["messages"] for record in greedy] == [record["messages"] for record in cold]
    questions, answers = (
        [[record["messages"][place] for record in records] for records in (greedy, warm)] for place in (0, 1)
    )
    assert questions[0][:4] == questions[1][:4] and answers[0] != answers[1]


def test_a_drawn_answer_can_be_drawn_again_from_the_store(tmp_path, loads_at_once):
    """Token for token, by features, head and what it says of its draw; a store of greedy answers says nothing."""
    for temperature in (1.0, 0.0):
        write(tmp_path / f"{temperature}.jsonl", answer_temperature=temperature, top_p=0.9)
        corpus = read_conversations(str(tmp_path / f"{temperature}.jsonl"))
        write_store(tmp_path / str(temperature), loads_at_once, corpus, batch_tokens=64)
        samples = list(FeatureStore(tmp_path / str(temperature)))
        answers = [answer for sample in samples for answer in find_answers(sample, loads_at_once.embed_head)]
        assert len(answers) > 20 and all(one.choices.equal(one.tokens[one.start :]) for one in answers)
        assert {answer.sampling for answer in answers} == {Sampling(1.0, top_p=0.9) if temperature else GREEDY}
        assert len({answer.draw.seed for answer in answers if answer.draw}) == (len(answers) if temperature else 0)


def test_first_messages_begin_as_told_and_others_do_not(tmp_path, loads_at_once):
    (tmp_path / "openings.txt").write_text("Write a poem\n\nHow many legs has a\n")
    records = write(tmp_path / "corpus.jsonl", openings=str(tmp_path / "openings.txt"))
    firsts = [record["messages"][0]["content"] for record in records]
    assert {first[:12] for first in firsts} == {"Write a poem", "How many leg"}
    assert not any(record["messages"][2]["content"].startswith(("Write a", "How many")) for record in records)
    tokens = loads_at_once.tokenizer("How many legs has a", add_special_tokens=False).input_ids
    assert any(
        loads_at_once.tokenizer(first).input_ids[: len(tokens)] == tokens for first in firsts
    )  # goes on from there
    (tmp_path / "empty.txt").write_text("\n")
    with pytest.raises(ValueError, match=r"empty.txt is empty; it must hold a text a line"):
        write(tmp_path / "other.jsonl", openings=str(tmp_path / "empty.txt"))
    with pytest.raises(FileNotFoundError, match=r"none.txt: no such file"):
        write(tmp_path / "other.jsonl", openings=str(tmp_path / "none.txt"))


def test_a_conversation_ends_where_the_context_is_full(tmp_path, monkeypatch, loads_at_once):
    """What an opening and the template take is not known before; its rows are cut, and others are as ever."""
    chat, read = loads_at_once.chat, []
    (tmp_path / "openings.txt").write_text("Why \n" + "ab " * 30 + "\n" + "ab " * 80 + "\n")
    options = {"turns": 1, "conversations": 4, "openings": str(tmp_path / "openings.txt")}
    long = write(tmp_path / "long.jsonl", **options)
    spec, steps = dataclasses.replace(loads_at_once.spec, context=80), PlainLoop.steps

    def watched(self, prompts, limits, *rest):
        read.extend(len(prompt) + limit for prompt, limit in zip(prompts, limits, strict=True))
        return steps(self, prompts, limits, *rest)

    monkeypatch.setattr(loads_at_once, "spec", spec)
    monkeypatch.setattr(PlainLoop, "steps", watched)
    records = write(tmp_path / "short.jsonl", **options)
    assert max(read) <= spec.context
    answers = {record["messages"][0]["content"]: record["messages"][1]["content"] for record in records}
    both = [record["messages"] for record in long if record["messages"][0]["content"] in answers]
    assert any(answers[asked["content"]] == answer["content"] for asked, answer in both)
    assert all(len(chat.prompt(record["messages"][:1])) < spec.context for record in records)


def test_a_conversation_keeps_the_turns_before_the_context_is_full(tmp_path, monkeypatch, loads_at_once):
    (tmp_path / "openings.txt").write_text("ab " * 20 + "\n")
    options = {"conversations": 4, "openings": str(tmp_path / "openings.txt")}
    whole = write(tmp_path / "whole.jsonl", turns=2, **options)
    first = [record["messages"][:2] for record in whole]
    room = max(len(loads_at_once.chat.prompt(record["messages"][:3])) for record in whole)
    monkeypatch.setattr(loads_at_once, "spec", dataclasses.replace(loads_at_once.spec, context=room - 8))
    records = write(tmp_path / "short.jsonl", turns=2, **options)
    assert all(record["messages"][-1]["role"] == "assistant" for record in records)
    assert any(record["messages"] in first for record in records)


def test_the_same_seed_gives_the_same_file_and_another_another(tmp_path):
    first, again, other = (
        write(tmp_path / name, seed=seed) for name, seed in (("a.jsonl", 0), ("b.jsonl", 0), ("c.jsonl", 1))
    )
    assert (tmp_path / "a.jsonl").read_bytes() == (tmp_path / "b.jsonl").read_bytes()
    assert first == again != other
    assert write(tmp_path / "d.jsonl.gz") == first
    write(tmp_path / "e.jsonl.gz")
    assert (tmp_path / "d.jsonl.gz").read_bytes() == (tmp_path / "e.jsonl.gz").read_bytes()


def test_fewer_are_the_first_of_more(tmp_path):
    assert write(tmp_path / "a.jsonl", conversations=5) == write(tmp_path / "b.jsonl")[:5]


def test_a_killed_run_resumes_and_ends_with_the_same_file(tmp_path, monkeypatch):
    generations, calls, plain = 6, [], PlainLoop.steps

    def dying(*args):
        calls.append(args)
        if len(calls) > generations:
            raise KeyboardInterrupt
        return plain(*args)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(PlainLoop, "steps", dying)
        write(tmp_path / "killed.jsonl")
    assert not (tmp_path / "killed.jsonl").exists()
    parts = len(list((tmp_path / "killed.jsonl.parts").glob("0*.json")))
    assert parts == generations // 4  # a batch asks four times: two turns of two roles
    write(tmp_path / "killed.jsonl")
    write(tmp_path / "whole.jsonl")
    files = contents(tmp_path)
    assert sorted(files) == ["killed.jsonl", "whole.jsonl"] and files["killed.jsonl"] == files["whole.jsonl"]


@pytest.mark.parametrize(
    ("name", "when"), [("settings.json", "before"), ("000001.part.json", "after"), ("killed.jsonl", "before")]
)
def test_a_kill_around_any_file_is_survived(tmp_path, monkeypatch, name, when):
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        dies_at(patch, name, when)
        write(tmp_path / "killed.jsonl")
    write(tmp_path / "killed.jsonl")
    write(tmp_path / "whole.jsonl")
    files = contents(tmp_path)
    assert sorted(files) == ["killed.jsonl", "whole.jsonl"] and files["killed.jsonl"] == files["whole.jsonl"]


@pytest.mark.parametrize("change", [{"seed": 1}, {"target": "other"}])
def test_other_settings_do_not_go_on_with_the_same_parts(tmp_path, monkeypatch, change):
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        dies_at(patch, "000001.part.json", "after")
        write(tmp_path / "corpus.jsonl")
    before = contents(tmp_path / "corpus.jsonl.parts")
    with pytest.raises(ValueError, match=f"begun with other settings .*{next(iter(change))}"):
        write(tmp_path / "corpus.jsonl", **change)
    assert contents(tmp_path / "corpus.jsonl.parts") == before


def test_unfit_texts_are_thrown_away_and_a_target_that_writes_nothing_new_is_given_up(tmp_path, monkeypatch):
    same = {"role": "user", "content": "always the same"}
    monkeypatch.setattr(module._Writer, "_message", lambda self, *written: same)
    with pytest.raises(ValueError, match="no new conversation in 10 batches, after 1 of them"):
        write(tmp_path / "corpus.jsonl")
    assert not (tmp_path / "corpus.jsonl").exists()


def test_special_tokens_are_unfit_and_emptiness_is_seen(loads_at_once):
    writer = module._Writer(loads_at_once, 1, user=(Sampling(1.0), 8), answer=(GREEDY, 8))
    stop = min(loads_at_once.chat.stops)
    hello = loads_at_once.tokenizer("Hello ").input_ids
    for tokens in ([*hello, stop], hello):
        assert writer._message("user", "Oh ", tokens) == {"role": "user", "content": "Oh Hello"}
        assert writer._message("assistant", "", tokens) == loads_at_once.chat.message(tokens)
    assert writer._message("assistant", "", [stop]) is writer._message("user", "", [*hello, 0, *hello]) is None


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"conversations": 0}, "conversations is 0"),
        ({"temperature": 0.0}, "temperature is 0"),
        ({"answer_tokens": 600}, "do not fit the 512 that tiny reads"),
    ],
)
def test_bad_numbers_are_refused_before_anything_is_written(tmp_path, change, words):
    with pytest.raises(ValueError, match=words):
        write(tmp_path / "corpus.jsonl", **change)
    assert contents(tmp_path) == {}


def test_user_messages_follow_the_law(loads_at_once):
    """At a top-p of nearly 0 sampling is greedy, so that every row of a batch writes the same."""
    torch.manual_seed(0)
    sure = module._Writer(loads_at_once, 1, user=(Sampling(1.0, top_p=1e-6), 6), answer=(GREEDY, 8)).write(3, seed=0)
    free = module._Writer(loads_at_once, 1, user=(Sampling(1.0), 6), answer=(GREEDY, 8)).write(3, seed=0)
    assert sure.count(sure[0]) == len(sure) == 3 and free.count(free[0]) == 1
