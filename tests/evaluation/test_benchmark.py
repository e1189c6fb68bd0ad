"""`poss benchmark`: lawful records, the same answers by all methods, kill and resume."""

import gzip
import json
from collections import Counter
from pathlib import Path

import pytest
import torch

from poss_lightning.decoding.decoder import Decoded
from poss_lightning.evaluation import benchmark as module
from poss_lightning.evaluation.benchmark import Run, benchmark
from poss_lightning.evaluation.records import read_records
from poss_lightning.evaluation.suites import Question
from tests.support.inputs import write_suite
from tests.support.stores import dies_after
from tests.support.templates import DATED
from tests.support.tiny import tiny_draft, tiny_tokenizer

QUESTIONS = [
    {"question_id": 7, "category": "a", "turns": ["How many legs?", "And a horse?"]},
    {"question_id": "eight", "category": "b", "turns": ["Say it, please."]},
    {"question_id": 9, "turns": ["The target says it.", "Answer.", "What?"]},
]
METHODS = ("plain", "generate", "chain", "poss")
FILES = ["records.jsonl", "run.json"]


@pytest.fixture(scope="module")
def inputs(target, tmp_path_factory) -> Path:
    """A suite and two drafts."""
    folder = tmp_path_factory.mktemp("benchmark")
    (folder / "suite.jsonl").write_text("".join(json.dumps(question) + "\n" for question in QUESTIONS))
    tiny_draft(target, [2]).save_pretrained(folder / "chain")
    tiny_draft(target, [1, 1]).save_pretrained(folder / "poss")
    return folder


@pytest.fixture(scope="module")
def run(inputs, tiny_folder):
    """Benchmark the tiny target into a folder; keywords change the settings."""
    settings = {
        "drafts": {name: str(inputs / name) for name in ("chain", "poss")},
        "target": tiny_folder,
        "dtype": "float32",
        "suites": [str(inputs / "suite.jsonl")],
        "max_new_tokens": 12,
        "nodes": 9,
        "tree_width": 3,
        "repeats": 2,
    }
    return lambda out, **changes: benchmark(str(out), **settings | changes)


@pytest.fixture(scope="module")
def whole(run, tmp_path_factory) -> Path:
    """The folder of an uninterrupted run."""
    out = tmp_path_factory.mktemp("whole") / "out"
    run(out)
    return out


def shown(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))


def facts_of(folder: Path) -> dict:
    return json.loads((folder / "run.json").read_text())


def untimed(folder: Path) -> list[dict]:
    """The lines of a folder without what differs between runs."""
    lines = map(json.loads, (folder / "records.jsonl").read_text().splitlines())
    return [{name: value for name, value in line.items() if name != "seconds"} for line in lines]


# --- what is written ---


def test_every_method_gives_the_same_answer_to_every_turn_and_repeat(whole, target):
    """In float32. A record that can be read is lawful."""
    records = read_records(whole)
    found = Counter((record.suite, record.id, record.turn, record.repeat, record.method) for record in records)
    expected = [
        ("suite", question["question_id"], turn, repeat, method)
        for question in QUESTIONS
        for turn in range(len(question["turns"]))
        for repeat in range(2)
        for method in METHODS
    ]
    assert found == Counter(expected)
    assert shown(whole) == FILES
    assert len({(record.id, record.turn, tuple(record.tokens), record.text) for record in records}) == 6
    by_id = {question["question_id"]: question for question in QUESTIONS}
    for record in records:
        assert record.question == by_id[record.id]["turns"][record.turn]
        assert record.category == by_id[record.id].get("category")
        assert "".join(record.pieces) == record.text
        if record.turn == 0:
            assert record.prompt_tokens == len(target.chat.prompt([{"role": "user", "content": record.question}]))


def test_what_auto_measured_stands_in_run_json(run, tmp_path, whole):
    assert "costs" not in facts_of(whole)
    run(tmp_path, limit=1, tree="auto")
    costs = facts_of(tmp_path)["costs"]
    assert set(costs) == {"chain", "poss"}
    for measured in costs.values():
        assert measured["draft_step"] > 0 and set(measured["verify"]) >= {"1", "2", "4"}


def test_with_lookup_each_draft_decodes_alone_too(run, tmp_path):
    run(tmp_path, lookup=3, repeats=1, limit=1, baselines=["plain", "lookup"])
    facts = facts_of(tmp_path)
    found = {name: method.get("lookup") for name, method in facts["methods"].items()}
    assert found == {"plain": None, "lookup": None, "chain": 0, "poss": 0, "chain+lookup": 3, "poss+lookup": 3}
    assert list(facts["config"]["drafts"]) == ["chain", "poss"]
    records = read_records(tmp_path)
    assert {record.method for record in records} == set(found)
    assert len({(record.turn, tuple(record.tokens)) for record in records}) == 2


