"""A training's folder on the command line: one training each, resumed there, unchanged by what cannot resume."""

import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from lightning_utilities.core.imports import RequirementCache

from poss_lightning.work import Work
from tests.support.command import left, says
from tests.support.stores import contents

SHORT = ("--trainer.accelerator", "cpu", "--trainer.precision", "32-true", "--trainer.enable_progress_bar", "false")
ONE = (*SHORT, "--trainer.max_steps", "1", "--trainer.limit_val_batches", "0")
AGAIN = ("--name", "run", "--trainer.default_root_dir", ".")
LAST = "run/checkpoints/last.ckpt"
RESUME = ("fit", "--config", "run/config.yaml", "--ckpt_path", LAST)


@pytest.fixture
def small(store) -> tuple[object, ...]:
    return ("--data.store", store, "--data.validation", "0.2", "--model.allocation", "[2]")


@pytest.fixture
def begin(poss, small):
    """Train a step in the folder `run`."""
    return lambda *more: poss("fit", *small, *ONE, *AGAIN, *more)


def test_a_folder_takes_one_training_and_what_cannot_resume_changes_nothing(poss, begin, tmp_path):
    with pytest.warns(UserWarning, match="no validation ran, so draft-best was not written"):
        assert begin().code is None
    before = contents(tmp_path)
    (tmp_path / "torn.ckpt").write_bytes(before[LAST][: len(before[LAST]) // 2])
    says(begin(), "fit", f"run holds a training already: resume with --ckpt_path {LAST}, or choose another --name")
    for given, words in (
        ("torn.ckpt", "torn.ckpt is not a complete checkpoint of plain tensors"),
        ("gone.ckpt", "gone.ckpt: no such file"),
        ("run/draft-last", "is a folder; give a .ckpt file that `poss fit` wrote, as checkpoints/last.ckpt"),
    ):
        says(poss("fit", "--config", "run/config.yaml", "--ckpt_path", given), "fit", words)
    (tmp_path / "torn.ckpt").unlink()
    assert contents(tmp_path) == before
    says(poss(*RESUME, "--data.seed", "1"), "fit", "of other data")  # Lightning itself has begun to log
    other = poss(*RESUME, "--model.allocation", "[1, 1]")
    says(other, "fit", "allocation is (1, 1), and the checkpoint's draft has (2,)")
    assert contents(tmp_path)["run/config.yaml"] == before["run/config.yaml"]
    assert contents(tmp_path)[LAST] == before[LAST]


def test_it_resumes_in_its_folder_with_the_given_options(poss, begin, tmp_path):
    assert begin().code is None
    given = ("--model.learning_rate", "1e-5", "--model.warmup", "0.5", "--trainer.max_steps", "2")
    with pytest.warns(UserWarning, match="the learning rate is 1e-05 from here, it was 3e-05"):
        assert poss(*RESUME, *given).code is None
    settings = yaml.safe_load((tmp_path / "run/config.yaml").read_text())
    assert settings["trainer"]["max_steps"] == 2 and settings["ckpt_path"] is None
    assert (settings["model"]["learning_rate"], settings["model"]["warmup"]) == (1e-5, 0.5)
    with pytest.warns(UserWarning, match="nothing was left to train at step 2"):
        poss(*RESUME)
    elsewhere = ("--trainer.logger.save_dir", tmp_path, "--trainer.max_steps", "3")  # the same, by another path
    assert poss(*RESUME[:4], tmp_path / LAST, *elsewhere).code is None
    assert left(tmp_path / "run/checkpoints") == ["last.ckpt"]
    assert torch.load(tmp_path / LAST, weights_only=True)["global_step"] == 3


def start_slurm(monkeypatch) -> None:
    """Pretend to be the only task of a job."""
    for name, value in {"NTASKS": 1, "PROCID": 0, "LOCALID": 0, "NODEID": 0, "JOB_ID": 7}.items():
        monkeypatch.setenv(f"SLURM_{name}", str(value))


def test_slurm_must_start_all_processes_and_resumes_in_one_folder(begin, tmp_path, monkeypatch):
    (tmp_path / "hpc_ckpt_1.ckpt").write_bytes(b"of a different training")
    start_slurm(monkeypatch)
    two = begin("--trainer.devices", "2")
    says(two, "fit", "trainer.devices is 2 and trainer.num_nodes 1, but the processes started are 1: srun --ntasks-per")
    assert begin().code is None


@pytest.mark.nightly
def test_a_requeued_slurm_job_resumes_or_restarts(begin, tmp_path, monkeypatch):
    assert begin().code is None
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    says(begin(), "fit", f"run holds a training already: resume with --ckpt_path {LAST}")
    shutil.copy(tmp_path / LAST, tmp_path / "run/hpc_ckpt_1.ckpt")  # as Lightning leaves it when SLURM ends a job
    with monkeypatch.context() as job, pytest.warns(UserWarning, match="nothing was left to train at step 1"):
        start_slurm(job)
        assert begin().code is None
    (tmp_path / "run/hpc_ckpt_1.ckpt").unlink()
    monkeypatch.delenv("SLURM_RESTART_COUNT")
    shutil.rmtree(tmp_path / "run/checkpoints")  # only drafts: nothing to resume from
    says(begin(), "fit", "run holds a training already: remove it, or choose another --name")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")  # but a job that was killed so early may restart
    assert begin().code is None


@pytest.mark.nightly
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 128 + signal.SIGTERM), (signal.SIGINT, 1)], ids=str)
def test_a_stopped_training_fails_and_says_how_to_resume(small, tmp_path, number, code):
    endless = ("--trainer.max_steps", "100000", "--trainer.max_epochs", "-1", "--trainer.log_every_n_steps", "1")
    command = [Path(sys.executable).parent / "poss", "fit", *small, *ONE, *AGAIN, *endless]
    pipes = {"stderr": subprocess.PIPE, "stdout": subprocess.DEVNULL}
    with subprocess.Popen(command, **pipes, text=True, cwd=tmp_path) as process:
        said = []
        for line in process.stderr:
            said.append(line)
            if "step 2 of" in line:
                process.send_signal(number)
        assert process.wait() == code, said
    assert not any(noise in line for line in said for noise in ("weights_only", "HINT", "monitored"))
    reached = torch.load(tmp_path / LAST, weights_only=True)["global_step"]
    assert any(f"stopped at step {reached}: --ckpt_path {LAST} resumes" in line for line in said[-3:]), said
    assert any("interrupted" in line for line in said) == (number == signal.SIGINT)


