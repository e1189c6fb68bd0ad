"""`poss benchmark`: lawful records, the same answers by all methods, kill and resume."""

import json
from itertools import pairwise
from pathlib import Path
from unittest.mock import Mock

import pandas as pd
import pytest
import torch

from poss_lightning.decoding.decoder import Decoded
from poss_lightning.evaluation import benchmark as module
from poss_lightning.evaluation import record as recording
from poss_lightning.evaluation.benchmark import benchmark, decode_question
from poss_lightning.evaluation.provenance import describe_draft
from poss_lightning.evaluation.rounds import ANSWER_KEY, BASELINES, PARTS, read_answers, read_rounds
from poss_lightning.evaluation.suites import Question
from poss_lightning.files import read_json
from tests.support.inputs import write_suite
from tests.support.stores import contents, dies_after
from tests.support.templates import DATED
from tests.support.tiny import tiny_draft, tiny_tokenizer

QUESTIONS = [
    {"id": 7, "category": "a", "turns": ["How many legs?", "And a horse?"]},
    {"id": "eight", "category": "b", "turns": ["Say it, please."]},
    {"id": 9, "category": None, "turns": ["The target says it.", "Answer.", "What?"]},
]
METHODS = ("plain", "generate", "chain", "poss")
FILES = ["answers.parquet", "rounds.parquet", "run.json"]