def test_run_json_says_what_was_run_where_and_with_what(whole, target):
    facts = facts_of(whole)
    assert facts["command"] and facts["machine"] and facts["device"] == "cpu" and facts["started"]
    assert {"python", "torch", "transformers", "poss-lightning"} <= facts["versions"].keys()
    assert facts["config"]["max_new_tokens"] == 12 and facts["config"]["fingerprint"] == target.spec.fingerprint
    assert list(facts["methods"]) == list(METHODS)
    poss = facts["methods"]["poss"]
    assert (poss["depth"], poss["nodes"], poss["tree_width"], poss["allocation"]) == (2, 9, 3, [1, 1])


# --- killed, resumed, refused ---


@pytest.mark.parametrize(("answers", "questions"), [(1, 0), (11, 1)])  # two to warm up, eight for the first
def test_a_killed_run_resumes_and_writes_every_record_once(whole, run, tmp_path, answers, questions):
    with dies_after(module.Speculative, "decode", answers):
        run(tmp_path)
    receipts = [json.loads(path.read_text()) for path in sorted((tmp_path / "unfinished").glob("question-*.json"))]
    begun = "".join(f"{line}\n" for receipt in receipts for line in receipt["records"])
    assert len({json.loads(line)["id"] for line in begun.splitlines()}) == questions
    assert not (tmp_path / "records.jsonl").exists()
    run(tmp_path)
    assert untimed(tmp_path) == untimed(whole)
    assert (tmp_path / "records.jsonl").read_text().startswith(begun)  # what was timed is not timed again
    assert shown(tmp_path) == FILES


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"max_new_tokens": 11}, "max_new_tokens 12, now 11"),
        ({"limit": 1}, "limit None, now 1; questions "),
        ({"drafts": {}}, "drafts None, now {}; .*methods.poss.weights '.*', now None"),
    ],
)
def test_a_finished_run_is_left_alone_and_other_settings_are_refused(whole, run, change, words):
    before = {path.name: path.read_bytes() for path in whole.iterdir()}
    run(whole)
    with pytest.raises(ValueError, match=rf"holds records of other settings \({words}"):
        run(whole, **change)
    assert before == {path.name: path.read_bytes() for path in whole.iterdir()}


def test_a_run_of_yesterday_keeps_its_date(run, target, tmp_path):
    folder = tmp_path / "dated"
    target.model.save_pretrained(folder)
    tiny_tokenizer(DATED).save_pretrained(folder)
    options = {"target": str(folder), "drafts": {}, "baselines": ["plain"], "repeats": 1}
    run(tmp_path / "out", **options, chat_template_kwargs={"strftime_now": "2024-07-26"})
    records = (tmp_path / "out" / "records.jsonl").read_bytes()
    run(tmp_path / "out", **options)
    assert (tmp_path / "out" / "records.jsonl").read_bytes() == records
    run(tmp_path / "today", **options)
    assert untimed(tmp_path / "today")[0]["tokens"] != untimed(tmp_path / "out")[0]["tokens"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"nodes": 2}, "nodes is 2, which cannot hold a path of depth 2"),
        ({"baselines": ["plain", "beam"]}, "may hold generate"),
        ({"drafts": {"generate": "x"}}, "like a baseline"),
        ({"drafts": {1: "x"}}, "which YAML reads as int: quote it"),
        ({"drafts": {"d": "nowhere/at-all"}}, "neither a local folder nor a hub id"),
        ({"suites": ["LONG"]}, r"question 1 of made, turn 0: a prompt has \d+ tokens; .* reads 512"),
    ],
)
def test_bad_settings_are_refused_before_anything_is_written(run, tmp_path, change, words):
    if "suites" in change:
        change = {"suites": [write_suite(tmp_path / "made.jsonl", ["Hi"], ["word " * 600])]}
    with pytest.raises((ValueError, OSError), match=words):
        run(tmp_path / "out", **change)
    assert not (tmp_path / "out").exists()


def test_a_conversation_that_outgrows_the_context_ends_there_and_the_others_do_not(run, tmp_path, caplog):
    run(tmp_path / "out", suites=[write_suite(tmp_path / "made.jsonl", ["Hi"], ["Hi", "word " * 600], ["Ho"])])
    assert "question 1 of made ends before turn 1" in caplog.text
    assert {(record.id, record.turn) for record in read_records(tmp_path / "out")} == {(0, 0), (1, 0), (2, 0)}


