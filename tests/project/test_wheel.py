"""The built wheel, installed elsewhere, trains, decodes and examines without the checkout."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.documents import blocks

ROOT = Path(__file__).resolve().parents[2]
ON = "--dtype float32 --device cpu"
COMMANDS = [
    "fit --data.store store --model.allocation [1,1] --trainer.max_steps 2 --trainer.accelerator cpu --name run",
    f"generate Hi --target {{inputs}}/target --draft {{inputs}}/draft --max_new_tokens 8 {ON}",
    f"doctor {{inputs}}/draft --target {{inputs}}/target --store store --limit 8 {ON}",
    "extract {corpus} runs/demo/features --limit 12 --max_length 256",  # what README's Python reads
]


def run(*arguments: str | Path, cwd: Path, **environment: str | Path) -> str:
    given = {"cwd": cwd, "env": os.environ | {name: str(value) for name, value in environment.items()}}
    done = subprocess.run([sys.executable, *arguments], **given, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.nightly
def test_the_wheel_runs_without_the_checkout(inputs, tmp_path):
    build = "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", tmp_path, ROOT
    run("-m", "pip", *build, cwd=tmp_path)
    (wheel,) = tmp_path.glob("*.whl")
    run("-m", "pip", "install", "--no-deps", "--no-index", "--target", tmp_path / "site", wheel, cwd=tmp_path)
    where = {"cwd": tmp_path, "PYTHONPATH": tmp_path / "site"}
    assert run("-c", "import poss_lightning; print(poss_lightning.__file__)", **where).startswith(str(tmp_path))
    corpus = next((tmp_path / "site" / "poss_lightning" / "corpus" / "data").glob("*.jsonl.gz"))
    shutil.copytree(inputs / "store", tmp_path / "store")
    for command in COMMANDS:
        words = [word.format(inputs=inputs, corpus=corpus) for word in command.split()]
        run("-c", "from poss_lightning.cli import main; main()", *words, **where)
    (readme,) = blocks((ROOT / "README.md").read_text(), "python")
    assert "τ" in run("-c", readme.replace("max_steps=40", "max_steps=2"), **where)
