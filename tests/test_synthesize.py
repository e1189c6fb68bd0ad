"""The target answers given prompts: turn by turn, as it would alone, killed and resumed."""

from pathlib import Path

import pytest

from poss_lightning import synthesize as module
from poss_lightning.corpus.readers import read_conversations
from poss_lightning.synthesize import synthesize
from poss_lightning.target_model.generation import PlainDecoder
from tests.support.inputs import write_suite
from tests.support.stores import dies_after

TURNS = [["Hi", "And you?"], ["How many legs?"], ["user", "system", "why"], ["The draft " * 9], ["please"]]


@pytest.fixture
def answer(tmp_path, tiny_folder):
    """Answer these questions in a file of this name; returns its path."""

    def run(name: str, turns: list[list[str]], /, answer_tokens: int = 12, **options) -> Path:
        suite, out = write_suite(tmp_path / "odd.jsonl", *turns), tmp_path / name
        options |= {"target": tiny_folder, "dtype": "float32", "batch_size": 2}
        synthesize(str(out), prompts=[suite], answer_tokens=answer_tokens, **options)
        return out

    return run


def test_answers_are_those_of_each_conversation_alone(answer, target, capsys):
    """Questions without room for an answer are left out."""
    long = ["x " * 600]
    conversations = read_conversations(str(answer("out.jsonl", [*TURNS, long])))
    assert "1 of 6 questions are left out" in capsys.readouterr().out
    assert [conversation.id for conversation in conversations] == [f"odd/{i}" for i in range(len(TURNS))]
    for conversation, turns in zip(conversations, TURNS, strict=True):
        messages = conversation.messages
        assert [message["content"] for message in messages[::2]] == turns
        for place in range(1, len(messages), 2):
            prompt = target.chat.prompt(messages[:place])
            tokens = PlainDecoder(target).generate([prompt], 12, target.chat.stops)[0]
            assert messages[place] == target.chat.message(tokens)
    with pytest.raises(ValueError, match=r"all 1 questions are left out: .* no room for prompt and answer"):
        answer("none.jsonl", [long])


def test_the_temperature_is_that_of_the_answers_and_options_of_the_users_messages_are_refused(answer):
    for temperature in 0.0, 0.8:
        conversations = read_conversations(str(answer(f"{temperature}.jsonl", TURNS, temperature=temperature)))
        answers = [message for talk in conversations for message in talk.messages if message["role"] == "assistant"]
        assert {"drawn" in message and message["drawn"]["temperature"] for message in answers} == {temperature or False}
    given = {"turns": 2, "user_temperature": 0.5, "user_tokens": 9, "openings": "x"}
    for name, value in given.items():
        with pytest.raises(ValueError, match=f"{name} is {value}; it has no effect with prompts"):
            answer("out.jsonl", TURNS, **{name: value})


def test_prompts_of_like_length_are_answered_side_by_side(answer, monkeypatch):
    batches, plain = [], PlainDecoder.generate
    monkeypatch.setattr(PlainDecoder, "generate", lambda *given: batches.append([*map(len, given[1])]) or plain(*given))
    answer("out.jsonl", [["why " * count] for count in (3, 40, 5, 41, 4)], answer_tokens=1)
    assert [len(batch) for batch in batches] == [5] and batches[0] == sorted(batches[0], reverse=True)


def test_a_killed_run_resumes_and_ends_with_the_same_file(answer, tmp_path):
    whole = answer("whole.jsonl", TURNS)
    with dies_after(PlainDecoder, "generate", 2):
        answer("killed.jsonl", TURNS)
    assert not (tmp_path / "killed.jsonl").exists()
    with pytest.raises(ValueError, match=r"killed.jsonl.parts was begun .* \(answer_tokens 12, now 9\)"):
        answer("killed.jsonl", TURNS, answer_tokens=9)
    assert answer("killed.jsonl", TURNS).read_bytes() == whole.read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["killed.jsonl", "odd.jsonl", "whole.jsonl"]


def test_all_rows_of_a_file_are_asked(tmp_path, tiny_folder, monkeypatch):
    asked = []
    monkeypatch.setattr(module, "_answers", lambda model, questions, *rest: asked.extend(questions) or [{}])
    (tmp_path / "many.jsonl").write_text('{"id": 7, "prompt": "a"}\n' * 90)
    synthesize(str(tmp_path / "out.jsonl"), prompts=str(tmp_path / "many.jsonl"), target=tiny_folder, dtype="float32")
    assert [question.id for question in asked] == [7, *(f"7#{number}" for number in range(2, 91))]
