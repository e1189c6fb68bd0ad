"""Records: reading what was written, and refusing what cannot be."""

import gzip
import json
import re
from dataclasses import asdict

import pyarrow.parquet as pq
import pytest

from poss_lightning.evaluation.cells import pack
from poss_lightning.evaluation.records import (
    Record,
    check_drafts,
    check_targets,
    find_depths,
    read_cells,
    read_records,
    read_runs,
    to_line,
)

RECORD = {
    "suite": "chat", "id": 1, "turn": 0, "method": "poss-2", "repeat": 0, "seed": 0, "prompt_tokens": 41,
    "new_tokens": 7, "accepted": [3, 0, 0], "seconds": {"draft": 0.1, "total": 0.5}, "tokens": [5, 6, 7, 8, 9, 10, 2],
    "text": "größer\u2028\n",
}  # fmt: skip


def test_written_records_are_read_back(tmp_path):
    records = [
        Record(**RECORD),
        Record(**{**RECORD, "id": "two", "pieces": list("abcdefg"), "question": "Wie groß?\n", "category": "sums"}),
        Record(**{**RECORD, "method": "generate", "accepted": []}),
        Record(**{**RECORD, "accepted": [3, 0, 5]}),  # the last round was cut
        Record(**{**RECORD, "new_tokens": 1, "tokens": [2], "accepted": []}),  # the prefill's token was a stop
    ]
    (tmp_path / "records.jsonl").write_text("\n".join(map(to_line, records)) + "\n", encoding="utf-8")
    assert read_records([tmp_path]) == read_records(str(tmp_path / "records.jsonl")) == records
    assert not {"pieces", "question", "category"} & json.loads(to_line(records[0])).keys()  # as in older files


@pytest.mark.parametrize(
    "change, said",
    [
        ({"accepted": "3"}, "accepted is '3'"),
        (
            {"accepted": [3, 0]},
            "which emits 6 to 6 tokens (1, and accepted + 1 a round, the last of which may be cut); it must emit",
        ),
        ({"accepted": [3, -1, 1]}, "integers of at least 0"),
        ({"method": "generate"}, "it must be [], generate has no rounds"),
        ({"new_tokens": 6}, "new_tokens is 6; it must be 7"),
        ({"pieces": ["a"]}, "pieces has 1 entries; it must have 7"),
        ({"seconds": {"draft": 1}}, '"total" above 0'),
        ({"seconds": {"total": float("nan")}}, '"total" above 0'),
        ({"turn": True}, "turn is True; it must be an integer"),
        ({"accepted": [3, 1, 1]}, "which emits 8 to 9 tokens"),
        ({"text": None}, "text is None; it must be a string"),
        ({"question": ["Why?"]}, "question is ['Why?']; it must be a string"),
    ],
)
def test_unlawful_records_are_named_by_file_line_and_field(tmp_path, change, said):
    lines = [json.dumps(RECORD), json.dumps({**RECORD, **change})]
    (tmp_path / "records.jsonl").write_text("\n".join(lines))
    with pytest.raises(ValueError, match=re.escape(said)) as caught:
        read_records([tmp_path])
    assert f"{tmp_path / 'records.jsonl'}, line 2: " in str(caught.value)


@pytest.mark.parametrize(
    "content, said",
    [
        ("", "holds no records"),
        ('{"suite": "chat"', "line 1: .* is not JSON"),
        ("[]", "line 1: .* is not a JSON object"),
        ('\n{"suite": "chat"}', "line 2: lacks accepted, id, "),
    ],
)
def test_lines_that_are_no_records(tmp_path, content, said):
    (tmp_path / "records.jsonl").write_text(content)
    with pytest.raises(ValueError, match=said):
        read_records(tmp_path)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=re.escape(str(tmp_path / "records.jsonl"))):
        read_records(tmp_path)


def write(folder, packed=False, **change):
    folder.mkdir(parents=True, exist_ok=True)
    line = to_line(Record(**{**RECORD, **change})).encode()
    name = "records.jsonl.gz" if packed else "records.jsonl"
    (folder / name).write_bytes(gzip.compress(line) if packed else line)


def test_packed_records_are_the_same_and_folders_below_are_found(tmp_path):
    write(tmp_path / "plain")
    write(tmp_path / "packed", packed=True)
    assert read_records(tmp_path / "packed" / "records.jsonl.gz") == read_records(tmp_path / "plain")
    assert read_records(tmp_path) == read_records([tmp_path / "packed", tmp_path / "plain"])


