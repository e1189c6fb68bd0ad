"""The command line: bad input is answered with one clear line and leaves nothing behind; every YAML in conf/ parses."""

import gc
import json
import platform
import re
import shutil
import signal
import subprocess
import sys
from importlib.metadata import version
from inspect import signature
from pathlib import Path

import lightning
import pytest
import torch
import yaml
from lightning_utilities.core.imports import RequirementCache

from poss_lightning import __version__, cli, extract
from poss_lightning.evaluation import benchmark, suites
from poss_lightning.evaluation.hub import SIX
from poss_lightning.evaluation.records import read_records
from poss_lightning.features.datamodule import FeatureData
from poss_lightning.training.fit import fit_once
from poss_lightning.training.help import SAID
from poss_lightning.training.module import SpecialistTraining
from poss_lightning.work import Work
from tests.support.command import Poss, Result, left, says
from tests.support.lab import write_records
from tests.support.synthetic import make_records

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
CUT = ("--vocabulary_size", "40", "--corpus", "{inputs}/corpus.jsonl", "--target", "{inputs}/target")

BAD = [
    # the target
    ((*EXTRACT, "out", "--target", "nowhere/at-all"), "target 'nowhere/at-all' is neither a local folder nor a hub id"),
    ((*EXTRACT, "out", "--target", "{inputs}/draft"), "draft' cannot be loaded: "),
    ((*EXTRACT, "out", "--target", "{inputs}/no-template"), "has no chat template"),
    ((*EXTRACT, "out", "--target", "{inputs}/target", "--dtype", "int3"), "dtype is 'int3'"),
    (("synthesize", "out.jsonl", "--target", "nowhere/at-all"), "neither a local folder nor a hub id"),
    (("synthesize", "out.jsonl", *FLOAT, "--top_p", "2"), "top_p is 2.0"),
    (("synthesize", "out.jsonl", *FLOAT, "--user_tokens", "500"), "do not fit the 512"),
    # the corpus
    (("extract", "{inputs}/empty.jsonl", "out", *FLOAT), "empty.jsonl is empty: no conversation with an answer"),
    (("extract", "{inputs}/malformed.jsonl", "out", *FLOAT), "malformed.jsonl: 2 malformed; line 2: not JSON"),
    (("extract", "nowhere.jsonl", "out", *FLOAT), "nowhere.jsonl is missing"),
    (("extract", "", "out", *FLOAT), "corpus is ''; it must be a file, a folder or a hub id"),
    ((*EXTRACT, "out", *FLOAT, "--max_length", "2"), "none of the 40 conversations has an answer within 2 tokens"),
    ((*EXTRACT, "out", *FLOAT, "--max_length", "0"), "max_length is 0"),
    # the store
    (
        (*EXTRACT, "{inputs}/store", "--target", "{inputs}/another", "--dtype", "float32"),
        "store of another kind (target ",
    ),
    ((*EXTRACT, "{inputs}/store", *FLOAT, "--max_length", "30"), "max_length 512, now 30"),
    ((*EXTRACT, "{inputs}/truncated", "--verify", "true"), "shard-00000.arrow has"),
    ((*EXTRACT, "{inputs}/flipped", "--verify", "true"), "shard-00000.arrow was changed since it was written"),
    (("fit", "--data.store", "missing", "--model.allocation", "[2]"), "missing is no finished feature store"),
    (("fit", "--data.store", "{inputs}/truncated", "--model.allocation", "[2]"), "shard-00000.arrow has"),
    ((*FIT, "[2]", "--model.start_from", "{inputs}/draft-of-another"), "has another target: fingerprint"),
    ((*FIT, "[2]", "--data.validation", "0"), "validation is 0"),
    ((*FIT, "[2]", "--data.limit", "0"), "limit is 0"),
    # the draft
    ((*FIT, "[0, 2]"), "model.allocation is [0, 2]; 0 must lie between 1 and 64"),
    ((*FIT, "[]"), "allocation is []"),
    ((*FIT, "two"), "model.allocation is 'two'; it must be a list [A,B], each a whole number"),
    ((*FIT[:-1],), "required: fit.model.allocation"),
    ((*BENCHMARK, "nowhere/draft"), "draft 'nowhere/draft' is neither a local folder nor a hub id"),
    ((*BENCHMARK, "{inputs}/no-weights"), "is not a draft: it has no model.safetensors"),
    ((*BENCHMARK, "{inputs}/contradicting"), "does not fit its config.json"),
    ((*BENCHMARK, "{inputs}/draft-of-another"), "trained for another target: fingerprint"),
    ((*GENERATE, "--draft", "{inputs}/draft-of-another"), "trained for another target: fingerprint"),
    # trees and prompts
    ((*BENCHMARK, "{inputs}/draft", "--depth", "6", "--nodes", "6"), "nodes is 6, which cannot hold a path of depth 6"),
    ((*GENERATE, "--draft", "{inputs}/draft", "--depth", "3", "--nodes", "2"), "nodes is 2"),
    ((*GENERATE, "--max_new_tokens", "0"), "max_new_tokens is 0; it must lie between 1 and 1,048,576 (no target reads"),
    ((*GENERATE, "--temperature", "-1"), "temperature is -1.0"),
    ((*GENERATE, "--top_k", "-1"), "top_k is -1; it must be 0 (all tokens) or lie between"),
    ((*GENERATE, "--chat", "true", "--json", "True"), "chat and json are both true"),
    ((*GENERATE, "--show", "tree"), "show is tree, but without --draft there is none"),
    ((*GENERATE, "--show", "tree", "--json", "true"), "show is tree and json true"),
    ((*GENERATE, "--depth", "3"), "depth is 3, but without --draft there is no tree"),
    ((*GENERATE, "--tree", "fixed"), "tree is fixed, but without --draft there is no tree"),
    ((*GENERATE, "--config", str(CONF / "tree/chain.yaml")), "but without --draft there is no tree"),
    (
        ("compare", "{inputs}/records", "--html", "out.html", "--runs", "{inputs}/draft"),
        "runs has {inputs}/draft, which holds no TensorBoard",
    ),
    ((*GENERATE, "--compare", "true"), "compare is true, but without --draft"),
    ((*GENERATE, "--tree", "tall"), "tree is 'tall'; it must be auto or fixed"),
    (("generate", " ", *FLOAT), "the prompt is empty"),
    (("generate", "word " * 600, *FLOAT), "tokens; {inputs}/target reads 512, the answer included"),
    ((*BENCHMARK[:4], *FLOAT, "--suites", "[{inputs}/long.jsonl]"), "question 1 of long, turn 0: a prompt has"),
    (("benchmark", "out", *FLOAT, "--suites", "[nowhere]"), "suite 'nowhere' is no .jsonl file"),
    (("benchmark", "out", *FLOAT, "--suites", "[{inputs}/malformed.jsonl]"), "malformed.jsonl:2: not JSON"),
    # the line itself
    (
        (*EXTRACT, "out", "--tarrget", "x"),
        "unrecognized arguments: --tarrget x; did you mean --target? (poss extract --help tells its options)",
    ),
    (
        (*FIT, "[2]", "--trainer.logger.save_dir", "runs"),
        "--trainer.logger.save_dir is an option of a logger: name a logger first: --trainer.logger TensorBoardLogger",
    ),
    (
        (*FIT, "[2]", "--trainer.logger", "TensorBoardLogger", "--trainer.logger.savedir", "runs"),
        "trainer.logger, TensorBoardLogger: Option 'savedir' is not accepted",
    ),
    (
        (*FIT, "[2]", "--trainer.logger", "TensorBoardLogger"),
        "trainer.logger, TensorBoardLogger: it needs save_dir: --trainer.logger.save_dir VALUE (poss fit --help",
    ),
    (
        ("benchmark", "out", *FLOAT, "--suites", "[chat,", "code]"),
        "unrecognized arguments: code]; a list has no spaces in the terminal, [A,B], or stands in quotes (poss",
    ),
    (
        (*FIT, "[2]", "--trainer.logger", "wandb"),
        "trainer.logger is 'wandb'; it must be the name of a class, for example TensorBoardLogger (poss fit --help",
    ),
    (
        (*FIT, "[2]", "--trainer.callbacks+=EarlyStopping", "--trainer.callbacks.montor", "val/loss"),
        "trainer.callbacks, EarlyStopping: Option 'montor' is not accepted",
    ),
    (
        ("fit", "--model.store", "{inputs}/store", "--model.allocation", "[2]"),
        "model.store is the store of the data: name it as --data.store",
    ),
    ((*EXTRACT, "out", "--max_length", "five"), "max_length is 'five'; it must be a whole number (poss extract --help"),
    ((*EXTRACT, "out", *FLOAT, "--layers", "[5]"), "layers has 5"),
    ((*EXTRACT, "out", *FLOAT, "--stored", "int8"), "stored is 'int8'; it must be exact or float8"),
    ((*EXTRACT, "s3://x/y"), "it must be a local folder"),
    (("export", "nowhere.ckpt", "out"), "nowhere.ckpt: no such file"),
    (("export", "{inputs}/corpus.jsonl", "out"), "corpus.jsonl is no whole checkpoint of plain tensors"),
    (("export", "{inputs}/draft", "{inputs}/store"), "store is there already: choose another name or remove it"),
    ((*FIT, "[2]", "--ckpt_path", "nowhere.ckpt"), "nowhere.ckpt: no such file"),
    ((*FIT, "[2]", "--ckpt_path", "{inputs}/corpus.jsonl"), "corpus.jsonl is no whole checkpoint of plain tensors"),
    ((*FIT, "[2]", "--ckpt_path", "{inputs}/store"), "store is a folder, and no draft's; give a .ckpt file"),
    (("validate", *FIT[1:], "[2]"), "no --ckpt_path: this is the draft before training, of random weights"),
    (
        ("test", *FIT[1:], "[2]", "--ckpt_path", "{inputs}/draft"),
        "draft is a draft's folder; give a training's checkpoints/last.ckpt, or `poss replay` the draft",
    ),
    (("replay", "{inputs}/store", "out", "--device", "abacus"), "device is 'abacus'"),
    (("replay", "{inputs}/store", "out", "--drafts.lookup", "x"), "a draft is named 'lookup', like a baseline"),
    (("export", "{inputs}/draft", "out", "--vocabulary_size", "0"), "vocabulary_size is 0; it must lie between 1 and"),
    (("export", "{inputs}/no-weights", "out"), "is not a draft: it has no model.safetensors"),
    (("export", "{inputs}/draft-of-another", "out", *CUT), "another target: fingerprint"),
    (("plan", "--tokens", "1"), "tokens is 1; it must"),
    (("fit", "--model.allocation", "[2]"), "store is None and corpus None; give one of them"),
    ((*FIT, "[2]", "--data.target", "x"), "target is 'x', but the features in store '"),
    (("extract",), "required: corpus, out"),
    ((*EXTRACT, "out", "--config", "nowhere.yaml"), "File does not exist"),
    ((*EXTRACT, "out", "--config", str(CONF / "tree" / "chain.yaml")), "'depth' is not accepted"),
    ((*THREE, "--config", "{inputs}/misspelt.yaml"), "in {inputs}/misspelt.yaml; did you mean model.allocation?"),
    ((*THREE, "--config={inputs}/group.yaml"), "'modle.depth'; it stands in {inputs}/group.yaml; did you mean model."),
    ((*THREE, "--config", "{inputs}/flat.yaml"), "flat.yaml; did you mean model.allocation, below `model:`? (poss fit"),
    (("fit", "--config", "{inputs}/value.yaml"), "each a whole number; it stands in {inputs}/value.yaml (poss"),
    ((*THREE, "--config", "{inputs}/tab.yaml"), "{inputs}/tab.yaml is no YAML, line 2: found character '\\t'"),
    ((*EXTRACT, "out", "--config", "{inputs}/open.yaml"), "{inputs}/open.yaml is no YAML, line 2: expected ','"),
    ((*THREE, "--config", "{inputs}/empty.yaml"), "{inputs}/empty.yaml is empty; it must have options, `name: value`"),
    ((*THREE, "--config", "{inputs}/list.yaml"), "{inputs}/list.yaml is a list; it must have options"),
    ((*THREE, "--config", "{inputs}/latin.yaml"), "{inputs}/latin.yaml is no YAML: 'utf-8' codec"),
    ((*EXTRACT, "out", "--config", "{inputs}/flat.yaml"), "'allocation' is not accepted; it stands in {inputs}/flat"),
    ((*FIT, "[2]", "--trainer.max_stepss", "3"), "unrecognized arguments: --trainer.max_stepss 3"),
    ((*FIT, "[2]", "--trainer.accelerator", "abacus"), "accelerator"),
    ((*EXTRACT, "out", "--max_len", "5"), "unrecognized arguments: --max_len 5; did you mean --max_length?"),
    ((*BENCHMARK, "{inputs}/draft", "--dept", "4"), "unrecognized arguments: --dept 4; did you mean --depth?"),
    (("fit", "--data.stor", "{inputs}/store"), "unrecognized arguments: --data.stor"),
    (("replay", "out", "--store", "{inputs}/store"), "store stand in their places, without --store: see the usage"),
    (("extract", "--corpus", "x", "--out", "y"), "corpus and out stand in their places, without --corpus and --out"),
    ((*FIT, "[2]", "--optimizer", "torch.optim.SGD"), "--optimizer torch.optim.SGD; did you mean --model.optimizer?"),
    ((*EXTRACT, "out", *FLOAT, "--layers", "[2,2"), "layers is '[2,2'; it must be a list [A,B], each a whole number"),
    (("compare", "nowhere"), "nowhere: no such file"),
    # one value in place of several
    ((*BENCHMARK[:4], "--drafts", "{inputs}/draft"), "it must be names with values {A: B}, each a text"),
    (("merge", "[1,2]", "out"), "stores is '1'; it must be a list [A,B], each a text; YAML reads 1 as int: quote it"),
    (("merge", "runs/x", "out"), "stores is 'runs/x'; it must be a list [A,B], each a text (poss merge"),
    (("benchmark", "out", *FLOAT, "--suites", "nowhere"), "suite 'nowhere' is no .jsonl file"),
    # numbers out of their range, before anything is loaded
    ((*GENERATE, "--temperature", "1e-40"), "temperature is 1e-40; it must be 0 (greedy) or lie between 1e-06 and"),
    (("synthesize", "out.jsonl", "--answer_temperature", "1e-320"), "answer_temperature is 1e-320; it must be 0"),
    (
        (*GENERATE, "--max_new_tokens", "1000000000"),
        "max_new_tokens is 1000000000; it must lie between 1 and 1,048,576",
    ),
    ((*GENERATE, "--nodes", "1000000000"), "nodes is 1000000000; it must lie between 1 and 1,024 (to verify more"),
    ((*GENERATE, "--top_k", "100000"), "top_k is 100000; the target has 320 tokens, and 0 takes all of them"),
    ((*BENCHMARK, "{inputs}/draft", "--top_k", "321"), "top_k is 321; the target has 320 tokens"),
    (("answer", "o.jsonl", "--batch_size", "100000000000"), "batch_size is 100000000000; it must lie between 1 and 4"),
    (
        ("synthesize", "o.jsonl", "--seed", "99999999999999999999"),
        "seed is 99999999999999999999; it must lie between 0",
    ),
    (("synthesize", "o.jsonl", "--seed", "-1"), "seed is -1; it must lie between 0 and 4,294,967,295"),
    ((*BENCHMARK, "x", "--seed", "-1"), "seed is -1; it must lie between 0 and 4,294,967,295"),
    ((*FIT, "[2]", "--seed_everything", "-1"), "seed_everything is -1; it must lie between 0 and 4,294,967,295"),
    ((*BENCHMARK, "x", "--limit", "10000000000"), "limit is 10000000000; it must lie between 1 and 1,000,000,000"),
    ((*FIT, "[2]", "--model.betas", "[0.9,2]"), "model.betas is (0.9, 2.0); 2.0 must lie between 0 and 0.999999999"),
    ((*FIT, "[60,60]"), "allocation is [60, 60]; it must be a list of positive integers, e.g. [2, 2, 2], of 64 pos"),
    (("plan", "--allocation", "[1000000000]"), "allocation is [1000000000]; 1000000000 must lie between 1 and 64"),
    ((*EXTRACT, "out", *FLOAT, "--layers", "[1,1]"), "layers is [1, 1]; name each layer once"),
    (
        ("answer", "o.jsonl", *FLOAT, "--max_new_tokens", "600"),
        "no prompt leaves room for it: {inputs}/target reads 512",
    ),
]


