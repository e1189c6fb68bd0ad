"""Rounds: what is written is read, wherever it lies."""

from pathlib import Path

import pandas as pd

import poss_lightning
from poss_lightning.evaluation.rounds import (
    ANSWER_KEY,
    find_rounds,
    move_answers,
    read_answers,
    read_rounds,
    write_rounds,
)

ROW = {
    "suite": "chat", "id": "1", "turn": 0, "method": "poss-2", "repeat": 0, "prompt_tokens": 41, "new_tokens": 7,
    "accepted": [3, 0, 0], "seconds": {"draft": 0.1, "total": 0.5}, "tokens": [5, 6, 7, 8, 9, 10, 2],
    "pieces": [*"größer", ""], "question": "Wie groß?\u2028\n", "category": "sums",
}  # fmt: skip
PLAIN = ROW | {"method": "plain", "accepted": [], "category": None, "seconds": {"total": 2.0}}
OTHER = ROW | {"id": "two", "tokens": [5], "new_tokens": 1, "accepted": [], "pieces": None}


def test_written_rounds_are_read_back(tmp_path):
    write_rounds(tmp_path, [ROW, PLAIN, OTHER])
    rounds = poss_lightning.read_rounds(str(tmp_path))
    assert [accepted.tolist() for accepted in rounds["accepted"]] == [[3, 0, 0], [], []]
    assert rounds["seconds"].tolist() == [0.5, 2.0, 0.5] and rounds["draft"].dropna().tolist() == [0.1, 0.1]
    assert rounds["category"].isna().tolist() == [False, True, False] and rounds["choice"].isna().all()
    for name in ("suite", "id", "turn", "method", "repeat", "prompt_tokens", "new_tokens"):
        assert rounds[name].tolist() == [row[name] for row in (ROW, PLAIN, OTHER)]
    answers = read_answers(rounds)
    assert len(answers) == 2  # the same tokens of one prompt are one answer
    first, _, other = rounds.join(answers, on=ANSWER_KEY).itertuples()
    assert (first.tokens.tolist(), "".join(first.pieces), first.question) == (ROW["tokens"], "größer", ROW["question"])
    assert other.tokens.tolist() == [5] and other.pieces is None


def test_cells_are_named_by_their_folders_and_share_their_answers(tmp_path, monkeypatch):
    cells = [tmp_path / place for place in ("choice=a/seed=0", "choice=a/seed=10", "choice=b/seed=0")]
    for cell in cells:
        write_rounds(cell, [ROW, OTHER | {"tokens": [int(cell.name[-1])]}])
        move_answers(cell, tmp_path)
        move_answers(cell, tmp_path)  # as a killed sweep repeats
    write_rounds(tmp_path / "below" / "choice=a" / "seed=0", [ROW])  # an experiment of its own
    rounds = read_rounds(tmp_path)
    assert [*zip(rounds["choice"], rounds["seed"], strict=True)] == [("a", 0)] * 2 + [("a", 10)] * 2 + [("b", 0)] * 2
    assert len(read_answers(rounds)) == 2 and len(list(tmp_path.rglob("answers.parquet"))) == 2
    pd.testing.assert_frame_equal(read_rounds(cells), rounds)
    monkeypatch.chdir(cells[2])
    assert read_rounds(".")["choice"].tolist() == ["b", "b"]
    monkeypatch.chdir(tmp_path)
    read = pd.read_parquet([str(file) for file in find_rounds(Path())])
    assert read["choice"].tolist() == rounds["choice"].tolist() and read["seed"].tolist() == rounds["seed"].tolist()
    assert [Path(folder).name for folder in read_rounds(tmp_path / "below")["folder"]] == ["seed=0"]
