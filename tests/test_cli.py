"""The command line: bad input gets one clear line and leaves nothing behind; every YAML file of conf/ parses."""

import json
import platform
import re
import shutil
import subprocess
import sys
from importlib.metadata import version
from inspect import signature
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
from tests.support.command import Poss, Result, left, says
from tests.support.documents import Command, parsed

CONF = Path(__file__).parents[1] / "conf"


@pytest.fixture
def poss(monkeypatch, capsys, tmp_path) -> Poss:
    """Run a command line in this process, in an empty folder."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: object) -> Result:
        monkeypatch.setattr(sys, "argv", ["poss", *map(str, arguments)])
        code = None
        try:
            cli.main()
        except SystemExit as stop:
            code = stop.code
        return Result(code, *capsys.readouterr())

    return run


FLOAT = ("--target", "{inputs}/target", "--dtype", "float32")
BENCHMARK = ("benchmark", "out", *FLOAT, "--suites", "[{inputs}/suite.jsonl]", "--drafts.d")
EXTRACT = ("extract", "{inputs}/corpus.jsonl")
GENERATE = ("generate", "Hi", *FLOAT)
FIT = ("fit", "--data.store", "{inputs}/store", "--data.validation", "0.2", "--model.allocation")
THREE = ("fit", "--config", "draft/poss2.yaml", "--config", "trainer/cpu.yaml")
BAD = [  # one of each kind; the tests of each room have the others
    ((*EXTRACT, "out", "--target", "nowhere/at-all"), "target 'nowhere/at-all' is neither a local folder nor a hub id"),
    ((*EXTRACT, "out", "--target", "{inputs}/no-template"), "has no chat template"),
    (("extract", "{inputs}/empty.jsonl", "out", *FLOAT), "empty.jsonl is empty: no conversation with an answer"),
    (
        (*EXTRACT, "{inputs}/store", "--target", "{inputs}/another", "--dtype", "float32"),
        "holds a different store (target ",
    ),
    ((*EXTRACT, "{inputs}/flipped", "--verify", "true"), "shard-00000.arrow was changed since it was written"),
    (("fit", "--data.store", "{inputs}/truncated", "--model.allocation", "[2]"), "shard-00000.arrow has"),
    ((*BENCHMARK, "{inputs}/contradicting"), "does not fit its config.json"),
    ((*GENERATE, "--draft", "{inputs}/draft-of-another"), "trained for a different target: fingerprint"),
    ((*GENERATE, "--depth", "3"), "depth is 3, but without --draft there is no tree"),
    (
        (*FIT, "[2]", "--ckpt_path", "{inputs}/corpus.jsonl"),
        "corpus.jsonl is not a complete checkpoint of plain tensors",
    ),
    (("validate", *FIT[1:], "[2]"), "no --ckpt_path: this is the draft before training, of random weights"),
    # an option: its name, its value, its file, the nearest option
    ((*EXTRACT, "out", "--tarrget", "x"), "--tarrget x; did you mean target? (poss extract --help tells its options)"),
    ((*FIT, "two"), "model.allocation: Expected a <class 'list'>. Got value: two (poss fit --help"),
    ((*EXTRACT, "out", "--max_length", "five"), "max_length is 'five'; it must be a valid integer"),
    (
        ("generate", "Hi", "--config", "{inputs}/number.yaml"),
        "draft: Expected a <class 'str'>. Got value: 1; it is set in",
    ),
    ((*THREE, "--config={inputs}/group.yaml"), "'modle.depth'; it is set in {inputs}/group.yaml; did you mean model."),
    (("replay", "out", "--store", "{inputs}/store"), "store is given by its place, without --store: see the usage"),
    ((*THREE, "--config", "{inputs}/tab.yaml"), "{inputs}/tab.yaml is not valid YAML, line 2: found character '\\t'"),
    # a number: before anything is loaded, and where the target decides
    ((*GENERATE, "--temperature", "1e-40"), "temperature is 1e-40; it must be 0 (greedy) or lie between 1e-06 and"),
    ((*FIT, "[2]", "--model.loss", "{token: 1e300}"), "model.loss is 1e+300; it must lie between 0 and 1000000000"),
    ((*GENERATE, "--top_k", "100000"), "top_k is 100000; the target has 320 tokens, and 0 takes all of them"),
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


def test_a_broken_run_json_is_named(poss, inputs, tmp_path):
    shutil.copytree(inputs / "records", tmp_path / "out")
    (tmp_path / "out/run.json").write_text("[]")
    words = "out/run.json is a list; it must be"
    says(poss("compare", "out"), "compare", words)
    again = (argument.replace("{inputs}", str(inputs)) for argument in (*BENCHMARK, "{inputs}/draft"))
    says(poss(*again), "benchmark", words)


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


@pytest.mark.parametrize("option", ["--help", "--version"])
def test_help_and_version_import_nothing_heavy(option):
    look = "import sys; from poss_lightning import cli; cli.main(); print('torch' in sys.modules, len(sys.modules))"
    done = subprocess.run([sys.executable, "-c", look, option], capture_output=True, text=True, check=True)
    heavy, modules = done.stdout.split()[-2:]
    assert heavy == "False" and int(modules) < 200 and done.stderr == ""


def test_tables_of_records_need_no_torch():
    """Its import alone takes seconds."""
    look = "import sys, poss_lightning.reports.compare, poss_lightning.reports.allocate; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", look], capture_output=True, text=True, check=True).stdout == "False\n"


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


def test_replays_of_two_targets_are_not_compared(poss, inputs):
    other = ("--target", inputs / "another", "--dtype", "float32")
    assert poss("extract", inputs / "corpus.jsonl", "other", *other, "--limit", "4").code is None
    for out, store, draft in (("a", inputs / "store", "draft"), ("b", "other", "draft-of-another")):
        assert poss("replay", store, out, f"--drafts.{out}", inputs / draft, "--dtype", "float32").code is None
    says(poss("compare", "[a,b]"), "compare", "a was measured on another target than b (")


# --- the YAML files ---

TRAINERS = [CONF / f"trainer/{name}.yaml" for name in ("cpu", "gpu", "ddp", "zero1", "zero2", "zero3")]
TREES, DRAFTS = sorted((CONF / "tree").glob("*.yaml")), sorted((CONF / "draft").glob("*.yaml"))
TARGETS = sorted((CONF / "target").glob("*.yaml"))


def printed(poss: Poss, *arguments: object) -> dict:
    result = poss("fit", *arguments, "--data.store", "any", "--print_config")
    assert result.code == 0, result.code
    return yaml.safe_load(result.out)


def test_every_yaml_is_tried_below():
    others = ("suites/six.yaml", "demo.yaml", "lab.yaml", "published.yaml", "trainer/base.yaml")
    tried = [*TREES, *DRAFTS, *TRAINERS, *TARGETS, *(CONF / name for name in others)]
    sweeps = [*(CONF / "reproduce").iterdir()]  # tried by tests/project/test_targets.py
    assert sorted(CONF.rglob("*.yaml")) == sorted([*tried, *sweeps])


@pytest.mark.parametrize("draft", DRAFTS, ids=lambda path: path.stem)
def test_drafts_parse(poss, draft):
    config = printed(poss, "--config", draft)["model"]
    given = yaml.safe_load(draft.read_text())["model"]
    assert {name: config[name] for name in given} == given
    assert sum(config["allocation"]) == {"eagle2": 6, "eagle3": 8, "block": 7}[config["kind"]]


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


@pytest.mark.nightly
@pytest.mark.parametrize("tree", TREES, ids=lambda path: path.stem)
def test_trees_are_benchmarked(poss, inputs, tmp_path, tree):
    common = ("--target", inputs / "target", "--dtype", "float32", "--suites", f"[{inputs / 'suite.jsonl'}]")
    draft = ("--drafts.d", inputs / "draft", "--max_new_tokens", "9")
    assert poss("benchmark", "out", *draft, *common, "--config", tree).code is None
    facts = json.loads((tmp_path / "out" / "run.json").read_text())
    given = yaml.safe_load(tree.read_text())
    assert {name: facts["methods"]["d"][name] for name in given} == given
    assert facts["command"][:3] == ["poss", "benchmark", "out"]
    assert len({tuple(record.tokens) for record in read_records(tmp_path / "out")}) == 1


@pytest.mark.parametrize("file", TARGETS, ids=lambda path: path.stem)
@pytest.mark.parametrize("words", [["extract", "corpus", "out"], ["synthesize", "out.jsonl"], ["benchmark", "out"]])
def test_a_target_is_named_by_its_yaml(words, file):
    options = parsed(Command(0, "poss", [*words, "--config", str(file)]))
    given = yaml.safe_load(file.read_text())
    assert "target" in given and {name: options[name] for name in given} == given


def test_the_six_suites_are_the_hub_s():
    options = parsed(Command(0, "poss", ["benchmark", "out", "--config", str(CONF / "suites/six.yaml")]))
    assert options["suites"] == [f"hub:{name}" for name in SIX] and options.get("limit") is None
