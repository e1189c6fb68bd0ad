"""Rounds by accepted tokens: what engines and AIPerf hold is what our records hold; what is wrong is refused."""

import json
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from poss_lightning.evaluation.records import to_line
from poss_lightning.reports.histogram import Acceptance, by_prompt, histogram, name_apart, read_answers, tables
from tests.support.synthetic import make_records

DEPTH, NODES = 3, 8
RECORDS = make_records(methods=("autoregressive", "eagle"))
DRAFTED = [record for record in RECORDS if record.method == "eagle"]


@pytest.fixture
def folder(tmp_path) -> Path:
    folder = tmp_path / "ours"
    folder.mkdir()
    (folder / "records.jsonl").write_text("".join(to_line(record) + "\n" for record in RECORDS))
    facts = {"autoregressive": {}, "eagle": {"depth": DEPTH, "nodes": NODES, "tree": "fixed"}}
    (folder / "run.json").write_text(json.dumps({"methods": facts}))
    return folder


def lines(file: Path, *values: dict) -> str:
    file.write_text("".join(json.dumps(value) + "\n" for value in values))
    return str(file)


def of_vllm(accepted: list[int]) -> dict:
    """What vLLM's server reports of an answer, and what does not matter here."""
    dense = [accepted.count(count) for count in range(DEPTH + 1)]
    stats = {"acceptance_histogram": dense, "num_draft_tokens": (NODES - 1) * len(accepted), "num_spec_tokens": DEPTH}
    return {"choices": [], "metrics": {"time_to_first_token_ms": 1.0, "speculative_decoding": stats}}


def test_what_is_written_is_read_as_it_was(folder, tmp_path, capsys):
    histogram(str(folder), out=str(tmp_path / "profile_export.jsonl"), resamples=20)
    said = capsys.readouterr().out
    first, again = read_answers(str(folder)), read_answers(str(tmp_path / "profile_export.jsonl"))
    assert list(first) == list(again)
    histogram(str(tmp_path / "profile_export.jsonl"), resamples=20)
    assert capsys.readouterr().out == said and "eagle" in said and "autoregressive" not in said


def test_aiperf_finds_its_identities(folder):
    """Those that SpecDecodeAcceptanceRecord checks, with its field names."""
    for answer, record in zip(read_answers(str(folder)), DRAFTED, strict=True):
        written = answer.rounds.to_aiperf()
        pairs = {int(accepted): rounds for accepted, rounds in written["acceptance_histogram"].items()}
        assert pairs == Counter(record.accepted) and written["per_step_accepted"] == record.accepted
        assert sum(pairs.values()) == written["num_spec_steps"] == len(record.accepted)
        assert sum(j * n for j, n in pairs.items()) == written["num_accepted_draft_tokens"] == sum(record.accepted)
        assert written["num_draft_tokens"] == (NODES - 1) * len(record.accepted)
        assert written["mean_acceptance_length"] == 1 + sum(record.accepted) / len(record.accepted)


def test_vllm_s_dense_counts_say_the_same(folder, tmp_path):
    responses = lines(tmp_path / "eagle.jsonl", *(of_vllm(record.accepted) for record in DRAFTED), {"error": "busy"})
    ours, theirs = ([answer.rounds for answer in read_answers(file)] for file in (str(folder), responses))
    assert tables({"eagle": ours}, 20) == tables({"eagle": theirs}, 20)


def test_turns_and_repeats_of_a_prompt_count_together_and_requests_apart(folder, tmp_path):
    prompts = by_prompt(list(read_answers(str(folder))))["eagle"]
    assert len(prompts) == len({(record.suite, record.id) for record in DRAFTED}) < len(DRAFTED)
    assert sum(one.rounds for one in prompts) == sum(len(record.accepted) for record in DRAFTED)
    assert sum(one.total for one in prompts) == sum(map(sum, (record.accepted for record in DRAFTED)))
    requests = lines(tmp_path / "eagle.jsonl", *(of_vllm(record.accepted) for record in DRAFTED))
    assert len(by_prompt(list(read_answers(requests)))["eagle"]) == len(DRAFTED)
    with pytest.raises(ValueError, match=r"'eagle' answers .* turn 0 repeat 0 twice, in .*ours and in .*ours; name"):
        by_prompt([*read_answers(str(folder)), *read_answers(str(folder / "records.jsonl"))])


@pytest.mark.parametrize(
    "other",
    [
        {"config": {"temperature": 1.0}},
        {"config": {"temperature": 1.0, "top_p": 0.5}},
        {"methods": {"eagle": {"depth": DEPTH, "nodes": NODES, "weights": "5c"}}},
    ],
    ids=["temperature", "top-p", "training"],
)
def test_other_trainings_and_temperatures_of_one_name_stand_apart(folder, tmp_path, other):
    beside = tmp_path / "other"
    shutil.copytree(folder, beside)
    (beside / "run.json").write_text(json.dumps(json.loads((folder / "run.json").read_text()) | other))
    answers = name_apart([*read_answers(str(folder)), *read_answers(str(beside))])
    assert list(by_prompt(answers)) == ["eagle, ours", "eagle, other"]
    assert by_prompt(name_apart(list(read_answers(str(folder))))).keys() == {"eagle"}
    served = lines(tmp_path / "eagle.jsonl", of_vllm([1, 2]))
    assert len(by_prompt(name_apart([*read_answers(served), *read_answers(str(folder))]))) == 2


