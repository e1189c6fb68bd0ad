"""Places where a command must not write: each refuses them in one line, and leaves them as they were."""

import inspect
from importlib import import_module
from pathlib import Path

import pytest

from poss_lightning import cli
from tests.support.command import run_in, says, unchanged

TINY = ("--target", "{inputs}/target", "--dtype", "float32")
WRITERS = {  # arguments before the name of the output, and after
    "synthesize": ((), TINY),
    "extract": (("{inputs}/corpus.jsonl",), TINY),
    "export": (("{inputs}/draft",), ()),
    "convert": (("{inputs}/draft",), ("--output_format", "eagle", "--target", "{inputs}/target")),
    "benchmark": ((), (*TINY, "--drafts.d", "{inputs}/draft")),
    "replay": (("{inputs}/store",), ("--drafts.d", "{inputs}/draft", "--dtype", "float32")),
    "compare": (("{inputs}/suite.jsonl", "--html"), ()),
    "demo": (("--out",), TINY),
}
ENDINGS = {"synthesize": ".jsonl", "compare": ".html"}  # these write a file, the others a folder


def test_every_command_that_writes_is_tested():
    tools = {name: getattr(import_module(module), name) for name, (module, _) in cli.TOOLS.items()}
    writing = {name for name, tool in tools.items() if {"out", "html"} & {*inspect.signature(tool).parameters}}
    assert writing == set(WRITERS)


@pytest.fixture
def place(tmp_path, tiny_folder) -> Path:
    """A file, a folder of each ending, and a folder with somebody's file."""
    (tmp_path / "file").write_text("mine")
    (tmp_path / "others").mkdir()
    (tmp_path / "others" / "notes.txt").write_text("mine")
    for ending in (".jsonl", ".html", ".yaml"):
        (tmp_path / f"folder{ending}").mkdir()
    return tmp_path


NO_NAME = "it must be the name of what to write"
PLACES = [  # for a folder, for a file, and words of the message
    ("", "", NO_NAME),
    (" ", " ", NO_NAME),
    ("file", "folder{ending}", "file: name a folder|a folder: name a file|there already"),
    ("file/below", "file/below{ending}", "Not a directory"),
    ("others", "others", "not empty and holds nothing to resume|there already|must end in"),
    ("{inputs}/target", "{inputs}/target", "not empty and holds nothing to resume|there already|must end in"),
    ("a" * 300, "a" * 300 + "{ending}", "File name too long"),
    ("/proc/a", "/proc/a{ending}", "cannot be written: /proc is not yours to write"),  # where root has permission
]
CASES = [(command, *PLACES[number % len(PLACES)]) for number, command in enumerate(WRITERS)]  # each place once


@pytest.mark.parametrize(("command", "folder", "file", "words"), CASES, ids=[*WRITERS])
def test_a_place_that_cannot_be_written_is_refused(inputs, place, command, folder, file, words):
    before, after = WRITERS[command]
    name = (file if command in ENDINGS else folder).replace("{ending}", ENDINGS.get(command, ""))
    arguments = [text.replace("{inputs}", str(inputs)) for text in (*before, name, *after)]
    with unchanged(place, inputs):
        result = run_in(place, command, *arguments)
    says(result, command, next((each for each in words.split("|") if each in str(result.code)), words))


REFUSED = {  # what each command checks last, when it has loaded everything
    "synthesize": (*TINY, "--user_tokens", "400", "--answer_tokens", "200"),
    "extract": (*TINY, "--layers", "[9]"),
    "export": ("--vocabulary_size", "321", "--corpus", "{inputs}/corpus.jsonl", "--target", "{inputs}/target"),
    "convert": ("--output_format", "eagle", "--target", "{inputs}/another"),
    "benchmark": (*TINY, "--drafts.d", "{inputs}/draft", "--depth", "7", "--nodes", "7"),
    "replay": ("--drafts.d", "{inputs}/draft", "--dtype", "float32", "--depth", "7", "--nodes", "7"),
    "compare": (),
    "demo": (*TINY, "--start_from", "{inputs}/draft", "--trained", "{inputs}/draft-of-another"),
}


@pytest.mark.parametrize("command", REFUSED)
def test_a_refusal_leaves_nothing(inputs, tmp_path, command):
    name = "out" + ENDINGS.get(command, "")
    arguments = [text.replace("{inputs}", str(inputs)) for text in (*WRITERS[command][0], name, *REFUSED[command])]
    with unchanged(tmp_path, inputs):
        result = run_in(tmp_path, command, *arguments)
    says(result, command, "")