@pytest.mark.parametrize(("arguments", "words"), BAD)
def test_bad_input_is_answered_with_one_line_and_leaves_nothing(poss, inputs, tmp_path, arguments, words):
    before = left(inputs)
    result = poss(*(argument.replace("{inputs}", str(inputs)) for argument in arguments))
    says(result, arguments[0], words.replace("{inputs}", str(inputs)))
    assert left(tmp_path) == [] and left(inputs) == before


@pytest.mark.parametrize(
    ("command", "text", "words"),
    [
        (
            "generate",
            "draft: 1",
            "draft is '1'; it must be a text or null; YAML reads 1 as int: quote it; it stands in",
        ),
        ("generate", "draft: on", "draft is 'True'; it must be a text or null; YAML reads True as bool: quote it"),
        (
            "benchmark",
            "drafts: {d: 1}",
            "it must be names with values {A: B}, each a text or null; YAML reads 1 as int",
        ),
        ("replay", "drafts: {on: d}", "a draft is named True, which YAML reads as bool: quote it"),
        ("benchmark", "drafts: {1: d}", "a draft is named 1, which YAML reads as int: quote it"),
        ("benchmark", "suites: [chat, 7]", "YAML reads 7 as int: quote it; it stands in a.yaml"),
        (
            "replay",
            "drafts: [1]",
            "is '[1]'; it must be names with values {A: B}, each a text or null; it stands in a.ya",
        ),
    ],
)
def test_a_text_that_yaml_reads_otherwise_is_to_be_quoted(poss, tmp_path, command, text, words):
    (tmp_path / "a.yaml").write_text(text)
    first = {"generate": ["Hi"], "benchmark": ["out"], "replay": ["store", "out"]}[command]
    says(poss(command, *first, "--config", "a.yaml"), command, words)


