"""The command line: bad input gets one clear line and leaves nothing behind; every YAML file of conf/ parses."""

import platform
import re
import subprocess
import sys
from importlib.metadata import version
from inspect import signature
from itertools import product
from pathlib import Path

import pytest
import yaml

from poss_lightning import __version__, cli
from poss_lightning.evaluation.hub import SIX
from poss_lightning.evaluation.records import read_records
from poss_lightning.features.datamodule import FeatureData
from poss_lightning.training.help import SHORT_HELP
from poss_lightning.training.module import SpecialistTraining
from poss_lightning.versions import STACK
from tests.support.command import Poss, left, says
from tests.support.documents import Command, parsed

CONF = Path(__file__).parents[1] / "conf"
FLOAT = ("--target", "{inputs}/target", "--dtype", "float32")
EXTRACT = ("extract", "{inputs}/corpus.jsonl")
GENERATE = ("generate", "Hi", *FLOAT)
FIT = ("fit", "--data.store", "{inputs}/store", "--data.validation", "0.2", "--model.allocation")
THREE = ("fit", "--config", "draft/poss2.yaml", "--config", "trainer/cpu.yaml")
BAD = [  # one of each kind; the tests of each room have the others
    ((*EXTRACT, "{inputs}/flipped", "--verify", "true"), "shard-00000.arrow was changed since it was written"),
    ((*GENERATE, "--depth", "3"), "depth is 3, but without --draft there is no tree"),
    (("validate", *FIT[1:], "[2]"), "no --ckpt_path: this is the draft before training, of random weights"),
    # an option: its name, its value, its file, the nearest option
    ((*EXTRACT, "out", "--tarrget", "x"), "--tarrget x; did you mean target? (poss extract --help tells its options)"),
    ((*FIT, "two"), "model.allocation: Expected a <class 'list'>. Got value: two (poss fit --help"),
    (
        ("generate", "Hi", "--config", "{inputs}/number.yaml"),
        "draft: Expected a <class 'str'>. Got value: 1; it is set in",
    ),
    ((*THREE, "--config={inputs}/group.yaml"), "'modle.depth'; it is set in {inputs}/group.yaml; did you mean model."),
    (("replay", "out", "--store", "{inputs}/store"), "store is given by its place, without --store: see the usage"),
    ((*THREE, "--config", "{inputs}/tab.yaml"), "{inputs}/tab.yaml is not valid YAML, line 2: found character '\\t'"),
    # a number, where the target decides
]


@pytest.mark.parametrize(("arguments", "words"), BAD)
def test_bad_input_gets_one_line_and_leaves_nothing(poss, inputs, tmp_path, arguments, words):
    before = left(inputs)
    result = poss(*(argument.replace("{inputs}", str(inputs)) for argument in arguments))
    says(result, arguments[0], words.replace("{inputs}", str(inputs)))
    assert left(tmp_path) == [] and left(inputs) == before


def test_drafts_may_have_names_like_numbers_and_switches(poss, inputs, tmp_path):
    """On the command line, and quoted in YAML; and a single suite needs no list."""
    for name in ("1", "on"):
        (tmp_path / name).symlink_to(inputs / "draft")
    (tmp_path / "a.yaml").write_text(f"drafts: {{'1': 'on', b: '1'}}\nsuites: {inputs / 'suite.jsonl'}")
    few = ("--target", inputs / "target", "--dtype", "float32", "--max_new_tokens", "3")
    assert poss("generate", "7", *few, "--draft", "1").code is None
    assert poss("benchmark", "2", *few, "--config", "a.yaml", "--drafts.7", "on").code is None
    assert {record.method for record in read_records("2")} == {"plain", "generate", "1", "b", "7"}
    listed = ("--suites", f"[{inputs / 'suite.jsonl'}]", "--drafts", '{"1": "on", "b": "1", "7": "on"}')
    assert poss("benchmark", "2", *few, *listed).code is None  # the same settings
    assert poss("compare", "2").code is None


