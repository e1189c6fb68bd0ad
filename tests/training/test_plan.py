"""`poss plan`: its FLOPs are those that torch counts, and its memory that of a real training."""

import json
import re
from types import SimpleNamespace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from poss_lightning import cli
from poss_lightning.draft.specialists import DraftConfig
from poss_lightning.losses.passes import pass_losses
from poss_lightning.training.flops import count_parameters, step_flops
from poss_lightning.training.optimizers import make_optimizer
from poss_lightning.training.plan import GIB, TARGETS, find_target, moment_bytes, state_bytes, token_bytes
from tests.support.tiny import tiny_draft, tiny_target

LLAMA = DraftConfig(target=TARGETS["llama-3-8b"], allocation=(2, 2, 2), depth=6)


# --- FLOPs ---


@pytest.fixture(scope="module")
def deep():
    """A target with inner layers to read."""
    return tiny_target(num_hidden_layers=4)


@pytest.mark.parametrize("kind", ["eagle2", "eagle3"])
@pytest.mark.parametrize("detach", [True, False])
@pytest.mark.parametrize("allocation", [[3], [1, 2], [1, 1, 1]], ids=str)
def test_flops_are_those_that_torch_counts(target, deep, allocation, detach, kind):
    """All but attention's, the only batched products: torch counts them twice, as backward recomputes them."""
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


def test_flops_of_a_block_are_those_that_torch_counts(target, deep):
    """All but attention's, the only batched products."""
    draft = tiny_draft(deep, [4], kind="block", block_layers=2)
    embedded, read = torch.randn(1, 24, 32), torch.randn(1, 24, 96)
    counts = (torch.arange(24) % 5)[None]
    given = {"features": torch.randn(1, 24, 32), "counts": counts, "head": target.embed_head.head}
    with FlopCounterMode(display=False) as counter:
        passes = [draft.head_input(output) for output in draft(embedded, read, 4, begins=counts > 0)]
        pass_losses(passes, **given, weights={"token": 1.0}).total.backward()
    plain = {str(op): flops for op, flops in counter.get_flop_counts()["Global"].items() if "bmm" not in str(op)}
    sizes = {"vocabulary": target.spec.vocab_size, "tokens": 24, "slots": (blocks := (counts > 0).sum())}
    own = 2 * blocks * 3 * 2 * 5 * 2 * 32 * 5  # places attend to their own block
    assert step_flops(draft.config, **sizes, context=0.0) - own == sum(plain.values())


def test_flops_of_attention_are_three_times_those_of_its_forward(target):
    config = tiny_draft(target, [2, 2]).config
    queries, keys = torch.randn(2, 4, 24, 8)
    with FlopCounterMode(display=False) as counter:
        (queries @ keys.mT) @ keys
    near, far = (step_flops(config, vocabulary=320, tokens=24, slots=24, context=keys) for keys in (0.0, 24.0))
    assert far - near == 3 * config.depth * counter.get_total_flops()


# --- memory ---


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


@pytest.mark.parametrize("kind", ["eagle2", "eagle3"])
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_moments_are_those_of_a_step(deep, kind, optimizer):
    """All but the second ones of vectors, which Muon leaves to AdamW, too."""
    draft = tiny_draft(deep, [1, 2], kind=kind)
    options = {"optimizer": optimizer, "learning_rate": 1e-3, "betas": (0.9, 0.95), "weight_decay": 0.0}
    stepped = make_optimizer(draft, options, SimpleNamespace(global_rank=0, world_size=1))
    for parameter in draft.parameters():
        parameter.grad = torch.ones_like(parameter)
    stepped.step()
    moments = sum(value.nbytes for state in stepped.state.values() for value in state.values() if value.ndim)
    vectors = sum(parameter.nbytes for parameter in draft.parameters() if parameter.ndim == 1)
    assert moment_bytes(draft.config, optimizer) == moments - (vectors if optimizer == "muon" else 0)


# --- targets and the command ---


def test_sizes_of_a_local_folder_are_those_of_the_loaded_target(tiny_folder, target):
    spec, tied = find_target(tiny_folder)
    assert tied == target.embed_head.tied
    sizes = ("hidden_size", "intermediate_size", "heads", "kv_heads", "head_dim", "vocab_size", "layers")
    for field in sizes:
        assert getattr(spec, field) == getattr(target.spec, field)


def test_an_unknown_target_and_a_broken_config_are_named(tmp_path):
    with pytest.raises(
        ValueError, match=r"target is 'gpt-5'; it must be llama-3-8b, .* or a folder with a config.json"
    ):
        find_target("gpt-5")
    config = {"model_type": "llama", "hidden_size": 8, "num_attention_heads": 0, "num_key_value_heads": 1}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=re.escape(str(tmp_path))):
        find_target(str(tmp_path))


def test_tying_is_the_default_of_the_model_class(tmp_path):
    """For a config that does not mention it."""
    for kind, tied in (("gemma", True), ("llama", False)):
        (tmp_path / "config.json").write_text(json.dumps({"model_type": kind, "hidden_size": 32}))
        assert find_target(str(tmp_path))[1] == tied


def test_the_report_of_one_training(capsys):
    run(["--target=llama-3-8b", "--allocation=[2, 2, 2]", "--strategy=zero2", "--processes=8"])
    out = capsys.readouterr().out
    assert "687.9 M parameters, 218.1 M per specialist" in out and "8200 bytes" in out
    assert token_bytes(LLAMA, "float8") <= 4096 + 24
    lines = {line[:22].strip(): float(line[22:].split()[0]) for line in out.splitlines() if line.endswith("GiB")}
    count = 687.9e6
    assert lines["weights"] == pytest.approx(2 * count / GIB, abs=0.01)
    assert lines["optimizer"] == pytest.approx(12 * count / 8 / GIB, abs=0.01)
    assert lines["together"] == pytest.approx(sum(lines.values()) / 2, abs=0.03)
    run(["--target=llama-3-8b", "--allocation=[8]", "--kind=eagle3", "--vocabulary_size=32000"])
    out = capsys.readouterr().out
    assert "vocabulary 32000: 424.7 M parameters, 243.3 M per specialist" in out and "32776 bytes" in out


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--allocation=[2, 2]", "--depth=2"], r"depth is 2, which never .* specialist of \[2, 2\]: give at least 3"),
        (
            ["--target=smollm2-135m", "--vocabulary_size=50000"],
            "vocabulary_size is 50000; it must lie between 1 and 49152",
        ),
        (["--optimizer=muon", "--strategy=zero2"], "optimizer is muon, which needs whole matrices on every process"),
    ],
)
def test_options_out_of_range_are_named(options, words):
    with pytest.raises(ValueError, match=words):
        run(options)


def run(options: list[str]) -> None:
    cli.run("plan", options)