def test_folders_named_like_numbers_and_switches_are_drafts_too(poss, inputs, tmp_path):
    """In the terminal, and quoted in YAML; and one suite needs no list."""
    for name in ("1", "on"):
        (tmp_path / name).symlink_to(inputs / "draft")
    (tmp_path / "a.yaml").write_text(f"drafts: {{'1': 'on', b: '1'}}\nsuites: {inputs / 'suite.jsonl'}")
    few = ("--target", inputs / "target", "--dtype", "float32", "--max_new_tokens", "3")
    assert poss("generate", "7", *few, "--draft", "1").code is None
    assert poss("benchmark", "2", *few, "--config", "a.yaml", "--drafts.7", "on").code is None
    assert {record.method for record in read_records("2")} == {"autoregressive", "generate", "1", "b", "7"}
    listed = ("--suites", f"[{inputs / 'suite.jsonl'}]", "--drafts", '{"1": "on", "b": "1", "7": "on"}')
    assert poss("benchmark", "2", *few, *listed).code is None  # the same settings
    assert poss("compare", "2").code is None


@pytest.fixture
def others(tmp_path) -> Path:
    """What is given in place of a draft's folder, as far as it is looked at."""
    models = ("eagle", "eagle3", "library", "model", "small", "served")
    for folder in ("run/draft-best", "run/checkpoints", "run/a b", "sweep", *models):
        (tmp_path / folder).mkdir(parents=True)
    for file in (
        "run/checkpoints/last.ckpt",
        "run/a b/best.ckpt",
        "model/tokenizer.json",
        "library/tokenizer.json",
        "run/draft-best/config.json",
    ):
        (tmp_path / file).touch()
    more = {"eagle3": {"draft_vocab_size": 40}, "library": {"speculators_model_type": "eagle3"}}
    more |= {"small": {"num_hidden_layers": 2}, "served": {"poss_lightning": {"allocation": [1, 1]}}}
    for folder in models:
        config = {"architectures": ["LlamaForCausalLM"], **more.get(folder, {})}
        (tmp_path / folder / "config.json").write_text(json.dumps(config))
    (tmp_path / "sweep/sweep.yaml").write_text("choices: {a: {}}")
    (tmp_path / "asked.jsonl").write_text(json.dumps({"messages": [{"role": "user", "content": "Why?"}]}))
    return tmp_path


