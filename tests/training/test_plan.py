"""`poss plan`: its FLOPs are those that torch counts, and its memory that of a real training."""

import json
import re
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch.utils.flop_counter import FlopCounterMode

from poss_lightning import cli
from poss_lightning.draft.config import DraftConfig
from poss_lightning.losses.passes import pass_losses, slots_that_count
from poss_lightning.training.optimizers import make_optimizer
from poss_lightning.training.plan import (
    GIB,
    SIZE_FIELDS,
    TARGETS,
    count_parameters,
    find_target,
    moment_bytes,
    state_bytes,
    step_flops,
    token_bytes,
)
from tests.support.tiny import tiny_draft

LLAMA = DraftConfig(target=TARGETS["llama-3-8b"], allocation=(2, 2, 2), depth=6)


@pytest.mark.parametrize(
    ("allocation", "options"),
    [
        ([3], {}),
        ([1, 2], {"detach": False}),
        ([1, 1, 1], {"kind": "eagle3"}),
        ([4], {"kind": "block", "block_layers": 2}),
    ],
    ids=str,
)
def test_flops_are_those_that_torch_counts(target, deep, allocation, options):
    """All but attention's, the only batched products: torch counts them twice, as backward recomputes them."""
    draft, depth = tiny_draft(deep, allocation, **options), sum(allocation)
    config = draft.config
    embedded, features = torch.randn(2, 1, 24, 32)
    inputs = torch.randn(1, 24, 96 if config.aux_layers else 32)
    counts = (torch.arange(24) % (depth + 1))[None]
    loss = {"weights": {"token": 1.0}, "draft_head": draft.lm_head.weight if config.own_head else None}
    with FlopCounterMode(display=False) as counter:
        outputs = draft(embedded, inputs, depth, begins=slots_that_count(counts, 1))
        passes = [draft.head_input(output) for output in outputs]
        pass_losses(passes, features, counts, target.embed_head.head, **loss).total.backward()
    plain = {str(op): flops for op, flops in counter.get_flop_counts()["Global"].items() if "bmm" not in str(op)}
    slots = (counts > 0).sum()
    flops = step_flops(config, vocabulary=target.spec.vocab_size, tokens=24, slots=slots, context=0.0)
    in_blocks = 2 * slots * 3 * 2 * 5 * 2 * 32 * 5 if config.one_pass else 0  # places attend to their own block
    assert flops - in_blocks == sum(plain.values())


def test_flops_of_attention_are_three_times_those_of_its_forward(target):
    config = tiny_draft(target, [2, 2]).config
    queries, keys = torch.randn(2, 4, 24, 8)
    with FlopCounterMode(display=False) as counter:
        (queries @ keys.mT) @ keys
    near, far = (step_flops(config, vocabulary=320, tokens=24, slots=24, context=keys) for keys in (0.0, 24.0))
    assert far - near == 3 * config.depth * counter.get_total_flops()


def test_a_strategy_divides_what_its_table_says():
    """The bytes per parameter in docs/clusters.md."""
    count = count_parameters(LLAMA)
    one, ddp = state_bytes(LLAMA, "one", 1), state_bytes(LLAMA, "ddp", 8)
    assert one == {"weights": 6 * count, "gradients": 4 * count, "optimizer": 8 * count}
    assert ddp == one | {"gradients": 8 * count}
    divided = {"zero1": {"gradients", "optimizer"}, "zero2": {"gradients", "optimizer"}, "zero3": {*one}}
    for strategy, parts in divided.items():
        few, many = (state_bytes(LLAMA, strategy, processes) for processes in (2, 8))
        assert {name for name in few if many[name] < few[name]} == parts
        assert all(many[name] == few[name] / 4 for name in parts)


@pytest.mark.parametrize(("kind", "optimizer"), [("eagle2", "adamw"), ("eagle2", "muon"), ("eagle3", "muon")])
def test_moments_are_those_of_a_step(deep, kind, optimizer):
    """All but the second ones of vectors, which Muon leaves to AdamW, too."""
    draft = tiny_draft(deep, [1, 2], kind=kind)
    options = {"optimizer": optimizer, "learning_rate": 1e-3, "betas": (0.9, 0.95), "weight_decay": 0.0}
    stepped = make_optimizer(
        draft, options, SimpleNamespace(global_rank=0, world_size=1, strategy=SingleDeviceStrategy("cpu"))
    )
    for parameter in draft.parameters():
        parameter.grad = torch.ones_like(parameter)
    stepped.step()
    moments = sum(value.nbytes for state in stepped.state.values() for value in state.values() if value.ndim)
    vectors = sum(parameter.nbytes for parameter in draft.parameters() if parameter.ndim == 1)
    assert moment_bytes(draft.config, optimizer) == moments - (vectors if optimizer == "muon" else 0)


def test_sizes_of_a_local_folder_are_those_of_the_loaded_target(tiny_folder, target):
    spec, tied = find_target(tiny_folder)
    assert tied == target.embed_head.tied
    assert all(getattr(spec, name) == getattr(target.spec, name) for name in SIZE_FIELDS)


def test_the_report_of_one_training(capsys):
    cli.run("plan", ["--target=llama-3-8b", "--allocation=[2, 2, 2]", "--strategy=zero2", "--processes=8"])
    out = capsys.readouterr().out
    assert "687.9 M parameters, 218.1 M per specialist" in out and "8200 bytes" in out
    assert token_bytes(LLAMA, "float8") <= 4096 + 24
    lines = {line[:22].strip(): float(line[22:].split()[0]) for line in out.splitlines() if line.endswith("GiB")}
    expected = {"weights": 2 * 687.9e6 / GIB, "optimizer": 12 * 687.9e6 / 8 / GIB}
    assert lines | expected == pytest.approx(lines, abs=0.01)
    assert lines["together"] == pytest.approx(sum(lines.values()) / 2, abs=0.03)
    cli.run("plan", ["--target=llama-3-8b", "--allocation=[8]", "--kind=eagle3", "--vocabulary_size=32000"])
    out = capsys.readouterr().out
    assert "vocabulary 32000: 424.7 M parameters, 243.3 M per specialist" in out and "32776 bytes" in out


def test_what_cannot_be_planned_is_refused(tmp_path):
    config = {"model_type": "llama", "hidden_size": 8, "num_attention_heads": 0, "num_key_value_heads": 1}
    (tmp_path / "config.json").write_text(json.dumps(config))
    for options, words in (
        (["--target=gpt-5"], r"target is 'gpt-5'; it must be llama-3-8b, .* or a folder with a config.json"),
        ([f"--target={tmp_path}"], re.escape(str(tmp_path))),
        (["--target=smollm2-135m", "--vocabulary_size=50000"], "is 50000; it must lie between 1 and 49152"),
        (["--processes=2", "--strategy=one"], "processes is 2 with strategy one"),
        (["--optimizer=muon", "--strategy=zero2"], "optimizer is muon, which needs whole matrices on every process"),
    ):
        with pytest.raises(ValueError, match=words):
            cli.run("plan", options)
