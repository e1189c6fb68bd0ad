"""`poss plan`: what it says of parameters, FLOPs and memory is what a real draft and a real training have."""

import json
import math
from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks import plan as bench
from poss_lightning import cli
from poss_lightning.draft.specialists import DraftConfig, Specialists
from poss_lightning.losses.passes import pass_losses
from poss_lightning.training.costs import (
    count_head_parameters,
    count_parameters,
    count_specialist_parameters,
    shapes,
    step_flops,
)
from poss_lightning.training.memory import _draft_bytes, checkpoint_bytes, memory, most_tokens
from poss_lightning.training.plan import GIB, TARGETS, find_target, plan, token_bytes
from poss_lightning.training.setup import STRATEGIES, Setup
from tests.support.tiny import tiny_draft, tiny_target

LLAMA = DraftConfig(target=TARGETS["llama-3-8b"], allocation=(2, 2, 2), depth=6)
SETUP = Setup(config=LLAMA, tied=False, tokens=2048)


def shared(strategy: str, **changes) -> Setup:
    return replace(SETUP, strategy=strategy, processes=1 if strategy == "one" else 8, **changes)


# --- parameters and FLOPs ---


@pytest.fixture(scope="module")
def deep():
    """A target with inner layers to read."""
    return tiny_target(num_hidden_layers=4)


@pytest.mark.parametrize("kind", ["eagle2", "eagle3"])
@pytest.mark.parametrize("allocation", [[6], [2, 2, 2], [1, 3, 2]], ids=str)
def test_parameters_are_those_of_the_real_draft(deep, allocation, kind):
    draft = tiny_draft(deep, allocation, kind=kind)
    assert sorted(shapes(draft.config)) == sorted(tuple(p.shape) for p in draft.parameters())
    assert count_parameters(draft.config) == sum(p.numel() for p in draft.parameters())
    assert count_specialist_parameters(draft.config) == sum(p.numel() for p in draft.layers[0].parameters())


def test_a_specialist_of_llama_3_8b():
    assert round(count_specialist_parameters(LLAMA) / 1e6, 1) == 218.1


@pytest.mark.parametrize("name", ["llama-3-8b", "llama-2-13b", "qwen3-8b"])
def test_an_eagle_3_draft_s_parameters_at_real_sizes(name):
    spec = TARGETS[name]
    config = DraftConfig(target=spec, allocation=(3, 3, 2), depth=8, vocabulary_size=32000, kind="eagle3")
    with torch.device("meta"):
        draft = Specialists(config, torch.arange(32000, device="cpu"))
    assert sorted(shapes(config)) == sorted(tuple(p.shape) for p in draft.parameters())
    assert count_parameters(config) == sum(p.numel() for p in draft.parameters())
    assert count_head_parameters(config) == draft.lm_head.weight.numel()
    assert count_specialist_parameters(config) == sum(p.numel() for p in draft.layers[0].parameters())


@pytest.mark.parametrize(("allocation", "depth"), [([6], 1), ([6], 4), ([2, 2, 2], 6), ([1, 3], 6), ([3, 3], 2)])
def test_keys_are_projected_once_for_every_specialist_that_reads_them(target, allocation, depth):
    config = DraftConfig(target=target.spec, allocation=tuple(allocation), depth=depth)
    pairs = {(config.specialist_at(k), m) for k in range(1, depth + 1) for m in range(k)}
    assert config.kv_pairs(depth) == pairs