PUBLISHED = "is a draft in a published format; one of ours is written by: poss convert"
EXPORTED = "is written by: poss export"


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("run", "run is a training's folder; its draft is run/draft-best"),
        (".", ". is a training's folder; its draft is run/draft-best"),
        ("run/checkpoints/last.ckpt", f"a training's checkpoint; its draft {EXPORTED} run/checkpoints/last.ckpt DRAFT"),
        ("run/checkpoints", f"a folder of checkpoints; a draft {EXPORTED} run/checkpoints/last.ckpt DRAFT"),
        ("run/a b", f"a folder of checkpoints; a draft {EXPORTED} 'run/a b/best.ckpt' DRAFT"),
        ("eagle", f"eagle {PUBLISHED} eagle DRAFT --input_format eagle --target TARGET"),
        ("eagle3", f"{PUBLISHED} eagle3 DRAFT --input_format eagle3 --target TARGET"),
        ("library", f"{PUBLISHED} library DRAFT --input_format speculators --target TARGET"),
        ("model", "model is a whole model: it may be the target"),
        ("small", "small is a whole model: it may be the target"),
        ("served", "served is a draft of ours as vLLM reads it; give the one that it was made from"),
        ("asked.jsonl", "asked.jsonl is a file; a draft is a folder with config.json and model.safetensors"),
        (
            "{inputs}/store",
            "is a feature store; a draft is trained on it by: poss fit --config draft/poss2.yaml --data",
        ),
    ],
)
def test_what_is_no_draft_is_named_with_the_command_that_makes_one(poss, inputs, others, given, words):
    given = given.replace("{inputs}", str(inputs))
    for command in (
        ("generate", "Hi", "--draft", given),
        ("benchmark", "out", "--drafts.d", given),
        ("replay", inputs / "store", "out", "--drafts.d", given),
        ("convert", given, "out", "--output_format", "vllm"),
    ):
        says(poss(*command), command[0], words)
    assert not (others / "out").exists()


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (("compare", "run"), "run is a training's folder, its draft run/draft-best; it is measured by: poss benchmark"),
        (("compare", "{inputs}/draft"), "is a draft; it is measured by: poss benchmark RECORDS --drafts.NAME {inputs}"),
        (("compare", "{inputs}/store"), "is a feature store; a draft is measured on it by: poss replay {inputs}/store"),
        (
            ("compare", "sweep"),
            "sweep is an experiment of which no training is done; go on with it by: poss sweep sweep",
        ),
        (("compare", "sweep/sweep.yaml"), "sweep/sweep.yaml lies beside records: give its folder, sweep"),
        (("compare", "{inputs}/records/run.json"), "lies beside records: give its folder, {inputs}/records"),
        (
            ("sweep", "sweep/sweep.yaml"),
            "sweep.yaml is a file; an experiment is the folder of its sweep.yaml: poss sweep s",
        ),
        (
            ("extract", "{inputs}/suite.jsonl", "out"),
            "it has 'turns', and `poss answer` lets a target answer questions",
        ),
        (("extract", "asked.jsonl", "out"), "with an answer (1 without); `poss answer` lets a target answer them"),
        (
            ("convert", "{inputs}/draft", "out", "--input_format", "eagle"),
            "its config.json is of our format: leave out --input_format",
        ),
    ],
)
def test_what_is_of_another_kind_is_named_with_the_command_that_goes_on(poss, inputs, others, command, words):
    said = poss(*(argument.replace("{inputs}", str(inputs)) for argument in command))
    says(said, command[0], words.replace("{inputs}", str(inputs)))


