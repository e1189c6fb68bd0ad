"""Suites: every form of a record, local and from the hub (local copies with the real columns), and what is refused."""

import gzip
import json
from collections import Counter
from pathlib import Path

import datasets
import pytest

from poss_lightning.evaluation.suites import HUB_SUITES, OWN_FOLDER, own_suites, read_suites


def lines(*records: dict) -> str:
    return "".join(json.dumps(record) + "\n" for record in records)


def chat(*turns: tuple[str, str]) -> list[dict]:
    return [{"role": role, "content": text} for role, text in turns]


# --- local ---


def test_our_own_suites_are_six_of_ten_and_can_be_written_and_read_again(tmp_path):
    """So a suite, also of the hub, can be carried to a machine without network."""
    assert own_suites() == ["chat", "code", "instructions", "maths", "questions", "summaries"]
    questions = read_suites()
    assert Counter(question.suite for question in questions) == dict.fromkeys(own_suites(), 10)
    assert read_suites(limit=2) == [question for name in own_suites() for question in read_suites([name])[:2]]
    assert read_suites([str(OWN_FOLDER)]) == questions
    (tmp_path / "chat.jsonl").write_text(lines(*map(vars, questions[:10])))
    assert read_suites([str(tmp_path)]) == questions[:10]


CALL = {"function": {"name": "weather", "arguments": {}}}
LATER = [{"role": "tool", "content": "x"}, *chat(("assistant", "x"), ("user", "b"))]
FORMS = [
    ({"turns": ["a", "b"]}, ["a", "b"]),
    ({"prompt": "a"}, ["a"]),
    ({"prompt": chat(("user", "a"))}, ["a"]),
    ({"messages": chat(("user", "a"), ("assistant", "x"), ("user", "b"))}, ["a", "b"]),
    ({"messages": chat(("user", "a"), ("user", "b"), ("assistant", "x"), ("user", "c"))}, ["a\n\nb", "c"]),
    ({"messages": chat(("system", "s"), ("user", "a"), ("user", "b"))}, ["a", "b"]),  # no answers
    ({"messages": chat(("user", "a"), ("assistant", "x"), ("system", "s"), ("user", "b"))}, ["a"]),
    ({"question": '["a", "b"]'}, ['["a", "b"]']),
    ({"messages": chat(("assistant", "unasked"), ("user", "a"))}, ["a"]),
    ({"turns": ["a"], "system": "s"}, ["a"]),
    ({"instruction": "a", "input": "b", "output": "x"}, ["a\n\nb"]),
    ({"instruction": "a", "prompt": "### a ### x", "output": "x"}, ["a"]),
    ("a", ["a"]),
    ({"messages": [*chat(("user", "a")), {"role": "assistant", "content": "", "tool_calls": [CALL]}, *LATER]}, ["a"]),
    ({"turns": None, "prompt": "a"}, ["a"]),  # rows of a table have every column
    ({"prompt": "first", "messages": chat(("user", "a"), ("assistant", "x"), ("user", "b"))}, ["a", "b"]),
]


def test_every_form_of_a_record(tmp_path):
    (tmp_path / "suite.jsonl.gz").write_bytes(gzip.compress(lines(*(record for record, _ in FORMS)).encode()))
    questions = read_suites([str(tmp_path / "suite.jsonl.gz")])
    assert [question.turns for question in questions] == [turns for _, turns in FORMS]
    openings = [question.opening for question in questions if question.opening]
    assert openings == [chat(("system", "s"))] * 2
    assert [(question.suite, question.id) for question in questions] == [("suite", n + 1) for n in range(len(FORMS))]


def test_a_named_field_counts_before_all_and_a_repeated_id_gets_a_number_unless_strict(tmp_path):
    """An id is of several fields, or the number of the line; a category is text."""
    file = tmp_path / "suite.jsonl"
    file.write_text(lines({"turns": ["a"], "instruction": "b"}, {"instruction": chat(("user", "c"))}))
    assert [question.turns for question in read_suites([f"{file}?field=instruction"])] == [["b"], ["c"]]
    records = [{"question_id": 7, "id": "x"}, {"id": "y", "category": "z"}, {"conversation_id": "c"}]
    records += [{"id": None, "category": ["no text"]}, {"id": "y"}, {"id": 7}, {"id": 7}]
    file.write_text(lines(*({"prompt": "a"} | record for record in records)))
    questions = read_suites([str(tmp_path)], strict=False)
    assert [question.id for question in questions] == [7, "y", "c", 4, "y#2", "7#2", "7#3"]
    assert [question.category for question in questions] == ["", "z", "", "", "", "", ""]


# --- the hub ---


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))


def data_set(folder: Path, rows: list[dict], config: str = "default", split: str = "train") -> str:
    """A copy of a data set as the hub lays it out: parquet, and a card that names configs and splits."""
    (folder / config).mkdir(parents=True)
    datasets.Dataset.from_list(rows).to_parquet(folder / config / f"{split}-0.parquet")
    card = [{"config_name": config, "data_files": [{"split": split, "path": f"{config}/{split}-*"}]}]
    (folder / "README.md").write_text(f"---\nconfigs: {json.dumps(card)}\n---\n")
    return str(folder)