def test_a_killed_run_resumes_with_its_settings_on_its_machine_alone(run, tmp_path, monkeypatch):
    """Seconds of two machines do not meet in one file."""
    options = {"suites": [write_suite(tmp_path / "made.jsonl", ["Hi"], ["Ho"])]}
    with dies_after(Run, "_decode_question", 1):
        run(tmp_path / "out", **options)
    with pytest.raises(ValueError, match=r"was begun with other settings \(repeats 2, now 1\)"):
        run(tmp_path / "out", **options, repeats=1)
    there = module.provenance(torch.device("cpu"))
    monkeypatch.setattr(module, "provenance", lambda device: there | {"threads": 99})
    with pytest.raises(ValueError, match=r"was begun with threads \d+, here it is 99"):
        run(tmp_path / "out", **options)
    monkeypatch.setattr(module, "provenance", lambda device: there | {"git": "later"})
    run(tmp_path / "out", **options)
    facts = facts_of(tmp_path / "out")
    assert facts["git"] != "later" and [process["git"] for process in facts["gone_on"]] == ["later"]


def test_a_run_json_alone_may_be_of_anything_and_is_not_replaced(run, tmp_path):
    (tmp_path / "run.json").write_text("mine")
    with pytest.raises(FileExistsError, match="holds nothing to resume"):
        run(tmp_path)
    assert (tmp_path / "run.json").read_text() == "mine"


def test_gzipped_records_are_not_replaced(run, tmp_path):
    (tmp_path / "records.jsonl.gz").write_bytes(gzip.compress(b"{}"))
    with pytest.raises(ValueError, match=r"records.jsonl.gz holds records: unpack it"):
        run(tmp_path, suites=[write_suite(tmp_path / "made.jsonl", ["Hi"])])
    assert not (tmp_path / "run.json").exists()


# --- the loop, with decoders of a fixed answer ---


class FixedAnswer:
    """A decoder with one answer, which notes its prompts."""

    def __init__(self, tokens: list[int], asked: list[tuple[str, list[int]]], name: str):
        self.tokens, self.asked, self.name = tokens, asked, name

    def decode(self, prompts: list[list[int]], limit: int, **options) -> list[Decoded]:
        self.asked.append((self.name, prompts[0]))
        accepted = [] if self.name in METHODS[:2] else [0] * (len(self.tokens) - 1)
        return [Decoded(self.tokens, accepted, {"total": 0.1})]


def fixed_run(target, folder: Path, *texts: str, repeats: int = 1) -> tuple[Run, list[tuple[str, list[int]]]]:
    asked: list[tuple[str, list[int]]] = []
    named = zip(METHODS, texts, strict=False)
    methods = {name: FixedAnswer(target.tokenizer(text).input_ids, asked, name) for name, text in named}
    return Run(folder, target, methods, {"command": [], "config": {}, "methods": {}}, 8, repeats), asked


def test_the_plain_answer_is_the_context_for_all(target, tmp_path):
    loop, asked = fixed_run(target, tmp_path, "plain words", "other words", "wrong words")
    loop.decode([Question("s", 1, "", ["Hi", "And?"])])
    messages = [("user", "Hi"), ("assistant", "plain words"), ("user", "And?")]
    second = target.chat.prompt([{"role": role, "content": content} for role, content in messages])
    assert [prompt == second for _, prompt in asked[-3:]] == [True] * 3
    assert [prompt == second for _, prompt in asked[:-3]] == [False] * 6  # the warm-up, and the first turn


def test_a_conversation_ends_after_an_answer_that_no_text_says(target, tmp_path, caplog):
    """Its special tokens would be missing, and what stands between them would be run together."""
    loop, asked = fixed_run(target, tmp_path, f"so {target.tokenizer.all_special_tokens[0]} it is", "b", "c")
    loop.decode([Question("s", 1, "", ["Hi", "And?"]), Question("s", 2, "", ["Hi"])])
    assert len(asked) == 3 + 6 and [log.message for log in caplog.records] == [
        "question 1 of s ends after turn 0: its answer has special tokens, so no message can repeat it"
    ]


def test_methods_take_turns_in_an_order_that_rotates(target, tmp_path):
    loop, asked = fixed_run(target, tmp_path, "a", "b", "c", repeats=2)
    loop.decode([Question("s", number, "", ["Hi"]) for number in range(3)])
    rounds = [tuple(name for name, _ in asked[start : start + 3]) for start in range(3, len(asked), 3)]
    assert all(sorted(order) == sorted(METHODS[:3]) for order in rounds)
    assert [order[0] for order in rounds[::2]] == list(METHODS[:3])  # question by question
    assert all(first[0] != second[0] for first, second in zip(rounds[::2], rounds[1::2], strict=True))  # repeats


def test_other_weights_under_the_same_name_are_refused(run, target, tmp_path):
    drafts = {"d": str(tmp_path / "draft")}
    for seed in (0, 1):
        tiny_draft(target, [2], seed=seed).save_pretrained(tmp_path / "draft")
        if not seed:
            run(tmp_path / "out", drafts=drafts, limit=1)
    with pytest.raises(ValueError, match=r"other settings \(methods.d.weights '\w+', now '\w+'\)"):
        run(tmp_path / "out", drafts=drafts, limit=1)
