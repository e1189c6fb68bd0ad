"""The same global batches give the same draft on every strategy, and any of them resumes where another stopped.

Each is compared with a plain loop: four AdamW steps in float32, some clipped, with uneven slot counts. One process, two
of DDP and two of each stage of ZeRO take 2 and 4 batches a step, the third of which is short, as it ends the epoch.
"""

import json
import sys
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy
from safetensors.torch import load_file

from poss_lightning.draft.kinds import load_draft
from poss_lightning.features.datamodule import FeatureDataModule
from poss_lightning.features.stream import collate
from poss_lightning.training.callbacks import DraftFolders
from poss_lightning.training.fit import command_line
from poss_lightning.training.strategies import DeepSpeed, StreamedCheckpointIO, prepare
from tests.support import ranks
from tests.support.processes import forked, needs_deepspeed
from tests.support.ranks import DATA, EAGLE3, MODEL
from tests.support.steps import Weights, difference, plain_steps, step_by_step, weights, write_initial
from tests.support.tiny import tiny_target
from tests.support.tolerance import LAYER, tolerance_of_adamw


def each(*names: str) -> list:
    """Parameters, of which those of several processes are nightly."""
    nightly, zero = pytest.mark.nightly, [needs_deepspeed]
    marks = {name: [nightly] * (not name.startswith("one")) + zero * ("zero" in name) for name in names}
    return [pytest.param(name, marks=marks[name]) for name in names]


NAMES = ("one", "ddp", "zero1", "zero2", "zero3")
STRATEGIES = each(*NAMES)
RUNS = [f"{strategy}/{name}" for strategy in NAMES for name in ("2", "4", "from-other", "eagle3")]
SUMS = 3 * 3 * LAYER  # forward and backward of three passes
NEAR, NEAR_IN_BFLOAT16 = tolerance_of_adamw(sums=SUMS), tolerance_of_adamw(sums=SUMS, dtype=torch.bfloat16)


@pytest.fixture(scope="module")
def sources(make_store, tmp_path_factory) -> dict[str, dict]:
    """Of both kinds of draft: features, the model's options, and weights, so spread that every specialist matters.

    The own head of EAGLE-3 learns outside the unroll, without detaching.
    """
    inner = make_store(tiny_target(num_hidden_layers=7), limit=32, layers=(2, 3, 4))
    eagle2, eagle3 = {"store": make_store(tiny_target(), limit=32), "model": {}}, {"store": inner, "model": EAGLE3}
    for own in (eagle2, eagle3):
        own["initial"] = str(tmp_path_factory.mktemp("initial") / "weights.safetensors")
        write_initial(Path(own["initial"]), own["store"], **own["model"])
    return {"eagle2": eagle2, "eagle3": eagle3}


@pytest.fixture(scope="module")
def trained(request, sources, tmp_path_factory) -> Path:
    """A folder a run, strategy/name; each library has processes of its own."""
    out = tmp_path_factory.mktemp("trained")
    store, initial = sources["eagle2"]["store"], sources["eagle2"]["initial"]
    every = {strategy: runs(out, strategy, other, sources["eagle3"]) for other, strategy in pairwise(("one", *NAMES))}
    forked(1, ranks.main, store, initial, every["one"])
    asked = " ".join(item.name for item in request.session.items if item.path == request.path)
    if "ddp" in asked:
        given = [*every["ddp"], command(out, store, "ddp", {"trainer": {"strategy": "ddp"}})]
        forked(2, ranks.main, store, initial, given)
    if "zero" in asked:
        offloaded = {"strategy": "zero3-offload", "folder": str(out / "zero3-offload/4"), "world": 2, "accumulate": 2}
        ours = [run for strategy in NAMES if "zero" in strategy for run in every[strategy]]
        given = [*ours, offloaded, command(out, store, "zero3", "trainer/zero3.yaml")]
        forked(2, ranks.main, store, initial, given)
    return out


def command(out: Path, store: str, strategy: str, layer: str | dict) -> dict:
    """What the command line is given for two CPU ranks."""
    trainer = {"accelerator": "cpu", "devices": 2, "max_steps": 2, "log_every_n_steps": 1}
    trainer |= {"val_check_interval": 2, "check_val_every_n_epoch": None, "default_root_dir": str(out)}
    options = {"name": f"{strategy}.yaml", "data": {"store": store, "validation": 0.2}, "trainer": trainer}
    often = "--checkpoint.init_args.every_n_train_steps=1"
    fit = [*command_line("draft/poss3.yaml", layer, options), often]
    return {"strategy": strategy, "fit": fit, "last": str(out / f"{strategy}.yaml" / "checkpoints" / "last.ckpt")}


