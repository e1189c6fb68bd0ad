"""Tiny drafts that have learnt, and how `poss doctor` is run on them."""

import json
import random
from collections.abc import Callable
from functools import cache
from itertools import count
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from poss_lightning import cli
from poss_lightning.doctor.answers import ANSWERS, Answers, make_prompts, write_answers
from poss_lightning.doctor.diagnosis import NOTHING, Case, find_causes, report
from poss_lightning.doctor.load import compare_facts, load
from poss_lightning.evaluation.suites import read_suites
from poss_lightning.target_model.model import Target
from poss_lightning.work import Work
from tests.support.families import FAMILIES, SIZE
from tests.support.learnt import learnt_draft
from tests.support.templates import QWEN3
from tests.support.tiny import CHATML, tiny_tokenizer

ON_CPU = ("--answer_tokens", "40", "--device", "cpu", "--dtype", "float32")


@pytest.fixture(scope="session")
def prompts(tmp_path_factory) -> str:
    """Questions of as many tokens each: digits, which the tokenizer never joins."""
    path, draw = tmp_path_factory.mktemp("prompts") / "digits.jsonl", random.Random(0)
    questions = ["".join(draw.choices("0123456789", k=6)) for _ in range(12)]
    path.write_text("".join(json.dumps({"prompt": question}) + "\n" for question in questions))
    return str(path)


@pytest.fixture(scope="session")
def family_target(tmp_path_factory) -> Callable[[str], tuple[Target, str]]:
    """A deep target of a family, and its folder."""

    @cache
    def make(family: str) -> tuple[Target, str]:
        torch.manual_seed(0)
        config = AutoConfig.for_model(family.partition(",")[0], **SIZE | FAMILIES[family] | {"num_hidden_layers": 8})
        folder = str(tmp_path_factory.mktemp("family") / family)
        model = AutoModelForCausalLM.from_config(config)
        torch.nn.init.uniform_(model.base_model.norm.weight, 0.2, 2.0)  # so that it matters where it stands
        model.save_pretrained(folder)
        tiny_tokenizer(QWEN3 if family == "qwen3" else CHATML).save_pretrained(folder)
        return Target.load(folder, "float32", "cpu"), folder

    return make


@pytest.fixture(scope="session")
def texts_of(prompts) -> Callable[[Target], Answers]:
    """The answers of a target, which are written and read once."""

    @cache
    def answer(target: Target) -> Answers:
        return Answers(target, write_answers(target, make_prompts(target, read_suites(prompts)), 40))

    return answer


@pytest.fixture(scope="session")
def learnt(deep, texts_of, tmp_path_factory) -> Callable[..., Path]:
    """The folder of a draft of a kind that has learnt the answers of the deep target, or of a different one."""

    @cache
    def learn(kind: str, target: Target = deep, texts: str = ANSWERS, **how) -> Path:
        folder = tmp_path_factory.mktemp("learnt") / kind
        learnt_draft(target, [*texts_of(target).samples(texts).values()], kind, **how).save_pretrained(folder)
        return folder

    return learn


@pytest.fixture
def diagnose(deep, texts_of, tmp_path) -> Callable[..., list[str]]:
    """The causes that `poss doctor` prints; `NOTHING` without what differs."""
    number = count()

    def run(draft: Path, input_format: str = "ours", allocation: list[int] | None = None, target: Target = deep):
        found = load(str(draft), input_format, allocation, target)
        case = Case(Work(tmp_path / f"measured-{next(number)}"), texts_of(target))
        known = compare_facts(found.stated, found.config, target)
        lines = report(found, find_causes(case, found, known), [], known, 12)
        lines = [line for line in lines if not line.startswith("config.json for")]
        return [NOTHING if line.startswith(NOTHING) else line for line in lines]

    return run


@pytest.fixture
def examine(deep_folder, prompts, tmp_path, monkeypatch, capsys) -> Callable[..., str]:
    """What `poss doctor` prints of a draft."""
    monkeypatch.chdir(tmp_path)

    def run(draft: Path, *arguments: object, target: str = deep_folder) -> str:
        capsys.readouterr()
        given = (draft, "--target", target, "--prompts", prompts, *ON_CPU, *arguments)
        cli.run("doctor", [str(word) for word in given])
        return capsys.readouterr().out

    return run
