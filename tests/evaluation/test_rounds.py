"""Rounds in files: written and read they are the same, and what is no round is named."""

import gzip
import json
from types import SimpleNamespace

import pytest
import torch

from poss_lightning.decoding.decoder import Progress
from poss_lightning.decoding.trees import Tree
from poss_lightning.decoding.verification import Verdict
from poss_lightning.evaluation.drawing import Guesses
from poss_lightning.evaluation.rounds import Round, as_text, read_rounds, recorder, to_line

GUESSES = Guesses(["the", " cat", "\n", "\u2028 sat"], [0, 0, 0, 1], [0.0, -0.5, -1.25, -1.5], [0, 1, 3], " down")
ANSWER = ("chat", "seven", 1, "poss2")


@pytest.mark.parametrize("name", ["rounds.jsonl", "rounds.jsonl.gz"])
def test_written_and_read_rounds_are_the_same_in_their_order(tmp_path, name):
    rounds = [Round(*ANSWER, number, GUESSES._replace(bonus=None if number == 2 else "x")) for number in range(3)]
    data = "\n".join(map(to_line, reversed(rounds))).encode()
    (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith("gz") else data)
    assert read_rounds([tmp_path]) == {ANSWER: rounds}


def test_a_folder_without_rounds_adds_none(tmp_path):
    assert read_rounds([tmp_path]) == {}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"tokens": []}, r"tokens is \[\]"),
        ({"tokens": [1, 2, 3, 4]}, "tokens is"),
        ({"parents": [0, 0, 2, 1]}, "parents is"),  # its own
        ({"parents": [0, 0, 0]}, "parents is"),
        ({"scores": [0.0, -1.0, 0.5, -1.0]}, "scores is"),
        ({"scores": [0.0]}, "scores is"),
        ({"path": [1]}, "path is"),
        ({"path": [0, 2, 3]}, "path is"),  # 3 is below 1
        ({"path": [0, 9]}, "path is"),
        ({"bonus": 3}, "bonus is 3"),
    ],
)
def test_what_is_no_round_is_named_by_file_line_and_field(tmp_path, change, words):
    line = json.loads(to_line(Round(*ANSWER, 0, GUESSES)))
    (tmp_path / "rounds.jsonl").write_text(json.dumps(line) + "\n" + json.dumps(line | change))
    with pytest.raises(ValueError, match=rf"rounds\.jsonl, line 2: .*{words}"):
        read_rounds([tmp_path])


@pytest.mark.parametrize(
    ("line", "words"), [("{oops", "is not JSON"), ("[1]", "is not a JSON object"), ("{}", "lacks tokens")]
)
def test_lines_that_are_no_object_are_named(tmp_path, line, words):
    (tmp_path / "rounds.jsonl").write_text(line)
    with pytest.raises(ValueError, match=f"line 1: .*{words}"):
        read_rounds([tmp_path])


def test_a_file_that_is_not_whole_is_named(tmp_path):
    (tmp_path / "rounds.jsonl.gz").write_bytes(gzip.compress(b"{}")[:-5])
    with pytest.raises(ValueError, match=r"rounds.jsonl.gz is no whole gzip file"):
        read_rounds([tmp_path])


def test_read_out_says_the_same_tree_in_words():
    ids = Guesses([5, 6, 7], [0, 0, 1], [0.0, -0.123456, -1e-9], [0, 1], None)
    words = as_text(ids, str)
    assert words == (["5", "6", "7"], [0, 0, 1], [0.0, -0.1235, 0.0], [0, 1], None)
    assert as_text(ids._replace(bonus=8), str).bonus == "8"


def target() -> SimpleNamespace:
    tokenizer = SimpleNamespace(decode=lambda tokens: f"w{tokens[0]}")
    return SimpleNamespace(tokenizer=tokenizer, chat=SimpleNamespace(stops=frozenset()))


def test_recorded_rounds_are_numbered_and_copied():
    earlier = Round("chat", 0, 0, "m", 0, GUESSES)
    tree = Tree(torch.tensor([[3, 4]]), torch.tensor([[0, 0]]), torch.tensor([[0.0, -1.0]]))
    verdict = Verdict(torch.tensor([[0, 1]]), torch.tensor([[4, 5]]), torch.tensor([1]))
    rounds = [earlier]
    watch = recorder(("chat", 1, 0, "m"), target(), rounds)
    watch(Progress({0: [3]}))  # the prefill has no tree
    for _ in range(2):
        watch(Progress({0: [4, 5]}, tree=tree, verdict=verdict))
    tree.tokens.zero_()  # the next round's
    guesses = Guesses(["w3", "w4"], [0, 0], [0.0, -1.0], [0, 1], "w5")
    assert rounds == [earlier, *(Round("chat", 1, 0, "m", number, guesses) for number in range(2))]
