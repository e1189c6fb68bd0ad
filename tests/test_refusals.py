"""What is refused: calls, a row for each function that raises, and places where a command must not write."""

import inspect
from argparse import ArgumentError
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch.strategies import FSDPStrategy

from poss_lightning import cli
from poss_lightning.configs import locate_configs, read_config
from poss_lightning.decoding.decoder import new_token_limits
from poss_lightning.decoding.engine import Speculative
from poss_lightning.decoding.plans import TreePlan
from poss_lightning.draft.config import DraftConfig, DraftOptions
from poss_lightning.draft.folder import check_state
from poss_lightning.draft.kinds import load_draft
from poss_lightning.evaluation.rounds import check_method_names, read_rounds
from poss_lightning.features.datamodule import FeatureDataModule
from poss_lightning.features.schedule import split
from poss_lightning.features.store import FeatureStore
from poss_lightning.features.writing import write_store
from poss_lightning.files import read_json
from poss_lightning.losses.passes import LossSpec
from poss_lightning.machine import choose_device, choose_dtype
from poss_lightning.reports.compare import compare
from poss_lightning.target_model.chat import Chat
from poss_lightning.target_model.model import Target
from poss_lightning.training.checks import check_precision, check_trainer
from poss_lightning.training.fit import compose
from poss_lightning.training.module import DraftModule
from poss_lightning.training.start import check_same_draft, resume
from poss_lightning.training.strategies import DeepSpeed
from tests.support.command import Result, run_in, says, unchanged
from tests.support.stores import SIZES, make_conversations
from tests.support.tiny import tiny_draft, tiny_target, tiny_tokenizer
from tests.support.training import quiet_trainer

# --- calls ---

NOWHERE = Path("nowhere")
TWO = {"depth": 2, "allocation": (1, 1)}
PAGE = {"runs": "nowhere"}
BEGUN_WITH = {"optimizer": "adamw", "betas": [0.9, 0.95], "weight_decay": 0.0}
BEGUN = {"hyper_parameters": BEGUN_WITH}


def untested(folder: Path) -> None:
    FeatureDataModule(str(folder)).test_dataloader()


def checked_schedule(folder: Path) -> None:
    data = FeatureDataModule(str(folder))
    data.trainer = quiet_trainer(accumulate_grad_batches=2, limit_train_batches=3)
    data.train_dataloader()


def other_draft(target: Target) -> tuple[dict[str, str], DraftConfig]:
    stored = DraftConfig(target=tiny_target(1).spec, **TWO)
    return {"draft": stored.to_json()}, DraftConfig(target=target.spec, **TWO)


def four(folder: Path, **options: Any) -> dict[str, Any]:
    return {"allocation": [2, 2], "store": str(folder)} | options


def talks_of(target: Target, **options: Any) -> dict[str, Any]:
    return SIZES | {"folder": NOWHERE, "target": target, "conversations": make_conversations()} | options