def test_shares_are_counted_rounds():
    found = [Acceptance("e", {0: 3, 2: 1}, 12), Acceptance("e", {1: 1}, 3)]
    means, shares = tables({"m": found}, 20)
    assert [cell.text for cell in means.rows[0][1]] == ["2", "5", "1.60", "1.75", "20.0"]
    assert not any(cell.notes for table in (means, shares) for cell in table.rows[0][1])  # two prompts are too few
    idle = tables({"m": [*found, Acceptance("e", {}, 0)]}, 20)
    assert not any(cell.notes for table in idle for cell in table.rows[0][1])  # nor is a prompt without rounds a third
    assert [cell.text for cell in shares.rows[0][1]] == ["60.0", "20.0", "20.0"]


STATS = {"acceptance_histogram": {"0": 1, "2": 2}, "num_draft_tokens": 9}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        *(
            (
                {"acceptance_histogram": wrong},
                r"acceptance_histogram is .*; it must be a list of integers of at least 0",
            )
            for wrong in (3, {"a": 1}, {"00": 1}, {"5000": 1}, [1, -1], [1, True], {"0": "x"}, "ab")
        ),
        ({"num_draft_tokens": 3}, "4 tokens are accepted, and num_draft_tokens is 3"),
        ({"num_draft_tokens": "9"}, "num_draft_tokens is '9'; it must be an integer of at least 0"),
        ({"num_spec_tokens": 10**9}, "num_spec_tokens is 1000000000; it must be at most 1024"),
        ({"num_spec_tokens": 1}, "a round accepted 2 tokens, and num_spec_tokens is 1"),
        ({"num_spec_steps": 4}, "num_spec_steps is 4; by acceptance_histogram it is 3"),
        ({"num_accepted_draft_tokens": 5}, "num_accepted_draft_tokens is 5; by acceptance_histogram it is 4"),
        ({"per_step_accepted": [2, 0]}, "per_step_accepted and acceptance_histogram are of different rounds"),
        ({"per_step_accepted": 2}, "per_step_accepted is 2; it must be a list"),
    ],
)
def test_numbers_that_contradict_each_other_are_named_by_line(tmp_path, change, words):
    file = lines(tmp_path / "a.jsonl", *({"spec_decode_acceptance": STATS | extra} for extra in ({}, change)))
    with pytest.raises(ValueError, match=f"a.jsonl, line 2: {words}"):
        list(read_answers(file))


@pytest.mark.parametrize("line", [{"spec_decode_acceptance": "x"}, {"metrics": [1]}, {"metadata": "m", "metrics": 1}])
def test_lines_of_other_shapes_are_passed_over(tmp_path, line):
    file = lines(tmp_path / "a.jsonl", line, {"metadata": "m", "spec_decode_acceptance": STATS})
    assert [(answer.method, answer.place) for answer in read_answers(file)] == [("a", {})]


@pytest.mark.parametrize("methods", [None, {"eagle": None}, {"eagle": {"depth": 3, "nodes": "y"}}, {}])
def test_a_run_json_that_does_not_know_the_method_is_refused(folder, methods):
    (folder / "run.json").write_text(json.dumps({"methods": methods}))
    with pytest.raises(ValueError, match="does not say how many tokens 'eagle' drafts a round"):
        list(read_answers(str(folder)))


def test_nothing_is_written_over_and_nothing_drafted_is_said(folder, tmp_path):
    with pytest.raises(FileExistsError):
        histogram(str(folder), out=str(folder / "records.jsonl"))
    plain = [record for record in RECORDS if record.method != "eagle"]
    (folder / "records.jsonl").write_text("".join(to_line(record) + "\n" for record in plain))
    with pytest.raises(ValueError, match="no record in it is of a method that drafts"):
        histogram(str(folder))


def test_what_says_nothing_of_acceptance_is_refused(folder, tmp_path):
    with pytest.raises(ValueError, match=r"b\.jsonl: no line has 'spec_decode_acceptance' or 'metrics\.speculative"):
        list(read_answers(lines(tmp_path / "b.jsonl", {"metrics": {}}, {"metrics": None})))


def test_of_trees_sized_round_by_round_all_but_the_drafted_tokens_is_told(folder, tmp_path):
    fixed = tables(by_prompt(list(read_answers(str(folder)))), 20)
    run = json.loads((folder / "run.json").read_text())
    run["methods"]["eagle"]["tree"] = "auto"
    (folder / "run.json").write_text(json.dumps(run))
    histogram(str(folder), out=str(tmp_path / "auto.jsonl"))
    for file in (str(folder), str(tmp_path / "auto.jsonl")):  # as it was written, too
        acceptance, shares = tables(by_prompt(list(read_answers(file))), 20)
        assert acceptance.columns == fixed[0].columns[:-1] and shares.rows == fixed[1].rows


def test_a_round_that_the_tree_could_not_accept_is_refused():
    with pytest.raises(ValueError, match="a round accepted 3 tokens, and num_spec_tokens is 2"):
        Acceptance.from_record(replace(DRAFTED[0], accepted=[3], tokens=[1] * 5, new_tokens=5, pieces=None), 2, 7)
