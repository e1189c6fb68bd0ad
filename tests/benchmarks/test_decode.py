"""The decoding benchmark and the soak, at tiny sizes."""

import json
from dataclasses import replace
from functools import partial

import pytest

from benchmarks import decode, soak
from benchmarks.measure import in_turn, spread
from tests.support.tiny import tiny_draft
from tests.support.tolerance import close


def test_works_take_turns_in_an_order_that_rotates():
    assert close(spread([3.0, 1.0, 2.0]), {"median": 2.0, "low": 1.2, "high": 2.8})
    done = []
    times = in_turn({name: partial(done.append, name) for name in "xyz"}, 2)
    assert "".join(done) == "xyzyzxzxy" and [len(seconds) for seconds in times.values()] == [2, 2, 2]


def test_the_command_prints_and_writes_every_part(target, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(decode.Target, "load", lambda *args, **options: target)
    monkeypatch.setattr(decode, "load_draft", lambda name: tiny_draft(target, [2]))
    monkeypatch.setattr(decode, "KINDS", {"[1]": {"allocation": (1,)}})
    monkeypatch.setattr(decode, "LENGTHS", (10, 300))
    monkeypatch.setattr(decode, "TEXTS", (10,))
    monkeypatch.setattr(decode, "WIDE", target.model.config)
    out = tmp_path / "decode.json"
    decode.main(["--limit", "1", "--max-new-tokens", "4", "--rounds", "2", "--suites", "chat", "--out", str(out)])
    written, printed = json.loads(out.read_text()), capsys.readouterr().out
    assert set(written["costs"]) == {"[1]"} and written["questions"] == 1
    assert written["batch"]["8"]["fixed"]["tau"] >= 1 and written["batch"]["8"]["plain"]["speed_up"] == 1
    assert (
        written["speed"]["generate"]["tokens_per_second"] > 0 and float(written["speed"]["draft"]["over generate"]) > 0
    )
    assert all(f"\n{part}\n" in printed for part in decode.PARTS) and "60_nodes" in written["context"]["300 tokens"]


def test_a_case_follows_from_its_seed(target):
    cases = [soak.make_case(seed, target, ["A horse has four legs."], 6, 30, 20) for seed in (1, 1, 2)]
    assert cases[0] == cases[1] != cases[2]
    assert all(1 <= len(prompt) <= 30 and max(prompt) < 320 for case in cases for prompt in case.prompts)
    found = soak.soak(2 / 60)
    assert found["cases"] >= 1 and found["tokens"] > 0


def test_a_soak_stops_at_a_mismatch_and_names_its_case(monkeypatch):
    plain = soak.Speculative.decode

    def wrong(*args):
        return [replace(row, tokens=[*row.tokens[:-1], 319 - row.tokens[-1]]) for row in plain(*args)]

    monkeypatch.setattr(soak.Speculative, "decode", wrong)
    with pytest.raises(soak.Mismatch, match=r"--seed 7, tiny: row \d of \d: \["):
        soak.soak(1, seed=7)