REFUSED_CALLS = [  # a function; its arguments, as they are or from fixtures by name; words of what it says
    (LossSpec, {"terms": {"tokens": 1.0}}, "loss has the term 'tokens'; terms are feature, token, topk, acceptance"),
    (check_method_names, (["PosS-2, 56 steps"],), "'PosS-2, 56 steps'; names stand in lists, so it must have no comma"),
    (check_method_names, ([1],), "a draft is named 1, which YAML reads as int: quote it"),
    (read_rounds, ([],), "paths is empty; give folders with rounds, or files of engines"),
    (read_rounds, lambda tmp_path: [tmp_path], " has no rounds.parquet in it or below (is it finished?)"),
    (
        compare,
        lambda inputs, tmp_path: PAGE | {"records": str(inputs / "records"), "html": str(tmp_path / "a.html")},
        "no TensorBoard",
    ),
    (FeatureStore.select, lambda finished: [FeatureStore(str(finished)), (1, 2)], "keeps no outputs of layer"),
    (choose_device, ("warp",), "device is 'warp', which this machine or this torch does not have"),
    (choose_dtype, ("int3", "cpu"), "dtype is 'int3'; it must be auto, bfloat16, float16 or float32"),
    (read_json, lambda inputs: [inputs / "tab.yaml"], "tab.yaml is not JSON: Expecting value"),
    (read_config, lambda inputs: [inputs / "tab.yaml"], "tab.yaml is not valid YAML: while scanning"),
    (locate_configs, (["--config", "draft/has.yaml"],), "which `poss list` shows; did you mean draft/hass.yaml?"),
    (split, (["a"] * 8, 0.5, 0), "there is one conversation, or all are the same: none can be held out"),
    (Chat, lambda: (SimpleNamespace(is_fast=False),), "SimpleNamespace gives no offsets: use a fast tokenizer"),
    (Chat, lambda: (tiny_tokenizer(None),), "has no chat template: name an instruction-tuned target, or save"),
    (check_state, ({"bias": torch.ones(2) > 0},), "bias is torch.bool; it must be real numbers"),
    (new_token_limits, lambda target: (target, [[5]], 0), "the limit of new tokens is 0; it must be at least 1"),
    (new_token_limits, lambda target: (target, [[5, 320]], 5), "token 320 of a prompt"),
    (new_token_limits, lambda target: (target, [[7] * 512], 5), "a prompt has 512 tokens; tiny reads 512"),
    (Speculative.from_draft, lambda target: (tiny_target(5), tiny_draft(target, [2])), "a different target: finger"),
    (TreePlan, (7, 7), "nodes is 7, which cannot hold a path of depth 7 and its root: give at least 8"),
    (TreePlan, (65,), "depth is 65; it must be less than or equal to 64"),
    (DraftOptions, {"allocation": "2,2,2"}, "allocation is '2,2,2'; it must be a list of positive"),
    (DraftModule, {"store": "x", "allocation": [1], "loss": {"token": 1e300}}, "loss.token is 1e+300; it must"),
    (FeatureDataModule, (), "give one of them"),
    (FeatureDataModule, lambda finished: {"store": str(finished), "corpus": "x.jsonl"}, "give one of them"),
    (FeatureDataModule, lambda finished: {"store": str(finished), "target": "other"}, "target is 'other', and store "),
    (
        FeatureDataModule,
        lambda finished: {"store": str(finished), "validation": 0.0},
        "validation is 0.0, so there would",
    ),
    (untested, lambda finished: [finished], "there is nothing to test on: give a test_store"),
    (DraftModule, lambda finished: four(finished, anchors=8), "anchors is 8, and the passes of a draft of kind eagle2"),
    (
        DraftModule,
        lambda finished: four(finished, depth=2),
        "which never reaches every specialist of [2, 2]: give at l",
    ),
    (DraftModule, lambda finished: four(finished, depth=3, window=3), "depth is 4, and the draft's window 3"),
    (LossSpec().check_kind, (False,), "loss has feature: 1.0, but a draft of this kind predicts no feature"),
    (write_store, lambda target: talks_of(target, max_length=3), "the 24 conversations has an answer within 3 tokens"),
    (
        write_store,
        lambda target: talks_of(target, layers=(1, 2)),
        "layers has 2; those of tiny that can be kept are 1 ",
    ),
    (
        checked_schedule,
        lambda finished: [finished],
        "limit_train_batches is 3; it must be a multiple of accumulate_grad_batches, 2",
    ),
    (
        quiet_trainer().validate,
        lambda: (DraftModule([1]), []),
        "store is None, and the trainer has no FeatureDataModule",
    ),
    (load_draft, lambda inputs: [inputs / "evil.ckpt"], "evil.ckpt is not a complete checkpoint of plain tensors"),
    (DraftConfig.from_json, ("{}", "a.ckpt"), "a.ckpt is not a draft's config ('target'); its fields are al"),
    (check_same_draft, other_draft, "draft is for a different target than these features: fingerprint"),
    (
        resume,
        (None, BEGUN, BEGUN_WITH | {"betas": (0.9, 0.999)}),
        "betas is [0.9, 0.999], and this training began with [0.9",
    ),
    (compose, ("draft/hass.yaml", {"weights_only": False}), "'weights_only'"),
    (
        compose,
        lambda inputs: [str(inputs / "dots.yaml")],
        "dots.yaml has 'trainer.max_steps' beside 'trainer': write it",
    ),
    (compose, ("draft/hass.yaml", {"ckpt_path": "auto"}), "but every training gets a new folder: give --name"),
    (check_precision, ("16-mixed",), "take bf16-mixed, 32-true, 64-true"),
    (
        check_trainer,
        (SimpleNamespace(strategy=FSDPStrategy(), callbacks=[]), "adamw"),
        "is FSDPStrategy, whose weights",
    ),
    (DeepSpeed, (2, False, True), "offload_parameters is true at stage 2; only stage 3 divides the weights"),
    (DraftConfig, lambda target: {"target": target.spec, "detach": "yes"} | TWO, "detach is 'yes'; it must be a valid"),
    (DraftConfig, lambda target: {"target": target.spec, "fc_norm": True} | TWO, "fc_norm is True, which only kind"),
]


