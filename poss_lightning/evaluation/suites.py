"""Suites of questions: the project's own, JSON lines in many forms, and named data sets of the hub (`suites.yaml`)."""

import hashlib
import json
import reprlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from itertools import groupby, islice
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from poss_lightning.corpus import formats, readers
from poss_lightning.corpus.formats import Malformed
from poss_lightning.ranges import Count, check_numbers
from poss_lightning.target_model.chat import Chat
from poss_lightning.target_model.template import Message
from poss_lightning.terminal import announced

OWN_FOLDER = Path(__file__).parent / "prompts"
HUB_FILE = Path(__file__).parent / "suites.yaml"
HUB = "hub:"
_ANSWER: Message = {"role": "assistant", "content": "…"}


@dataclass(frozen=True)
class HubSuite:
    """A split of a data set, and how its rows become questions."""

    repo: str  # a hub id, or a folder that `datasets` can load
    revision: str | None  # a commit; None of a folder
    split: str = "test"
    config: str | None = None  # of the data set; None for its default
    file: str | None = None  # of the data set, where its files are different suites
    questions: int | None = 80  # asked where the user sets no limit; None for all
    fields: dict[str, str] = field(default_factory=dict)  # of a record, made from those of a row
    without: str = ""  # a field of rows that are no questions if it has a value


HUB_SUITES = {name: HubSuite(**suite) for name, suite in yaml.safe_load(HUB_FILE.read_text()).items()}


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
        """Return the tokens up to the first answer."""
        return chat.prompt([*self.opening, {"role": "user", "content": self.turns[0]}], self.template)


def digest(questions: list[Question]) -> str:
    """Return 16 hex digits of the content of questions, whatever their source."""
    fields = [{name: value for name, value in asdict(each).items() if name != "source"} for each in questions]
    return hashlib.sha256(json.dumps(fields, default=str).encode()).hexdigest()[:16]


def own_suites() -> list[str]:
    """List the project's own suites."""
    return sorted(path.stem for path in OWN_FOLDER.glob("*.jsonl"))


@check_numbers
def read_suites(
    sources: list[str] | str | None = None, limit: Count | None = None, strict: bool = True
) -> list[Question]:
    """Read the questions of several suites, in order; a suite is named by its file or data set without the path.

    Args:
        sources: one of these, or a list of them; None for all of the project's own suites.
            `chat`, ...: a suite of the project's own.
            `FILE`, `FOLDER`: a file of records, as for a corpus, or a folder of `.jsonl` files; for the forms of a
            record see `read_question`. `FILE?field=NAME` reads a different field.
            `hub:mt_bench` and the others of `suites.yaml`: the papers' six, and those of vLLM's speculators.
            `?repo=FOLDER` names a copy of the data set.
        limit: at most this many questions of each suite, the first; by default all of a file, and what `suites.yaml`
            says.
        strict: a malformed record, or a repeated id, is an error; otherwise malformed ones are left out, counted and
            named, up to a tenth of them, and a repeated id gets `#2`, `#3`, ...
    """
    sources = [sources] if isinstance(sources, str) else sources
    questions: list[Question] = []
    for suite in (suite for source in sources or own_suites() for suite in _open(source)):
        if twins := [question.source for question in questions if question.suite == suite.name]:
            raise ValueError(f"two suites are named {suite.name!r}; names must differ: {twins[0]}, {suite.origin}")
        questions += suite.questions(limit, strict)
    return questions


class _Suite(NamedTuple):
    """What the questions of a suite are made from."""

    name: str
    origin: str  # a file, or a data set with its commit
    records: Iterator[tuple[int, object]]  # numbered from 1
    field: str | None = None  # that has the question; None for the usual ones
    limit: int | None = None  # of questions, where the user sets none

    def questions(self, limit: int | None, strict: bool) -> list[Question]:
        """Make the questions of the first records."""
        questions, faults, used = [], [], {}
        for number, record in islice(self.records, limit or self.limit):
            try:
                question = self.question(number, formats.parse_line(record) if isinstance(record, bytes) else record)
            except Malformed as error:
                faults.append(f"{self.origin}:{number}: {error}")
                continue
            if (id := formats.unique_name(str(question.id), used)) != str(question.id):
                if strict:
                    raise ValueError(f"suite {self.name} repeats question_id {question.id!r}; ids must differ")
                question = replace(question, id=id)
            questions.append(question)
        formats.report_left_out(f"{self.origin}: {{}} malformed", faults, len(questions) + len(faults), strict)
        if not questions:
            raise ValueError(f"{self.origin} has no questions")
        return questions

    def question(self, number: int, record: object) -> Question:
        """Make the question of a record; Malformed if it has none."""
        record = {"turns": [record]} if isinstance(record, str) else record
        if not isinstance(record, dict):
            raise Malformed(f"a record must be an object, not {type(record).__name__}")
        opening, turns, template = read_question(record, self.field)
        ids = (record[name] for name in ("question_id", *readers.IDS) if record.get(name) not in (None, ""))
        id, category = next(ids, number), record.get("category")
        return Question(
            self.name,
            id if isinstance(id, int) else str(id),
            category if isinstance(category, str) else "",
            turns,
            opening,
            template,
            self.origin,
        )


