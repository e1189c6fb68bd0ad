"""What other engines counted: in every form, compare and doctor read what the rounds accepted."""

import json
from collections import Counter

import numpy as np
import pytest
import torch

from poss_lightning.evaluation.rounds import read_rounds
from poss_lightning.evaluation.serving_metrics import read_served
from tests.support.tolerance import close

ROUNDS = [[2, 0, 1, 2], [0, 0], [3]]


def counts(rounds: list[int]) -> list[int]:
    return [rounds.count(accepted) for accepted in range(4)]


def vllm(rounds: list[int], detailed: bool = True) -> dict:
    """A response of vLLM's server."""
    known = {"acceptance_histogram": counts(rounds), "num_draft_tokens": 3 * len(rounds)}
    known |= {"per_step_accepted": rounds} if detailed else {}
    return {"id": f"cmpl-{len(rounds)}", "choices": [{"text": "so"}], "metrics": {"speculative_decoding": known}}


def aiperf(rounds: list[int]) -> dict:
    """A line of AIPerf's profile_export.jsonl."""
    metadata = {"session_num": sum(rounds), "conversation_id": "conv_7", "turn_index": 1}
    return {"metadata": metadata, "spec_decode_acceptance": {"acceptance_histogram": Counter(map(str, rounds))}}


def sglang(rounds: list[int], name: str = "spec_correct_drafts_histogram") -> dict:
    """A response of SGLang's /generate."""
    return {"text": "so", "meta_info": means(rounds) | {name: counts(rounds)}}


def means(rounds: list[int]) -> dict:
    return {"spec_verify_ct": len(rounds), "spec_accept_length": 1 + sum(rounds) / len(rounds)}


def chat(rounds: list[int]) -> dict:
    """A chat completion of SGLang's, which has a histogram where it was asked for."""
    details = {"sglext": {"spec_tokens_details": sglang(rounds)["meta_info"]}}
    return {"id": f"{len(rounds)}", "usage": {"completion_tokens": 5}, "choices": [{"message": {}} | details]}


def stream(*answers: dict) -> str:
    """Each answer in two chunks, of which the first is of half its rounds or none."""
    chunks = [chunk for each in answers for chunk in ({"id": each["id"], "choices": [{"delta": {}}]}, each)]
    return "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n"


def lines(*answers: dict) -> str:
    return "".join(json.dumps(answer) + "\n" for answer in answers)


ANSWERS = [vllm(rounds) for rounds in ROUNDS]
FORMS = {
    "detailed": lines(*ANSWERS),
    "histograms": lines(*(vllm(rounds, False) for rounds in ROUNDS)),
    "AIPerf": lines(*map(aiperf, ROUNDS)),
    "SGLang": lines(*map(sglang, ROUNDS)),
    "SGLang's earlier name": lines(*(sglang(rounds, "spec_accept_histogram") for rounds in ROUNDS)),
    "SGLang's chat": lines(*map(chat, ROUNDS)),
    "a saved stream": stream(*ANSWERS),
    "a stream with names of events": ": ping\n\n" + stream(*ANSWERS).replace("data:", "event: chunk\ndata:"),
    "answers with one id": lines(*(answer | {"id": "same"} for answer in ANSWERS)),
    "requests that failed or had no drafts": lines({"metrics": None, "choices": []}, vllm([], False), *ANSWERS),
}


def prometheus(name: str, **values: float) -> str:
    """A metric with one value for each set of labels, as `model-engine` names them."""
    labels = {key: 'model_name="{}",engine="{}"'.format(*key.split("_")) for key in values}
    text = f"# HELP {name} Number.\n# TYPE {name} counter\n"
    return text + "".join(f"{name}{{{labels[key]}}} {value}\n" for key, value in values.items())


def vllm_metrics(engines: dict[str, list[int]], has_places: bool = True) -> str:
    """vLLM's /metrics of engines that had these rounds."""
    name = "vllm:spec_decode_num"
    text = prometheus(f"{name}_drafts_total", **{key: float(len(own)) for key, own in engines.items()})
    text += prometheus(f"{name}_drafts_created", **dict.fromkeys(engines, 1.7e9))
    text += prometheus(f"{name}_accepted_tokens_total", **{key: float(sum(own)) for key, own in engines.items()})
    for place in range(3 * has_places):
        passed = {key: float(sum(count > place for count in own)) for key, own in engines.items()}
        name = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
        text += prometheus(name, **passed).replace(",engine", f',position="{place}",engine')
    return text