# Of each of the six its columns, as on the hub, in one row; and the question that is made of it: id, category, turns.
COLUMNS = {
    "mt_bench": (
        {"prompt": ["Write.", "Again."], "reference": [], "category": "writing", "prompt_id": 52640831},
        (52640831, "writing", ["Write.", "Again."]),
    ),
    "humaneval": (
        {"task_id": "HumanEval/7", "prompt": "\ndef f():\n", "canonical_solution": "", "test": "", "entry_point": "f"},
        ("HumanEval/7", "code", ["Complete the code I provided.\ndef f():\n"]),
    ),
    "gsm8k": ({"question": "How many?", "answer": "#### 2"}, (1, "math", ["How many?"])),
    "alpaca": ({"instruction": "Rhyme.", "input": "", "output": "", "text": ""}, (1, "", ["Rhyme."])),
    "qa": ({"question": "who wrote it", "answer": ["me"]}, (1, "qa", ["Who wrote it?"])),
    "sum": (
        {"article": "It rained.", "highlights": "Rain.", "id": "f001"},
        ("f001", "summarization", ["Summarize: It rained."]),
    ),
}


def test_the_six_of_the_papers_and_the_nine_of_speculators(tmp_path):
    """The nine are a file each, and asked whole."""
    for name, (row, (id, category, turns)) in COLUMNS.items():
        config, split = HUB_SUITES[name].config or "default", HUB_SUITES[name].split
        copy = data_set(tmp_path / name, [row], config, split)
        [question] = read_suites([f"hub:{name}?repo={copy}"])
        assert (question.suite, question.id, question.category, question.turns) == (name, id, category, turns)
        assert question.source == f"{copy} {config} {split}"
    files = {suite.file for suite in HUB_SUITES.values() if suite.file}
    for file in files:
        (tmp_path / file).write_text(lines(*({"prompt": f"{file} {n}"} for n in range(90))))
    questions = read_suites([f"hub:speculators_qa?repo={tmp_path}"])
    assert len(files) == 9 and [each.turns for each in questions] == [[f"qa.jsonl {n}"] for n in range(90)]


def test_the_pinned_commit_is_requested_and_recorded_and_a_copy_has_others(monkeypatch):
    asked = []

    def load(repo, config, *, revision, **options):
        asked.append((repo, config, revision))
        return [{"question": "How many?"}]

    monkeypatch.setattr(datasets, "load_dataset", load)
    pinned = HUB_SUITES["gsm8k"].revision
    assert all(len(suite.revision) == 40 and int(suite.revision, 16) for suite in HUB_SUITES.values())
    assert read_suites(["hub:gsm8k"])[0].source == f"openai/gsm8k@{pinned} main test"
    assert read_suites(["hub:gsm8k?repo=my/copy"])[0].source == "my/copy main test"
    assert asked == [("openai/gsm8k", "main", pinned), ("my/copy", "main", None)]


def test_the_first_eighty_questions_unless_there_is_a_limit(tmp_path, monkeypatch):
    """Rows and lines after them are not read."""
    rows = [{"instruction": f"Say {n}.", "input": "x" * (n % 3 == 0)} for n in range(200)]
    source = "hub:alpaca?repo=" + data_set(tmp_path / "copy", rows)
    questions = read_suites([source], limit=100)
    assert [(one.id, one.turns) for one in questions] == [(n + 1, [f"Say {n}."]) for n in range(150) if n % 3]
    assert read_suites([source]) == questions[:80]
    few = (rows[n] if n < 5 else 1 / 0 for n in range(9))
    monkeypatch.setattr(datasets.IterableDataset, "__iter__", lambda self: few)
    assert read_suites([source], limit=3) == questions[:3]
    (tmp_path / "suite.jsonl").write_text(lines({"prompt": "a"}) + "{oops")
    assert len(read_suites([str(tmp_path / "suite.jsonl")], limit=1)) == 1


REFUSED = [  # records, by file and line; and suites and fields that do not exist
    ([{"text": "a", "n": 1}], r"suite\.jsonl:1: has no `turns`, .* or `question` \(.*\); it has text, n"),
    ([{"turns": ["a", " "]}], r":1: `turns` is \['a', ' '\]; it must be a text, .* none of them blank"),
    ([{"turns": ["a"], "history": [["b", "c"]]}], ":1: it has 'history' beside a question: give"),
    ([5], ":1: a record must be an object, not int"),
    ([{"messages": [{"role": "tool", "content": "a"}]}], ":1: `messages` has no message of a user"),
    ([{"turns": ["a"], "question_id": 1}] * 2, "suite repeats question_id 1;"),
    ([], " has no questions"),
    ("nowhere", "suite 'nowhere' is not a file, .* poss list shows"),
    ("chat?feild=a", "'feild' is not an option; there are field"),
    ("chat?field=text", r"chat\.jsonl:1: has no `text`; it has question_id, category, turns"),
    ("hub:owner/name", "suite 'hub:owner/name' is not one that poss list shows; give JSON lines"),
    (["chat", "chat"], r"two suites are named 'chat'; names must differ: .*prompts/chat.jsonl, .*"),
]


@pytest.mark.parametrize(("given", "words"), REFUSED)
def test_what_cannot_be_read_is_named(tmp_path, monkeypatch, given, words):
    monkeypatch.chdir(tmp_path)
    if isinstance(given, list) and given != ["chat", "chat"]:
        Path("suite.jsonl").write_text(lines(*given))
        given = "suite.jsonl"
    with pytest.raises((FileNotFoundError, ValueError), match=words):
        read_suites(given)
