"""The decoding benchmark and the soak, at tiny sizes: they count what happens, and change nothing that they watch."""

import json
from dataclasses import replace

import pytest
import torch

from benchmarks import decode, floor, soak, speed
from benchmarks.random_target import random_draft, random_target
from benchmarks.rounds import Parts, against_naive, costs, overhead, spread
from poss_lightning.clock import Clock
from poss_lightning.decoding.autoregressive import Autoregressive
from poss_lightning.decoding.decoder import Request
from poss_lightning.decoding.engine import Speculative
from poss_lightning.evaluation.suites import Question
from tests.support.decoders import PROMPTS, tokens_of
from tests.support.tiny import tiny_draft

QUESTIONS = [Question(suite, n, "", [text]) for suite in ("a", "b") for n, text in enumerate(("Hi", "How many legs?"))]


# --- rounds and their parts ---


def test_parts_done_between_rounds_change_no_token(target):
    engine, tokens = Speculative(target, tiny_draft(target, [1, 2, 3]), 6, 40), []
    text = engine.rounds(Request(PROMPTS[:1], 30, frozenset()), Clock(target.device))
    tokens += next(text).tokens[0]
    parts = Parts(engine)
    assert [args[1].z.shape[1] for args in parts.step_calls] == [1] + [10] * 5 and parts.tree.tokens.shape == (1, 40)
    for step in text:
        tokens += step.tokens[0]
        assert all(parts.seconds(name) > 0 for name in ("steps", "joined", "verify"))
    assert [tokens] == tokens_of(Autoregressive(target), PROMPTS[:1], 30, frozenset())


def test_figures_of_rounds(target):
    found = overhead(target, (1, 1), rounds=3, depth=2, nodes=8, tree_width=3)
    assert found["round_ms"] > found["verify_ms"] > 0 and found["draft_steps_ms"] > 0
    assert found["round_over_parts"]["low"] <= found["round_over_parts"]["median"] <= found["round_over_parts"]["high"]
    found = against_naive(target, (1, 1), rounds=3, depth=2, nodes=8, tree_width=3)
    assert found["same_text"] and found["layer_rows_of_a_naive_round"] == 1 + 1 + 3  # one new token
    kinds = {"one": ([4], {}), "two": ([2, 2], {}), "tied": ([2, 2], {"kv": "shared"})}
    drafts = {name: tiny_draft(target, allocation, **config) for name, (allocation, config) in kinds.items()}
    found = costs(target, drafts, rounds=3, depth=2, nodes=8, tree_width=3)
    assert found["one"]["round_ratio"] == {"median": 1.0, "low": 1.0, "high": 1.0} and found["two"]["round_ms"] > 0
    slot = 2 * drafts["one"].layers[0].k_proj.out_features
    assert [kind["cache_bytes_a_token"] for kind in found.values()] == [4 * slot, 8 * slot, 4 * slot]
    assert found["two"]["weights_MB"] == found["tied"]["weights_MB"] > found["one"]["weights_MB"]
    assert spread([3.0, 1.0, 2.0]) == pytest.approx({"median": 2.0, "low": 1.2, "high": 2.8})


# --- real answers ---


def test_a_run_counts_what_decode_counts(target):
    for tree, width in (("fixed", 4), ("auto", 4), ("fixed", 1)):
        engine = Speculative(target, tiny_draft(target, [2, 2]), 4, 5 if width == 1 else 20, width, tree)
        seen = speed.run(engine, PROMPTS, 20)
        decoded = engine.decode(PROMPTS, 20)
        assert seen.tokens == sum(len(one.tokens) for one in decoded)
        if tree == "fixed":  # auto's rounds are others every time, as its clock is
            assert sorted(seen.accepted) == sorted(count for one in decoded for count in one.accepted)
            assert len(seen.trees) == max(len(one.accepted) for one in decoded)
        assert all(0 <= depth <= 4 and depth < nodes <= engine.nodes for depth, nodes in seen.trees)
        if width == 1:
            assert set(seen.trees) == {(4, 5)}
    assert speed.run(Autoregressive(target), PROMPTS, 20).trees == []


