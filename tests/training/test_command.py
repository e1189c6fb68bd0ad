"""A training's folder on the command line: one training each, resumed there, unchanged by what cannot resume."""

import shutil
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import yaml

from poss_lightning.losses.terms import DISTRIBUTION_TERMS
from poss_lightning.work import Work
from tests.support.command import left, run_in, says
from tests.support.documents import ROOT, blocks
from tests.support.stores import contents

SHORT = ("--trainer.accelerator", "cpu", "--trainer.precision", "32-true")
ONE = (*SHORT, "--trainer.max_steps", "1", "--trainer.limit_val_batches", "0")
AGAIN = ("--name", "run", "--trainer.default_root_dir", ".")
LAST = "run/checkpoints/last.ckpt"
AUTO = ("--ckpt_path", "auto")
RESUME = ("fit", "--config", "run/config.yaml", "--ckpt_path", LAST)


@pytest.fixture
def small(store) -> tuple[object, ...]:
    return ("--data.store", store, "--data.validation", "0.2", "--model.allocation", "[2]")


@pytest.fixture
def begin(poss, small):
    """Train a step in the folder `run`."""
    return lambda *more: poss("fit", *small, *ONE, *AGAIN, *more)


def test_a_folder_takes_one_training_which_resumes_there_and_what_cannot_resume_changes_nothing(
    poss, begin, inputs, tmp_path
):
    assert begin().code is None
    before = contents(tmp_path)
    (tmp_path / "torn.ckpt").write_bytes(before[LAST][: len(before[LAST]) // 2])
    says(begin(), "fit", f"run holds a training already: resume with --ckpt_path {LAST}, or choose another --name")
    for given, words in (
        ("torn.ckpt", "torn.ckpt is not a complete checkpoint of plain tensors"),
        ("gone.ckpt", "gone.ckpt: no such file"),
        (inputs / "evil.ckpt", "evil.ckpt is not a complete checkpoint of plain tensors: "),  # it would run a command
    ):
        says(poss("fit", "--config", "run/config.yaml", "--ckpt_path", given), "fit", words)
    (tmp_path / "torn.ckpt").unlink()
    assert contents(tmp_path) == before
    says(poss(*RESUME, "--data.seed", "1"), "fit", "of other data")  # Lightning itself has begun to log
    other = poss(*RESUME, "--model.allocation", "[1, 1]")
    says(other, "fit", "allocation is (1, 1), and the checkpoint's draft has (2,)")
    assert contents(tmp_path)["run/config.yaml"] == before["run/config.yaml"]
    assert contents(tmp_path)[LAST] == before[LAST]
    given = ("--model.learning_rate", "1e-5", "--model.warmup", "0.5", "--trainer.max_steps", "2")
    with pytest.warns(UserWarning, match="continues at step 1 of 2: the rate is 1e-05 from here, it was 0"):
        assert poss(*RESUME, *given).code is None
    settings = yaml.safe_load((tmp_path / "run/config.yaml").read_text())
    assert settings["trainer"]["max_steps"] == 2 and settings["ckpt_path"] is None
    assert (settings["model"]["learning_rate"], settings["model"]["warmup"]) == (1e-5, 0.5)
    assert left(tmp_path / "run/checkpoints") == ["last.ckpt"]


def test_a_moved_or_copied_training_resumes_where_its_checkpoint_lies(poss, begin, small, tmp_path):
    """And not in the folder that its config.yaml names, which has a different training by then."""
    begin()
    (tmp_path / "run").rename(tmp_path / "old")
    shutil.copytree(tmp_path / "old", tmp_path / "copy")
    begin("--model.allocation", "[1, 1]")
    (tmp_path / "link").symlink_to("old")
    (tmp_path / "below").mkdir()
    before = contents(tmp_path / "run")
    places = (("old", "old", "."), ("copy", "copy", "."), ("old", "link", "."), ("old", "../old", "below"))
    for step, (place, named, current) in enumerate(places, start=2):
        resume = ("fit", "--config", f"{named}/config.yaml", "--ckpt_path", f"{named}/checkpoints/last.ckpt")
        assert run_in(tmp_path / current, *resume, "--trainer.max_steps", step).code is None
        assert torch.load(tmp_path / place / "checkpoints/last.ckpt", weights_only=True)["global_step"] == step
    here = poss("fit", "--config", "old/config.yaml", "--ckpt_path", "old/checkpoints/last.ckpt", "--name", "run")
    says(here, "fit", "run holds a training already, and not that of old/checkpoints/last.ckpt: resume with")
    assert contents(tmp_path / "run") == before


def test_a_training_killed_before_its_first_checkpoint_starts_over(begin, tmp_path, caplog):
    """And one killed later resumes, by the same command."""
    begin()
    whole = torch.load(tmp_path / LAST, weights_only=True)["state_dict"]
    shutil.rmtree(tmp_path / "run/checkpoints")
    says(begin(*AUTO), "fit", "run holds a training already: remove it, or choose another --name")
    (tmp_path / "run/unfinished").mkdir()
    (tmp_path / "run/unfinished/work.lock").touch()
    caplog.set_level("INFO")
    assert begin(*AUTO).code is None
    assert "run: a training was killed here before its first checkpoint: starting over" in caplog.messages
    again = torch.load(tmp_path / LAST, weights_only=True)["state_dict"]
    assert all(torch.equal(value, again[name]) for name, value in whole.items())
    assert len([*(tmp_path / "run").glob("events.*")]) == 1 and not (tmp_path / "run/unfinished").exists()
    assert begin(*AUTO, "--trainer.max_steps", "2").code is None
    assert torch.load(tmp_path / LAST, weights_only=True)["global_step"] == 2


def test_slurm_must_start_all_processes_and_a_requeued_job_resumes_in_its_folder(
    poss, small, tmp_path, monkeypatch, caplog
):
    for name, value in {"NTASKS": 1, "PROCID": 0, "LOCALID": 0, "NODEID": 0, "JOB_ID": 7}.items():  # its only task
        monkeypatch.setenv(f"SLURM_{name}", str(value))
    caplog.set_level("INFO")
    two = poss("fit", *small, *ONE, "--trainer.devices", "2")
    says(two, "fit", "trainer.devices is 2 and trainer.num_nodes 1, but the processes started are 1: srun --ntasks-per")
    (tmp_path / "hpc_ckpt_1.ckpt").write_bytes(b"Lightning's, of a different training")
    for step in (1, 2):
        assert poss("fit", *small, *ONE, "--trainer.max_steps", step).code is None
        assert [folder.name for folder in (tmp_path / "runs").iterdir()] == ["slurm-7.0"]
        monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    assert {"step 0 of 1: training begins", "step 1 of 2: training begins"} <= {*caplog.messages}


@pytest.mark.nightly
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 128 + signal.SIGTERM), (signal.SIGINT, 1)], ids=str)
def test_a_stopped_training_fails_and_says_how_to_resume(small, tmp_path, number, code):
    endless = ("--trainer.max_steps", "100000", "--trainer.max_epochs", "-1", "--trainer.log_every_n_steps", "1")
    command = [Path(sys.executable).parent / "poss", "fit", *small, *ONE, *AGAIN, *endless]
    pipes = {"stderr": subprocess.PIPE, "stdout": subprocess.DEVNULL}
    heeds = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # which a shell's job in the background does not
    with subprocess.Popen(command, **pipes, text=True, cwd=tmp_path, preexec_fn=heeds) as process:
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


