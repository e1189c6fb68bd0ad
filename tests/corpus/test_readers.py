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


@pytest.mark.parametrize("name", FILES)
def test_a_file_is_read_by_its_content(write, name):
    assert [c.id for c in read_conversations(write(name, FILES[name]))] == ["a", "b é"]


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
SAID = (CALL["function"], [CALL], [{"type": "text", "text": json.dumps(OLD)}])  # in turns of the role "tool_call"
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
    *(({"messages": [HI, {"role": "tool_call", "content": said}]}, [HI, CALLING]) for said in SAID),
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


@pytest.mark.parametrize(("record", "messages"), FORMS)
def test_every_form_is_read(write, record, messages):
    [conversation] = read_conversations(write("x.jsonl", lines(record)))
    assert conversation.messages == messages


def test_a_record_may_have_variables_of_the_template(write):
    tools = [{"type": "function", "function": {"name": "f"}}]
    record = CHAT | {"tools": '[{"name": "f"}]', "chat_template_kwargs": {"enable_thinking": False}}
    [conversation] = read_conversations(write("x.jsonl", lines(record)))
    assert conversation.template == {"enable_thinking": False, "tools": tools}


def test_the_same_content_has_the_same_digest(write):
    records = [CHAT, CHAT | {"id": "b"}, CHAT | {"tools": [{"name": "f"}]}, {"messages": [HI, HELLO, HI, HELLO]}]
    first, *others = [c.digest for c in read_conversations(write("x.jsonl", lines(*records)))]
    assert [digest == first for digest in others] == [True, False, False]


def test_ids_are_from_several_fields_or_the_line_and_unique(write):
    chat = {"messages": CHAT["messages"]}
    records = [{"id": None, "conversation_id": "c"}, {"question_id": 81}, {"id": ""}, {"id": "c#2"}, {"id": "c"}]
    found = read_conversations(write("share.v3.jsonl", lines("", *[record | chat for record in records])))
    assert [conversation.id for conversation in found] == ["c", "81", "share.v3:4", "c#2", "c#3"]


def test_a_limit_reads_no_further(write):
    assert len(read_conversations(write("x.jsonl", lines(CHAT, SHAREGPT, "no json")), limit=2)) == 2


def test_conversations_without_answer_are_skipped_and_counted(write, caplog):
    silent = [{"messages": [HI]}, {"messages": [HELLO]}, {"messages": []}]
    assert len(read_conversations(write("x.jsonl", lines(*silent, CHAT)))) == 1
    assert "skipped 3 conversations without an answer, kept 1" in caplog.text


def message(**changed) -> dict:
    return {"messages": [{"role": "user", "content": "Hi", **changed}]}