def runs(out: Path, strategy: str, other: str, eagle3: dict) -> list[dict]:
    world = 1 if strategy == "one" else 2
    settings = {"2": {}, "4": {}, "bf16": {"precision": "bf16-mixed"}, "eagle3": eagle3}
    settings["from-other"] = {"resume": str(out / other / "4" / "step=2.ckpt")}
    common = {"strategy": strategy, "world": world}
    return [
        {**common, **more, "folder": str(out / strategy / name), "accumulate": (2 if name == "2" else 4) // world}
        for name, more in settings.items()
    ]


@pytest.fixture(scope="module")
def reference(sources) -> dict[str, tuple[Weights, Weights]]:
    """By a run's name: weights after plain steps, of every conversation alone and without Lightning; those before."""

    def steps(kind: str, share: int) -> tuple[Weights, Weights]:
        own = sources[kind]
        return plain_steps(own["store"], own["initial"], share, **own["model"]), load_file(own["initial"])

    four = steps("eagle2", 4)
    return {"2": steps("eagle2", 2), "4": four, "bf16": four, "from-other": four, "eagle3": steps("eagle3", 4)}


def test_processes_have_uneven_slot_counts(sources):
    store = sources["eagle2"]["store"]
    schedule = FeatureDataModule(store, **DATA).train_dataloader().schedule
    sums = [sum(int(collate([[source]]).mask.passes.sum()) for source in step) for step in step_by_step(store, 1)]
    assert len(set(sums)) == len(sums) and len(schedule.batches()) % 4 == 2


@pytest.mark.parametrize("run", each(*RUNS, "zero3-offload/4"))
def test_every_strategy_takes_the_same_steps(trained, reference, run):
    """Also if it resumes from the checkpoint of another, or an own head learns without detaching."""
    assert difference(weights(trained / run), *reference[Path(run).name]) < NEAR


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_step_reduces_every_gradient_once(trained, strategy):
    """With and without accumulation: what is summed over the processes is as many numbers as there are parameters."""
    learnt = load_draft(trained / strategy / "4" / "draft-last").parameters()
    least = sum(map(torch.numel, learnt)) if strategy != "one" else 0
    for batches in ("2", "4"):
        reduced = json.loads((trained / strategy / batches / "reduced.json").read_text())
        assert sorted(reduced) == ["1", "2", "3", "4"]
        assert all(least <= count <= least + 4 for count in reduced.values())  # the norm that clips, an overflow flag


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_bfloat16_stays_near(trained, reference, strategy):
    """Arithmetic in bfloat16; masters, moments and what a checkpoint holds in float32."""
    assert difference(weights(trained / strategy / "bf16"), *reference["bf16"]) < NEAR_IN_BFLOAT16
    stored = torch.load(trained / strategy / "bf16" / "step=4.ckpt", weights_only=True)
    floats = [value for value in stored["state_dict"].values() if value.is_floating_point()]
    moments = [state[name] for state in stored["optimizer_states"][0]["state"].values() for name in ("exp_avg", "step")]
    assert {value.dtype for value in floats + moments} == {torch.float32}
    assert any((value != value.bfloat16()).any() for value in floats)


@pytest.mark.parametrize("precision", ["4", "bf16"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_draft_comes_out_of_training_and_out_of_its_checkpoint(trained, tmp_path, strategy, precision):
    """It has 12 bytes a parameter, names and numbers; other processes keep no copy (`ranks.keeps_no_copy`)."""
    run = trained / strategy / precision
    for folder in (run / "draft-last", run / "draft-best", run / "step=4.ckpt"):
        draft = load_draft(folder)
        assert draft.config.allocation == tuple(MODEL["allocation"])
        assert all(torch.equal(value, weights(run)[name]) for name, value in draft.state_dict().items())
    planned = 12 * sum(p.numel() for p in draft.parameters())
    assert 0 <= (run / "step=4.ckpt").stat().st_size - planned < 40_000 < planned / 4


def test_a_checkpoint_is_written_atomically_and_mapped_to_be_read(tmp_path, monkeypatch):
    path, io = tmp_path / "folder" / "last.ckpt", StreamedCheckpointIO()
    io.save_checkpoint({"step": torch.tensor(1)}, path)
    stored = io.load_checkpoint(path)
    assert stored == {"step": 1} and (sys.platform != "linux" or str(path) in Path("/proc/self/maps").read_text())
    monkeypatch.setattr(torch, "save", lambda checkpoint, path: (path.write_bytes(b"half"), 1 / 0))
    with pytest.raises(ZeroDivisionError):
        io.save_checkpoint({"step": torch.tensor(2)}, path)
    assert torch.load(path, weights_only=True) == {"step": 1} and list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("make", [DDPStrategy, pytest.param(DeepSpeed, marks=needs_deepspeed)])
def test_processes_wait_for_the_checkpoint_of_the_first(make):
    """Lightning's own, 30 minutes, end a training whose first process is at a slow disk."""
    strategy = make()
    prepare(strategy)
    assert strategy._timeout >= timedelta(hours=2) and type(strategy.checkpoint_io) is StreamedCheckpointIO


def test_the_first_process_says_whether_a_draft_is_the_best(monkeypatch, tmp_path):
    """By its own rounding this process would not save, and the others would wait for it."""
    saved: list[str] = []
    monkeypatch.setattr(DraftFolders, "_save", lambda self, trainer, module, name: saved.append(name))
    trainer = SimpleNamespace(
        sanity_checking=False, fast_dev_run=False, is_global_zero=False, state=SimpleNamespace(fn="fit")
    )
    trainer.callback_metrics, trainer.strategy = {"val/tau_tree": 2.0}, SimpleNamespace(broadcast=lambda _: 2.5)
    folders = DraftFolders()
    folders.best = 2.0
    folders.on_validation_end(trainer, None)
    assert saved == ["draft-last", "draft-best"] and folders.best == 2.5


@pytest.mark.parametrize("strategy", each("ddp", "zero3"))
def test_a_command_line_runs_on_two_cpu_ranks(trained, tmp_path, strategy):
    """With validation, replay and checkpoint while everything is divided, and a validation alone (`ranks.main`)."""
    run = trained / f"{strategy}.yaml"
    for folder in (run / "draft-last", run / "draft-best", run / "checkpoints" / "last.ckpt"):
        assert load_draft(folder).config.allocation == (3, 3)
