"""A tiny random target, and drafts for it: everything a law needs, in milliseconds."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"  # before anything imports the hub's client, so that no test waits for a network
if os.environ.get("POSS_DEVICE", "cpu") == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"  # before torch imports triton

from functools import partial
from pathlib import Path

import pytest
import torch

from poss_lightning import cli
from poss_lightning.evaluation import probe
from poss_lightning.evaluation.probe import answered_samples
from poss_lightning.features.store import Sample
from poss_lightning.features.stream import Batch
from poss_lightning.features.writing import write_store
from poss_lightning.target_model.model import Target
from tests.support.command import Poss, run_in
from tests.support.inputs import write_inputs
from tests.support.stores import SIZES, make_conversations
from tests.support.tiny import tiny_target, write_target

if os.environ.get("POSS_DEVICE", "cpu") == "cpu":  # `make test-gpu` and `make test-vllm` set it; others use no GPU
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
for name in [*os.environ]:  # settings of the user's shell, or of the cluster's job in which the tests run
    if name.startswith("SLURM_") or name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        del os.environ[name]
torch.set_num_threads(1)  # for tiny matrices more threads are slower
os.fsync = lambda descriptor: None  # no test waits for a disk
ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="session", autouse=True)
def checkout_stays_as_it_is():
    """No test leaves a file in the checkout's root, where commands write by default."""
    before = {path.name for path in ROOT.iterdir()}
    yield
    new = {path.name for path in ROOT.iterdir()} - before
    assert not {name for name in new if not name.startswith(".")}, f"tests left {sorted(new)} in {ROOT}"


@pytest.fixture(scope="session")
def target() -> Target:
    return tiny_target()


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory) -> str:
    """The tiny target as a local folder."""
    return write_target(tmp_path_factory.mktemp("tiny-target"))


@pytest.fixture(scope="session")
def deep() -> Target:
    """With layers enough for EAGLE-3."""
    return tiny_target(num_hidden_layers=8)


@pytest.fixture(scope="session")
def deep_folder(tmp_path_factory) -> str:
    return write_target(tmp_path_factory.mktemp("deep-target"), num_hidden_layers=8)


@pytest.fixture(scope="session")
def finished(target, tmp_path_factory) -> Path:
    """A store of several shards that one process wrote without interruption; no test changes it."""
    folder = tmp_path_factory.mktemp("finished") / "store"
    write_store(folder, target, make_conversations(), **SIZES)
    return folder


@pytest.fixture(scope="session")
def inputs(tmp_path_factory) -> Path:
    """Inputs of commands, whole and broken, which no test changes."""
    folder = tmp_path_factory.mktemp("inputs")
    write_inputs(folder)
    return folder


@pytest.fixture
def short_replays(monkeypatch) -> None:
    """Let a validation replay the first words of an answer per batch: replays are half of a small training's time."""

    def first_words(batch: Batch) -> list[Sample]:
        for sample in answered_samples(batch)[:1]:
            start, stop = sample.spans[0]
            stop = min(stop, start + 8)
            parts = (part[:stop] for part in (sample.greedy, sample.features, sample.layers))
            return [Sample(sample.id, sample.tokens[:stop], next(parts), [(start, stop)], *parts)]
        return []

    monkeypatch.setattr(probe, "answered_samples", first_words)


@pytest.fixture
def poss(tmp_path, monkeypatch) -> Poss:
    """Run a command line in this process, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    return partial(run_in, tmp_path)


@pytest.fixture
def convert(deep_folder):
    """`poss convert` for the deep target, or for another `target`."""

    def run(*arguments: object, target: str | Path = deep_folder) -> None:
        cli.run("convert", [*map(str, arguments), "--target", str(target)])

    return run