def test_a_dry_run_writes_nothing(poss, small, tmp_path):
    (tmp_path / "draft-last").mkdir()  # of somebody else
    before = left(tmp_path)
    assert poss("fit", *small, *SHORT, *AGAIN, "--trainer.fast_dev_run", "true").code is None
    assert left(tmp_path) == before


def test_a_validation_without_a_checkpoint_is_that_of_the_start(poss, inputs):
    small = ("--data.store", inputs / "store", "--data.validation", "0.2", "--model.allocation", "[2]")
    start = ("--model.start_from", inputs / "draft", "--trainer.logger", "false")
    result = poss("validate", *small, *SHORT, *start)
    assert result.code is None
    assert all(name in result.out for name in ("val/tau_tree", "val_loss/depth_2", "val_drift_cosine/mean"))


def test_a_callback_adds_a_loss_term(poss, small, tmp_path, monkeypatch):
    """The module of docs/extending.md; the parser imports it, and the training then knows the term."""
    monkeypatch.syspath_prepend(tmp_path)
    (page,) = [code for code in blocks((ROOT / "docs/extending.md").read_text(), "python") if "# mine.py" in code]
    (tmp_path / "mine.py").write_text(page)
    with patch.dict(DISTRIBUTION_TERMS):
        result = poss("fit", *small, *ONE, "--trainer.callbacks+", "mine.Register", "--model.loss", "{hellinger: 1.0}")
    assert result.code is None, result