def test_figures_and_ratios_by_hand():
    pairs = [
        {"x": speed.Run(10, 1.0, [1, 0], [(2, 4), (4, 8)]), "y": speed.Run(10, 2.0, [], [])},
        {"x": speed.Run(20, 1.0, [3], [(3, 6)]), "y": speed.Run(20, 4.0, [], [])},
        {"x": speed.Run(30, 3.0, [0], [(3, 6)]), "y": speed.Run(30, 30.0, [], [])},
    ]
    assert speed.speed_ratio(pairs, "x", "y") == 4.0
    assert speed.figures([pair["y"] for pair in pairs]) == {"tokens_per_second": 60 / 36}
    expected = {"tokens_per_second": 12.0, "tau": 2.0, "tree_depth": 3.0, "tree_nodes": 6.0}
    assert speed.figures([pair["x"] for pair in pairs]) == expected


def test_methods_take_turns_in_an_order_that_rotates(monkeypatch):
    asked = []
    monkeypatch.setattr(speed, "run", lambda decoder, prompts, limit: asked.append((decoder, prompts, limit)))
    speed.in_turn({"x": "x", "y": "y"}, [[[1]], [[2]]], 20)
    warm = [("x", [[1]], 16), ("y", [[1]], 16)]
    assert asked == warm + [("x", [[1]], 20), ("y", [[1]], 20), ("y", [[2]], 20), ("x", [[2]], 20)]


def test_a_batch_mixes_the_suites():
    names = [(question.suite, question.id) for question in speed.one_of_each([*QUESTIONS, QUESTIONS[0]], 6)]
    assert names == [("a", 0), ("b", 0), ("a", 1), ("b", 1), ("a", 0), ("a", 0)]


def test_suites_batches_and_vocabularies(target, tmp_path):
    draft = tiny_draft(target, [2, 1])
    found = speed.suites(target, draft, QUESTIONS, 8, nodes=12)
    assert set(found) == {"a", "b", "all"}
    for own in found.values():
        assert own["auto"]["tree_nodes"] <= 12 and own["fixed"]["tree_nodes"] == 12 and own["fixed"]["tau"] >= 1
        assert all(own[f"{tree}_speedup_vs_{other}"] > 0 for tree in ("auto", "fixed") for other in speed.BASELINES)
    assert speed.batch(target, draft, QUESTIONS, 3, 8, repeats=2)["auto_speedup_vs_autoregressive"] > 0
    corpus = tmp_path / "corpus.jsonl"
    messages = [{"role": "user", "content": "How?"}, {"role": "assistant", "content": "So it is."}]
    corpus.write_text(json.dumps({"messages": messages}) + "\n")
    found = speed.vocabularies(target, draft, QUESTIONS[:1], 8, (50, None), str(corpus))
    assert list(found) == ["50", "all"]


# --- the floor ---


def test_floors_are_the_bytes_that_must_be_read():
    """D 32, MLP 48, 4 heads and 2 of keys, of 8 each, 288 tokens, 2 layers; float32."""
    target = random_target(soak.TINY, torch.float32)
    engine = Speculative(target, random_draft(target, (1, 2)), 3, 20)
    next(engine.rounds(Request([[5] * 10], 8, frozenset()), Clock(target.device)))
    mlp, attention, slot, head = 3 * 32 * 48, 2 * 32 * 32, 2 * 2 * 8, 288 * 32  # projections of keys: 32 * slot
    layer = mlp + attention + 32 * slot + 2 * 32  # two norms
    assert floor.verify_bytes(engine, 20) == 4 * (2 * layer + 32 + head + 2 * slot * (10 + 20))
    own = mlp + attention + 32  # without the projections of keys, and with one norm
    join = 2 * 32 * 32 + 32 * slot  # of a slot that the second specialist will read
    assert floor.draft_bytes(engine, 1) == 4 * (own + head + slot * 10)
    assert floor.draft_bytes(engine, 3) == 4 * (3 * (own + head) + 2 * join + slot * (10 + 20 + 30))


