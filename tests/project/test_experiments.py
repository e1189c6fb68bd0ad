"""The committed experiments: their records are what their settings ask for, and of the drafts that are shipped."""

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from poss_lightning.draft.folder import shipped
from poss_lightning.draft.kinds import load_draft
from poss_lightning.evaluation.provenance import describe_draft
from poss_lightning.evaluation.rounds import ROUNDS, read_rounds, read_runs
from poss_lightning.evaluation.suites import read_suites
from poss_lightning.reports.comparable import not_comparable
from poss_lightning.reports.results import results
from poss_lightning.sweep import Sweep

EXPERIMENTS = Path(__file__).parents[2] / "experiments"
SWEEPS = [file.parent.relative_to(EXPERIMENTS) for file in sorted(EXPERIMENTS.rglob("sweep.yaml"))]


@pytest.mark.parametrize(
    "name", [pytest.param(each, marks=[pytest.mark.nightly] * (each.name != "scratch")) for each in SWEEPS], ids=str
)
def test_the_records_of_a_sweep_have_its_settings(name):
    folder = EXPERIMENTS / name
    done = [cell for cell in Sweep.load(folder / "sweep.yaml").cells(folder) if cell.is_done]
    assert done
    for cell in done:
        cell.check_settings()


@pytest.mark.nightly
def test_all_records_are_read_and_every_experiment_has_a_readme():
    """Each folder of records gives a table; its trainings had the same inputs, except where its README explains it."""
    cells = {file.parents[2] for file in EXPERIMENTS.rglob(f"choice=*/seed=*/{ROUNDS}")}
    runs = {file.parent for file in EXPERIMENTS.rglob(ROUNDS) if not file.parent.name.startswith("seed=")}
    for folder in sorted(cells | runs):
        rounds = read_rounds(folder)
        baselines = {*rounds["method"]} & {"plain", "vllm"}
        assert len(results(folder, baseline=min(baselines, default="plain")))
        assert not not_comparable(rounds, read_runs(rounds)) or folder.name in ("scale", "block"), folder
    index = (EXPERIMENTS / "README.md").read_text().replace("[text that the target wrote]", "[data]")
    for folder in filter(Path.is_dir, EXPERIMENTS.iterdir()):
        assert (folder / "README.md").is_file() and f"[{folder.name}]({folder.name}/README.md)" in index


def test_no_prompt_of_our_suites_is_in_the_training_text():
    asked = {turn for question in read_suites() for turn in question.turns}
    with gzip.open(EXPERIMENTS / "data" / "varied.jsonl.gz", "rt", encoding="utf-8") as lines:
        trained = {message["content"] for line in lines for message in json.loads(line)["messages"]}
    assert trained and not asked & trained


@pytest.mark.parametrize("name", shipped())
def test_the_shipped_drafts_are_those_of_the_published_figures(name):
    """Figures of experiments/shipped are of weights in bfloat16, as their machines decoded."""
    method = name.removeprefix("embedded-")
    (run,) = read_runs(read_rounds(EXPERIMENTS / "shipped" / "eval" / f"choice={method}")).values()
    draft = load_draft(name).to(torch.bfloat16)
    assert describe_draft(draft)["weights"] == run["methods"][method]["weights"]


@pytest.mark.nightly
def test_the_chain_for_one_gpu_runs_at_tiny_sizes(tmp_path):
    line = [sys.executable, str(EXPERIMENTS / "gpu" / "chain.py"), str(tmp_path), "--tiny", "--suites", "[questions]"]
    subprocess.run(line, env=os.environ | {"POSS_DEVICE": "cpu"}, check=True)
    sweeps, decoded = {"scratch": 3, "tuned": 2, "replay": 6}, {"T0": 4, "T1": 4, "auto": 4, "no-graphs": 4}
    for name, methods in (sweeps | decoded).items():
        assert read_rounds(tmp_path / name)["method"].nunique() == methods, name
