"""Notebooks run as they are committed, on a tiny target and a different sweep, and are committed stripped."""

import ast
import json
import re
import runpy
from pathlib import Path

import pytest

import poss_lightning
from poss_lightning.features.writing import write_store
from poss_lightning.target_model.model import Target
from tests.support.talks import SIZES, talks
from tests.support.tiny import tiny_draft

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"
EVERY = sorted(NOTEBOOKS.glob("*.ipynb"))
ABSOLUTE = re.compile(r"(?<![\w.])(/(home|root|work|tmp|Users|mnt|private)\b|[A-Z]:\\)")

execute = runpy.run_path(str(NOTEBOOKS / "execute.py"))
read, executed, stripped, text = (execute[name] for name in ("read", "executed", "stripped", "text"))


SWEEP = {"EXPERIMENT": "../experiments/size", "CHOICES": ["wide", "three-layers", "poss2"], "REFERENCE": "wide"}
SMALL = {"QUESTION": "How many legs has a horse?", "NEW_TOKENS": 12, "SAMPLE": 0, "SLOTS": 10}


@pytest.mark.nightly
@pytest.mark.parametrize("file", EVERY, ids=lambda file: file.stem)
def test_a_notebook_runs(file, tiny_folder, tmp_path, monkeypatch):
    """On a different sweep and a tiny target, draft and store; and its output names no place of this machine."""
    for name in ("JUPYTER_RUNTIME_DIR", "JUPYTER_CONFIG_DIR", "IPYTHONDIR"):  # where the kernel writes its own files
        monkeypatch.setenv(name, str(tmp_path / name))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    target, draft, store = Target.load(tiny_folder, "float32"), tmp_path / "draft", tmp_path / "store"
    tiny_draft(target, [1, 2]).save_pretrained(draft)
    write_store(store, target, talks()[:1], **SIZES)
    given = SWEEP | SMALL | {"TARGET": tiny_folder, "DRAFT": str(draft), "STORE": str(store)}
    notebook = read(file)
    parameters(notebook).source = "\n".join(f"{name} = {value!r}" for name, value in given.items())
    done = stripped(executed(notebook, NOTEBOOKS))
    outputs = [output for cell in done.cells if cell.cell_type == "code" for output in cell.outputs]
    assert outputs and not ABSOLUTE.search(json.dumps(outputs))
    figures = sum("image/png" in output.get("data", {}) for output in outputs)
    assert figures == {"quickstart": 0, "span_ablation": 2, "feature_drift": 3}[file.stem]


@pytest.mark.parametrize("file", EVERY, ids=lambda file: file.stem)
def test_a_notebook_is_committed_stripped(file):
    notebook, committed = read(file), file.read_text(encoding="utf-8")
    assert text(stripped(notebook)) == committed, f"{file.name}: write it with notebooks/execute.py"
    assert not (found := ABSOLUTE.search(committed)), f"{file.name} names a place of one machine: {found}"
    assert parameters(notebook) is next(cell for cell in notebook.cells if cell.cell_type == "code")
    assert file.stem == "quickstart" or "change the first code cell" in notebook.cells[0].source.splitlines()[0]


@pytest.mark.parametrize("file", EVERY, ids=lambda file: file.stem)
def test_a_notebook_uses_public_names_alone(file):
    tree = ast.parse("\n".join(cell.source for cell in read(file).cells if cell.cell_type == "code"))
    modules = {name.name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names}
    assert not any(name.startswith("poss_lightning") for name in modules)
    found = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and "poss_lightning" in node.module]
    assert found and {node.module for node in found} == {"poss_lightning"}
    assert {name.name for node in found for name in node.names} <= {*poss_lightning.__all__}


def parameters(notebook):
    """The one cell that says what a notebook reads."""
    (cell,) = (cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", []))
    return cell
