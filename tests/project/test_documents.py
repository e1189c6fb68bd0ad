"""Documents tell the truth: their commands parse, what they print is printed, and their worked examples run."""

import functools
import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
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
from tests.support.documents import DOCUMENTS, ROOT, Command, blocks, commands, everywhere, files, parsed, shell
from tests.support.lab import write_run
from tests.support.synthetic import make_rows
from tests.support.talks import SIZES, talks
from tests.support.tiny import tiny_draft
from tests.support.writers import CALLBACKS, TRAINER

pytestmark = pytest.mark.nightly
MAKEFILE = (ROOT / "Makefile").read_text()
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


def check(command: Command) -> None:
    """Parse a command without running it."""
    name, *words = command.words
    if command.program == "make":
        known = re.findall(r"^([a-z-]+):|\$\((\w+)\)", MAKEFILE, re.MULTILINE)
        assert {name, *(word.partition("=")[0] for word in words)} <= {word for pair in known for word in pair}
    elif name not in ASKING and not name.isupper():  # COMMAND stands for any
        assert name in cli.TRAINER | cli.TOOLS
        given = parsed(command) if words and not ASKING & {*words} else {}
        if name == "sweep" and given:
            Sweep.load(Path(given["folder"]) / "sweep.yaml")


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_command_and_experiment_parses_and_names_files_that_exist(document, desk):
    text = document.read_text()
    here = desk(text)
    for command in commands(everywhere(text)):
        print(command)  # pytest shows the last one where it fails
        check(command)
        if "--name" in command.words:  # the next lines read the settings of this training
            file = here / "runs" / command.words[command.words.index("--name") + 1] / "config.yaml"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text("{model: {allocation: [1]}, data: {store: any}}")
    for file in sweeps(text):
        experiment = Sweep.load(here / file)
        for cell in experiment.cells(here)[: len(experiment.choices)]:
            parsed(Command(0, "poss", ["fit", *command_line(*cell.configs)]))


# --- what a document shows as output is printed ---


def printed() -> Iterator[tuple[str, str]]:
    """Commands of `console` blocks, and the output below each."""
    for document in DOCUMENTS:
        for block in blocks(document.read_text(), "console"):
            for part in block.text.removeprefix("$ ").split("\n\n$ "):
                command, _, output = part.partition("\n")
                yield command, output.rstrip()


