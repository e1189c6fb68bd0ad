"""Tiny drafts that have learnt, and how `poss doctor` is run on them."""

import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from poss_lightning import cli
from poss_lightning.evaluation.suites import read_suites
from poss_lightning.target.model import Target
from tests.support.learnt import answered, learnt_draft

DRAFTS = {  # by name: allocation, and more of the config
    "eagle2": ([3], {"depth": 2}),
    "eagle3": ([3], {"depth": 2, "kind": "eagle3"}),
    "block": ([3], {"kind": "block"}),
}


@pytest.fixture(scope="session")
def prompts(tmp_path_factory) -> str:
    """Questions of as many tokens each: digits, which the tokenizer never joins."""
    path, draw = tmp_path_factory.mktemp("prompts") / "digits.jsonl", random.Random(0)
    questions = ["".join(draw.choices("0123456789", k=6)) for _ in range(12)]
    path.write_text("".join(json.dumps({"prompt": question}) + "\n" for question in questions))
    return str(path)


def learn(target: Target, prompts: str, name: str, folder: Path) -> Path:
    allocation, config = DRAFTS[name]
    texts = answered(target, [question.first_prompt(target.chat) for question in read_suites(prompts)])
    learnt_draft(target, texts, allocation, **config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def learnt(deep, prompts, tmp_path_factory) -> dict[str, Path]:
    """A folder of each draft, for the deep target."""
    return {name: learn(deep, prompts, name, tmp_path_factory.mktemp("learnt") / name) for name in DRAFTS}


@pytest.fixture
def examine(deep_folder, prompts, tmp_path, monkeypatch, capsys) -> Callable[..., str]:
    """What `poss doctor` prints of a draft."""
    monkeypatch.chdir(tmp_path)

    def run(draft: Path, *arguments: object, target: str = deep_folder) -> str:
        given = [
            "--target",
            target,
            "--prompts",
            prompts,
            "--answer_tokens",
            40,
            "--device",
            "cpu",
            "--dtype",
            "float32",
        ]
        capsys.readouterr()
        cli.run("doctor", [str(word) for word in (draft, *given, *arguments)])
        return capsys.readouterr().out

    return run