@pytest.fixture(scope="module")
def run(target, inputs, tmp_path_factory):
    """Benchmark the tiny target with two drafts into a folder; keywords change the settings."""
    folder = tmp_path_factory.mktemp("benchmark")
    (folder / "suite.jsonl").write_text("\n".join(map(json.dumps, QUESTIONS)))
    tiny_draft(target, [2]).save_pretrained(folder / "chain")
    settings = {
        "drafts": {"chain": str(folder / "chain"), "poss": str(inputs / "draft")},
        "target": str(inputs / "target"),
        "dtype": "float32",
        "suites": [str(folder / "suite.jsonl")],
        "max_new_tokens": 12,
        "tree": "fixed",
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


def untimed(folder: Path) -> list[dict]:
    """The rows of a folder without what differs between runs."""
    rows = with_answers(folder).drop(columns=["seconds", *PARTS, "folder"])
    return rows.map(lambda value: value.tolist() if hasattr(value, "tolist") else str(value)).to_dict("records")


def with_answers(folder: Path) -> pd.DataFrame:
    """The rounds, and what was asked and answered."""
    rounds = read_rounds(folder)
    return rounds.join(read_answers(rounds), on=ANSWER_KEY)


def test_every_method_gives_the_same_answer_to_every_turn_and_repeat(whole, target):
    """In float32; and the rounds give the tokens, of which the limit may have cut the last round's."""
    rows = [*with_answers(whole).itertuples()]
    assert [(row.suite, row.id, row.turn, row.repeat, row.method) for row in rows] == [
        ("suite", str(question["id"]), turn, repeat, method)
        for question in QUESTIONS
        for turn in range(len(question["turns"]))
        for repeat in range(2)
        for method in METHODS
    ]
    assert [*contents(whole)] == FILES
    assert len({(row.id, row.turn, tuple(row.tokens)) for row in rows}) == 6
    for row in rows:
        (asked,) = [question for question in QUESTIONS if str(question["id"]) == row.id]
        assert row.question == asked["turns"][row.turn]
        assert row.category == asked["category"] or (asked["category"] is None and pd.isna(row.category))
        assert "".join(row.pieces) == target.chat.text(row.tokens.tolist()) and row.new_tokens == len(row.tokens)
        most = 1 + sum(row.accepted) + len(row.accepted)
        assert (most == 1) if row.method in BASELINES else (most - row.accepted[-1] <= row.new_tokens <= most)
        if row.turn == 0:
            assert row.prompt_tokens == len(target.chat.prompt([{"role": "user", "content": row.question}]))


def test_the_order_of_methods_is_drawn_for_each_answer(target):
    """So none has the same predecessor throughout; and it is the same again after a kill."""
    asked, orders = [Question("s", name, "", ["Hi"]) for name in range(20)], []
    for _ in range(2):
        methods = Mock(**{f"{name}.decode.return_value": [Decoded([5, 6], [0], {"total": 0.1})] for name in METHODS})
        decoders = {name: getattr(methods, name) for name in METHODS}
        for question in asked:
            decode_question(target, decoders, question, repeats=1, seed=0, limit=8)
        called = [name.removesuffix(".decode") for name, *_ in methods.method_calls]
        orders.append([*zip(*[iter(called)] * 4, strict=True)])
    assert orders[0] == orders[1] and {tuple(sorted(order)) for order in orders[0]} == {tuple(sorted(METHODS))}
    assert len({pair for order in orders[0] for pair in pairwise(order)}) == 12  # every other one comes just before


def test_run_json_says_what_was_run_where_and_with_what(whole, run, target, tmp_path):
    facts = read_json(whole / "run.json")
    assert facts["command"] and facts["machine"] and facts["device"] == "cpu" and facts["started"]
    assert {"python", "torch", "transformers", "poss-lightning"} <= facts["versions"].keys()
    assert facts["config"]["max_new_tokens"] == 12 and facts["config"]["fingerprint"] == target.spec.fingerprint
    assert tuple(facts["methods"]) == METHODS
    poss = facts["methods"]["poss"]
    assert (poss["depth"], poss["nodes"], poss["tree_width"], poss["allocation"]) == (2, 9, 3, [1, 1])
    run(tmp_path, lookup=3, repeats=1, limit=1, baselines=["plain", "lookup"])
    facts, rounds = read_json(tmp_path / "run.json"), read_rounds(tmp_path)
    found = {name: method.get("lookup") for name, method in facts["methods"].items()}
    assert found == {"plain": None, "lookup": None, "chain": 0, "poss": 0, "chain+lookup": 3, "poss+lookup": 3}
    assert {*rounds["method"]} == set(found) and len(rounds.groupby(["turn", "answer"])) == 2


def test_a_draft_is_known_by_its_weights(target):
    first, second = (describe_draft(tiny_draft(target, [2], seed=seed)) for seed in (0, 1))
    assert first == describe_draft(tiny_draft(target, [2], seed=0)) and first["weights"] != second["weights"]


def test_a_killed_run_resumes_with_its_settings_on_its_machine_alone(whole, run, tmp_path, monkeypatch):
    """Every record is written once, seconds of two machines do not meet in one file, a finished run is left alone."""
    with dies_after(module, "decode_question", 1):
        run(tmp_path)
    (receipt,) = (tmp_path / "unfinished").glob("question-*.json")
    begun = [answer["seconds"]["total"] for answer in json.loads(receipt.read_text())]
    assert begun and not (tmp_path / "rounds.parquet").exists()
    with pytest.raises(ValueError, match=r"was begun with other settings \(repeats 2, now 1\)"):
        run(tmp_path, repeats=1)
    there = recording.provenance(torch.device("cpu"))
    monkeypatch.setattr(recording, "provenance", lambda device: there | {"threads": 99})
    with pytest.raises(ValueError, match=r"was begun with other settings \(process.threads \d+, now 99\)"):
        run(tmp_path)
    monkeypatch.setattr(recording, "provenance", lambda device: there | {"git": "later"})
    run(tmp_path)
    facts, before = read_json(tmp_path / "run.json"), contents(tmp_path)
    assert facts["git"] != "later" and [process["git"] for process in facts["resumed"]] == ["later"]
    assert untimed(tmp_path) == untimed(whole)
    assert read_rounds(tmp_path)["seconds"].tolist()[: len(begun)] == begun  # what was timed is not timed again
    run(tmp_path)
    changed = "limit None, now 1; max_new_tokens 12, now 11; .*methods.poss.weights '.*', now None"
    with pytest.raises(ValueError, match=rf"was begun with other settings \({changed}"):
        run(tmp_path, max_new_tokens=11, limit=1, drafts={})
    assert before == contents(tmp_path) and [*before] == FILES


def test_a_run_of_yesterday_keeps_its_date(run, target, tmp_path):
    folder = tmp_path / "dated"
    target.model.save_pretrained(folder)
    tiny_tokenizer(DATED).save_pretrained(folder)
    options = {"target": str(folder), "drafts": {}, "baselines": ["plain"], "repeats": 1, "limit": 1}
    run(tmp_path / "out", **options, chat_template_kwargs={"strftime_now": "2024-07-26"})
    before = contents(tmp_path / "out")
    run(tmp_path / "out", **options)
    assert contents(tmp_path / "out") == before
    run(tmp_path / "today", **options)
    assert untimed(tmp_path / "today")[0]["tokens"] != untimed(tmp_path / "out")[0]["tokens"]


def test_a_conversation_that_outgrows_the_context_ends_there_and_the_others_do_not(run, tmp_path, caplog):
    long = "word " * 600
    few = {"drafts": {}, "baselines": [], "repeats": 1}
    run(tmp_path / "out", suites=[write_suite(tmp_path / "made.jsonl", ["Hi"], ["Hi", long], ["Ho"])], **few)
    assert "question 1 of made ends before turn 1" in caplog.text
    rounds = read_rounds(tmp_path / "out")
    assert {*zip(rounds["id"], rounds["turn"], strict=True)} == {("0", 0), ("1", 0), ("2", 0)}
    with pytest.raises(ValueError, match=r"question 0 of made, turn 0: a prompt has \d+ tokens; .* reads 512"):
        run(tmp_path / "none", suites=write_suite(tmp_path / "made.jsonl", [long]))
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("words", ["plain words", "so <|im_start|> it is"])
def test_the_plain_answer_is_the_context_for_all_unless_no_text_says_it(target, caplog, words):
    """Special tokens would be missing, and what stands between them would be run together."""
    methods = {"plain": Mock(), "generate": Mock(), "chain": Mock()}
    for method, text in zip(methods.values(), (words, "other words", "wrong words"), strict=True):
        tokens = target.tokenizer(text).input_ids
        method.decode.return_value = [Decoded(tokens, [0] * (len(tokens) - 1), {"total": 0.1})]
    for question in (Question("s", 1, "", ["Hi", "And?"]), Question("s", 2, "", ["Hi"])):
        decode_question(target, methods, question, repeats=1, seed=0, limit=8)
    said = [("user", "Hi"), ("assistant", words), ("user", "And?")]
    messages = [{"role": role, "content": content} for role, content in said]
    first, second = target.chat.prompt(messages[:1]), target.chat.prompt(messages)
    ended = "question 1 of s ends after turn 0: its answer has special tokens, so no message can repeat it"
    later, logged = ([second], []) if words == "plain words" else ([], [ended])
    assert caplog.messages == logged
    for method in methods.values():
        prompts = [prompt for call in method.decode.call_args_list for prompt in call.args[0]]
        assert prompts == [first, *later, first]
