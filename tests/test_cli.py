"""The command line: bad input gets one clear line and leaves nothing behind; every YAML file of conf/ parses."""

import os
import platform
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
import yaml

from poss_lightning import __version__, cli
from poss_lightning.evaluation.rounds import read_rounds
from poss_lightning.evaluation.suites import HUB_SUITES
from poss_lightning.versions import STACK
from tests.support.command import Poss, left, says, unchanged
from tests.support.documents import parsed

CONF = Path(__file__).parents[1] / "conf"
EXTRACT = ("extract", "{inputs}/corpus.jsonl")
FIT = ("fit", "--data.store", "{inputs}/store", "--data.validation", "0.2", "--model.allocation")
THREE = ("fit", "--config", "draft/poss2.yaml", "--config", "trainer/cpu.yaml")
BAD = [  # one of each kind; the tests of each room have the others
    ((*EXTRACT, "{inputs}/flipped", "--verify", "true"), "shard-00000.arrow was changed since it was written"),
    (("generate", " "), "the prompt is empty: say something, or - to read it from stdin"),
    (("validate", *FIT[1:], "[2]"), "no --ckpt_path, and a draft of random weights: give"),
    ((*EXTRACT, "out", "--tarrget", "x"), "--tarrget x; did you mean target? (poss extract --help tells its options)"),
    ((*FIT, "2,2,2"), "model.allocation is 2,2,2; it must be a list, as [2,2,2] (poss fit --help"),
    (("convert", "{inputs}/draft", "o", "--allocation", "6"), "allocation is 6; it must be a list, as [6]"),
    (("replay", "{inputs}/store", "o", "--drafts", "a/b"), "drafts is a/b; it must be named, as --drafts.NAME a/b"),
    (("generate", "Hi", "--config", "{inputs}/number.yaml"), "it must be a text, so quote it in YAML; see {inputs}/n"),
    ((*FIT, "[2]", "alocation=[2]"), "begins with --, as --alocation=…; did you mean model.all"),
    ((*FIT, "[2]", "--trainer.devices", "2.5"), "trainer.devices is 2.5: "),
    ((*FIT, "[2]", "--trainer.logger", "CometLogger"), "fit: 'lightning.pytorch.loggers.CometLogger': Requirement "),
    ((*FIT, "[2]", "--config", "trainer/gpu.yaml"), "no GPU here; it must be cpu or auto, as in trainer/cpu.yaml"),
    ((*THREE, "--config={inputs}/group.yaml"), "'modle.depth'; see {inputs}/group.yaml; did you mean model.depth?"),
    ((*THREE, "--model.lr", "1"), "--model.lr 1; did you mean model.learning_rate?"),
    (("extract", "--corpus", "a"), "--corpus; corpus is given by its place"),
]


@pytest.mark.parametrize(("arguments", "words"), BAD)
def test_bad_input_gets_one_line_and_leaves_nothing(poss, inputs, tmp_path, arguments, words):
    with unchanged(tmp_path, inputs):
        result = poss(*(argument.replace("{inputs}", str(inputs)) for argument in arguments))
    says(result, arguments[0], words.replace("{inputs}", str(inputs)))


def test_drafts_may_have_names_like_numbers_and_switches(poss, inputs, tmp_path):
    """On the command line, and quoted in YAML; and a single suite needs no list."""
    for name in ("1", "on"):
        (tmp_path / name).symlink_to(inputs / "draft")
    (tmp_path / "a.yaml").write_text(f"drafts: {{'1': 'on', b: '1'}}\nsuites: {inputs / 'suite.jsonl'}")
    few = ("--target", inputs / "target", "--dtype", "float32", "--max_new_tokens", "3")
    assert poss("generate", "7", *few, "--draft", "1").code is None
    listed = ("--suites", f"[{inputs / 'suite.jsonl'}]", "--drafts", '{"1": "on", "b": "1", "7": "on"}')
    for same in (("--config", "a.yaml", "--drafts.7", "on"), listed):  # so the second resumes what the first wrote
        assert poss("benchmark", "2", *few, *same).code is None
    assert {*read_rounds("2")["method"]} == {"plain", "generate", "1", "b", "7"}


def test_an_unknown_command_gets_a_list_of_all_and_the_place_is_shown_where_asked_for(poss, monkeypatch):
    code = poss("fitt").code
    assert code.startswith("poss: no command 'fitt'; there are fit, ") and code.endswith("did you mean fit?")
    monkeypatch.setenv("POSS_TRACEBACK", "1")
    with pytest.raises(ValueError, match="the prompt is empty"):
        poss("generate", " ")


