"""Readers: both forms of a conversation, every kind of source, and what is said of bad ones."""

import gzip
import json
import logging

import datasets
import pytest

from poss_lightning.corpus.readers import Conversation, CorpusError, read_conversations

CHAT = {"id": "a", "messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]}
SHAREGPT = {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]}


def lines(*records) -> str:
    return "".join((record if isinstance(record, str) else json.dumps(record)) + "\n" for record in records)


@pytest.fixture
def write(tmp_path):
    def to(name: str, text: str) -> str:
        data = text.encode()
        (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
        return str(tmp_path / name)

    return to


def spoken(write, *turns: tuple[str, str]) -> list[tuple[str, str]]:
    """Write ShareGPT turns, read them, give them back as pairs."""
    record = {"conversations": [{"from": role, "value": text} for role, text in turns]}
    [conversation] = read_conversations(write("turns.jsonl", lines(record)))
    return [(message["role"], message["content"]) for message in conversation.messages]


@pytest.mark.parametrize("name", ["corpus.jsonl", "corpus.jsonl.gz"])
def test_json_lines_of_both_forms(write, name):
    found = read_conversations(write(name, lines(CHAT, "", SHAREGPT)))
    assert found == [Conversation("a", CHAT["messages"]), Conversation("corpus:3", CHAT["messages"])]


def test_json_array(write):
    found = read_conversations(write("share.v3.json", json.dumps([SHAREGPT, CHAT])))
    assert [conversation.id for conversation in found] == ["share.v3:1", "a"]


def test_every_id_field_and_numbers_as_ids(write):
    rest = {"messages": CHAT["messages"]}
    records = [{"id": None, "conversation_id": "c", **rest}, {"question_id": 81, **rest}, {"id": "", **rest}]
    assert [c.id for c in read_conversations(write("x.jsonl", lines(*records)))] == ["c", "81", "x:3"]


def test_an_id_met_again_gets_a_number(write):
    records = [CHAT, CHAT, {**CHAT, "id": "a#2"}, CHAT]
    assert [c.id for c in read_conversations(write("x.jsonl", lines(*records)))] == ["a", "a#2", "a#2#2", "a#3"]


def test_limit_looks_no_further(write):
    source = write("x.jsonl", lines(CHAT, SHAREGPT, "no json"))
    assert len(read_conversations(source, limit=2)) == 2
    with pytest.raises(ValueError, match="limit is 0"):
        read_conversations(source, limit=0)


def test_answers_before_any_question_are_dropped(write):
    turns = [("system", "S"), ("gpt", "unasked"), ("human", "Hi"), ("gpt", "Hello")]
    assert spoken(write, *turns) == [("system", "S"), ("user", "Hi"), ("assistant", "Hello")]


def test_neighbours_of_one_role_are_joined(write):
    turns = [("human", "a"), ("human", "b"), ("gpt", "c"), ("chatgpt", "d")]
    assert spoken(write, *turns) == [("user", "a\n\nb"), ("assistant", "c\n\nd")]


def test_empty_turns_are_dropped(write):
    turns = [("system", ""), ("human", "a"), ("gpt", " \n"), ("human", "b"), ("gpt", " c ")]
    assert spoken(write, *turns) == [("user", "a\n\nb"), ("assistant", " c ")]


def test_messages_after_the_last_answer_are_dropped(write):
    assert spoken(write, ("human", "a"), ("gpt", "b"), ("human", "c")) == [("user", "a"), ("assistant", "b")]


def test_conversations_without_answer_are_skipped_and_counted(write, caplog):
    silent = [{"messages": CHAT["messages"][:1]}, {"messages": CHAT["messages"][1:]}, {"messages": []}]
    with caplog.at_level(logging.WARNING):
        assert len(read_conversations(write("x.jsonl", lines(*silent, CHAT)))) == 1
    assert "skipped 3 conversations without an answer, kept 1" in caplog.text


def message(**changed) -> dict:
    return {"messages": [{"role": "user", "content": "Hi", **changed}]}


MALFORMED = [
    ("{", "not JSON"),
    ("[1]", "a record must be an object, it is a list"),
    ({"text": "Hi"}, "neither 'messages' nor 'conversations'"),
    ({"messages": "Hi"}, "'messages' must be a list, it is a str"),
    ({"conversations": ["Hi"]}, "conversations[0] must be an object, it is a str"),
    ({"conversations": [{"from": "gpt"}]}, "conversations[0] has no 'value'"),
    (message(role=None), "messages[0] has no 'role'"),
    (message(role="tool"), "messages[0]: unknown role 'tool', known are system, user"),
    (message(content=["Hi"]), "messages[0]: 'content' must be a string, it is a list"),
    (message(content="\ud83d"), "messages[0]: 'content' holds half a surrogate pair"),
]


@pytest.mark.parametrize(("record", "reason"), MALFORMED)
def test_malformed_lines_are_told_by_number_and_reason(write, record, reason):
    with pytest.raises(CorpusError) as caught:
        read_conversations(write("x.jsonl", lines(CHAT, record)))
    assert f"x.jsonl: 1 malformed\n  line 2: {reason}" in str(caught.value)


def test_all_malformed_lines_come_in_one_error_three_spelled_out(write):
    with pytest.raises(CorpusError) as caught:
        read_conversations(write("x.jsonl", lines(*(record for record, _ in MALFORMED), CHAT, "{", "}")))
    head, *faults, more = str(caught.value).split("\n  ")
    assert head.endswith("x.jsonl: 12 malformed")
    assert [fault.split(":")[0] for fault in faults] == [f"line {number}" for number in range(1, 4)]
    assert more == "and 9 more"


def test_an_array_has_records_not_lines(write):
    with pytest.raises(CorpusError, match=r"x\.json: 1 malformed\n  record 2: neither"):
        read_conversations(write("x.json", json.dumps([CHAT, {}])))


def test_bytes_that_are_no_text_are_told_by_line(tmp_path):
    (tmp_path / "x.jsonl").write_bytes(lines(CHAT).encode() + b'{"id": "\xff"}\n')
    with pytest.raises(CorpusError, match=r"line 2: not JSON .*utf-8"):
        read_conversations(str(tmp_path / "x.jsonl"))


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        ("x.jsonl", "", r"empty: no conversation with an answer \(0 without\)"),
        ("x.jsonl", lines(message()), r"empty: no conversation with an answer \(1 without\)"),
        ("x.json", "[]", "empty"),
        ("x.json", "{", "is not JSON"),
        ("x.json", json.dumps(CHAT), "is not a JSON array of conversations"),
        ("x.txt", lines(CHAT), "is not one of .jsonl, .jsonl.gz, .json"),
    ],
)
def test_unusable_files(write, name, text, reason):
    with pytest.raises(CorpusError, match=reason):
        read_conversations(write(name, text))


