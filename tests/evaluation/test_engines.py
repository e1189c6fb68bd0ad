"""Rounds as other engines report them: in every form, a record accepts what the rounds accepted."""

import json
from collections import Counter

import pytest

from poss_lightning.evaluation.rounds import read_rounds

ROUNDS = [[2, 0, 1, 2], [0, 0], [3]]


def counts(rounds: list[int]) -> list[int]:
    return [rounds.count(accepted) for accepted in range(4)]


def vllm(rounds: list[int], detailed: bool = True) -> dict:
    """A response of vLLM's server."""
    known = {"acceptance_histogram": counts(rounds), "num_draft_tokens": 3 * len(rounds)}
    known |= {"per_step_accepted": rounds} if detailed else {}
    return {"id": "cmpl-1", "choices": [{"text": "so"}], "metrics": {"speculative_decoding": known}}


def aiperf(rounds: list[int]) -> dict:
    """A line of AIPerf's profile_export.jsonl."""
    metadata = {"session_num": sum(rounds), "conversation_id": "conv_7", "turn_index": 1}
    return {"metadata": metadata, "spec_decode_acceptance": {"acceptance_histogram": Counter(map(str, rounds))}}


def sglang(rounds: list[int], name: str = "spec_correct_drafts_histogram") -> dict:
    """A response of SGLang's /generate."""
    return {"text": "so", "meta_info": {"spec_verify_ct": len(rounds), name: counts(rounds)}}


def lines(*answers: dict) -> str:
    return "".join(json.dumps(answer) + "\n" for answer in answers)


ANSWERS = [vllm(rounds) for rounds in ROUNDS]
FORMS = {
    "detailed": lines(*ANSWERS),
    "histograms": lines(*(vllm(rounds, False) for rounds in ROUNDS)),
    "AIPerf": lines(*map(aiperf, ROUNDS)),
    "SGLang": lines(*map(sglang, ROUNDS)),
    "SGLang's earlier name": lines(*(sglang(rounds, "spec_accept_histogram") for rounds in ROUNDS)),
    "requests that failed or had no drafts": lines({"metrics": None, "choices": []}, vllm([], False), *ANSWERS),
}


@pytest.mark.parametrize("form", FORMS)
def test_a_record_accepts_what_the_rounds_accepted(tmp_path, form):
    (tmp_path / "served.jsonl").write_text(FORMS[form])
    rounds = read_rounds(tmp_path / "served.jsonl")
    assert [Counter(accepted.tolist()) for accepted in rounds["accepted"]] == [Counter(own) for own in ROUNDS]
    assert "AIPerf" not in form or rounds["id"].tolist() == [str(sum(own)) for own in ROUNDS]
    assert {*rounds["turn"]} == {int("AIPerf" in form)}
    assert {*zip(rounds["suite"], rounds["method"], strict=True)} == {("requests", "served (engine)")}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("# HELP vllm:n Number.\n", r"line 1: .* \(not JSON .* --per-request-spec-decode-metrics detailed"),
        (lines({"choices": [], "metrics": None}), "no answer says what each .*AIPerf's .* --export-level records"),
        (lines({"spec_accept_length": 2.4}), "no answer says what each .*--per-request-spec-decode-metrics detailed"),
        (lines({"spec_decode_acceptance": [3, 2, 1]}), "line 1: .* does not say what each round accepted"),
        ("[1]", "line 1: 1 does not say"),
    ],
)
def test_a_different_form_is_refused_with_what_writes_the_right_one(tmp_path, text, words):
    (tmp_path / "metrics.txt").write_text(text)
    with pytest.raises(ValueError, match=words):
        read_rounds(tmp_path / "metrics.txt")
