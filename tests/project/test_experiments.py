"""The committed experiments: their records are what their settings ask for, and of the drafts that are shipped."""

import gzip
import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import gguf
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


def test_the_lab_is_made_from_files_of_a_checkout_without_history():
    made = subprocess.run(["make", "-n", "lab"], cwd=EXPERIMENTS.parent, capture_output=True, text=True, check=True)
    lines = [line for line in made.stdout.splitlines() if "runs/lab" in line]
    read = [word for line in lines for word in line.split() if word.endswith(".jsonl.gz") and "runs/" not in word]
    assert len(read) == 4 and all((EXPERIMENTS.parent / name).is_file() for name in read)
    assert not any("git " in line for line in lines)


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


def test_a_gguf_file_is_rounded_to_bfloat16_and_keeps_its_metadata(tmp_path):
    """What llama.cpp reads has the weights of our copy of the target."""
    source, rounded = tmp_path / "source.gguf", tmp_path / "rounded.gguf"
    matrix, norm = (torch.randn(size, generator=torch.Generator().manual_seed(0)) for size in ((4, 64), (64,)))
    packed = gguf.quants.quantize(matrix.numpy(), gguf.GGMLQuantizationType.Q4_1)
    writer = gguf.GGUFWriter(source, "llama")
    writer.add_token_list(["a", "b"])
    writer.add_rope_freq_base(1e5)
    writer.add_tensor("blk.0.ffn_up.weight", packed, raw_dtype=gguf.GGMLQuantizationType.Q4_1)
    writer.add_tensor("blk.0.attn_norm.weight", norm.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    runpy.run_path(str(EXPERIMENTS / "speed" / "others.py"))["write_bfloat16"](source, rounded)

    before, after = gguf.GGUFReader(source), gguf.GGUFReader(rounded)
    for name in ("tokenizer.ggml.tokens", "llama.rope.freq_base", "general.architecture"):
        assert after.fields[name].contents() == before.fields[name].contents()
    for old, new in zip(before.tensors, after.tensors, strict=True):
        plain, found = (gguf.quants.dequantize(tensor.data.copy(), tensor.tensor_type) for tensor in (old, new))
        assert (torch.from_numpy(found) == torch.from_numpy(plain).bfloat16().float()).all()
    assert [tensor.tensor_type.name for tensor in after.tensors] == ["BF16", "F32"]


@pytest.mark.nightly
def test_the_chain_for_one_gpu_runs_at_tiny_sizes(tmp_path):
    line = [sys.executable, str(EXPERIMENTS / "gpu" / "chain.py"), str(tmp_path), "--tiny", "--suites", "[questions]"]
    subprocess.run(line, env=os.environ | {"POSS_DEVICE": "cpu"}, check=True)
    sweeps, decoded = {"scratch": 3, "tuned": 2, "replay": 6}, {"T0": 4, "T1": 4, "auto": 4, "no-graphs": 4}
    for name, methods in (sweeps | decoded).items():
        assert read_rounds(tmp_path / name)["method"].nunique() == methods, name
