"""Places where a command must not write: each refuses them in one line, and leaves them as they were."""

import inspect
from importlib import import_module
from pathlib import Path

import pytest

from poss_lightning import cli
from tests.support.command import Result, run_in, says, unchanged

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