MALFORMED = [
    ("{", "not JSON"),
    ("[1]", "messages[0] must be an object, not int"),
    ("[" * 10**5, "not JSON"),
    ({"question": "a", "answer": ["b", "c"]}, "'answer' has 2 texts; it must be one"),
    ({"history": [["a", "b"]], "prompt": "b", "response": "c"}, "it has 'history' beside a question: give"),
    ({"query": "Hi", "answers": "[]", "tools": '[{"name": "weather"}]'}, "neither 'messages' nor 'conversations', nor"),
    ({"messages": str([HI, HELLO])}, "'messages' must be a list, not str"),
    ({"messages": [HI, HELLO | {"tokens": [-5]}]}, "messages[1]: 'tokens' must be a list of token ids"),
    ({"prompt": "Hi"}, "neither 'messages' nor 'conversations', nor a question with its answer: it has 'prompt'"),
    ({"messages": "Hi"}, "'messages' must be a list, not str"),
    (message(role="narrator"), "messages[0]: unknown role 'narrator', known are system"),
    (message(content=[{"type": "image"}]), "messages[0] has a part of type 'image'; text, thoughts and calls are read"),
    (message(content=[PART, "a"]), "messages[0] has thoughts or calls, and is not an assistant's"),
    *(
        (message(role="assistant", **said), f"messages[0] has {reason}")
        for said, reason in (
            ({"content": [{"type": "summary_text", "text": "a"}]}, "a part of type 'summary_text'"),
            ({"content": [{"type": "redacted_thinking", "data": "a"}]}, "a part of type 'redacted_thinking'"),
            ({"content": ["a", PART]}, "thoughts after content; a message holds thoughts, then content, then calls"),
            ({"content": [USED, "a"]}, "content after calls"),
            (
                {"reasoning_details": [{"type": "reasoning.encrypted", "data": "a"}]},
                "a part of type 'reasoning.encrypted'",
            ),
            *(({name: 0}, f"'{name}': an answer that is kept out") for name in ("train", "loss_mask", "is_masked")),
            ({"scratchpad": "I see."}, "'scratchpad', which is not read: name thoughts 'reasoning_content', or remove"),
            ({"analysis": [{"step": "先想"}]}, "'analysis', which is not read"),
            ({"thinking": "a", "thoughts": "b"}, "different thoughts in 'thinking' and 'thoughts'"),
            ({"content": "<think>a</think>b", "thinking": "c"}, "different thoughts in 'thinking' and in its content"),
        )
    ),
    *(
        (message(role="assistant", tool_calls=[call]), f"messages[0]: {reason}")
        for call, reason in (
            ({"name": "f", "arguments": "{'a': 1}"}, "the arguments of 'f' are not JSON"),
            ({"name": "f", "input": [1]}, "the arguments of 'f' must be an object, not [1]"),
            ({"function": {"name": "f", "arguments": {}}, "result": "4"}, "a tool call has ['result'], and arguments"),
        )
    ),
    ({"prompt": "Hi", "response": "Hello", "cot": "I see."}, "it has 'cot' beside the answer: give thoughts"),
    (CHAT | {"deepseek_reasoning": "I see."}, "it has 'deepseek_reasoning' beside the answer"),
    (message(role="function_call", content="weather()"), "messages[0]: a tool call must have a function with a name"),
    ({"messages": [BRIEF | {"functions": '[{"name": "f"}]'}, HI, HELLO]}, "messages[0] has 'functions'; tools are"),
    (message(content=[{"image": "a.png"}, {"text": "b"}]), "messages[0] has a part of type 'image'"),
    (message(role="assistant", tool_calls=[{"name": "f", "given": 1}]), "messages[0]: a tool call has ['given'], and"),
    (message(role="assistant", weight=0.5), "messages[0]: 'weight' is 0.5; it must be 0 or 1"),
    (CHAT | {"id": "\ud83d"}, "it holds half a surrogate pair"),
    ({"prompt": [HI, HELLO], "completion": [HELLO]}, "'prompt' ends with the assistant, and 'completion' may continue"),
    ({"instruction": "a", "input": {"b": 1}, "output": "c"}, "'input' must be a text, not dict"),
    (CHAT | {"images": ["a.png"]}, "it has 'images', and only text is read"),
    (CHAT | {"tools": "weather"}, "'tools' must be a list of functions"),
    (CHAT | {"system": "a", "messages": [BRIEF, HI, HELLO]}, "its 'system' and its first message are different"),
]


@pytest.mark.parametrize(("record", "reason"), MALFORMED)
def test_malformed_lines_are_left_out_and_named_with_the_reason(write, caplog, record, reason):
    assert len(read_conversations(write("x.jsonl", lines(CHAT, record)))) == 1
    assert f"x.jsonl: 1 of 2 malformed\n  line 2: {reason}" in caplog.text


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
    *(("x.jsonl", begin, "is not JSON lines, a JSON array or parquet") for begin in (b"PK\x03\x04", b"id,messages\n")),
    ("x.jsonl", TWO.encode("utf-16"), "is not JSON lines, a JSON array or parquet"),
    ("x.jsonl.gz", ZIPPED[:-12], "x.jsonl.gz cannot be read to its end"),
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
    for name, split in (("empty", "train"), ("chats", "nosuch")):
        with pytest.raises(CorpusError, match=rf"{name} is a folder datasets cannot load \(split '{split}'\)"):
            read_conversations(str(tmp_path / name), split)


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