@pytest.mark.parametrize(("command", "output"), printed(), ids=lambda text: text[:48])
def test_the_output_in_a_document_is_what_is_printed(command, output, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    poss, name, *words = shlex.split(command)
    assert poss == "poss"
    cli.run(name, words)
    assert "\n".join(line.rstrip() for line in capsys.readouterr().out.rstrip().splitlines()) == output


# --- worked examples run, on the tiny target and in one step ---

HERE = ["--device", "cpu", "--dtype", "float32"]
ONE_STEP = {"max_steps": 1, "val_check_interval": 1, "callbacks": CALLBACKS}
FIT = {"data": {"validation": 0.3}, "trainer": TRAINER | ONE_STEP}
SMALL = {  # appended to a command's own options, so these win
    "synthesize": [*HERE, "--conversations", "40", "--user_tokens", "6", "--answer_tokens", "8"],
    "extract": HERE,
    "generate": [*HERE, "--max_new_tokens", "8"],
    "benchmark": [*HERE, "--suites", "[chat]", "--limit", "3", "--max_new_tokens", "4"],
    "fit": ["--config", "small.yaml"],  # FIT
}


def test_the_worked_examples_run(desk, tiny_folder, capsys):
    """Page by page, in one folder: every command of their shell blocks, in order."""
    for name in ("own-target.md", "experiments.md", "extending.md"):
        text = (ROOT / "docs" / name).read_text()
        here = desk(text)
        (here / "small.yaml").write_text(yaml.safe_dump(FIT))
        for file in sweeps(text):  # its reference alone, and one seed
            given = yaml.safe_load((here / file).read_text())
            given["choices"] = {given["reference"]: given["choices"][given["reference"]]}
            (here / file).write_text(OmegaConf.to_yaml(OmegaConf.merge(given, {"seeds": [0], "fit": FIT})))
        for command in commands(shell(text), T=tiny_folder):
            verb, *words = command.words
            cli.run(verb, [*words, *SMALL.get(verb, [])])
    for run in ("eagle", "poss2"):
        for promised in ("draft-best", "draft-last", "checkpoints/last.ckpt", "config.yaml"):
            assert (here / "runs" / run / promised).exists()
    for experiment in ("allocation", "early"):
        (rounds,) = (here / "experiments" / experiment).glob("choice=*/seed=0/rounds.parquet")
        assert (rounds.parent / "run.json").is_file()
    assert "τ" in capsys.readouterr().out


@pytest.mark.parametrize(
    "document",
    [ROOT / "README.md", *(ROOT / "docs" / f"{name}.md" for name in ("decoding", "own-target", "extending"))],
)
def test_the_python_of_a_document_runs(document, desk, tiny_folder, target, tmp_path, monkeypatch):
    """Its first block, on the tiny target, with a draft and a store of it, for one step."""
    drafts = [tmp_path / name for name in ("embedded-hass", "embedded-poss2")]
    for draft, allocation in zip(drafts, ([4], [2, 2]), strict=True):
        tiny_draft(target, allocation).save_pretrained(draft)
    write_store(tmp_path / "store", target, talks(), **SIZES)
    quiet = {"accelerator": "cpu", "logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = functools.partial(lightning.Trainer, **quiet, enable_model_summary=False)
    monkeypatch.setattr(lightning, "Trainer", lambda max_steps, **given: trainer(max_steps=min(max_steps, 1), **given))
    stand_ins = {"embedded": tiny_folder, "runs/eagle/draft-best": drafts[0], "embedded-hass": drafts[0]}
    stand_ins |= {"embedded-poss2": drafts[1], "runs/demo/features": "store", "runs/features": "store"}
    text = blocks(document.read_text(), "python")[0].text
    for theirs, ours in stand_ins.items():
        text = text.replace(f'"{theirs}"', json.dumps(str(ours)))
    with patch.dict(DISTRIBUTION_TERMS):  # a document may add one
        exec(text, given := {})
    if "output" in given:
        assert given["output"].shape[1] > 8
    if "training" in given:
        assert given["training"].trainer.global_step == 1


def test_the_measure_of_the_worked_example_has_its_columns(tmp_path, capsys, monkeypatch):
    """One line is all that a measure needs; and the table of docs/experiments.md can be read."""
    for seed in range(2):
        for choice in ("hass", "poss-1"):
            rows = [row | {"method": choice} for row in make_rows(("poss-1",), seed=seed)]
            write_run(tmp_path / "experiments" / "methods" / f"choice={choice}" / f"seed={seed}", rows, {})
    monkeypatch.chdir(tmp_path)
    page = blocks((ROOT / "docs/extending.md").read_text(), "python")
    (example,) = [block.text for block in page if "MEASURES" in block.text]
    kept = [*MEASURES]
    try:
        exec(example, {})
    finally:
        MEASURES[:] = kept
    out = capsys.readouterr().out
    assert out.count("τ of depth 2") == 3  # methods, against the reference, by suite
    exec(blocks((ROOT / "docs/experiments.md").read_text(), "python")[0].text, {})
    assert "poss-1" in capsys.readouterr().out


def test_the_drafter_of_the_worked_example_is_lossless(tiny_folder):
    """Its last line says so."""
    (example,) = [
        block.text for block in blocks((ROOT / "docs/extending.md").read_text(), "python") if "KnownText" in block.text
    ]
    exec(example.replace('"embedded"', repr(str(tiny_folder))), {})


def test_the_family_of_the_worked_example_is_tested():
    text = (ROOT / "docs/extending.md").read_text()
    (example,) = [block.text for block in blocks(text, "python") if "FAMILIES" in block.text]
    exec(example, given := {})
    assert given["FAMILIES"].items() <= families.FAMILIES.items()


ADDED = """
from pathlib import Path
from poss_lightning.corpus.readers import read_conversations
from poss_lightning.training.fit import compose
print(compose("draft/hass.yaml", {"data": {"store": "any"}, "model": {"damping": 0.5}})["model"]["damping"])
Path("pairs.jsonl").write_text('{"pairs": [["Hi", "Hello"], ["How?", "So."]]}')
print([message["content"] for message in read_conversations("pairs.jsonl")[0].messages])
compose("draft/hass.yaml", {"data": {"store": "any"}, "model": {"damping": 2}})
"""


def test_an_option_of_a_draft_and_a_record_form_are_added_in_one_place(tmp_path):
    """By the patches in docs/extending.md, to a copy of the package."""
    changes = "".join(block.text for block in blocks((ROOT / "docs/extending.md").read_text(), "diff"))
    large = shutil.ignore_patterns("__pycache__", "shipped", "data")
    for folder in ("conf", "poss_lightning"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=large)
    subprocess.run(["git", "apply", "-"], cwd=tmp_path, input=changes, text=True, check=True)
    done = subprocess.run([sys.executable, "-c", ADDED], cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout.startswith("0.5\n['Hi', 'Hello', 'How?', 'So.']\n")
    assert "damping is 2; it must be less than or equal to 1" in done.stderr
