"""A tiny random target, and drafts for it: everything a law needs, in milliseconds."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"  # before anything imports the hub's client: no test waits for a network

from pathlib import Path

import pytest
import torch

from poss_lightning import cli
from poss_lightning.target.model import Target
from tests.support import pretended
from tests.support.inputs import write_inputs
from tests.support.tiny import tiny_model, tiny_target, tiny_tokenizer

if "POSS_DEVICE" not in os.environ:
    os.environ["CUDA_VISIBLE_DEVICES"] = (
        ""  # the same tests wherever they run; `make test-gpu` and `make test-vllm` set it
    )
for name in [*os.environ]:  # what a shell, or the cluster's job that the tests run in, would tell them
    if name.startswith("SLURM_") or name in ("POSS_VERBOSE", "RANK", "LOCAL_RANK", "WORLD_SIZE"):
        del os.environ[name]
torch.set_num_threads(1)  # tiny matrices: threads only cost
os.fsync = lambda descriptor: None  # no test waits for a disk
pretended.register()
ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="session", autouse=True)
def checkout_stays_as_it_is():
    """No test leaves a file of its own in the checkout's root, where commands write by default."""
    before = {path.name for path in ROOT.iterdir()}
    yield
    new = {path.name for path in ROOT.iterdir()} - before
    assert not {name for name in new if not name.startswith(".")}, f"tests left {sorted(new)} in {ROOT}"


@pytest.fixture(scope="session")
def target() -> Target:
    return tiny_target()


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory) -> str:
    """The tiny target as a local folder, as a user would name it on the command line."""
    folder = tmp_path_factory.mktemp("tiny-target")
    tiny_model().save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="session")
def inputs(target, tiny_folder, tmp_path_factory) -> Path:
    """What commands read, whole and broken; no test changes it."""
    folder = tmp_path_factory.mktemp("inputs")
    write_inputs(folder, target, tiny_folder)
    return folder


@pytest.fixture
def convert(request, tiny_folder):
    """`poss convert` for the target that a test is about, or a `target` given."""
    own = request.getfixturevalue("deep_folder") if "deep" in request.fixturenames else tiny_folder

    def run(*arguments: object, target: str | Path = own) -> None:
        cli.run("convert", [*map(str, arguments), "--target", str(target)])

    return run