@pytest.mark.parametrize(("call", "arguments", "words"), REFUSED_CALLS, ids=lambda each: getattr(each, "__name__", ""))
def test_a_call_is_refused_in_one_line(request, call, arguments, words):
    if callable(arguments):
        arguments = arguments(*map(request.getfixturevalue, inspect.signature(arguments).parameters))
    with pytest.raises((ValueError, OSError, ArgumentError)) as error:
        call(**arguments) if isinstance(arguments, dict) else call(*arguments)
    assert words in str(error.value) and not NOWHERE.exists()


# --- places ---

TINY = ("--target", "{inputs}/target", "--dtype", "float32")
WRITERS = {  # arguments before the name of the output, and after
    "synthesize": ((), TINY),
    "extract": (("{inputs}/corpus.jsonl",), TINY),
    "convert": (("{inputs}/draft",), ("--output_format", "eagle", "--target", "{inputs}/target")),
    "benchmark": ((), (*TINY, "--drafts.d", "{inputs}/draft")),
    "replay": (("{inputs}/store",), ("--drafts.d", "{inputs}/draft", "--dtype", "float32")),
    "compare": (("{inputs}/suite.jsonl", "--html"), ()),
    "doctor": (("{inputs}/draft", "--out"), TINY),
}


def test_every_command_that_writes_is_tested():
    tools = {name: getattr(import_module(module), name) for name, (module, _) in cli.TOOLS.items()}
    writing = {name for name, tool in tools.items() if {"out", "html"} & {*inspect.signature(tool).parameters}}
    assert writing == set(WRITERS)


PLACES = [  # each refusal once
    ("extract", " ", "it must be the name of what to write"),
    ("synthesize", "folder.jsonl", "folder.jsonl is a folder: name a file in it"),
    ("compare", "page.txt", "page.txt; its name must end in .html"),
    ("compare", "a" * 300 + ".html", "File name too long"),
    ("convert", "file", "file already exists"),
    ("convert", "file/below", "Not a directory"),
    ("replay", "file", "file is a file: name a folder"),
    ("benchmark", "others", "others is not empty and holds nothing to resume"),
]


@pytest.mark.parametrize(("command", "name", "words"), PLACES, ids=lambda text: text[:20])
def test_a_place_that_cannot_be_written_is_refused(inputs, tmp_path, command, name, words):
    (tmp_path / "file").write_text("mine")
    (tmp_path / "others").mkdir()
    (tmp_path / "others" / "notes.txt").write_text("mine")
    (tmp_path / "folder.jsonl").mkdir()
    before, after = WRITERS[command]
    says(refuse(inputs, tmp_path, command, *before, name, *after), command, words)


def refuse(inputs: Path, folder: Path, command: str, *arguments: str) -> Result:
    """What a command says that changes nothing in a folder or its inputs."""
    with unchanged(folder, inputs):
        return run_in(folder, command, *(text.replace("{inputs}", str(inputs)) for text in arguments))


REFUSED = {  # what each command checks last, when it has loaded everything
    "synthesize": (*TINY, "--user_tokens", "400", "--answer_tokens", "200"),
    "extract": (*TINY, "--layers", "[9]"),
    "convert": ("--output_format", "eagle", "--target", "{inputs}/another"),
    "benchmark": (*TINY, "--drafts.d", "{inputs}/draft", "--depth", "7", "--nodes", "7"),
    "replay": ("--drafts.d", "{inputs}/draft", "--dtype", "float32", "--depth", "7", "--nodes", "7"),
    "compare": (),
    "doctor": (*TINY, "--store", "{inputs}/nowhere"),
}


@pytest.mark.parametrize("command", REFUSED)
def test_a_refusal_leaves_nothing(inputs, tmp_path, command):
    name = "out" + {"synthesize": ".jsonl", "compare": ".html"}.get(command, "")
    says(refuse(inputs, tmp_path, command, *WRITERS[command][0], name, *REFUSED[command]), command, "")
