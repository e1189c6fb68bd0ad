"""The target answers given prompts: turn by turn, as it would alone, killed and resumed."""

import pytest

from poss_lightning import synthesize as module
from poss_lightning.corpus.readers import read_conversations
from poss_lightning.synthesize import synthesize
from poss_lightning.target.generation import PlainLoop
from tests.support.inputs import write_suite
from tests.support.stores import dies_after
from tests.support.tiny import tiny_target

TURNS = [["Hi", "And you?"], ["How many legs?"], ["user", "system", "why"], ["The draft " * 9], ["please"]]


@pytest.fixture(autouse=True)
def target(monkeypatch):
    target = tiny_target(0)
    monkeypatch.setattr(module.Target, "load", lambda name, *rest, **options: target)
    return target


@pytest.fixture
def suite(tmp_path):
    return write_suite(tmp_path / "odd.jsonl", *TURNS)


def test_answers_are_those_of_each_conversation_alone(tmp_path, target, suite):
    synthesize(str(tmp_path / "out.jsonl"), prompts=[suite], answer_tokens=12, batch_size=2, dtype="float32")
    found = {conversation.id: conversation.messages for conversation in read_conversations(str(tmp_path / "out.jsonl"))}
    assert list(found) == [f"odd/{i}" for i in range(len(TURNS))]
    for (name, messages), turns in zip(found.items(), TURNS, strict=True):
        assert [message["content"] for message in messages if message["role"] == "user"] == turns, name
        for place in range(1, len(messages), 2):
            prompt = target.chat.prompt(messages[:place])
            tokens = PlainLoop(target).generate([prompt], 12, target.chat.stops)[0]
            assert messages[place] == target.chat.message(tokens)


def test_prompts_of_like_length_are_answered_side_by_side(tmp_path, monkeypatch):
    words = [3, 40, 5, 41, 4]
    suite = write_suite(tmp_path / "odd.jsonl", *(["why " * count] for count in words))
    batches, plain = [], PlainLoop.generate

    def spied(loop, prompts, *arguments):
        batches.append([len(prompt) for prompt in prompts])
        return plain(loop, prompts, *arguments)

    monkeypatch.setattr(PlainLoop, "generate", spied)
    synthesize(str(tmp_path / "out.jsonl"), prompts=[suite], answer_tokens=1, batch_size=2)
    assert [len(batch) for batch in batches] == [2, 2, 1]
    lengths = [length for batch in batches for length in batch]
    assert lengths == sorted(lengths, reverse=True)


def test_a_killed_run_resumes_and_ends_with_the_same_file(tmp_path, suite):
    options = {"prompts": [suite], "answer_tokens": 12, "batch_size": 2, "dtype": "float32"}
    synthesize(str(tmp_path / "whole.jsonl"), **options)
    with dies_after(PlainLoop, "generate", 2):
        synthesize(str(tmp_path / "killed.jsonl"), **options)
    assert not (tmp_path / "killed.jsonl").exists()
    with pytest.raises(ValueError, match=r"killed.jsonl.parts was begun .* \(answer_tokens 12, now 9\)"):
        synthesize(str(tmp_path / "killed.jsonl"), **(options | {"answer_tokens": 9}))
    synthesize(str(tmp_path / "killed.jsonl"), **options)
    assert (tmp_path / "killed.jsonl").read_bytes() == (tmp_path / "whole.jsonl").read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["killed.jsonl", "odd.jsonl", "whole.jsonl"]


def test_all_rows_of_a_data_set_are_asked(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(module, "answer_questions", lambda corpus, model, questions, **options: asked.extend(questions))
    (tmp_path / "many").mkdir()
    (tmp_path / "many" / "train.jsonl").write_text('{"id": 7, "prompt": "a"}\n' * 90)
    synthesize(str(tmp_path / "out.jsonl"), prompts=f"hub:{tmp_path / 'many'}", dtype="float32")
    assert [question.id for question in asked] == [7, *(f"7#{number}" for number in range(2, 91))]


def test_questions_without_room_for_an_answer_are_left_out(tmp_path, capsys):
    options = {"prompts": [write_suite(tmp_path / "odd.jsonl", *TURNS, ["x " * 600])], "dtype": "float32"}
    synthesize(str(tmp_path / "out.jsonl"), answer_tokens=12, **options)
    assert "1 of 6 questions are left out" in capsys.readouterr().out
    assert len(read_conversations(str(tmp_path / "out.jsonl"))) == 5
    with pytest.raises(ValueError, match=r"all 6 questions are left out: .* no room for prompt and answer"):
        synthesize(str(tmp_path / "none.jsonl"), answer_tokens=600, **options)
    assert not (tmp_path / "none.jsonl").exists()