def test_an_unknown_command_is_answered_with_those_there_are(poss):
    for command, near in (("predict", ""), ("--verbose", ""), ("fitt", "fit"), ("compere", "compare")):
        result, hint = poss(command), f"did you mean {near}? " if near else ""
        assert result.code.startswith(f"poss: no command {command!r}; {hint}there are fit, ")
        assert "\n" not in result.code


@pytest.mark.parametrize("records", ["[]", "", " "])
def test_no_records_at_all_are_not_all_below_here(poss, tmp_path, records):
    (tmp_path / "a").mkdir()
    write_records(tmp_path / "a", make_records(prompts=2), {})
    says(poss("compare", records), "compare", "records is [")


@pytest.mark.parametrize(("content", "words"), [("[]", "is a list; it must be"), ("{oops", "is not JSON: Expecting")])
def test_a_run_json_that_is_none_is_named(poss, inputs, tmp_path, content, words):
    shutil.copytree(inputs / "records", tmp_path / "out")
    (tmp_path / "out/run.json").write_text(content)
    says(poss("compare", "out"), "compare", f"out/run.json {words}")
    again = (argument.replace("{inputs}", str(inputs)) for argument in (*BENCHMARK, "{inputs}/draft"))
    says(poss(*again), "benchmark", f"out/run.json {words}")


def test_a_probe_of_another_target_is_refused(poss, inputs, tmp_path):
    probe = {"class_path": "poss_lightning.evaluation.probe.Probe", "init_args": {"target": str(inputs / "another")}}
    quiet = ("--trainer.accelerator", "cpu", "--trainer.max_steps", "1", "--trainer.num_sanity_val_steps", "0")
    flags = ("--trainer.logger", "false", "--trainer.enable_checkpointing", "false", "--trainer.enable_progress_bar")
    store = ("fit", "--data.store", inputs / "store", "--data.validation", "0.2", "--model.allocation", "[2]")
    result = poss(*store, *quiet, *flags, "false", "--trainer.callbacks", json.dumps([probe]))
    assert "the probe's target is not the store's: fingerprint" in result.code and "\n" not in result.code


# --- a training's folder ---

SHORT = ("--trainer.accelerator", "cpu", "--trainer.precision", "32-true", "--trainer.enable_progress_bar", "false")
ONE = (*SHORT, "--trainer.max_steps", "1", "--trainer.limit_val_batches", "0")
LOGGER = {"save_dir": ".", "name": "run", "version": ""}
AGAIN = ("--trainer.logger", json.dumps({"class_path": "TensorBoardLogger", "init_args": LOGGER}))
LAST = "run/checkpoints/last.ckpt"


@pytest.fixture
def small(inputs) -> tuple[object, ...]:
    return ("--data.store", inputs / "store", "--data.validation", "0.2", "--model.allocation", "[2]")


def contents(folder: Path) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in left(folder) if (folder / name).is_file()}


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 128 + signal.SIGTERM), (signal.SIGINT, 1)], ids=str)
def test_a_training_that_is_stopped_did_not_succeed_and_says_how_to_go_on(small, tmp_path, number, code):
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
    reached = torch.load(tmp_path / LAST, weights_only=True)["global_step"]
    assert any(f"stopped at step {reached}: --ckpt_path {LAST} goes on" in line for line in said[-3:]), said
    assert any("interrupted" in line for line in said) == (number == signal.SIGINT)


