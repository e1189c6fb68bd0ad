"""Documents tell the truth: their commands parse, and their worked examples run."""

import functools
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import lightning
import pytest
import yaml
from omegaconf import OmegaConf

from poss_lightning import cli
from poss_lightning.features.writing import write_store
from poss_lightning.losses.terms import DISTRIBUTION_TERMS
from poss_lightning.reports.measures import MEASURES
from poss_lightning.sweep import Sweep
from poss_lightning.training.fit import command_line
from tests.support import families
from tests.support.documents import DOCUMENTS, ROOT, blocks, commands, everywhere, files, parsed, shell
from tests.support.talks import SIZES, talks
from tests.support.tiny import tiny_draft
from tests.support.writers import CALLBACKS, TRAINER

MAKE = {*re.findall(r"^([a-z-]+):|\$\((\w+)\)", (ROOT / "Makefile").read_text(), re.MULTILINE)}
ASKING = {"--help", "--version"}


@pytest.fixture
def desk(tmp_path, monkeypatch) -> Callable[[str], Path]:
    """Fills the current folder with conf/ and experiments/ of the checkout, and the files that a text shows."""
    shutil.copytree(ROOT / "conf", tmp_path / "conf")
    (tmp_path / "experiments").mkdir()
    for folder in filter(Path.is_dir, (ROOT / "experiments").iterdir()):
        (tmp_path / "experiments" / folder.name).symlink_to(folder)
    for file in (ROOT / "conf" / "reproduce").iterdir():  # docs/reproduce.md copies them there
        (tmp_path / "experiments" / file.stem).mkdir()
        shutil.copy(file, tmp_path / "experiments" / file.stem / "sweep.yaml")
    monkeypatch.chdir(tmp_path)

    def lay(text: str) -> Path:
        for name, shown in files(text).items():
            assert not (tmp_path / name).exists(), f"{name} is there already"
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(shown)
        return tmp_path

    return lay


def sweeps(text: str) -> list[str]:
    return [name for name in files(text) if name.endswith("sweep.yaml")]


# --- every command parses ---


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_command_and_experiment_parses_and_names_files_that_exist(document, desk):
    text = document.read_text()
    here = desk(text)
    for command in commands(everywhere(text)):
        print(command)  # pytest shows the last one where it fails
        name, *words = command.words
        if command.program == "make":
            assert {name, *(word.partition("=")[0] for word in words)} <= {word for pair in MAKE for word in pair}
        elif name not in ASKING and not name.isupper():  # COMMAND stands for any
            assert name in cli.TRAINER | cli.TOOLS
            given = parsed(command.words, command.complete) if words and not ASKING & {*words} else {}
            if name == "sweep" and given:
                Sweep.load(Path(given["folder"]) / "sweep.yaml")
        if "--name" in words:  # the next lines read the settings of this training
            file = here / "runs" / words[words.index("--name") + 1] / "config.yaml"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text("{model: {allocation: [1]}, data: {store: any}}")
    for file in sweeps(text):
        experiment = Sweep.load(here / file)
        for cell in experiment.cells(here)[: len(experiment.choices)]:
            parsed(["fit", *command_line(*cell.configs)])


# --- worked examples run, on the tiny target and in one step ---

PAGES = ("own-target", "experiments", "extending")
HERE = ["--device", "cpu", "--dtype", "float32"]
ONE_STEP = {"max_steps": 1, "val_check_interval": 1, "callbacks": CALLBACKS}
FIT = {"data": {"validation": 0.3}, "trainer": TRAINER | ONE_STEP}
SMALL = {  # appended to a command's own options, so these win
    "synthesize": [*HERE, "--conversations", "40", "--answer_tokens", "8"],
    "extract": HERE,
    "generate": [*HERE, "--max_new_tokens", "8"],
    "benchmark": [*HERE, "--suites", "[chat]", "--limit", "3", "--max_new_tokens", "4"],
    "fit": ["--config", "small.yaml"],  # FIT
}