def test_times_beside_the_floor():
    found = floor.round_times(random_target(soak.TINY, torch.float32), (1, 1), (1, 4, 60), range(1, 3), 8, repeats=2)
    assert list(found["verify"]) == ["N 1", "N 4", "N 60"] and list(found["draft"]) == ["K 1", "K 2"]
    assert list(found["round_ms"]) == ["K 1, N 4", "K 1, N 11", "K 2, N 4", "K 2, N 60"]
    one = found["verify"]["N 4"]
    assert one["over_floor"] == pytest.approx(one["ms"] / one["floor_ms"]) and found["copy_gigabytes_per_second"] > 0


# --- the command ---


def test_the_command_writes_what_it_prints(target, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(decode.Target, "load", lambda *args, **options: target)
    monkeypatch.setattr(decode, "ALLOCATIONS", ((1,),))
    out = tmp_path / "decode.json"
    options = ["--limit", "1", "--max-new-tokens", "4", "--rounds", "2", "--suites", "chat", "--out", str(out)]
    decode.main(["--parts", "overhead", "suites", *options])
    written, printed = json.loads(out.read_text()), capsys.readouterr().out
    assert written["draft"].startswith("random") and "random" in printed and written["questions"] == 1
    assert set(written["overhead"]) == {"[1]"} and set(written["suites"]) == {"chat", "all"}
    assert "round_over_parts" in printed and "batch" not in written
    with pytest.raises(SystemExit):
        decode.main(["--parts", "llama"])


# --- the soak ---


def test_two_seconds_of_soak():
    seen = soak.soak(2 / 60)
    assert seen["cases"] >= 1 and seen["tokens"] > 0


def test_a_case_follows_from_its_seed(target):
    cases = [soak.make_case(seed, target, ["A horse has four legs."], 6, 30, 20) for seed in (1, 1, 2)]
    assert cases[0] == cases[1] != cases[2]
    assert all(1 <= len(prompt) <= 30 and max(prompt) < 320 for case in cases for prompt in case.prompts)


def test_a_soak_stops_at_a_mismatch_and_names_its_case(monkeypatch):
    plain = soak.Speculative.decode

    def wrong(self, *args):
        decoded = plain(self, *args)
        decoded[-1].tokens[-1] = (decoded[-1].tokens[-1] + 1) % 288
        return decoded

    monkeypatch.setattr(soak.Speculative, "decode", wrong)
    with pytest.raises(soak.Mismatch, match=r"--seed 7, random: row \d of \d, token \d+"):
        soak.soak(1, seed=7)


def test_only_rounding_excuses_a_mismatch():
    """Two tokens with the same rows of the head tie; the next likeliest is no excuse."""
    target = random_target(soak.TINY, torch.float32)
    case = soak.make_case(3, target, ["A horse."], 6, 5, 4)
    case = replace(case, prompts=[[5, 6, 7], [8]], temperature=0.0)
    logits = target.embed_head.logits(target.text_features(torch.tensor([[8]])))[0, -1]
    best, second = logits.topk(2).indices.tolist()
    assert not soak.undecided(target, case, case.prompts, 1, [], {best, second})
    twin = (best + 1) % 288
    target.embed_head.head.data[twin] = target.embed_head.head[best]
    assert soak.undecided(target, case, case.prompts, 1, [], {best, twin})


def test_growing_memory_fails(monkeypatch, capsys):
    monkeypatch.setattr(soak, "soak", lambda *args: {"cases": 1, "resident_start": 100, "growth": 0.051})
    monkeypatch.setattr(soak.Target, "load", lambda *args: None)
    with pytest.raises(SystemExit, match="1"):
        soak.main(["--part", "decoding"])
    assert "memory grew by 5.1% after the first fifth" in capsys.readouterr().out
    monkeypatch.setattr(soak, "soak", lambda *args: {"cases": 1, "growth": 0.049})
    soak.main(["--part", "decoding"])
