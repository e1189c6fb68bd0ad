"""Records: reading what was written, and refusing what cannot be."""

import gzip
import json
import re
from dataclasses import asdict, replace

import pyarrow.parquet as pq
import pytest

from poss_lightning.evaluation.cells import pack, packed_cells
from poss_lightning.evaluation.records import Record, by_cell, read_records, read_sources, to_line
from tests.support.lab import write_records

RECORD = {
    "suite": "chat", "id": 1, "turn": 0, "method": "poss-2", "repeat": 0, "seed": 0, "prompt_tokens": 41,
    "new_tokens": 7, "accepted": [3, 0, 0], "seconds": {"draft": 0.1, "total": 0.5}, "tokens": [5, 6, 7, 8, 9, 10, 2],
    "text": "größer\u2028\n",
}  # fmt: skip


def test_written_records_are_read_back(tmp_path):
    records = [
        Record(**RECORD),
        Record(**RECORD | {"id": "two", "pieces": list("abcdefg"), "question": "Wie groß?\n", "category": "sums"}),
        Record(**RECORD | {"method": "generate", "accepted": []}),
        Record(**RECORD | {"accepted": [3, 0, 5]}),  # the last round was cut
        Record(**RECORD | {"new_tokens": 1, "tokens": [2], "accepted": []}),  # the prefill's token was a stop
        Record(**RECORD | {"seconds": {}}),  # replayed
    ]
    newer = json.dumps(RECORD | {"field": "of a newer version"})
    older = json.dumps(RECORD | {"method": "autoregressive", "accepted": []})
    text = "".join(f"{line}\n" for line in [*map(to_line, records), newer, older])
    (tmp_path / "records.jsonl").write_text(text, encoding="utf-8")
    expected = [*records, records[0], replace(records[2], method="plain")]
    assert read_records([tmp_path]) == read_records(str(tmp_path / "records.jsonl")) == expected
    assert not {"pieces", "question", "category"} & json.loads(to_line(records[0])).keys()  # as in older files
    rows = [asdict(record) | {"method": "poss-2"} for record in records if record.accepted]
    pack(tmp_path / "sweep", "poss-2", 0, {}, rows)
    again = [asdict(record) for record in read_records(tmp_path / "sweep")]
    assert sorted(again, key=str) == sorted(rows, key=str)  # an answer's side by side


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"id": 1.5}, "id is 1.5; it must be a valid integer"),
        ({"accepted": [3, -1, 1]}, "accepted.1 is -1; it must be greater than or equal to 0"),
        ({"seconds": {"draft": 1}}, 'it must have a "total" above 0'),
        ({"accepted": [3, 1, 1]}, "which emits 8 to 9 tokens"),
        ({"method": "generate"}, "it must be [], generate has no rounds"),
        ({"new_tokens": 6}, "new_tokens is 6; it must be 7"),
        ({"pieces": ["a"]}, "pieces has 1 entries; it must have 7"),
    ],
)
def test_invalid_records_are_named_by_file_line_and_field(tmp_path, change, words):
    (tmp_path / "records.jsonl").write_text(f"{json.dumps(RECORD)}\n{json.dumps(RECORD | change)}")
    with pytest.raises(ValueError, match=re.escape(words)) as caught:
        read_records([tmp_path])
    assert str(caught.value).startswith(f"{tmp_path / 'records.jsonl'}, line 2: ") and "\n" not in str(caught.value)


def test_packed_records_are_the_same_and_folders_below_are_found(tmp_path):
    write_records(tmp_path / "plain", [Record(**RECORD)], {})
    (tmp_path / "packed").mkdir()
    packed = gzip.compress((tmp_path / "plain" / "records.jsonl").read_bytes())
    (tmp_path / "packed" / "records.jsonl.gz").write_bytes(packed)
    assert read_records(tmp_path / "packed" / "records.jsonl.gz") == read_records(tmp_path / "plain")
    assert read_records(tmp_path) == read_records([tmp_path / "packed", tmp_path / "plain"])
    write_records(tmp_path / "packed", [Record(**RECORD)], {})
    (tmp_path / "empty.jsonl").touch()
    for place, words in (
        ("gone", re.escape(str(tmp_path / "gone"))),
        ("packed", r"holds records\.jsonl and records\.jsonl\.gz; remove one"),
        ("empty.jsonl", "holds no records"),
    ):
        with pytest.raises((FileNotFoundError, ValueError), match=words):
            read_records(tmp_path / place)


def test_cells_are_named_by_their_folders(tmp_path, monkeypatch):
    for place in ("a/seed-0", "a/seed-10", "b/seed-0"):
        write_records(tmp_path / place, [Record(**RECORD | {"text": place})], {})
    cells = by_cell(read_sources(tmp_path))
    texts = {key: records[0].text for key, records in cells.items()}
    assert texts == {("a", 0): "a/seed-0", ("a", 10): "a/seed-10", ("b", 0): "b/seed-0"}
    monkeypatch.chdir(tmp_path / "b" / "seed-0")
    assert by_cell(read_sources(".")) == {("b", 0): cells["b", 0]}  # by the absolute path
    for place, words in (("plain", "is not a folder CHOICE/seed-N"), ("more/a/seed-00", "is a second a/seed-0")):
        write_records(tmp_path / place, [Record(**RECORD)], {})
        with pytest.raises(ValueError, match=words):
            by_cell(read_sources([tmp_path / "a", tmp_path / place]))


def test_a_cell_keeps_the_scalars_that_are_read_and_older_cells_are_read(tmp_path):
    scalars = {"val/loss": (9, 1 / 3), "train/loss": (9, 1.0), "val_drift_l2/depth_1": (9, 0.5)}
    scalars |= {"val_drift_l2/depth_3": (9, 0.7), "val/tau_tree": (4, 2.0)}
    for choice, question in (("old", {}), ("new", {"question": "Why?"})):
        row = {**RECORD, "pieces": None, "method": choice, **question}
        pack(tmp_path, choice, 0, {"scalars": scalars}, [row])
    kept = {name: [(step, round(value, 5))] for name, (step, value) in scalars.items() if name != "train/loss"}
    assert [cell.last_scalars() for cell in packed_cells(tmp_path)] == [kept] * 2
    schema = pq.read_schema(tmp_path / "records.parquet")
    names = [name for name in schema.names if name not in ("question", "category")]
    older = pq.read_table(tmp_path / "records.parquet", columns=names)
    assert {cell[0].question for cell in by_cell(read_sources(tmp_path)).values()} == {None, "Why?"}
    pq.write_table(older, tmp_path / "records.parquet")  # as versions before questions were kept wrote it
    assert [record.question for record in read_records(tmp_path)] == [None, None]