@pytest.mark.parametrize(
    ("command", "hint"),
    [
        ("predict", ""),
        ("fitt", "did you mean fit? "),
        ("answer", "did you mean synthesize --prompts? "),
    ],
)
def test_an_unknown_command_gets_a_list_of_all(poss, command, hint):
    code = poss(command).code
    assert code.startswith(f"poss: no command {command!r}; {hint}there are fit, ") and "\n" not in code


def test_the_help_of_a_training_has_our_options_and_on_demand_all(poss, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    short, full = poss("fit", "--help").out, poss("fit", "--help", "all").out
    assert short.count("\n") < 230 and "poss fit --help all has the rest" in short.splitlines()[-1]
    listed = [re.findall(r"^  --([\w.]+)", text, re.MULTILINE) for text in (short, full)]
    for options in listed:
        places = [options.index(option) for option in ("model.allocation", "data.store", "trainer.max_steps")]
        assert places == sorted(places)
    in_short, in_full = map(set, listed)
    assert in_short < in_full and "trainer.plugins" not in short
    signatures = {"model": SpecialistTraining, "data": FeatureData}
    ours = {f"{part}.{name}" for part, made in signatures.items() for name in signature(made).parameters}
    assert ours - in_short == {"model.store"}  # which the data give
    assert set(SHORT_HELP) <= in_short


# --- what works ---

COMMAND = "from poss_lightning import cli; cli.main()"
TABLES = "import poss_lightning.reports.compare, poss_lightning.reports.allocate"


@pytest.mark.parametrize(
    ("code", "option", "most"), [(COMMAND, "--help", 200), (COMMAND, "--version", 200), (TABLES, "", 2000)]
)
def test_help_version_and_tables_of_records_need_no_torch(code, option, most):
    """Its import alone takes seconds; a table needs pandas."""
    look = f"import sys; {code}; print('torch' in sys.modules, len(sys.modules))"
    done = subprocess.run([sys.executable, "-c", look, option], capture_output=True, text=True, check=True)
    heavy, modules = done.stdout.split()[-2:]
    assert heavy == "False" and int(modules) < most and done.stderr == ""


def test_a_reader_that_closes_the_pipe_is_no_error():
    """`poss --help | head -1`"""
    command = [sys.executable, "-m", "poss_lightning.cli", "--help"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    process.stdout.close()
    assert process.stderr.read() == ""
    process.stderr.close()
    assert process.wait() == 0


def test_a_real_process_prints_one_line_and_fails(inputs, tmp_path):
    command = [Path(sys.executable).parent / "poss", "extract", inputs / "empty.jsonl", "out"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.count("\n") == 1 and done.stderr.startswith("poss extract: ")
    assert left(tmp_path) == []


def test_the_version_has_those_of_the_libraries(poss):
    printed = dict(line.split() for line in poss("--version").out.splitlines())
    assert printed["poss-lightning"] == __version__ and printed["python"] == platform.python_version()
    assert all(printed[name] == version(name) for name in STACK if name != "deepspeed")


@pytest.mark.parametrize("command", [*cli.TRAINER, *cli.TOOLS])
def test_every_command_has_help(poss, command):
    result = poss(command, "--help")
    assert result.code == 0 and "usage: poss" in result.out and result.err == ""


def test_the_commands_go_together(poss, inputs, tmp_path):
    """Write, read, check, answer; with a depth beyond the allocation, which is allowed."""
    target = ("--target", inputs / "target", "--dtype", "float32")
    sizes = ("--conversations", "4", "--batch_size", "4", "--user_tokens", "6", "--answer_tokens", "8")
    assert poss("synthesize", "corpus.jsonl", *target, *sizes).code is None
    assert poss("extract", "corpus.jsonl", "store", *target).code is None
    verified = poss("extract", "corpus.jsonl", "store", "--verify", "true")
    assert "every file is as it was written" in verified.out and "verify: 100%" in verified.err
    plain = poss("generate", "Hi", *target, "--max_new_tokens", "9").out
    drafted = poss("generate", "Hi", *target, "--max_new_tokens", "9", "--draft", inputs / "draft", "--depth", "5").out
    assert drafted.split("\n\n")[0] == plain.split("\n\n")[0] and "τ" in drafted and "same tokens" in drafted
    files = ("store/ends.safetensors", "store/manifest.json", "store/shard-00000.arrow")
    assert left(tmp_path) == ["corpus.jsonl", "store", *files]


# --- the YAML files ---

TRAINERS = [CONF / f"trainer/{name}.yaml" for name in ("cpu", "gpu", "ddp", "zero1", "zero2", "zero3")]
TREES, DRAFTS = sorted((CONF / "tree").glob("*.yaml")), sorted((CONF / "draft").glob("*.yaml"))
TARGETS = sorted((CONF / "target").glob("*.yaml"))


def printed(poss: Poss, *arguments: object) -> dict:
    result = poss("fit", *arguments, "--data.store", "any", "--print_config")
    assert result.code == 0, result.code
    return yaml.safe_load(result.out)


def test_every_yaml_is_tried():
    """Here, drafts in training/test_roads.py, and sweeps in project/test_targets.py."""
    others = ("suites/six.yaml", "demo.yaml", "lab.yaml", "published.yaml", "trainer/base.yaml")
    tried = [*TREES, *DRAFTS, *TRAINERS, *TARGETS, *(CONF / name for name in others)]
    assert sorted(CONF.rglob("*.yaml")) == sorted([*tried, *(CONF / "reproduce").iterdir()])


@pytest.mark.parametrize(
    "training",
    [*TRAINERS, *(CONF / f"{name}.yaml" for name in ("demo", "lab", "published"))],
    ids=lambda path: path.stem,
)
def test_trainings_parse_with_a_draft_and_data_and_begin_with_the_base(poss, training):
    config = printed(poss, "--config", CONF / "draft/poss2.yaml", "--config", training)
    assert config["model"]["allocation"] == [2, 2, 2] and config["data"]["validation"] == 0.05
    assert config["trainer"]["gradient_clip_val"] == 0.5 and config["trainer"]["precision"] in ("auto", "bf16-mixed")
    callbacks = [callback["class_path"].rsplit(".")[-1] for callback in config["trainer"]["callbacks"]]
    assert {"Replay", "DraftFolders"} <= set(callbacks)


def test_files_of_conf_are_found_by_name_outside_a_checkout(poss, tmp_path):
    """The user's own file of that name comes first."""
    config = printed(poss, "--config", "draft/poss2.yaml", "--config=conf/published.yaml")
    assert config["model"]["allocation"] == [2, 2, 2] and config["data"]["batch_tokens"] == 2048
    (tmp_path / "draft").mkdir()
    (tmp_path / "draft" / "poss2.yaml").write_text("model: {allocation: [5]}")
    assert printed(poss, "--config", "draft/poss2.yaml")["model"]["allocation"] == [5]


def test_an_interpolation_follows_the_command_line(poss, tmp_path):
    text = "model: {allocation: [2], chunk: '${data.batch_tokens}'}\ndata: {batch_tokens: 9}\n"
    (tmp_path / "a.yaml").write_text(text)
    config = printed(poss, "--config", "a.yaml", "--data.batch_tokens", "77")
    assert config["model"]["chunk"] == 77


FILES = [*product((["extract", "corpus", "out"], ["synthesize", "out.jsonl"], ["benchmark", "out"]), TARGETS)]
FILES += [(["benchmark", "out"], tree) for tree in TREES]


@pytest.mark.parametrize(("words", "file"), FILES, ids=lambda each: each[0] if isinstance(each, list) else each.stem)
def test_a_target_or_a_tree_is_named_by_its_yaml(words, file):
    options = parsed(Command(0, "poss", [*words, "--config", str(file)]))
    given = yaml.safe_load(file.read_text())
    assert ("target" in given) == (file in TARGETS) and {name: options[name] for name in given} == given


def test_the_six_suites_are_the_hub_s():
    options = parsed(Command(0, "poss", ["benchmark", "out", "--config", str(CONF / "suites/six.yaml")]))
    assert options["suites"] == [f"hub:{name}" for name in SIX] and options.get("limit") is None