def test_a_second_training_in_a_folder_is_refused_while_the_first_runs(begin, tmp_path):
    with Work(tmp_path / "run/unfinished").exclusive():
        says(begin(), "fit", "run: another process writes there")
        assert left(tmp_path / "run") == ["unfinished", "unfinished/work.lock"]


def test_a_logger_names_its_missing_package(poss, small, monkeypatch):
    monkeypatch.setattr("lightning.pytorch.loggers.wandb._WANDB_AVAILABLE", RequirementCache("wandb>=999"))
    result = poss("fit", *small, "--trainer.logger", "WandbLogger")
    says(result, "fit", "WandbLogger needs wandb>=999, which is not installed")


def test_a_dry_run_writes_nothing(poss, small, tmp_path):
    (tmp_path / "draft-last").mkdir()  # of somebody else
    before = left(tmp_path)
    assert poss("fit", *small, *SHORT, *AGAIN, "--trainer.fast_dev_run", "true").code is None
    assert left(tmp_path) == before


def test_a_validation_without_a_checkpoint_warns(poss, inputs):
    small = ("--data.store", inputs / "store", "--data.validation", "0.2", "--model.allocation", "[2]")
    start = ("--model.start_from", inputs / "draft", "--trainer.logger", "false")
    with pytest.warns(UserWarning, match="no --ckpt_path: this is the draft before training, as .*/draft has it"):
        result = poss("validate", *small, *SHORT, *start)
    assert result.code is None and "val/loss" in result.out
