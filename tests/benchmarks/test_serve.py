"""The client of vLLM's server, and `benchmarks.serve`, with a stand-in that knows its answers."""

import json
import sys
from pathlib import Path

import pytest

from benchmarks import serve
from benchmarks.serve import Server, count_accepted
from poss_lightning.evaluation.benchmark import benchmark
from poss_lightning.evaluation.records import read_records, read_runs
from poss_lightning.reports.compare import compare
from tests.support.inputs import write_suite
from tests.support.tiny import tiny_draft

FAKE = (sys.executable, str(Path(__file__).parents[1] / "support" / "fake_vllm.py"))
TURNS = [["How many legs?", "And a horse?"], ["Say it, please."]]


def response(tokens: list[int], text: str, accepted: list[int], stopped: bool) -> dict:
    """What vLLM sends; without a draft it has no metrics."""
    choice = {"token_ids": tokens, "text": text, "finish_reason": "stop" if stopped else "length"}
    metrics = {"metrics": {"speculative_decoding": {"per_step_accepted": accepted}}} if accepted else {"metrics": None}
    return {"choices": [choice], **metrics}


def program(folder: Path, plain: dict, draft: dict | None = None) -> tuple[str, ...]:
    """A server that gives these answers, by prompt."""
    (folder / "answers.json").write_text(json.dumps({"plain": plain, "draft": draft or {}}))
    return (*FAKE, str(folder / "answers.json"))


def test_a_server_answers_and_ends_whatever_happens_in_its_context(tmp_path):
    fake = program(tmp_path, {"[5, 7]": response([3, 4, 1], "so", [2, 4], True)})
    with pytest.raises(KeyboardInterrupt), Server(["model"], tmp_path / "log", fake) as server:
        assert server.version() == "0.fake"
        answer = server.answer([5, 7], 8, [1])
        with pytest.raises(ValueError, match=r"answers /v1/completions with 400 .*no such prompt"):
            server.answer([5], 8, [1])
        raise KeyboardInterrupt
    assert answer[:2] == ([3, 4, 1], "so") and answer.seconds > 0
    assert server._process.poll() is not None


def test_a_server_that_does_not_start_raises_its_last_error(tmp_path):
    with pytest.raises(ValueError, match=r"the server ended, see .*log: ValueError: no such model$"):
        Server(["model"], tmp_path / "log", (*FAKE, str(tmp_path / "none"))).__enter__()


def test_nothing_counts_after_a_stop_token():
    assert count_accepted([], 1, stopped=True) == []  # the prefill's token stops
    assert count_accepted([2, 3], 6, stopped=False) == [2, 3]  # the limit cuts the last round: what it accepted counts
    assert count_accepted([2, 3], 8, stopped=True) == [2, 3]  # the bonus stops
    assert count_accepted([2, 3], 6, stopped=True) == [2, 1]  # the second of three stops, in place of the bonus
    assert count_accepted([4], 2, stopped=True) == [0]


@pytest.fixture
def ours(target, tiny_folder, tmp_path) -> Path:
    """A benchmark of the tiny target with a chain."""
    tiny_draft(target, [3]).save_pretrained(tmp_path / "chain")
    benchmark(
        str(tmp_path / "ours"),
        drafts={"chain": str(tmp_path / "chain")},
        target=tiny_folder,
        suites=[write_suite(tmp_path / "suite.jsonl", *TURNS)],
        max_new_tokens=12,
        nodes=4,
        tree_width=1,
        baselines=["plain"],
        dtype="float32",
    )
    return tmp_path / "ours"


def test_served_answers_become_records_beside_ours(ours, target, tmp_path, capsys):
    """A server with the answers of our loop and our chain has their records."""
    records, known = read_records(ours), {"plain": {}, "chain": {}}
    (source,) = serve.read_sources(ours)
    prompts = {(prompt.plain.id, prompt.plain.turn): prompt.tokens for prompt in serve.prompts_of(source, target)}
    for record in records:
        prompt, stopped = prompts[record.id, record.turn], record.tokens[-1] in target.chat.stops
        assert len(prompt) == record.prompt_tokens
        known[record.method][json.dumps(prompt)] = response(record.tokens, record.text, record.accepted, stopped)
    line = [str(ours), str(tmp_path / "out"), "--loads", "1", "3", "--", "--enforce-eager"]
    serve.main(line, program(tmp_path, known["plain"], known["chain"]))
    assert capsys.readouterr().out.count("3 of 3 answers as our own loop's") == 4
    names = {"plain": "vllm", "chain": "vllm-chain"}
    expected = {(names[r.method], r.id, r.turn): (r.tokens, r.accepted) for r in records}
    for load in (1, 3):
        folder = tmp_path / "out" / f"load-{load}"
        assert {(r.method, r.id, r.turn): (r.tokens, r.accepted) for r in read_records(folder)} == expected
        (run,) = read_runs(folder).values()
        assert run["methods"]["vllm-chain"]["depth"] == 3 and run["config"]["load"] == load
        assert run["served"]["vllm"]["tokens"] == sum(len(r.tokens) for r in records if r.method == "plain")
    compare([str(ours), str(tmp_path / "out" / "load-3")])
    assert "vllm-chain" in capsys.readouterr().out


def test_changed_prompts_are_refused(ours, target, tmp_path):
    suite = tmp_path / "suite.jsonl"
    suite.write_text(suite.read_text().replace("How many legs?", "How many legs has it?"))
    (source,) = serve.read_sources(ours)
    with pytest.raises(ValueError, match="suite 0, turn 0: the prompt differs from that in"):
        serve.prompts_of(source, target)
