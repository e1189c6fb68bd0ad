"""Notebooks run as they are committed, on a tiny target and a made-up sweep, and are committed without output."""

import json
import re
import runpy
from pathlib import Path

import pytest

from poss_lightning.features.writing import write_store
from poss_lightning.target_model.model import Target
from tests.support.lab import CHOICES, DEPTH, SEEDS, write_events, write_run
from tests.support.synthetic import make_rows
from tests.support.talks import SIZES, talks
from tests.support.tiny import tiny_draft

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"
EVERY = sorted(NOTEBOOKS.glob("*.ipynb"))
ABSOLUTE = re.compile(r"(?<![\w.])(/(home|root|work|tmp|Users|mnt|private)\b|[A-Z]:\\)")

execute = runpy.run_path(str(NOTEBOOKS / "execute.py"))
read, executed, stripped, text = (execute[name] for name in ("read", "executed", "stripped", "text"))


@pytest.fixture(scope="module")
def given(tiny_folder, tmp_path_factory) -> dict:
    """A value for every name of a notebook's parameters."""
    folder = tmp_path_factory.mktemp("notebooks")
    for place, choice in enumerate(CHOICES):
        for seed in range(SEEDS):
            facts = {"depth": DEPTH, "allocation": [DEPTH], "training_depth": DEPTH, "parameters": 12345}
            cell = folder / "sweep" / f"choice={choice}" / f"seed={seed}"
            rows = make_rows((choice,), prompts=3, seed=seed)
            write_run(cell, rows, {"methods": {choice: facts}})
            write_events(cell, seed, gain=0.02 * place)
    target = Target.load(tiny_folder, "float32")
    tiny_draft(target, [1, 2]).save_pretrained(folder / "draft")
    write_store(folder / "store", target, talks()[:1], **SIZES)
    return {
        "TARGET": tiny_folder,
        "DRAFT": str(folder / "draft"),
        "QUESTION": "How many legs has a horse?",
        "NEW_TOKENS": 12,
        "EXPERIMENT": str(folder / "sweep"),
        "CHOICES": list(CHOICES),
        "REFERENCE": CHOICES[0],
        "STORE": str(folder / "store"),
        "SAMPLE": 0,
        "SLOTS": 10,
    }


@pytest.mark.nightly
@pytest.mark.parametrize("file", EVERY, ids=lambda file: file.stem)
def test_a_notebook_runs(file, given, tmp_path, monkeypatch):
    """From its first cell to its last, with other parameters; and its output names no place of this machine."""
    for name in ("JUPYTER_RUNTIME_DIR", "JUPYTER_CONFIG_DIR", "IPYTHONDIR"):  # where the kernel writes its own files
        monkeypatch.setenv(name, str(tmp_path / name))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    notebook = read(file)
    parameters(notebook).source = "\n".join(f"{name} = {value!r}" for name, value in given.items())
    done = stripped(executed(notebook, NOTEBOOKS))
    outputs = [output for cell in done.cells if cell.cell_type == "code" for output in cell.outputs]
    assert outputs and not ABSOLUTE.search(json.dumps(outputs))
    figures = sum("image/png" in output.get("data", {}) for output in outputs)
    assert figures == {"quickstart": 0, "span_ablation": 4, "feature_drift": 3}[file.stem]


@pytest.mark.parametrize("file", EVERY, ids=lambda file: file.stem)
def test_a_notebook_is_committed_stripped(file):
    notebook, committed = read(file), file.read_text(encoding="utf-8")
    assert text(stripped(notebook)) == committed, f"{file.name}: write it with notebooks/execute.py"
    assert not (found := ABSOLUTE.search(committed)), f"{file.name} names a place of one machine: {found}"
    assert parameters(notebook) is next(cell for cell in notebook.cells if cell.cell_type == "code")
    assert file.stem == "quickstart" or "change the first code cell" in notebook.cells[0].source.splitlines()[0]


def parameters(notebook):
    """The one cell that says what a notebook reads."""
    (cell,) = (cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", []))
    return cell
