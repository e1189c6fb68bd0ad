"""Suites of questions: the project's own, JSON lines in many forms, the papers' six, and any data set of the hub."""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

from poss_lightning.corpus.formats import Malformed, file_records, options_of, parse_line, report_left_out, unused
from poss_lightning.evaluation.forms import read_id, read_question
from poss_lightning.evaluation.hub import KNOWN, HubSuite, stream
from poss_lightning.ranges import Count, check_numbers
from poss_lightning.target.chat import Chat
from poss_lightning.target.template import Message

OWN = Path(__file__).parent / "prompts"
HUB = "hub:"


@dataclass(frozen=True)
class Question:
    """One prompt of a suite, in one or more user turns."""

    suite: str
    id: int | str
    category: str
    turns: list[str]
    opening: list[Message] = field(default_factory=list)  # system messages before the first turn
    template: dict[str, Any] = field(default_factory=dict)  # given to the chat template besides, such as tools
    source: str = field(default="", compare=False)  # of the suite: a file, or a data set with its commit

    def __str__(self) -> str:
        return f"question {self.id} of {self.suite}"

    def first_prompt(self, chat: Chat) -> list[int]:
        """The tokens up to the first answer."""
        return chat.prompt([*self.opening, {"role": "user", "content": self.turns[0]}], self.template)


def digest(questions: list[Question]) -> str:
    """16 hex digits of all that the questions say, wherever they are from."""
    said = [{name: value for name, value in asdict(each).items() if name != "source"} for each in questions]
    return hashlib.sha256(json.dumps(said, default=str).encode()).hexdigest()[:16]


def own_suites() -> list[str]:
    """Names of the project's own suites."""
    return sorted(path.stem for path in OWN.glob("*.jsonl"))


@check_numbers
def read_suites(
    sources: list[str] | str | None = None,
    limit: Count | None = None,
    strict: bool = True,
    hub_limit: Count | None = 80,
) -> list[Question]:
    """Questions of several suites, in order; a suite is named by its file or data set without the path.

    Args:
        sources: one of these, or a list of them; None for all of the project's own suites.
            `chat`, ...: a suite of the project's own.
            `FILE`, `FOLDER`: a file of records, as for a corpus, or a folder of `.jsonl` files; for the forms of a
            record see `forms.read_question`. `FILE?field=NAME` reads a different field.
            `hub:mt_bench` and the others of `suites.yaml`: the papers' six, SPEED-Bench, those of vLLM's speculators.
            `hub:OWNER/NAME`, `hub:FOLDER`: a data set whose rows have the forms of a file's.
            Options of a suite of the hub, joined by `&`: `?repo=FOLDER` for a copy, `field`, `config`, `split`,
            `revision`.
        limit: at most this many questions of each suite, the first; by default all of a file, what `suites.yaml` says,
            and `hub_limit` of other data sets of the hub.
        strict: a malformed record, or a repeated id, is an error; otherwise malformed ones are left out, counted and
            named, up to a tenth of them, and a repeated id gets `#2`, `#3`, ...
        hub_limit: see `limit`; None for all.
    """
    sources = [sources] if isinstance(sources, str) else sources
    questions: list[Question] = []
    for source in sources or own_suites():
        for suite in _load(source, limit, strict, hub_limit):
            name = suite[0].suite
            if twins := [question.source for question in questions if question.suite == name]:
                raise ValueError(f"two suites are named {name!r}; names must differ: {twins[0]}, {suite[0].source}")
            questions += suite
    return questions


def _load(source: str, limit: int | None, strict: bool, hub_limit: int | None) -> Iterator[list[Question]]:
    if source.startswith(HUB):
        yield _from_hub(source, limit, strict, hub_limit)
        return
    place, options = (source, {}) if Path(source).exists() else options_of(source, "field")
    files = local_files(place) or [OWN / f"{name}.jsonl" for name in own_suites() if name == place]
    if not files:
        raise FileNotFoundError(
            f"suite {source!r} is not a file, a folder of .jsonl files, or one that poss list shows"
        )
    for path in files:
        rows = ((f"{path}:{number}", number, record) for number, record in file_records(path))
        name = Path(path.name.removesuffix(".gz")).stem
        name = path.resolve().parent.name if name == "question" else name  # SUITE/question.jsonl, as EAGLE has them
        yield _suite(name, str(path), rows, limit, options.get("field"), strict)


def _from_hub(source: str, limit: int | None, strict: bool, hub_limit: int | None) -> list[Question]:
    place, options = options_of(source, "repo", "field", "config", "split", "revision")
    name, field = place.removeprefix(HUB), options.pop("field", None)
    if name not in KNOWN and "/" not in name:
        raise FileNotFoundError(f"suite {source!r} is not hub:OWNER/NAME, and not one that poss list shows")
    copied: dict[str, Any] = {"revision": None} if "repo" in options else {}  # the pin is of the original
    suite = replace(KNOWN.get(name) or HubSuite(name, questions=hub_limit), **(copied | options))
    origin, records = stream(suite)
    rows = ((f"{source} row {number}", number, record) for number, record in records)
    return _suite(Path(name).name, origin, rows, limit or suite.questions, field, strict)


def local_files(suite: str) -> list[Path]:
    """The user's own files that a suite's name refers to; none for a suite of the project or of the hub."""
    path = Path(suite.partition("?")[0])
    return [path] if path.is_file() else sorted(path.glob("*.jsonl")) if path.is_dir() else []


def _suite(
    name: str,
    source: str,
    rows: Iterator[tuple[str, int, object]],
    limit: int | None,
    field: str | None,
    strict: bool,
) -> list[Question]:
    """The questions of a suite made from rows: the place of each, for messages; its number; and its content."""
    questions, faults = [], []
    for place, number, row in islice(rows, limit):
        try:
            questions.append(_question(name, source, number, row, field))
        except Malformed as error:
            faults.append(f"{place}: {error}")
    report_left_out(f"{source}: {{}} malformed", faults, len(questions) + len(faults), strict)
    if not questions:
        raise ValueError(f"{source} has no questions")
    used: dict[str, int] = {}
    for place, question in enumerate(questions):
        if (id := unused(str(question.id), used)) != str(question.id):
            if strict:
                raise ValueError(f"suite {name} repeats question_id {question.id!r}; ids must differ")
            questions[place] = replace(question, id=id)
    return questions


def _question(suite: str, source: str, number: int, row: object, field: str | None) -> Question:
    record = parse_line(row) if isinstance(row, bytes) else row
    record = {"turns": [record]} if isinstance(record, str) else record
    if not isinstance(record, dict):
        raise Malformed(f"a record must be an object, not {type(record).__name__}")
    opening, turns, template = read_question(record, field)
    category = record.get("category")
    known = category if isinstance(category, str) else ""
    return Question(suite, read_id(record, number), known, turns, opening, template, source)