def test_missing_file(tmp_path):
    with pytest.raises(CorpusError, match="missing: there is no such file"):
        read_conversations(str(tmp_path / "x.jsonl"))


SPOILT = [lambda data: data[:-12], lambda data: b"plain text", lambda data: data[:20] + b"!" * 40]


@pytest.mark.parametrize("spoil", SPOILT)
def test_a_spoilt_archive(tmp_path, spoil):
    path = tmp_path / "x.jsonl.gz"
    path.write_bytes(spoil(gzip.compress(lines(CHAT, SHAREGPT).encode())))
    with pytest.raises(CorpusError, match=r"x.jsonl.gz cannot be read to its end"):
        read_conversations(str(path))


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty folder for `datasets` to load, with a cache of its own."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "chats").mkdir()
    return tmp_path / "chats"


def test_a_folder_of_json_lines(folder):
    (folder / "train.jsonl").write_text(lines(CHAT, {**CHAT, "id": None}))
    (folder / "test.jsonl").write_text(lines(CHAT))
    assert [c.id for c in read_conversations(str(folder))] == ["a", "chats:2"]
    assert read_conversations(str(folder), split="test") == [Conversation("a", CHAT["messages"])]
    with pytest.raises(CorpusError, match=r"cannot load .*nosuch"):
        read_conversations(str(folder), split="nosuch")


def test_a_folder_of_parquet(folder):
    datasets.Dataset.from_list([SHAREGPT, SHAREGPT]).to_parquet(folder / "train.parquet")
    assert read_conversations(str(folder), limit=1) == [Conversation("chats:1", CHAT["messages"])]


def test_folders_that_cannot_be_loaded(folder):
    with pytest.raises(CorpusError, match="is a folder datasets cannot load"):
        read_conversations(str(folder))
    (folder / "train.jsonl").write_text("{")
    with pytest.raises(CorpusError, match="is a folder datasets cannot load"):
        read_conversations(str(folder))


def test_neither_path_nor_hub_id(monkeypatch):
    def unreachable(source, split):
        raise ConnectionError(f"Couldn't reach {source!r} on the Hub")

    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    with pytest.raises(CorpusError, match=r"no path here and no reachable hub id .*Couldn't reach"):
        read_conversations("nobody/nothing")
