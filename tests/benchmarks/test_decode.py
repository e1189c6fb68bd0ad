"""The decoding benchmark, the bandwidth floor and the soak, at tiny sizes."""

import json
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from benchmarks import decode, exact, floor, soak
from benchmarks.measure import in_turn, spread
from benchmarks.random_target import random_draft
from poss_lightning.clock import Clock
from poss_lightning.decoding.decoder import Request
from poss_lightning.decoding.engine import Speculative
from poss_lightning.sampling import Sampling
from tests.support.tiny import tiny_draft, tiny_target


def test_figures_of_rounds(target):
    kinds = {"one": ([4], {}), "two": ([2, 2], {}), "tied": ([2, 2], {"kv": "shared"})}
    drafts = {name: tiny_draft(target, allocation, **config) for name, (allocation, config) in kinds.items()}
    found = decode.costs(target, drafts, 3, depth=2, nodes=8, tree_width=3)
    assert found["one"]["round_ratio"] == {"median": 1.0, "low": 1.0, "high": 1.0} and found["two"]["round_ms"] > 0
    slot = 2 * drafts["one"].layers[0].k_proj.out_features
    assert [kind["cache_bytes_a_token"] for kind in found.values()] == [4 * slot, 8 * slot, 4 * slot]
    assert found["two"]["weights_MB"] == found["tied"]["weights_MB"] > found["one"]["weights_MB"]
    assert spread([3.0, 1.0, 2.0]) == pytest.approx({"median": 2.0, "low": 1.2, "high": 2.8})


def test_works_take_turns_in_an_order_that_rotates():
    done = []
    times = in_turn({name: partial(done.append, name) for name in "xyz"}, 2)
    assert "".join(done) == "xyzyzxzxy" and [len(seconds) for seconds in times.values()] == [2, 2, 2]


def test_the_command_prints_and_writes_every_part(target, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(decode.Target, "load", lambda *args, **options: target)
    monkeypatch.setattr(decode.Specialists, "from_pretrained", lambda name: tiny_draft(target, [2]))
    monkeypatch.setattr(decode, "KINDS", {"[1]": {"allocation": (1,)}})
    monkeypatch.setattr(decode, "LENGTHS", (10, 300))
    out = tmp_path / "decode.json"
    options = ["--limit", "1", "--max-new-tokens", "4", "--rounds", "2", "--suites", "chat", "--out", str(out)]
    decode.main(options)
    written, printed = json.loads(out.read_text()), capsys.readouterr().out
    assert set(written["costs"]) == {"[1]"} and written["questions"] == 1
    assert written["draws"]["chain"]["drawn_over_greedy"]["median"] > 0 and written["batch"]["8"]["fixed"]["tau"] >= 1
    assert written["batch"]["8"]["plain"]["speed_up"] == 1
    assert all(f"\n{part}\n" in printed for part in decode.PARTS) and "60_nodes" in written["context"]["300 tokens"]


def test_the_count_of_drawn_tokens_resumes(target, tmp_path, monkeypatch):
    monkeypatch.setattr(exact.Target, "load", lambda *args, **options: target)
    monkeypatch.setattr(exact.Specialists, "from_pretrained", lambda name: tiny_draft(target, [2, 2, 2]))
    asked = [SimpleNamespace(first_prompt=lambda chat, i=i: [5 + i] * (1 + i % 3)) for i in range(60)]
    monkeypatch.setattr(exact, "read_suites", lambda: asked)
    out, tokens = tmp_path / "exact.json", 0
    for batches in (1, 2):
        exact.main(["--tokens", str(tokens + 1), "--max-new-tokens", "8", "--out", str(out)])
        found, before = json.loads(out.read_text()), tokens
        tokens = found["tokens"]
        assert (found["batches"], found["texts"], found["texts_that_differ"]) == (batches, 30 * batches, 0)
        assert tokens > before


def test_floors_are_the_bytes_that_must_be_read():
    """D 32, MLP 48, 4 heads and 2 of keys, of 8 each, 320 tokens, 2 layers; float32."""
    target = tiny_target()
    engine = Speculative(target, random_draft(target, (1, 2)), 3, 20)
    next(engine.rounds(Request([[5] * 10], 8, frozenset()), Clock(target.device)))
    mlp, attention, slot, head = 3 * 32 * 48, 2 * 32 * 32, 2 * 2 * 8, 320 * 32  # projecting keys: 32 * slot
    layer = mlp + attention + 32 * slot + 2 * 32  # two norms
    assert floor.verify_bytes(engine, 20) == 4 * (2 * layer + 32 + head + 2 * slot * (10 + 20))
    own = mlp + attention + 32  # without the projections of keys, and with one norm
    join = 2 * 32 * 32 + 32 * slot  # of a slot that the second specialist will read
    assert floor.draft_bytes(engine, 1) == 4 * (own + head + slot * 10)
    assert floor.draft_bytes(engine, 3) == 4 * (3 * (own + head) + 2 * join + slot * (10 + 20 + 30))


# --- the soak ---


def test_a_case_follows_from_its_seed(target):
    cases = [soak.make_case(seed, target, ["A horse has four legs."], 6, 30, 20) for seed in (1, 1, 2)]
    assert cases[0] == cases[1] != cases[2]
    assert all(1 <= len(prompt) <= 30 and max(prompt) < 320 for case in cases for prompt in case.prompts)
    found = soak.soak(2 / 60)
    assert found["cases"] >= 1 and found["tokens"] > 0


def test_a_soak_stops_at_a_mismatch_and_names_its_case(monkeypatch):
    plain = soak.Speculative.decode

    def wrong(self, *args):
        decoded = plain(self, *args)
        decoded[-1].tokens[-1] = (decoded[-1].tokens[-1] + 1) % 320
        return decoded

    monkeypatch.setattr(soak.Speculative, "decode", wrong)
    with pytest.raises(soak.Mismatch, match=r"--seed 7, tiny: row \d of \d, token \d+"):
        soak.soak(1, seed=7)


def test_only_rounding_excuses_a_mismatch():
    """Two tokens with the same row of the head tie; the second most likely one does not."""
    target = tiny_target()
    case = replace(soak.make_case(3, target, ["A horse."], 6, 5, 4), prompts=[[5, 6, 7], [8]], sampling=Sampling())
    logits = target.embed_head.logits(target.text_features(torch.tensor([[8]])))[0, -1]
    best, second = logits.topk(2).indices.tolist()
    assert not soak.is_tie(target, case, case.prompts, 1, [], {best, second})
    twin = (best + 1) % 320
    target.embed_head.head.data[twin] = target.embed_head.head[best]
    assert soak.is_tie(target, case, case.prompts, 1, [], {best, twin})


def test_growing_memory_fails(monkeypatch, capsys):
    monkeypatch.setattr(soak, "soak", lambda *args: {"cases": 1, "growth": 0.051})
    monkeypatch.setattr(soak.Target, "load", lambda *args: None)
    with pytest.raises(SystemExit, match="1"):
        soak.main(["--part", "decoding"])
    assert "memory grew by 5.1% after the first fifth" in capsys.readouterr().out
    monkeypatch.setattr(soak, "soak", lambda *args: {"cases": 1, "growth": 0.049})
    soak.main(["--part", "decoding"])