@pytest.mark.parametrize("kind", ["eagle2", "eagle3"])
@pytest.mark.parametrize("detach", [True, False])
@pytest.mark.parametrize("allocation", [[3], [1, 2], [1, 1, 1]], ids=str)
def test_flops_are_those_that_torch_counts(target, deep, allocation, detach, kind):
    """All but attention's, which torch sees made again in backward: those are the only batched products."""
    draft = tiny_draft(deep, allocation, detach=detach, kind=kind)
    embedded, features = torch.randn(2, 1, 24, 32)
    inputs = torch.randn(1, 24, 96 if draft.config.own_head else 32)
    own = {"draft_head": draft.lm_head.weight, "weights": {"token": 1.0}} if draft.config.own_head else {}
    counts = (torch.arange(24) % 4)[None]
    slots = (counts > 0).sum()
    with FlopCounterMode(display=False) as counter:
        pass_losses(draft(embedded, inputs, 3), features, counts, target.embed_head.head, **own).total.backward()
    plain = {str(op): flops for op, flops in counter.get_flop_counts()["Global"].items() if "bmm" not in str(op)}
    flops = step_flops(draft.config, vocabulary=target.spec.vocab_size, tokens=24, slots=slots, context=0.0)
    assert flops == sum(plain.values())


def test_attention_s_flops_are_three_times_those_of_its_forward(target):
    config = tiny_draft(target, [2, 2]).config
    queries, keys = torch.randn(2, 4, 24, 8)
    with FlopCounterMode(display=False) as counter:
        (queries @ keys.mT) @ keys
    near, far = (step_flops(config, vocabulary=320, tokens=24, slots=24, context=keys) for keys in (0.0, 24.0))
    assert far - near == 3 * config.depth * counter.get_total_flops()


# --- memory ---


