"""Rounds as other engines report them: in every form, a record accepts what the rounds accepted."""

import json
from collections import Counter

import pytest

from poss_lightning.evaluation.records import read_records

ROUNDS = [[2, 0, 1, 2], [0, 0], [3]]


def vllm(rounds: list[int], detailed: bool = True) -> dict:
    """A response of vLLM's server."""
    counts = [rounds.count(accepted) for accepted in range(4)]
    known = {"acceptance_histogram": counts, "num_draft_tokens": 3 * len(rounds)}
    known |= {"per_step_accepted": rounds} if detailed else {}
    return {"id": "cmpl-1", "choices": [{"text": "so"}], "metrics": {"speculative_decoding": known}}


def aiperf(rounds: list[int]) -> dict:
    """A line of AIPerf's profile_export.jsonl."""
    counts = {str(accepted): times for accepted, times in Counter(rounds).items()}
    metadata = {"session_num": sum(rounds), "conversation_id": "conv_7", "turn_index": 1}
    return {"metadata": metadata, "spec_decode_acceptance": {"acceptance_histogram": counts}}


def sglang(rounds: list[int], name: str = "spec_correct_drafts_histogram") -> dict:
    """A response of SGLang's /generate."""
    counts = [rounds.count(accepted) for accepted in range(4)]
    return {"text": "so", "meta_info": {"spec_verify_ct": len(rounds), name: counts}}


def lines(answers: list[dict]) -> str:
    return "".join(json.dumps(answer) + "\n" for answer in answers)


ANSWERS = [vllm(rounds) for rounds in ROUNDS]
FORMS = {
    "detailed": lines(ANSWERS),
    "histograms": lines([vllm(rounds, False) for rounds in ROUNDS]),
    "AIPerf": lines([aiperf(rounds) for rounds in ROUNDS]),
    "SGLang": lines([sglang(rounds) for rounds in ROUNDS]),
    "SGLang's earlier name": lines([sglang(rounds, "spec_accept_histogram") for rounds in ROUNDS]),
    "an array": json.dumps(ANSWERS),
    "a byte order mark, blank lines, CRLF": "\ufeff" + lines(ANSWERS).replace("\n", "\r\n\r\n"),
    "a request that failed": lines([ANSWERS[0], {"metrics": None, "choices": []}, *ANSWERS[1:]]),
    "an answer without drafts": lines([vllm([], False), vllm([]), *ANSWERS]),
}


@pytest.mark.parametrize("form", FORMS)
def test_a_record_accepts_what_the_rounds_accepted(tmp_path, form):
    (tmp_path / "served.jsonl").write_text(FORMS[form], encoding="utf-8", newline="")
    records = read_records(tmp_path / "served.jsonl")
    assert [Counter(record.accepted) for record in records] == [Counter(rounds) for rounds in ROUNDS]
    assert "AIPerf" not in form or [(r.id, r.turn) for r in records] == [(sum(rounds), 1) for rounds in ROUNDS]
    assert any(kind in form for kind in ("histograms", "AIPerf", "SGLang")) or [r.accepted for r in records] == ROUNDS
    assert {(r.suite, r.method) for r in records} == {("requests", "served (engine)")}


PROMETHEUS = "# HELP vllm:spec_decode_num_drafts_total Number.\n"
SGLANG = {"text": "so", "meta_info": {"spec_verify_ct": 20, "completion_tokens": 48}}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (PROMETHEUS, "line 1: not JSON .* --per-request-spec-decode-metrics detailed"),
        (lines([SGLANG]), "no answer says what each round accepted: .* --per-request-spec-decode-metrics"),
        (lines([{"choices": [], "usage": {}, "metrics": None}]), "no answer says .*AIPerf's .* --export-level records"),
        (lines([{"spec_accept_length": 2.4}]), "lacks accepted, .* --per-request-spec-decode-metrics detailed"),
        (lines([{"spec_decode_acceptance": [3, 2, 1]}]), "line 1: {.*3, 2, 1.*} does not say what each round accepted"),
        ("[1]", "is not a JSON object"),
    ],
)
def test_a_different_form_is_refused_with_what_writes_the_right_one(tmp_path, text, words):
    (tmp_path / "metrics.txt").write_text(text)
    with pytest.raises(ValueError, match=words):
        read_records(tmp_path / "metrics.txt")
