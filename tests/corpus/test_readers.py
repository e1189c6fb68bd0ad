"""Readers: every form of a conversation, every kind of source, and the messages for bad ones."""

import gzip
import json

import datasets
import pytest

from poss_lightning.corpus.readers import Conversation, CorpusError, read_conversations

CHAT = {"id": "a", "messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]}
SHAREGPT = {"conversations": [{"from": "Human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]}


def lines(*records) -> str:
    return "".join((record if isinstance(record, str) else json.dumps(record)) + "\n" for record in records)


@pytest.fixture
def write(tmp_path):
    def to(name: str, content: str | bytes) -> str:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
        return str(tmp_path / name)

    return to


CHATS = [CHAT, CHAT | {"id": "b é"}]
TWO = lines(*CHATS)
FILES = {
    "zipped.jsonl.gz": gzip.compress(TWO.encode()),
    "array.jsonl": json.dumps(CHATS),
    "indented.jsonl": json.dumps(CHATS, indent=1),
    "any.txt": TWO,
    "mark.jsonl": "\ufeff" + TWO,
    "windows.json": "\r\n" + TWO.replace("\n", "\r\n"),
}


def test_a_file_is_read_by_its_content(write):
    for name, content in FILES.items():
        assert [c.id for c in read_conversations(write(name, content))] == ["a", "b é"], name


def test_parquet_and_saved_folders(tmp_path):
    both = [SHAREGPT | {"messages": None}, {"messages": CHAT["messages"], "conversations": None}]
    data = datasets.Dataset.from_list([*both, CHAT | {"messages": [BRIEF | {"content": None}, *CHAT["messages"]]}])
    data.to_parquet(tmp_path / "x.parquet")
    data.save_to_disk(tmp_path / "saved")
    datasets.DatasetDict({"train": data.select([0]), "test": data}).save_to_disk(tmp_path / "splits")
    sources = {"x.parquet": ("train", 3), "saved": ("train", 3), "splits": ("test", 3)}
    for name, (split, count) in sources.items():
        found = read_conversations(str(tmp_path / name), split)
        assert [c.messages for c in found] == [CHAT["messages"]] * count
    assert len(read_conversations(str(tmp_path / "splits"))) == 1
    with pytest.raises(CorpusError, match=r"splits is a folder datasets cannot load \(split 'dev'\)"):
        read_conversations(str(tmp_path / "splits"), "dev")


def test_fields_that_only_other_rows_of_a_table_have_are_left_out(tmp_path):
    arguments = [{"city": "Oslo"}, {"x": 1}]
    calls = [CALLING | {"tool_calls": [{"function": {"name": "f", "arguments": each}}]} for each in arguments]
    datasets.Dataset.from_list([{"messages": [HI, call]} for call in calls]).to_parquet(tmp_path / "x.parquet")
    found = [conversation.messages[1] for conversation in read_conversations(str(tmp_path / "x.parquet"))]
    assert [message["tool_calls"][0]["function"]["arguments"] for message in found] == arguments


HI, HELLO = CHAT["messages"]
NAN = float("nan")
BRIEF = {"role": "system", "content": "Be brief."}
CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Oslo"}}}
OLD = {"name": "weather", "arguments": '{"city": "Oslo"}'}
EMPTY = {"type": "function", "function": {"name": "a", "arguments": {}}}
NONE = [{"arguments": none} for none in ("", " ", "{}", "null", "[]", '""', [], {}, None)] + [{}, {"parameters": ""}]
PART = {"type": "thinking", "thinking": "hm", "signature": "x y"}
PARTS = [
    [PART, {"type": "text", "text": "Hello"}],
    [
        {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "output_text", "text": "Hello"},
    ],
    [{"type": "thinking", "thinking": [{"type": "text", "text": "h"}, {"type": "text", "text": "m"}]}, "Hello"],
    [{"text": "hm", "thought": True}, {"text": "Hello"}],
]
USED = {"type": "tool_use", "id": "1", "name": "weather", "input": {"city": "Oslo"}}
CALLING, RESULT = {"role": "assistant", "content": "", "tool_calls": [CALL]}, {"role": "tool", "content": "4"}
SILENT, TOLD = RESULT | {"content": ""}, RESULT | {"content": '{"t": 4}'}
TURN = {"from": "tool_call", "value": json.dumps(CALL["function"])}
SPOKEN = (CALL["function"], [CALL], [{"type": "text", "text": json.dumps(OLD)}])  # in turns of the role "tool_call"
THOUGHTS = dict.fromkeys(("reasoning_content", "reasoning", "thinking"), "hm")
STOPPED, CUT = {"finish_reason": "stop"}, {"content": "", "finish_reason": "length"} | THOUGHTS
ANSWERS = [  # fields of an answer, and what is read
    *(({name: "hm"}, THOUGHTS) for name in ("thinking", "thoughts", "reasoning_text")),
    (
        {"reasoning": "hm", "reasoning_details": [{"type": "reasoning.text", "text": "hm", "signature": "a b"}]},
        THOUGHTS,
    ),
    ({"thinking_blocks": [PART], "timestamp": "9 May 2026", "model": "a b"}, THOUGHTS),
    *(({"content": parts}, THOUGHTS) for parts in PARTS),
    ({"content": [USED]}, {"content": "", "tool_calls": [CALL | {"id": "1"}]}),
    ({"thinking": "Hell"}, dict.fromkeys(THOUGHTS, "Hell")),  # the beginning of what it says
    *(({"tool_calls": [{"function": {"name": "a"} | none}]}, {"tool_calls": [EMPTY]}) for none in NONE),
    ({"content": "<think>a</think>b", "thinking": "a"}, {"content": "<think>a</think>b"}),
    ({"thought": "Hello\n"}, {}),
    ({"content": "", "reasoning": "hm", "finish_reason": "length"}, CUT),
    ({"stop_reason": "MAX_TOKENS"}, {"finish_reason": "length"}),
    *(({"weight": no}, {"weight": 0}) for no in (0, 0.0, False)),
    ({"loss_mask": None, "weight": 1.0}, {}),
    ({"content": None, "tool_calls": [CALL]}, {"content": "", "tool_calls": [CALL]}),
    ({"tool_calls": [CALL["function"], {"name": "a", "args": None}]}, {"tool_calls": [CALL, EMPTY]}),
    ({"function_call": OLD}, {"tool_calls": [CALL]}),
    ({"function_calls": json.dumps([OLD])}, {"tool_calls": [CALL]}),
]
FORMS = [
    ({"messages": [], "conversations": SHAREGPT["conversations"]}, [HI, HELLO]),
    ({"messages": [HI | {"content": [{"type": "text", "content": "H"}, "i"]}, HELLO]}, [HI, HELLO]),
    ({"system": "Be brief.", "messages": [HI, HELLO]}, [BRIEF, HI, HELLO]),
    ({"system": NAN, "messages": [HI, HELLO | {"weight": NAN, "name": NAN}]}, [HI, HELLO]),
    ({"messages": [HI, HELLO], "finish_reason": "length"}, [HI, HELLO | {"finish_reason": "length"}]),
    ({"messages": [HI, HELLO | STOPPED], "stop_reason": "max_tokens"}, [HI, HELLO | STOPPED]),
    *(({"messages": [HI, HELLO | given]}, [HI, HELLO | found]) for given, found in ANSWERS),
    # one question and its answer
    ({"instruction": "Hi", "input": "you", "output": "Hello"}, [HI | {"content": "Hi\n\nyou"}, HELLO]),
    ({"prompt": [BRIEF | {"role": "developer"}, HI], "completion": [HELLO]}, [BRIEF, HI, HELLO]),
    ({"prompt": "Hi", "response": '["a", "b"]'}, [HI, HELLO | {"content": '["a", "b"]'}]),
    ({"prompt": "Hi", "response": ["Hello"], "thinking": "hm"}, [HI, HELLO | THOUGHTS]),
    ({"input": [HI], "output": "Hello", "reasoning": " On"}, [HI, HELLO]),
    ({"question": "Hi", "context": "you", "answer": "Hello"}, [HI | {"content": "Hi\n\nyou"}, HELLO]),
    ({"conversations": ["Hi", "Hello"]}, [HI, HELLO]),
    ({"problem": "Hi", "generation": "Hello", "answer": "4"}, [HI, HELLO]),
    ({"prompt": "Hi", "chosen": [HI, HELLO], "rejected": [HI]}, [HI, HELLO]),
    ({"prompt": [HI], "chosen": [HELLO], "rejected": [HI]}, [HI, HELLO]),
    # lists of texts, turns as texts
    ({"id": "0", "data": ["Hi", "Hello", "Hi", "Hello"]}, [HI, HELLO] * 2),
    ({"question": "Hi", "data": ["a", "b"], "answer": "Hello"}, [HI, HELLO]),
    ({"messages": [json.dumps(HI), json.dumps(HELLO)]}, [HI, HELLO]),
    ({"messages": json.dumps([HI, HELLO])}, [HI, HELLO]),
    # tools
    *(({"messages": [HI, {"role": "tool_call", "content": said}]}, [HI, CALLING]) for said in SPOKEN),
    ({"messages": [HI, TURN, {"from": "observation", "value": ""}, HELLO]}, [HI, CALLING, SILENT, HELLO]),
    ({"messages": [HI, CALLING, RESULT | {"content": {"t": 4}}, HELLO]}, [HI, CALLING, TOLD, HELLO]),
    ({"messages": [HI, CALLING, CALLING | {"reasoning_content": "hm"}]}, [HI, CALLING, CALLING | THOUGHTS]),
    ({"messages": [HI, HELLO, TURN, TURN]}, [HI, HELLO | {"tool_calls": [CALL, CALL]}]),
    ({"messages": [HI, HELLO | STOPPED, TURN]}, [HI, HELLO | STOPPED, CALLING]),
    # made regular: answers before a question, empty turns, messages of a user in a row, what follows the last answer
    ({"messages": [BRIEF, HELLO, HI, HELLO]}, [BRIEF, HI, HELLO]),
    ({"messages": [HI, HI, HELLO, HELLO]}, [HI | {"content": "Hi\n\nHi"}, HELLO, HELLO]),
    ({"messages": [HI, HELLO, HI, HELLO | {"content": " \n"}, HI, HELLO]}, [HI, HELLO]),
    ({"messages": [BRIEF | {"content": None}, HI, HELLO, HI]}, [HI, HELLO]),
]


def test_every_form_is_read(write):
    for record, messages in FORMS:
        [conversation] = read_conversations(write("x.jsonl", lines(record)))
        assert conversation.messages == messages


def test_a_record_may_have_variables_of_the_template_which_its_digest_knows(write):
    more = {"tools": '[{"name": "f"}]', "chat_template_kwargs": {"enable_thinking": False}}
    records = [CHAT, CHAT | {"id": "b"}, CHAT | more, {"messages": [HI, HELLO, HI, HELLO]}]
    first, *others = read_conversations(write("x.jsonl", lines(*records)))
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert others[1].template == {"enable_thinking": False, "tools": tools}
    assert [other.digest == first.digest for other in others] == [True, False, False]


def test_ids_are_from_several_fields_or_the_line_and_unique(write):
    chat = {"messages": CHAT["messages"]}
    records = [{"id": None, "conversation_id": "c"}, {"question_id": 81}, {"id": ""}, {"id": "c#2"}, {"id": "c"}]
    found = read_conversations(write("share.v3.jsonl", lines("", *[record | chat for record in records])))
    assert [conversation.id for conversation in found] == ["c", "81", "share.v3:4", "c#2", "c#3"]


def test_conversations_without_answer_are_skipped_and_counted_and_a_limit_reads_no_further(write, caplog):
    silent = [{"messages": [HI]}, {"messages": [HELLO]}, {"messages": []}]
    assert len(read_conversations(write("x.jsonl", lines(*silent, CHAT, "no json")), limit=1)) == 1
    assert "skipped 3 conversations without an answer, kept 1" in caplog.text


def said(**changed) -> dict:
    return {"messages": [HI | changed]}


def answered(**changed) -> dict:
    return said(role="assistant", **changed)


MALFORMED = [  # once for each place that refuses
    ("{", "not JSON"),
    ("[" * 10**5, "not JSON"),
    (CHAT | {"id": "\ud83d"}, "it holds half a surrogate pair"),
    ("[1]", "messages[0] must be an object, not int"),
    ({"messages": "Hi"}, "'messages' must be a list, not str"),
    ({"prompt": "Hi"}, "neither 'messages' nor 'conversations', nor a question with its answer: it has 'prompt'"),
    ({"question": "a", "answer": ["b", "c"]}, "'answer' has 2 texts; it must be one"),
    ({"history": [["a", "b"]], "prompt": "b", "response": "c"}, "it has 'history' beside a question: give"),
    (
        {"messages": [HI], "response": "Hello"},
        "its messages end with the user, beside 'response': give that as the last",
    ),
    ({"prompt": "Hi", "completion": "Go away.", "label": False}, "its 'label' says that 'completion' is a bad answer"),
    ({"instruction": "a", "input": {"b": 1}, "output": "c"}, "'input' must be a text, not dict"),
    ({"prompt": [HI, HELLO], "completion": [HELLO]}, "'prompt' ends with the assistant, and 'completion' may continue"),
    ({"prompt": "Hi", "response": "Hello", "cot": "I see."}, "it has 'cot' beside the answer: give thoughts"),
    (CHAT | {"images": ["a.png"]}, "it has 'images', and only text is read"),
    (CHAT | {"tools": "weather"}, "'tools' must be a list of functions"),
    (CHAT | {"system": "a", "messages": [BRIEF, HI, HELLO]}, "its 'system' and its first message are different"),
    ({"messages": [BRIEF | {"functions": '[{"name": "f"}]'}, HI, HELLO]}, "messages[0] has 'functions'; tools are"),
    (said(role="narrator"), "messages[0]: unknown role 'narrator', known are system"),
    (said(content=[{"image": "a.png"}, {"text": "b"}]), "messages[0] has a part of type 'image'; text, thoughts and"),
    (said(content=[PART, "a"]), "messages[0] has thoughts or calls, and is not an assistant's"),
    (said(role="function_call", content="weather()"), "messages[0]: a tool call must have a function with a name"),
    (answered(content=[USED, "a"]), "messages[0] has content after calls; a message holds thoughts, then content"),
    (answered(tokens=[-5]), "messages[0]: 'tokens' must be a list of token ids"),
    (answered(is_masked=0), "messages[0] has 'is_masked': an answer that is kept out"),
    (answered(weight=0.5), "messages[0]: 'weight' is 0.5; it must be 0 or 1"),
    (answered(analysis=[{"step": "先想"}]), "messages[0] has 'analysis', which is not read: name thoughts"),
    (answered(channel="analysis"), "messages[0] has channel 'analysis'; give an analysis as 'thinking' of the answer"),
    (answered(thinking="a", thoughts="b"), "messages[0] has different thoughts in 'thinking' and 'thoughts'"),
    (
        answered(content="<think>a</think>b", thinking="c"),
        "messages[0] has different thoughts in 'thinking' and in its",
    ),
    (answered(tool_calls=[{"name": "f", "given": 1}]), "messages[0]: a tool call has ['given'], and arguments are"),
    (answered(tool_calls=[{"name": "f", "arguments": "{'a': 1}"}]), "messages[0]: the arguments of 'f' are not JSON"),
    (
        answered(tool_calls=[{"name": "f", "input": [1]}]),
        "messages[0]: the arguments of 'f' must be an object, not [1]",
    ),
]


def test_malformed_lines_are_left_out_and_named_with_the_reason(write, caplog):
    for record, reason in MALFORMED:
        assert len(read_conversations(write("x.jsonl", lines(CHAT, record)))) == 1
        assert f"x.jsonl: 1 of 2 malformed\n  line 2: {reason}" in caplog.messages[-1]


def test_more_than_a_tenth_malformed_is_an_error_that_spells_out_three(write):
    assert len(read_conversations(write("x.jsonl", lines(*[CHAT] * 38, *["{"] * 4)))) == 38
    words = r"x\.jsonl: 4 of 39 malformed(\n  line 3[678]: not JSON .*){3}\n  and 1 more$"
    with pytest.raises(CorpusError, match=words):
        read_conversations(write("x.jsonl", lines(*[CHAT] * 35, *["{"] * 4)))


ZIPPED = gzip.compress(TWO.encode(), mtime=0)  # a test is named by it, in every process the same
UNUSABLE = [
    ("x.jsonl", "", r"empty: no conversation with an answer \(0 without\)"),
    ("x.json", "[{", "is not JSON"),
    ("x.json", json.dumps([CHAT, {}]), "1 of 2 malformed\n  record 2: neither"),
    ("x.jsonl", lines(CHAT).encode() + b"\xff", r"line 2: not UTF-8 text .*: save the file as UTF-8"),
    ("x.jsonl", '{"id"\n' + lines(CHAT), "1 of 2 malformed\n  line 1: not JSON"),
    ("x.jsonl", b"id,messages\n", "is not UTF-8 JSON, lines or an array, nor parquet"),
    ("x.jsonl.gz", ZIPPED[:20] + b"!" * 40, "x.jsonl.gz cannot be read to its end"),
]


@pytest.mark.parametrize(("name", "content", "reason"), UNUSABLE)
def test_unusable_files_are_named_with_the_reason(write, name, content, reason):
    with pytest.raises(CorpusError, match=reason):
        read_conversations(write(name, content), strict=True)


DATED = {"role": "user", "content": "2026-11-28"}
SAID = [
    {"id": "2026-11-28", "messages": [DATED, HELLO | {"content": "2026-11-29T10:00:00"}]},
    *(
        {"id": str(v), "messages": [HI, CALLING | {"tool_calls": [{"name": "f", "arguments": {"v": v, "w": None}}]}]}
        for v in (1, 1.5, "one", ["x"], 2**61 + 1)
    ),
    CHAT | {"tools": [{"name": "f", "parameters": {"x": {"default": None}}}], "chat_template_kwargs": {"a": None}},
]


@pytest.mark.parametrize("name", ["train.jsonl", "data/train-00000.json", "a.jsonl.gz"])
def test_a_folder_of_json_reads_as_the_file_does(write, tmp_path, name):
    """A table would drop nulls, widen numbers and parse dates; it could not even hold these arguments."""
    text = json.dumps(SAID) if name.endswith(".json") else lines(*SAID)
    data = gzip.compress(text.encode()) if name.endswith(".gz") else text
    file = write("x.jsonl", data)
    write(f"folder/{name}", data)
    assert read_conversations(str(tmp_path / "folder")) == read_conversations(file)


def test_a_folder_is_loaded_by_datasets(write, tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "empty").mkdir()
    write("chats/train.jsonl", lines(CHAT, CHAT | {"id": None}))
    write("chats/test.jsonl", lines(CHAT))
    assert [c.id for c in read_conversations(str(tmp_path / "chats"))] == ["a", "chats:2"]
    assert read_conversations(str(tmp_path / "chats"), split="test") == [Conversation("a", CHAT["messages"])]
    with pytest.raises(CorpusError, match=r"empty is a folder datasets cannot load \(split 'train'\)"):
        read_conversations(str(tmp_path / "empty"))


def test_neither_path_nor_hub_id(monkeypatch):
    def unreachable(source, config, revision):
        raise ConnectionError(f"no {source!r}, {config}, {revision} on the Hub")

    monkeypatch.setattr(datasets, "load_dataset_builder", unreachable)
    with pytest.raises(CorpusError, match=r"no path here and no reachable hub id .*no 'nobody/nothing', sft, abc on"):
        read_conversations("nobody/nothing?config=sft&revision=abc")
    with pytest.raises(ValueError, match="'split' is not an option; there are config, revision"):
        read_conversations("nobody/nothing?split=train")
    with pytest.raises(CorpusError, match=r"nothing.jsonl is missing: there is no such file"):
        read_conversations("nobody/nothing.jsonl")
