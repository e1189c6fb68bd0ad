"""The scripts beside the experiments' files."""

import gzip
import json
import runpy
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from poss_lightning.draft.specialists import Specialists, shipped
from poss_lightning.evaluation.provenance import describe
from poss_lightning.evaluation.suites import read_suites
from tests.support.lab import write_records
from tests.support.synthetic import make_records

EXPERIMENTS = Path(__file__).parents[2] / "experiments"


def test_gains_are_read_pair_by_pair(tmp_path, capsys):
    for method in ("hass", "poss2"):
        for setting in ("", ".wide"):
            for seed in (0, 1):
                records = [replace(record, method=method + setting) for record in make_records(("eagle",), seed=seed)]
                write_records(tmp_path / f"{method}{setting}" / f"seed-{seed}", records, {"methods": {}})
    script = runpy.run_path(str(EXPERIMENTS / "scale" / "gains.py"))
    script["main"].__globals__["CELLS"] = [tmp_path]
    script["main"]()
    said = capsys.readouterr().out
    assert said.index("80 steps") < said.index("Against hass,") < said.index("Against hass.wide")


def test_what_specialists_must_bring_stands_beside_what_they_bring(capsys):
    runpy.run_path(str(EXPERIMENTS / "costs" / "break_even.py"))["main"]()
    _, alone, *others = capsys.readouterr().out.splitlines()
    assert alone.startswith("[6] ") and "0.0 %" in alone and "(" not in alone.split("/s")[1]
    assert len(others) == 5 and all("%" in line.split("/s")[1] for line in others)


def test_prompts_are_made_about_texts(tmp_path):
    texts = [f"Text number {number}." for number in range(7)]
    chats = [[{"role": "user", "content": "Write."}, {"role": "assistant", "content": text}] for text in texts]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    script = runpy.run_path(str(EXPERIMENTS / "data" / "about.py"))
    script["main"](str(tmp_path / "in.jsonl"), str(tmp_path / "out.jsonl"))
    prompts = [json.loads(line)["prompt"] for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert all(text in prompt for text, prompt in zip(texts, prompts, strict=True)) and len(set(prompts)) == 7


def test_prompts_follow_their_seed_and_none_comes_twice(tmp_path):
    script = runpy.run_path(str(EXPERIMENTS / "data" / "prompts.py"))
    said = []
    for name, seed in (("a", "3"), ("b", "3"), ("c", "4")):
        script["main"](str(tmp_path / name), "120", seed)
        said.append([json.loads(line)["prompt"] for line in (tmp_path / name).read_text().splitlines()])
    assert said[0] == said[1] != said[2]
    assert len(set(said[0])) == 120 and all("{" not in prompt for prompt in said[0] if len(prompt) < 100)
    assert {kind for kind in ("def ", "?", "$") for prompt in said[0] if kind in prompt} == {"def ", "?", "$"}


def test_prompts_show_nothing_of_the_machine(tmp_path):
    """Signatures of the standard library print default values: addresses, and once the whole environment."""
    script = runpy.run_path(str(EXPERIMENTS / "data" / "prompts.py"))
    script["main"](str(tmp_path / "functions"), "2000", "0", "functions")
    assert " at 0x" not in (said := (tmp_path / "functions").read_text()) and "environ(" not in said
    with pytest.raises(SystemExit, match=r"kinds are tasks, sums, .*; poems is none of them"):
        script["main"](str(tmp_path / "x"), "9", "0", "poems")


def test_chats_are_made_when_named(tmp_path):
    script = runpy.run_path(str(EXPERIMENTS / "data" / "prompts.py"))
    script["main"](str(tmp_path / "chats"), "60", "1", "chats")
    prompts = [json.loads(line)["prompt"] for line in (tmp_path / "chats").read_text().splitlines()]
    assert len(set(prompts)) == 60 and not any("{" in prompt or "def " in prompt for prompt in prompts)


def test_no_prompt_of_the_own_suites_was_trained_on():
    asked = {turn for question in read_suites() for turn in question.turns}
    for path in set((EXPERIMENTS / "data").glob("*.jsonl.gz")) - {EXPERIMENTS / "data" / "dev.jsonl.gz"}:
        with gzip.open(path, "rt", encoding="utf-8") as lines:
            trained = {message["content"] for line in lines for message in json.loads(line)["messages"]}
        assert trained and not asked & trained, path.name


def test_heads_before_and_after_more_text_stand_side_by_side(capsys):
    runpy.run_path(str(EXPERIMENTS / "before.py"))["main"]("heads", "people")
    said = capsys.readouterr().out
    assert said.index("hass of heads") < said.index("hass of people") < said.index("poss2 of people")


@pytest.mark.parametrize("name", shipped())
def test_the_shipped_drafts_are_those_of_the_published_figures(name):
    """Figures of experiments/shipped are of weights in bfloat16, as their machines decoded."""
    method = name.removeprefix("embedded-")
    run = json.loads((EXPERIMENTS / "shipped" / "eval" / method / "run.json").read_text())
    draft = Specialists.from_pretrained(name).to(torch.bfloat16)
    assert describe(draft)["weights"] == run["methods"][method]["weights"]