def test_help_version_and_tables_of_records_need_no_torch():
    """Its import alone takes seconds; a table needs pandas."""
    command = "from poss_lightning import cli; cli.main()"
    tables = "import poss_lightning.reports.compare"
    for code, option, most in ((command, "--help", 200), (command, "--version", 200), (tables, "", 2000)):
        look = f"import sys; {code}; print('torch' in sys.modules, len(sys.modules))"
        done = subprocess.run([sys.executable, "-c", look, option], capture_output=True, text=True, check=True)
        heavy, modules = done.stdout.split()[-2:]
        assert heavy == "False" and int(modules) < most and done.stderr == ""


def test_a_reader_that_closes_the_pipe_is_no_error():
    """`poss --help | head -1`"""
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run([sys.executable, "-m", "poss_lightning.cli", "--help"], stdout=writer, stderr=subprocess.PIPE)
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, b"")


def test_a_real_process_prints_one_line_and_fails(inputs, tmp_path):
    command = [Path(sys.executable).parent / "poss", "extract", inputs / "empty.jsonl", "out"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert (done.returncode, done.stdout, left(tmp_path)) == (1, "", [])
    assert done.stderr.count("\n") == 1 and done.stderr.startswith("poss extract: ")


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
    files = ("store/asked.json", "store/ends.safetensors", "store/manifest.json", "store/shard-00000.arrow")
    assert left(tmp_path) == ["corpus.jsonl", "store", *files]


# --- the YAML files ---

WORDS = {"extract": ["corpus", "out"], "synthesize": ["out.jsonl"], "generate": ["Hi"], "benchmark": ["out"]}
RECORDED = ("lab.yaml", "draft/hass.yaml")  # digests of these are in committed records, so their first lines stay


def commands_of(file: Path) -> list[str]:
    """The commands that the first line of a YAML file says it is for."""
    return re.findall(r"`poss (\w+)`", file.read_text().partition("\n")[0])


@pytest.mark.parametrize("file", sorted(CONF.rglob("*.yaml")), ids=lambda file: str(file.relative_to(CONF)))
def test_the_first_line_of_a_yaml_file_names_the_commands_that_take_all_its_options(file):
    """training/test_roads.py tries those of trainings, project/test_targets.py the sweeps."""
    given, commands = yaml.safe_load(file.read_text()), commands_of(file)
    assert commands or str(file.relative_to(CONF)) in RECORDED
    assert {*commands} <= {"fit", "validate", "sweep"} or {*commands} <= WORDS.keys()
    assert ("target" in given) == (file.parent.name == "target")
    for command in WORDS.keys() & {*commands}:
        options = parsed([command, *WORDS[command], "--config", str(file)])
        assert {name: options[name] for name in given} == given


def test_the_six_suites_are_the_hub_s():
    assert yaml.safe_load((CONF / "suites/six.yaml").read_text())["suites"] == [
        f"hub:{name}" for name in [*HUB_SUITES][:6]
    ]


def printed(poss: Poss, *arguments: object) -> dict:
    result = poss("fit", *arguments, "--data.store", "any", "--print_config")
    assert result.code == 0, result.code
    return yaml.safe_load(result.out)


def test_files_of_conf_are_found_by_name_outside_a_checkout_and_begin_with_the_base(poss, tmp_path):
    """The user's own file of that name comes first."""
    config = printed(poss, "--config", "draft/poss2.yaml", "--config=conf/published.yaml")
    assert config["model"]["allocation"] == [2, 2, 2] and config["data"]["batch_tokens"] == 2048
    always = {config[name]["class_path"].rsplit(".")[-1] for name in ("replay", "drafts", "checkpoint")}
    assert config["data"]["validation"] == 0.05 and always == {"Replay", "DraftFolders", "LastCheckpoint"}
    (tmp_path / "draft").mkdir()
    (tmp_path / "draft" / "poss2.yaml").write_text("model: {allocation: [5]}")
    assert printed(poss, "--config", "draft/poss2.yaml")["model"]["allocation"] == [5]


def test_an_interpolation_follows_the_command_line(poss, tmp_path):
    (tmp_path / "a.yaml").write_text("model: {allocation: [2], chunk: '${data.batch_tokens}'}\ndata: {batch_tokens: 9}")
    config = printed(poss, "--config", "a.yaml", "--data.batch_tokens", "77")
    assert config["model"]["chunk"] == 77
