"""The committed experiments: what each asks for is what its records say, and the shipped drafts are those measured."""

import gzip
import json
from pathlib import Path

import pytest
import torch

from poss_lightning.draft.folder import shipped
from poss_lightning.draft.specialists import Specialists
from poss_lightning.evaluation.provenance import describe
from poss_lightning.evaluation.records import read_runs, read_sources
from poss_lightning.evaluation.suites import read_suites
from poss_lightning.reports.findings import find, not_comparable
from poss_lightning.sweep import Sweep

EXPERIMENTS = Path(__file__).parents[2] / "experiments"
SWEEPS = sorted(file.parent for file in EXPERIMENTS.rglob("sweep.yaml"))
FIRST = EXPERIMENTS / "scratch"  # tried by default
MOST_BYTES, MOST_FILES = 3_000_000, 130


@pytest.mark.parametrize(
    "folder",
    [pytest.param(each, marks=() if each == FIRST else pytest.mark.nightly) for each in SWEEPS],
    ids=[str(each.relative_to(EXPERIMENTS)) for each in SWEEPS],
)
def test_a_sweep_asks_for_what_its_records_are_of(folder):
    own = Sweep.load(folder / "sweep.yaml")
    done = [cell for cell in own.cells(folder) if cell.is_done]
    assert done and not any(cell.changed() for cell in done)


@pytest.mark.nightly
def test_every_record_is_read_and_every_experiment_has_an_answer():
    """Each folder of records has a table; trainings of one were made of the same inputs, or its README says so."""
    places = {file.parent for name in ("cells.jsonl", "records.jsonl.gz") for file in EXPERIMENTS.rglob(name)}
    for folder in sorted(places):
        sources = read_sources(folder)
        baselines = {record.method for source in sources for record in source.records} & {"plain", "vllm"}
        assert find(folder, baseline=min(baselines, default="plain")).overall
        assert not not_comparable(sources) or folder.name == "scale", folder
    for folder in filter(Path.is_dir, EXPERIMENTS.iterdir()):
        assert (folder / "README.md").is_file() and f"[{folder.name}]({folder.name}/README.md)" in (
            EXPERIMENTS / "README.md"
        ).read_text().replace("[text that the target wrote]", "[data]")


def test_experiments_stay_small():
    files = [file for file in EXPERIMENTS.rglob("*") if file.is_file() and not {"cells", "__pycache__"} & {*file.parts}]
    assert len(files) <= MOST_FILES and sum(file.stat().st_size for file in files) <= MOST_BYTES
    assert len((EXPERIMENTS / "LOG.md").read_text().splitlines()) <= 150


def test_no_prompt_of_the_own_suites_was_trained_on():
    asked = {turn for question in read_suites() for turn in question.turns}
    with gzip.open(EXPERIMENTS / "data" / "varied.jsonl.gz", "rt", encoding="utf-8") as lines:
        trained = {message["content"] for line in lines for message in json.loads(line)["messages"]}
    assert trained and not asked & trained


@pytest.mark.parametrize("name", shipped())
def test_the_shipped_drafts_are_those_of_the_published_figures(name):
    """Figures of experiments/shipped are of weights in bfloat16, as their machines decoded."""
    method = name.removeprefix("embedded-")
    (run,) = read_runs(EXPERIMENTS / "shipped" / "eval" / "cells" / method).values()
    draft = Specialists.from_pretrained(name).to(torch.bfloat16)
    assert describe(draft)["weights"] == run["methods"][method]["weights"]