def test_a_folder_holds_one_or_the_other(tmp_path):
    for packed in (False, True):
        write(tmp_path, packed)
    with pytest.raises(ValueError, match=r"holds records\.jsonl and records\.jsonl\.gz; remove one"):
        read_records(tmp_path)


@pytest.mark.parametrize("content", [b"{}", gzip.compress(b"{}" * 99)[:-9], b""], ids=["plain", "torn", "empty"])
def test_a_torn_gzip_file_is_named(tmp_path, content):
    (tmp_path / "records.jsonl.gz").write_bytes(content)
    with pytest.raises(ValueError, match=r"records.jsonl.gz (is no whole gzip file|holds no records)"):
        read_records(tmp_path)


def test_cells_are_named_by_their_folders(tmp_path, monkeypatch):
    for place in ("a/seed-0", "a/seed-10", "b/seed-0"):
        write(tmp_path / place, text=place)
    cells = read_cells(tmp_path)
    assert {cell: records[0].text for cell, records in cells.items()} == {
        ("a", 0): "a/seed-0", ("a", 10): "a/seed-10", ("b", 0): "b/seed-0",
    }  # fmt: skip
    monkeypatch.chdir(tmp_path / "b" / "seed-0")
    assert read_cells(".") == {("b", 0): cells["b", 0]}  # wherever one stands
    write(tmp_path / "plain")
    assert read_cells(tmp_path / "plain") == {}


@pytest.mark.parametrize(
    "place, said", [("plain", "is no folder CHOICE/seed-N"), ("more/a/seed-00", "is a second a/seed-0")]
)
def test_cells_that_are_none_or_the_same_are_named(tmp_path, place, said):
    write(tmp_path / "a" / "seed-0")
    write(tmp_path / place)
    with pytest.raises(ValueError, match=said):
        read_cells([tmp_path / "a", tmp_path / place])


def test_run_facts_tolerate_gaps(tmp_path):
    for name, facts in {"a": {"methods": {"poss-2": {"depth": 6}, "x": {}}}, "b": {"device": "cpu"}, "c": None}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "records.jsonl").write_text(json.dumps(asdict(Record(**RECORD))))
        if facts is not None:
            (tmp_path / name / "run.json").write_text(json.dumps(facts))
    runs = read_runs([tmp_path / name for name in "abc"])
    assert list(runs) == [str(tmp_path / "a"), str(tmp_path / "b")]
    assert find_depths(runs) == {"poss-2": 6}
    check_drafts(runs)


def test_a_cell_keeps_its_questions_beside_older_cells_without_any(tmp_path):
    for choice, question in (("old", {}), ("new", {"question": "Why?"})):
        pack(tmp_path, choice, 0, {}, [{**RECORD, "pieces": None, "method": choice, **question}])
    schema = pq.read_schema(tmp_path / "records.parquet")
    older = pq.read_table(
        tmp_path / "records.parquet", columns=[name for name in schema.names if name not in ("question", "category")]
    )
    cells = read_cells(tmp_path)
    assert {choice: cell[0].question for (choice, _), cell in cells.items()} == {"old": None, "new": "Why?"}
    pq.write_table(older, tmp_path / "records.parquet")  # as versions before questions were kept wrote it
    assert [record.question for record in read_records(tmp_path)] == [None, None]


def test_two_drafts_of_one_name_are_refused():
    runs = {"a": {"methods": {"hass": {"depth": 6, "weights": "5c"}}}}  # as a replay's, whose trees are fixed
    check_drafts(runs | {"b": {"methods": {"hass": {"depth": 6, "weights": "5c", "tree": "fixed"}, "poss": {}}}})
    with pytest.raises(ValueError, match=r"'hass' of a is another than that of b \(weights 5c and 37, depth 6 and 4\)"):
        check_drafts(runs | {"b": {"methods": {"hass": {"depth": 4, "weights": "37"}}}})
    with pytest.raises(ValueError, match=r"that of b \(tree fixed and auto\): name them apart"):
        check_drafts(runs | {"b": {"methods": {"hass": {"depth": 6, "weights": "5c", "tree": "auto"}}}})


def test_records_of_two_targets_are_refused():
    runs = {"old": {"config": {"target": "b"}}, "none": {}, "a": {"config": {"target": "b", "fingerprint": "12"}}}
    check_targets(runs | {"c": {"config": {"target": "a copy of b", "fingerprint": "12"}}})
    says = r"a was measured on another target than d \(b, fingerprint 12, and b, fingerprint 34\); methods are compared"
    with pytest.raises(ValueError, match=says):
        check_targets(runs | {"d": {"config": {"target": "b", "fingerprint": "34"}}})