@pytest.mark.parametrize(
    "case",
    [
        bench.Case(bench.NARROW, (2, 1), 3, [100, 156]),
        bench.Case(bench.NARROW, (1, 2), 4, [256], 500, "32-true", 0.5, False),
        bench.Case(bench.sizes(256, 704, 4, 4, 64, 300), (1, 1), 2, [32]),  # all weights
        bench.Case(bench.sizes(32, 88, 8, 2, 8, 300), (3,), 3, [900]),  # all scores
        bench.Case(bench.NARROW, (2, 1), 3, [256], detach=False, kind="eagle3"),
        bench.Case(bench.sizes(64, 88, 4, 4, 16, 20000), (3,), 3, [32], kind="eagle3"),  # all head
        bench.Case(bench.sizes(64, 88, 4, 4, 16, 20000), (3,), 3, [64], precision="32-true"),  # all of the target's
        bench.Case(bench.sizes(256, 704, 4, 4, 64, 300), (1, 1), 2, [8], precision="32-true", optimizer="muon"),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_a_training_s_peak_is_the_one_predicted(case):
    figures = bench.compare(case)
    assert figures["ratio"] == pytest.approx(1, abs=bench.ALLOWED)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_memory_grows_linearly_with_the_batch(strategy, device):
    sizes = (2**15, 2**16, 2**17)  # below, the peak may be at another moment, where weights and gradients are the most
    small, middle, large = (memory(shared(strategy, device=device, conversation=2048, tokens=t)).total for t in sizes)
    assert large - middle == pytest.approx(2 * (middle - small), rel=1e-3)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_parts_sum_to_the_total(strategy):
    peak = memory(shared(strategy))
    assert peak.total == sum(value for name, value in peak._asdict().items() if name != "moment")
    assert all(value >= 0 for value in peak[1:])


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_one_token_more_than_fits_does_not(strategy):
    setup, limit = shared(strategy), 40 * GIB
    most = most_tokens(setup, limit)
    assert memory(replace(setup, tokens=most)).total <= limit < memory(replace(setup, tokens=most + 1)).total


def test_nothing_fits_into_nothing():
    assert most_tokens(SETUP, 1 * GIB) == 0


def test_what_a_strategy_divides_shrinks_with_the_processes_and_nothing_else_does():
    divided = {
        "ddp": set(),
        "fsdp2": {"weights", "gradients", "optimizer"},
        "zero1": {"weights", "optimizer"},  # of the weights the float32 masters
        "zero2": {"weights", "optimizer"},
        "zero3": {"weights", "gradients", "optimizer"},
    }
    for strategy, parts in divided.items():
        few, many = (memory(replace(shared(strategy, tokens=8192), processes=n)) for n in (2, 8))
        assert few.moment == many.moment
        assert {name for name in few._fields[1:] if getattr(many, name) < getattr(few, name)} == parts, strategy
        assert all(getattr(many, name) == getattr(few, name) for name in set(few._fields[1:]) - parts)


@pytest.mark.parametrize("strategy", ["zero1", "zero2", "zero3"])
def test_offload_takes_the_optimizer_away(strategy):
    here, away = memory(shared(strategy)), memory(shared(strategy, offload=True))
    assert away.optimizer == 0 < here.optimizer and away.weights < here.weights
    assert away.activations == here.activations


def test_muon_keeps_one_moment_of_a_matrix():
    adamw, muon = (memory(replace(SETUP, tokens=8192, optimizer=name)) for name in ("adamw", "muon"))
    vectors = sum(shape[0] for shape in shapes(LLAMA) if len(shape) == 1)
    assert adamw.moment == muon.moment == "forward"
    assert (adamw.optimizer, muon.optimizer) == (
        8 * count_parameters(LLAMA),
        pytest.approx(4 * count_parameters(LLAMA) + 4 * vectors),
    )


def test_an_own_head_is_no_matrix_of_muon():
    config = replace(LLAMA, kind="eagle3", vocabulary_size=32000)
    setup = replace(SETUP, config=config, optimizer="muon")
    file, _ = checkpoint_bytes(setup)
    matrices = sum(math.prod(shape) for shape in shapes(config) if len(shape) == 2) - count_head_parameters(config)
    assert file == pytest.approx(12 * count_parameters(config) - 4 * matrices)


def test_processes_share_what_muon_adds_to_an_epoch(capsys):
    """Five iterations of three products a matrix; the gradients of eight batches are one step."""
    options = {"target": "llama-3-8b", "allocation": [2, 2, 2], "tokens": 2048, "corpus_tokens": 1e10}
    hours = {}
    for processes in (1, 8):
        for optimizer in ("adamw", "muon"):
            plan(**options, optimizer=optimizer, strategy="ddp", processes=processes)
            hours[processes, optimizer] = float(capsys.readouterr().out.split("an epoch")[1].split()[0])
    sides = [(min(shape), max(shape)) for shape in shapes(LLAMA) if len(shape) == 2]
    flops = 5 * sum(2 * n * m * n + 2 * n * n * n + 2 * n * n * m for n, m in sides)
    for processes in (1, 8):
        added = hours[processes, "muon"] - hours[processes, "adamw"]
        assert added == pytest.approx(flops * 1e10 / 2048 / processes / (200e12 * processes) / 3600, abs=0.02)


def test_a_gathered_copy_is_as_large_as_the_draft():
    half, whole = (memory(shared("fsdp2", tokens=8192, precision=p)) for p in ("bf16-mixed", "32-true"))
    assert half.copies == 2 * count_parameters(LLAMA) and whole.copies == 4 * count_parameters(LLAMA)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"tokens": 1}, "tokens is 1; it must be at least 2"),
        ({"strategy": "fsdp"}, "strategy is 'fsdp'; it must be one or ddp"),
        ({"processes": 2}, "processes is 2 with strategy one"),
        ({"offload": True}, "offload is true with strategy one; only zero1"),
        ({"optimizer": "adam"}, "optimizer is 'adam'; it must be adamw or muon"),
        ({"optimizer": "muon", "strategy": "zero2"}, "optimizer is muon with strategy zero2; only one and ddp"),
        ({"precision": "16-mixed"}, "precision is '16-mixed'; it must be bf16-mixed or 32-true"),
        ({"answers": 0.0}, "answers is 0.0; it must be a share above 0"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_cannot_be_is_refused(change, words):
    with pytest.raises(ValueError, match=words):
        replace(SETUP, **change)


# --- targets and the command ---


def test_a_local_folder_says_what_the_target_itself_would(tiny_folder, target):
    spec, tied = find_target(tiny_folder)
    assert tied == target.embed_head.tied
    sizes = ("hidden_size", "intermediate_size", "heads", "kv_heads", "head_dim", "vocab_size", "rope_theta", "layers")
    for field in sizes:
        assert getattr(spec, field) == getattr(target.spec, field)


def test_an_unknown_target_and_a_broken_config_are_named(tmp_path):
    with pytest.raises(
        ValueError, match=r"target is 'gpt-5'; it must be llama-3-8b, .* or a folder with a config.json"
    ):
        find_target("gpt-5")
    (tmp_path / "config.json").write_text(json.dumps({"hidden_size": 8}))
    with pytest.raises(ValueError, match=r"config.json is no config of a language model: KeyError 'num_attention"):
        find_target(str(tmp_path))
    for heads in (0, "nine"):
        (tmp_path / "config.json").write_text(json.dumps({"hidden_size": 8, "num_attention_heads": heads}))
        with pytest.raises(ValueError, match=r"config.json is no config of a language model: \w+Error"):
            find_target(str(tmp_path))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_accumulated_gradients_are_kept_whole(strategy):
    """Beside the batches themselves: docs/clusters.md."""
    one = replace(SETUP, strategy=strategy, processes=1 if strategy == "one" else 8)
    count, least = count_parameters(one.config), 2 if one.zero else 4
    for moment in ("forward", "backward", "reduction"):
        gradients = [_draft_bytes(setup, moment, count).gradients for setup in (one, replace(one, accumulate=4))]
        assert gradients[1] >= max(least, gradients[0])
    assert _draft_bytes(one, "update", count) == _draft_bytes(replace(one, accumulate=4), "update", count)


def test_bytes_of_a_token_keep_the_bars():
    for spec in TARGETS.values():
        config = DraftConfig(target=spec, allocation=(6,), depth=6)
        inner = replace(config, kind="eagle3")
        assert token_bytes(config, "exact") == 2 * spec.hidden_size + 8 <= 2 * spec.hidden_size + 16
        assert token_bytes(config, "float8") <= spec.hidden_size + 24
        assert token_bytes(inner, "exact") == 8 * spec.hidden_size + 8  # its own features too, for the target's head


def test_the_overview_has_a_line_for_every_target_and_allocation(capsys):
    plan()
    lines = capsys.readouterr().out.splitlines()
    for name in TARGETS:
        assert [line.split(maxsplit=1)[1][:2] for line in lines if line.startswith(f"{name} ")] == ["[1", "[2", "[3"]


def test_the_report_of_one_training(capsys):
    options = ["--target=llama-3-8b", "--allocation=[2, 2, 2]", "--strategy=zero2", "--processes=8", "--gpu=80"]
    run(options)
    out = capsys.readouterr().out
    assert "687.9 M parameters, 218.1 M a specialist" in out and "8200 bytes a token" in out and "fits in 80 GiB" in out
    most = int(out.split("largest batch")[1].split()[0])
    run([*options, f"--tokens={most + 1}"])
    assert "does not fit in 80 GiB" in capsys.readouterr().out
    run(["--target=llama-3-8b", "--allocation=[8]", "--kind=eagle3", "--vocabulary_size=32000"])
    out = capsys.readouterr().out
    assert "vocabulary 32000: 424.7 M parameters, 243.3 M a specialist" in out and "32776 bytes a token" in out


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--target=llama-3-8b", "--allocation=[2, 2]", "--depth=2"], "depth is 2, which never reaches the last"),
        (["--target=smollm2-135m", "--vocabulary_size=50000"], "vocabulary_size is 50000; it must lie between 1 and"),
    ],
)
def test_options_out_of_range_are_named(options, words):
    with pytest.raises(ValueError, match=words):
        run(options)


def run(options: list[str]) -> None:
    cli.run("plan", options)