def test_a_folder_with_a_training_takes_no_other_and_what_cannot_go_on_leaves_it(poss, small, tmp_path, monkeypatch):
    command = [Path(sys.executable).parent / "poss", "fit", *small, *ONE, *AGAIN]
    first = subprocess.run(command, capture_output=True, text=True, check=True)  # where warnings and logs are printed
    assert "no validation ran, so there is no draft-best" in first.stderr
    assert "draft written to run/draft-last; next: poss generate" in first.stderr
    assert not any(noise in first.stderr + first.stdout for noise in ("weights_only", "HINT", "monitored"))
    before = contents(tmp_path)
    (tmp_path / "torn.ckpt").write_bytes(before[LAST][: len(before[LAST]) // 2])
    second = poss("fit", *small, *ONE, *AGAIN)
    says(second, "fit", f"run holds a training already: go on with --ckpt_path {LAST}, or choose another name")
    for command, given, words in [
        ("fit", "torn.ckpt", "torn.ckpt is no whole checkpoint of plain tensors"),
        ("validate", "torn.ckpt", "torn.ckpt is no whole checkpoint of plain tensors"),
        ("fit", "gone.ckpt", "gone.ckpt: no such file"),
        ("fit", "run/draft-last", "run/draft-last is a draft's folder; give a training's checkpoints/last.ckpt"),
    ]:
        says(poss(command, "--config", "run/config.yaml", "--ckpt_path", given), command, words)
    (tmp_path / "torn.ckpt").unlink()
    assert contents(tmp_path) == before

    other = poss("fit", "--config", "run/config.yaml", "--data.seed", "1", "--ckpt_path", LAST)
    says(other, "fit", "of other data")  # Lightning itself has begun to log
    assert contents(tmp_path)["run/config.yaml"] == before["run/config.yaml"]

    given = ("--model.learning_rate", "1e-5", "--model.not_finite", "skip", "--trainer.max_steps", "2")
    with pytest.warns(UserWarning, match="the learning rate is 1e-05 from here, it was 3e-05"):
        went_on = poss("fit", "--config", "run/config.yaml", "--ckpt_path", LAST, *given)
    assert went_on.code is None and left(tmp_path / "run/checkpoints") == ["last.ckpt"]
    settings = yaml.safe_load((tmp_path / "run/config.yaml").read_text())
    assert settings["trainer"]["max_steps"] == 2 and settings["ckpt_path"] is None  # of another training no beginning
    assert (settings["model"]["learning_rate"], settings["model"]["not_finite"]) == (1e-5, "skip")
    drafts = poss("fit", "--config", "run/config.yaml", "--ckpt_path", LAST, "--model.allocation", "[1, 1]")
    says(drafts, "fit", "allocation is (1, 1), and the checkpoint's draft has (2,)")
    with pytest.warns(UserWarning, match="nothing was left to train at step 2"):
        poss("fit", "--config", "run/config.yaml", "--ckpt_path", LAST)

    elsewhere = ("--trainer.logger.save_dir", tmp_path, "--trainer.max_steps", "3")  # the same, by another path
    assert poss("fit", "-c", "run/config.yaml", "--ckpt_path", tmp_path / LAST, *elsewhere).code is None
    assert left(tmp_path / "run/checkpoints") == ["last.ckpt"]
    assert torch.load(tmp_path / LAST, weights_only=True)["global_step"] == 3

    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    says(poss("fit", *small, *ONE, *AGAIN), "fit", f"run holds a training already: go on with --ckpt_path {LAST}")
    shutil.copy(tmp_path / LAST, tmp_path / "hpc_ckpt_1.ckpt")  # as Lightning leaves it when SLURM ends a job
    with monkeypatch.context() as job, pytest.warns(UserWarning, match="nothing was left to train at step 3"):
        for name, value in {"NTASKS": 1, "PROCID": 0, "LOCALID": 0, "NODEID": 0, "JOB_ID": 7}.items():
            job.setenv(f"SLURM_{name}", str(value))
        assert poss("fit", *small, *ONE, *AGAIN, "--trainer.max_steps", "3").code is None
    (tmp_path / "hpc_ckpt_1.ckpt").unlink()
    monkeypatch.delenv("SLURM_RESTART_COUNT")
    shutil.rmtree(tmp_path / "run/checkpoints")  # only drafts: nothing to go on with
    says(poss("fit", *small, *ONE, *AGAIN), "fit", "run holds a training already: remove it, or choose another name")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")  # but a job that was killed so early may begin anew
    assert poss("fit", *small, *ONE, *AGAIN).code is None


def test_a_training_goes_on_in_its_own_folder_where_folders_are_numbered(poss, small, tmp_path):
    names = ("--trainer.logger.save_dir", "runs", "--trainer.logger.name")
    command = ("fit", *small, *SHORT, "--trainer.logger", "TensorBoardLogger", *names)
    last = "runs/hass/version_0/checkpoints/last.ckpt"
    assert poss(*command, "hass", "--trainer.max_steps", "1").code is None
    goes_on = ("fit", "--config", "runs/hass/version_0/config.yaml", "--ckpt_path", last)
    assert poss(*goes_on, "--trainer.max_steps", "2").code is None
    assert [folder.name for folder in (tmp_path / "runs/hass").iterdir()] == ["version_0"]
    assert torch.load(tmp_path / last, weights_only=True)["global_step"] == 2

    fork = poss(*goes_on, "--trainer.logger.name", "fork", "--trainer.max_steps", "3")
    assert fork.code is None and (tmp_path / "runs/fork/version_0/draft-best/model.safetensors").is_file()


def test_a_second_training_in_a_folder_is_refused_while_the_first_runs(poss, small, tmp_path):
    run = ("--trainer.logger.save_dir", tmp_path)
    with Work(tmp_path / "run/unfinished").exclusive():
        says(poss("fit", *small, *ONE, *AGAIN, *run), "fit", "run: another process writes there")
        assert left(tmp_path / "run") == ["unfinished", "unfinished/work.lock"]


def test_a_logger_whose_package_is_not_installed_says_which(poss, small, monkeypatch):
    monkeypatch.setattr("lightning.pytorch.loggers.wandb._WANDB_AVAILABLE", RequirementCache("wandb>=999"))
    words = "WandbLogger needs wandb>=999, which is not installed: pip install 'wandb>=999'"
    says(poss("fit", *small, "--trainer.logger", "WandbLogger"), "fit", words)


def test_a_training_that_is_over_takes_no_memory(inputs, tmp_path):
    """A sweep has many in one process. Other tests may have left some, in objects that refer to each other."""

    def alive() -> int:
        return sum(isinstance(each, SpecialistTraining) for each in gc.get_objects())

    gc.collect()
    before = alive()
    data = {"store": str(inputs / "store"), "validation": 0.2}
    options = {"data": data, "model": {"allocation": [2], "vocabulary_size": None}, "trainer": {"max_steps": 1}}
    fit_once(tmp_path / "cell", "lab.yaml", options)
    assert alive() == before


def test_a_rehearsal_leaves_nothing(poss, small, tmp_path):
    (tmp_path / "draft-last").mkdir()  # and minds nobody else's
    before = left(tmp_path)
    assert poss("fit", *small, *ONE[: len(SHORT)], *AGAIN, "--trainer.fast_dev_run", "true").code is None
    assert left(tmp_path) == before


def test_a_start_is_measured_with_a_warning(poss, inputs, small):
    start = ("--model.start_from", inputs / "draft", "--trainer.logger", "false")
    with pytest.warns(UserWarning, match="no --ckpt_path: this is the draft before training, as .*/draft has it"):
        result = poss("validate", *small, *SHORT, *start)
    assert result.code is None and "val/loss" in result.out


def test_a_target_that_is_not_supported_is_refused_in_a_line(poss, monkeypatch):
    def load(*args) -> None:
        raise NotImplementedError("its layers are of kind 'mamba'")

    monkeypatch.setattr("poss_lightning.target.model.Target.load", load)
    says(poss("generate", "hi"), "generate", "its layers are of kind 'mamba'")


def test_an_export_says_what_it_wrote(poss, inputs, target):
    out = poss("export", inputs / "draft", "out", "--dtype", "bfloat16").out
    assert out == f"out: allocation [1, 1], for {target.spec.name}, in bfloat16\n"


def test_the_help_of_a_training_has_what_is_ours_and_all_of_it_when_asked(poss, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    short, whole = poss("fit", "--help").out, poss("fit", "--help", "all").out
    assert short.count("\n") < 230 and "poss fit --help all has the rest" in short.splitlines()[-1]
    ours = ("model.allocation", "data.store", "trainer.max_steps")
    for said in (short, whole):
        places = [re.search(rf"^  --{option}[ ,]", said, re.MULTILINE).start() for option in ours]
        assert places == sorted(places)
    options = {said: set(re.findall(r"^  --([\w.]+)", said, re.MULTILINE)) for said in (short, whole)}
    assert options[short] < options[whole] and "trainer.plugins" not in short
    signatures = {"model": SpecialistTraining, "data": FeatureData}
    mine = {f"{part}.{name}" for part, made in signatures.items() for name in signature(made).parameters}
    assert mine - options[short] == {"model.store"}  # which the data give
    assert set(SAID) <= options[short]


def test_help_takes_all_on_either_side_and_no_other_word(poss, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    short, whole = poss("fit", "--help").out, poss("fit", "--help", "all").out
    for words in (("-h", "all"), ("all", "--help"), ("--help=all",), ("--data.store", "all", "--help", "all")):
        assert poss("fit", *words).out == whole, words
    for words in (("-h",), ("--model.allocation", "[2]", "--help"), ("--help", "--data.store", "all")):
        assert poss("fit", *words).out == short, words
    for words in (("--help", "al"), ("al", "-h"), ("--help=al",), ("--help", "all", "al")):
        says(poss("fit", *words), "fit", "it must be --help, or --help all")


# --- what works ---


def test_help_and_version_are_there_at_once():
    """In a true process, which exits with 0 and has not imported anything heavy."""
    look = "import sys; from poss_lightning import cli; cli.main(); print('torch' in sys.modules, len(sys.modules))"
    for option in ("--help", "--version"):
        done = subprocess.run([sys.executable, "-c", look, option], capture_output=True, text=True, check=True)
        heavy, modules = done.stdout.split()[-2:]
        assert heavy == "False" and int(modules) < 200 and done.stderr == ""


def test_tables_of_records_need_no_torch():
    """Its import alone takes seconds."""
    look = "import sys, poss_lightning.reports.compare, poss_lightning.reports.allocate; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", look], capture_output=True, text=True, check=True).stdout == "False\n"


def test_a_reader_who_has_seen_enough_is_no_error():
    """`poss --help | head -1`"""
    command = [sys.executable, "-m", "poss_lightning.cli", "--help"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    process.stdout.close()
    assert process.stderr.read() == ""
    process.stderr.close()
    assert process.wait() == 0


def test_control_characters_of_names_are_spelt_out(poss):
    result = poss("compare", "a\x1b[2Jb\x07")
    assert r"a\x1b[2Jb\x07: no such file" in result.code and "\x1b" not in result.code


def test_the_version_names_the_stack(poss):
    said = dict(line.split() for line in poss("--version").out.splitlines())
    assert said["poss-lightning"] == __version__ and said["python"] == platform.python_version()
    assert said["torch"] == version("torch") and said["lightning"] == lightning.__version__
    assert {"transformers", "torchmetrics", "datasets"} <= said.keys()


def test_a_true_process_prints_one_line_and_fails(inputs, tmp_path):
    command = [Path(sys.executable).parent / "poss", "extract", inputs / "malformed.jsonl", "out"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.count("\n") == 1 and done.stderr.startswith("poss extract: ")
    assert left(tmp_path) == []


@pytest.mark.parametrize("command", [*cli.TRAINER, *cli.TOOLS])
def test_every_command_has_help(poss, command):
    result = poss(command, "--help")
    assert result.code == 0 and "usage: poss" in result.out and result.err == ""


def test_the_commands_go_together(poss, inputs, tmp_path):
    """Write, read, check, answer: with a depth beyond the allocation, which is allowed."""
    target = ("--target", inputs / "target", "--dtype", "float32")
    sizes = ("--conversations", "4", "--batch_size", "4", "--user_tokens", "6", "--answer_tokens", "8")
    assert poss("synthesize", "corpus.jsonl", *target, *sizes).code is None
    assert poss("extract", "corpus.jsonl", "store", *target).code is None
    verified = poss("extract", "corpus.jsonl", "store", "--verify", "true")
    assert "every file is as it was written" in verified.out and "verify: 100%" in verified.err
    plain = poss("generate", "Hi", *target, "--max_new_tokens", "9").out
    drafted = poss("generate", "Hi", *target, "--max_new_tokens", "9", "--draft", inputs / "draft", "--depth", "5").out
    assert drafted.split("\n\n")[0] == plain.split("\n\n")[0] and "τ" in drafted and "same tokens" in drafted
    assert left(tmp_path) == sorted(["corpus.jsonl", "store", *(f"store/{name}" for name in FILES)])


def test_replays_of_two_targets_do_not_compare(poss, inputs):
    other = ("--target", inputs / "another", "--dtype", "float32")
    assert poss("extract", inputs / "corpus.jsonl", "other", *other, "--limit", "4").code is None
    for out, store, draft in (("a", inputs / "store", "draft"), ("b", "other", "draft-of-another")):
        assert poss("replay", store, out, f"--drafts.{out}", inputs / draft, "--dtype", "float32").code is None
    says(poss("compare", "[a,b]"), "compare", "a was measured on another target than b (")


FILES = ("ends.safetensors", "manifest.json", "shard-00000.arrow")


# --- the YAML files ---

TRAINERS = [CONF / f"trainer/{name}.yaml" for name in ("cpu", "gpu", "ddp", "fsdp2", "zero1", "zero2", "zero3")]
TREES, DRAFTS = sorted((CONF / "tree").glob("*.yaml")), sorted((CONF / "draft").glob("*.yaml"))
TARGETS = sorted((CONF / "target").glob("*.yaml"))


def printed(poss: Poss, *arguments: object) -> dict:
    result = poss("fit", *arguments, "--data.store", "any", "--print_config")
    assert result.code == 0, result.code
    return yaml.safe_load(result.out)


def test_every_yaml_is_tried_below():
    others = ("data/padded.yaml", "suites/six.yaml", "demo.yaml", "lab.yaml", "published.yaml", "trainer/base.yaml")
    tried = [*TREES, *DRAFTS, *TRAINERS, *TARGETS, *(CONF / name for name in others)]
    sweeps = [*(CONF / "reproduce").iterdir()]  # tried by tests/project/test_targets.py
    assert sorted(CONF.rglob("*.yaml")) == sorted([*tried, *sweeps])


@pytest.mark.parametrize("draft", DRAFTS, ids=lambda path: path.stem)
def test_drafts_parse(poss, draft):
    config = printed(poss, "--config", draft)["model"]
    given = yaml.safe_load(draft.read_text())["model"]
    assert {name: config[name] for name in given} == given
    assert sum(config["allocation"]) == (8 if config["kind"] == "eagle3" else 6)


@pytest.mark.parametrize(
    "training",
    [*TRAINERS, *(CONF / f"{name}.yaml" for name in ("demo", "lab", "published"))],
    ids=lambda path: path.stem,
)
def test_trainings_parse_with_a_draft_and_data_and_begin_with_the_base(poss, training):
    config = printed(
        poss, "--config", CONF / "draft/poss2.yaml", "--config", CONF / "data/padded.yaml", "--config", training
    )
    assert config["model"]["allocation"] == [2, 2, 2] and config["data"]["validation"] == 0.05
    assert config["trainer"]["gradient_clip_val"] == 0.5 and config["trainer"]["precision"] in ("auto", "bf16-mixed")
    callbacks = [callback["class_path"].rsplit(".")[-1] for callback in config["trainer"]["callbacks"]]
    assert {"Replay", "DraftFolders"} <= set(callbacks)


def test_files_of_conf_are_found_by_name_away_from_a_checkout(poss, tmp_path):
    """A file of one's own goes first."""
    config = printed(poss, "--config", "draft/poss2.yaml", "--config=conf/data/padded.yaml")
    assert config["model"]["allocation"] == [2, 2, 2] and config["data"]["packed"] is False
    (tmp_path / "draft").mkdir()
    (tmp_path / "draft" / "poss2.yaml").write_text("model: {allocation: [5]}")
    assert printed(poss, "--config", "draft/poss2.yaml")["model"]["allocation"] == [5]


def test_an_interpolation_follows_the_command_line(poss, tmp_path):
    (tmp_path / "a.yaml").write_text(
        "model: {allocation: [2], chunk: '${data.batch_tokens}'}\ndata: {batch_tokens: 9}\n"
    )
    config = printed(poss, "--config", "a.yaml", "--data.batch_tokens", "77")
    assert config["model"]["chunk"] == 77


@pytest.mark.parametrize("tree", TREES, ids=lambda path: path.stem)
def test_trees_are_benchmarked(poss, inputs, tmp_path, tree):
    common = ("--target", inputs / "target", "--dtype", "float32", "--suites", f"[{inputs / 'suite.jsonl'}]")
    result = poss(
        "benchmark", "out", "--drafts.d", inputs / "draft", *common, "--max_new_tokens", "9", "--config", tree
    )
    assert result.code is None
    facts = json.loads((tmp_path / "out" / "run.json").read_text())
    given = yaml.safe_load(tree.read_text())
    assert {name: facts["methods"]["d"][name] for name in given} == given
    assert facts["command"][:3] == ["poss", "benchmark", "out"]
    assert len({tuple(record.tokens) for record in read_records(tmp_path / "out")}) == 1


@pytest.mark.parametrize("file", TARGETS, ids=lambda path: path.stem)
def test_a_target_is_named_by_its_yaml(poss, inputs, monkeypatch, file):
    asked = []

    def load(*arguments):
        asked.append(arguments)
        raise FileNotFoundError("not today")

    monkeypatch.setattr(extract.Target, "load", load)
    commands = ("extract", inputs / "corpus.jsonl"), ("answer",), ("synthesize",), ("benchmark",)
    for command, *before in commands:
        poss(command, *before, "out.jsonl", "--config", file)
    given = yaml.safe_load(file.read_text())
    wanted = given["target"], given.get("dtype", "auto"), given.get("device", "auto"), "none"
    assert asked == [wanted] * len(commands)


def test_the_six_suites_are_the_hub_s(poss, monkeypatch):
    asked = []

    def load(*arguments):
        asked.append(arguments)
        raise FileNotFoundError("not today")

    monkeypatch.setattr(suites, "load_suites", load)  # what `read_suites` asks
    monkeypatch.setattr(benchmark, "load_suites", load)
    for command in ("answer", "benchmark"):
        poss(command, "out.jsonl", "--config", CONF / "suites/six.yaml")
    assert asked == [([f"hub:{name}" for name in SIX], None)] * 2