def _open(source: str) -> Iterator[_Suite]:
    """Yield the suites of a source."""
    if source.startswith(HUB):
        yield _open_hub(source)
        return
    path, options = (source, {}) if Path(source).exists() else formats.options_of(source, "field")
    files = local_files(path) or [OWN_FOLDER / f"{name}.jsonl" for name in own_suites() if name == path]
    if not files:
        raise FileNotFoundError(
            f"suite {source!r} is not a file, a folder of .jsonl files, or one that poss list shows"
        )
    for file in files:
        name = Path(file.name.removesuffix(".gz")).stem
        name = file.resolve().parent.name if name == "question" else name  # SUITE/question.jsonl, as EAGLE has them
        yield _Suite(name, str(file), formats.file_records(file), options.get("field"))


def _open_hub(source: str) -> _Suite:
    """Return a data set of the hub; each row is downloaded when it is iterated to."""
    name, options = formats.options_of(source.removeprefix(HUB), "repo")
    if name not in HUB_SUITES:
        raise FileNotFoundError(f"suite {source!r} is not one that poss list shows; give JSON lines of other data sets")
    suite = HUB_SUITES[name]
    if "repo" in options:
        suite = replace(suite, repo=options["repo"], revision=None)  # the pin is of the original
    import datasets  # takes a second, and files do without it

    with announced(f"asking for the data set {suite.repo}"):
        rows = datasets.load_dataset(
            suite.repo,
            suite.config,
            split=suite.split,
            revision=suite.revision,
            data_files=suite.file,
            streaming=True,
        )
    parts = suite.repo + (f"@{suite.revision}" if suite.revision else ""), suite.config or "default", suite.split
    return _Suite(name, " ".join(parts), _hub_records(suite, rows), limit=suite.questions)


def _hub_records(suite: HubSuite, rows: Any) -> Iterator[tuple[int, object]]:
    for number, row in enumerate(rows, 1):
        if not row.get(suite.without):
            question = str(row.get("question", ""))
            row["sentence"] = question[:1].upper() + question[1:].removesuffix("?") + "?"
            fields = {name: form.format_map(row) for name, form in suite.fields.items()}
            yield number, formats.without_nulls(row) | fields


def local_files(suite: str) -> list[Path]:
    """Return the user's own files that a suite's name refers to; none for a suite of the project or of the hub."""
    path = Path(suite.partition("?")[0])
    return [path] if path.is_file() else sorted(path.glob("*.jsonl")) if path.is_dir() else []


def read_question(record: dict, field: str | None = None) -> tuple[list[Message], list[str], dict[str, Any]]:
    """The system messages, the user's turns, and what the chat template is given besides, as in a `Conversation`.

    Answers are left out, since the model gives its own: everything between two answers is one turn, its messages joined
    by a blank line. Where there are no answers at all, each message of the user is a turn. A
    conversation ends where the answer was a tool call, which nobody runs here, and before a later system message.

    Args:
        record: the first of these fields that it has is read: `turns` (texts), `messages` (role, content), ShareGPT's
            `conversations` (from, value; or texts of the user and the assistant in turn, also in `data`), `prompt` (a
            text, texts, or messages), `instruction` (and `input`), `question`.
        field: read this one instead, in any form that `prompt` may have.
    """
    key, value = _find_field(record, field)
    readers.check_text(record)
    opening = readers.system_of(record)
    if key in readers.CHATS or (chat := readers.as_chat(value)):
        systems = {name: record[name] for name in ("system", "system_prompt") if name in record}
        messages = readers.messages_of({"messages": value if key in readers.CHATS else chat, **systems})
        opening, texts = _split_turns(messages, key)
    else:
        readers.refuse_history(record)
        texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not texts or not all(isinstance(text, str) and text.strip() for text in texts):
        raise Malformed(f"`{key}` is {reprlib.repr(value)}; it must be a text, or a list of texts, none of them blank")
    return opening, texts, readers.template_of(record)


def _find_field(record: dict, field: str | None) -> tuple[str, Any]:
    """Return the field that has the question, and its value."""
    if (value := record.get(field or "turns")) is not None:
        return field or "turns", value
    if not field:
        key, value = readers.chat_of(record)
        if not key and isinstance(record.get("prompt"), list) and not record.get("instruction"):
            key, value = "prompt", record["prompt"]  # beside an instruction, it is made of that and the input
        key, value = (key, value) if key else readers.question_of(record)
        if key:
            return key, value
    usual = "`turns`, `messages`, `conversations`, `prompt` or `question` (?field=NAME names another)"
    has = ", ".join(map(str, record)) or "no field"
    raise Malformed(f"has no {f'`{field}`' if field else usual}; it has {has}")


def _split_turns(messages: list[Message], field: str) -> tuple[list[Message], list[str]]:
    """Return the system messages before the user speaks, and the messages between answers as turns."""
    if not any(message["role"] == "assistant" for message in messages):  # each of the user's begins a turn
        later = [i for i, message in enumerate(messages) if message["role"] == "user"][1:]
        messages = [part for i, one in enumerate(messages) for part in (*[_ANSWER] * (i in later), one)]
    first = readers.first_user(messages)
    tools = (i for i, one in enumerate(messages) if one.get("tool_calls") or one["role"] == "tool")
    systems = (i for i, one in enumerate(messages) if one["role"] == "system" and i > first)
    messages = readers.make_regular([*messages[: min([*tools, *systems], default=len(messages))], _ANSWER])
    first = readers.first_user(messages)
    runs = groupby(messages[first:], key=lambda message: message["role"] == "assistant")
    turns = ["\n\n".join(message["content"] for message in run) for is_answer, run in runs if not is_answer]
    if not turns:
        raise Malformed(f"`{field}` has no message of a user")
    return messages[:first], turns