def gauge(**means: float) -> str:
    return prometheus("sglang:spec_accept_length", **means)


FIRST, REST = ROUNDS[0], ROUNDS[1] + ROUNDS[2]
TAU = 1 + 8 / 7  # 8 tokens of 7 rounds; by answers 1 + (5/4 + 0 + 3) / 3
MIXED = [sglang(FIRST), *({"meta_info": means(rounds)} for rounds in ROUNDS[1:])]
STATES = [{"avg_spec_accept_length": mean, "memory": 3} for mean in (TAU, 0.0, None, TAU)]
COUNTED = {  # with what is passed at each position, [] where a mean alone is known
    "vLLM's engines": (vllm_metrics({"m_0": FIRST, "m_1": REST}), [7, 4, 3, 1]),
    "vLLM's models, one of which is idle": (vllm_metrics({"m_0": FIRST + REST, "other_0": []}), [7, 4, 3, 1]),
    "vLLM's, twice": (vllm_metrics({"m_0": FIRST}) + vllm_metrics({"m_0": FIRST + REST}), [7, 4, 3, 1]),
    "vLLM's, with exemplars": (
        vllm_metrics({"m_0": FIRST + REST}).replace(".0\n", '.0 # {id="a"} 1.0\n'),
        [7, 4, 3, 1],
    ),
    "vLLM's without positions": (vllm_metrics({"m_0": FIRST, "m_1": REST}, has_places=False), []),
    "SGLang's gauge": (gauge(m_0=TAU, m_1=0.0), []),
    "SGLang's server": (json.dumps({"internal_states": STATES}), []),
    "SGLang's means, weighted": (lines(*({"meta_info": means(rounds)} for rounds in ROUNDS)), []),
    "SGLang's means beside histograms": (lines(*MIXED), []),
}


@pytest.mark.parametrize("form", [*FORMS, *COUNTED])
def test_every_form_says_what_the_rounds_accepted(tmp_path, form):
    """Acceptance is by rounds; and responses give a row for each answer."""
    text, passed = COUNTED.get(form) or (FORMS[form], [7, 4, 3, 1])
    (tmp_path / "served.jsonl").write_text(text)
    served = read_served(tmp_path / "served.jsonl")
    assert close(served.tau, TAU, dtype=torch.float32) and np.sum(served.passed, 0).tolist() == (passed or 0)
    assert len(served.passed) == (len(ROUNDS) if form in FORMS else len(passed) > 0)
    if form in FORMS:
        rounds = read_rounds(tmp_path / "served.jsonl")
        assert [Counter(accepted.tolist()) for accepted in rounds["accepted"]] == [Counter(own) for own in ROUNDS]
        assert "AIPerf" not in form or rounds["id"].tolist() == [str(sum(own)) for own in ROUNDS]
        assert {*rounds["turn"]} == {int("AIPerf" in form)}
        assert {*zip(rounds["suite"], rounds["method"], strict=True)} == {("requests", "served (engine)")}


REFUSED = [  # of /metrics; of responses, what writes the right form
    (
        read_served,
        gauge(m_0=1.5, m_1=2.5),
        r"different means of its schedulers, \[1.5, 2.5\], and not of how many rounds",
    ),
    (read_served, gauge(m_0=0.0), "has no draft yet"),
    (read_served, vllm_metrics({"m_0": FIRST, "other_0": REST}), "has counters of m and other: keep the lines of one"),
    (
        read_served,
        vllm_metrics({"m_0": []}),
        "has counters of no draft yet; save /metrics after the engine has answered",
    ),
    (read_rounds, "# HELP vllm:n Number.\n", "is not UTF-8 JSON.*: give .* --per-request-spec-decode-metrics detailed"),
    (read_rounds, lines({"choices": [], "metrics": None}), "no answer says what each .*AIPerf's .* --export-level rec"),
    (read_rounds, lines(*MIXED), "line 2: the answer has a mean, not what each round accepted: give "),
    (read_rounds, lines({"spec_decode_acceptance": [3, 2, 1]}), "no answer says what each round accepted"),
    (read_served, lines({"num_spec_steps": 20, "mean_acceptance_length": None}), "no answer says what each round"),
    (read_rounds, "[1]", "line 1: 1 does not say"),
]


@pytest.mark.parametrize(("read", "text", "words"), REFUSED)
def test_what_says_nothing_of_a_draft_is_refused(tmp_path, read, text, words):
    (tmp_path / "metrics.txt").write_text(text)
    with pytest.raises(ValueError, match=words):
        read(tmp_path / "metrics.txt")