@pytest.mark.nightly
def test_the_worked_examples_run(desk, tiny_folder, capsys):
    """Page by page, in one folder: every command of their shell blocks, in order."""
    for name in PAGES:
        text = (ROOT / "docs" / f"{name}.md").read_text()
        here = desk(text)
        (here / "small.yaml").write_text(yaml.safe_dump(FIT))
        for file in sweeps(text):  # its reference alone, and one seed
            given = yaml.safe_load((here / file).read_text())
            given["choices"] = {given["reference"]: given["choices"][given["reference"]]}
            (here / file).write_text(OmegaConf.to_yaml(OmegaConf.merge(given, {"seeds": [0], "fit": FIT})))
        for command in commands(shell(text), T=tiny_folder):
            verb, *words = command.words
            written = ["--user_tokens", "6"] * (verb == "synthesize" and "--prompts" not in words)
            cli.run(verb, [*words, *SMALL.get(verb, []), *written])
    for run in ("eagle", "poss2"):
        for promised in ("draft-best", "draft-last", "checkpoints/last.ckpt", "config.yaml"):
            assert (here / "runs" / run / promised).exists()
    for experiment in ("allocation", "early"):
        (rounds,) = (here / "experiments" / experiment).glob("choice=*/seed=0/rounds.parquet")
        assert (rounds.parent / "run.json").is_file()
    assert "τ" in capsys.readouterr().out


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["README.md", *(f"docs/{n}.md" for n in (*PAGES, "decoding"))])
def test_the_python_of_a_document_runs(name, desk, tiny_folder, target, tmp_path, monkeypatch, capsys):
    """All blocks as one script, on the tiny target with a draft and a store of it, for one step.

    Those of a user's own Trainer run in training/test_trainer.py.
    """
    drafts = [tmp_path / name for name in ("embedded-hass", "embedded-poss2")]
    for draft, allocation in zip(drafts, ([4], [2, 2]), strict=True):
        tiny_draft(target, allocation).save_pretrained(draft)
    write_store(tmp_path / "store", target, talks(), **SIZES)
    quiet = {"accelerator": "cpu", "logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = functools.partial(lightning.Trainer, **quiet, enable_model_summary=False)
    monkeypatch.setattr(lightning, "Trainer", lambda max_steps, **given: trainer(max_steps=min(max_steps, 1), **given))
    stand_ins = {"embedded": tiny_folder, "runs/eagle/draft-best": drafts[0], "embedded-hass": drafts[0]}
    stand_ins |= {"embedded-poss2": drafts[1], "runs/demo/features": "store", "runs/features": "store"}
    stand_ins["runs/compare"] = ROOT / "experiments" / "lookup"  # records of decoded answers
    page = re.sub("## Your own Trainer.*?\n## ", "", (ROOT / name).read_text(), flags=re.DOTALL)
    script, shown, measures = "\n".join(blocks(page, "python")), {"__name__": "page"}, [*MEASURES]
    for theirs, ours in stand_ins.items():
        script = script.replace(f'"{theirs}"', json.dumps(str(ours)))
    with patch.dict(DISTRIBUTION_TERMS):  # a document may add a term, or a measure
        exec(script, shown)
    is_measured, MEASURES[:] = len(MEASURES) > len(measures), measures
    assert not is_measured or capsys.readouterr().out.count("τ of depth 2") >= 3  # by method, suite, and compared
    assert "training" not in shown or shown["training"].trainer.global_step == 1
    assert "output" not in shown or shown["output"].shape[1] > 8
    assert shown.get("FAMILIES", {}).items() <= families.FAMILIES.items()


CHANGES = "".join(blocks((ROOT / "docs/extending.md").read_text(), "diff"))


def test_the_patches_of_extending_fit_the_code():
    subprocess.run(["git", "apply", "--check", "-"], cwd=ROOT, input=CHANGES, text=True, check=True)


ADDED = """
from pathlib import Path
from poss_lightning.corpus.readers import read_conversations
from poss_lightning.training.fit import compose
print(compose("draft/hass.yaml", {"data": {"store": "any"}, "model": {"damping": 0.5}})["model"]["damping"])
Path("pairs.jsonl").write_text('{"pairs": [["Hi", "Hello"], ["How?", "So."]]}')
print([message["content"] for message in read_conversations("pairs.jsonl")[0].messages])
compose("draft/hass.yaml", {"data": {"store": "any"}, "model": {"damping": 2}})
"""


@pytest.mark.nightly
def test_an_option_of_a_draft_and_a_record_form_are_added_in_one_place(tmp_path):
    """By the patches in docs/extending.md, to a copy of the package."""
    large = shutil.ignore_patterns("__pycache__", "shipped", "data")
    for folder in ("conf", "poss_lightning"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=large)
    subprocess.run(["git", "apply", "-"], cwd=tmp_path, input=CHANGES, text=True, check=True)
    done = subprocess.run([sys.executable, "-c", ADDED], cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout.startswith("0.5\n['Hi', 'Hello', 'How?', 'So.']\n")
    assert "damping is 2; it must be less than or equal to 1" in done.stderr
