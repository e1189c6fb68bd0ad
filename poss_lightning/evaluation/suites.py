"""Suites of questions: the project's own, JSON lines in many forms, the papers' six, and any data set of the hub."""

import hashlib
import json
import reprlib
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace
from itertools import groupby, islice
from pathlib import Path
from typing import Any

import yaml

from poss_lightning.corpus import formats, readers
from poss_lightning.corpus.formats import Malformed
from poss_lightning.corpus.turns import refuse_half_pairs
from poss_lightning.ranges import Count, check_numbers
from poss_lightning.target.chat import Chat
from poss_lightning.target.template import Message
from poss_lightning.terminal import announced

OWN = Path(__file__).parent / "prompts"
NAMED = Path(__file__).parent / "suites.yaml"
HUB = "hub:"
WITHHELD = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE USING SPECDEC_BENCH"
_ANSWER: Message = {"role": "assistant", "content": "…"}


@dataclass(frozen=True)
class HubSuite:
    """A split of a data set, and how its rows become questions."""

    repo: str  # a hub id, or a folder that `datasets` can load
    revision: str | None = None  # a commit; None for the newest
    config: str | None = None  # of the data set; None for its default
    split: str | None = None  # None for `test`, else `validation`, else the only one
    file: str | None = None  # of the data set, where its files are different suites
    questions: int | None = 80  # asked where the user sets no limit; None for all
    fields: dict[str, str] = field(default_factory=dict)  # of a record, made from those of a row
    without: str = ""  # a field of rows that are no questions if it has a value


KNOWN = {name: HubSuite(**suite) for name, suite in yaml.safe_load(NAMED.read_text()).items()}


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
    """16 hex digits of all that the questions say, wherever they are from."""
    said = [{name: value for name, value in asdict(each).items() if name != "source"} for each in questions]
    return hashlib.sha256(json.dumps(said, default=str).encode()).hexdigest()[:16]


def own_suites() -> list[str]:
    """List the project's own suites."""
    return sorted(path.stem for path in OWN.glob("*.jsonl"))


@check_numbers
def read_suites(
    sources: list[str] | str | None = None,
    limit: Count | None = None,
    strict: bool = True,
) -> list[Question]:
    """Read the questions of several suites, in order; a suite is named by its file or data set without the path.

    Args:
        sources: one of these, or a list of them; None for all of the project's own suites.
            `chat`, ...: a suite of the project's own.
            `FILE`, `FOLDER`: a file of records, as for a corpus, or a folder of `.jsonl` files; for the forms of a
            record see `read_question`. `FILE?field=NAME` reads a different field.
            `hub:mt_bench` and the others of `suites.yaml`: the papers' six, SPEED-Bench, those of vLLM's speculators.
            `hub:OWNER/NAME`, `hub:FOLDER`: a data set whose rows have the forms of a file's.
            Options of a suite of the hub, joined by `&`: `?repo=FOLDER` for a copy, `field`, `config`, `split`,
            `revision`.
        limit: at most this many questions of each suite, the first; by default all of a file, what `suites.yaml` says,
            and 80 of other data sets of the hub.
        strict: a malformed record, or a repeated id, is an error; otherwise malformed ones are left out, counted and
            named, up to a tenth of them, and a repeated id gets `#2`, `#3`, ...
    """
    sources = [sources] if isinstance(sources, str) else sources
    questions: list[Question] = []
    for source in sources or own_suites():
        for suite in _load(source, limit, strict):
            name = suite[0].suite
            if twins := [question.source for question in questions if question.suite == name]:
                raise ValueError(f"two suites are named {name!r}; names must differ: {twins[0]}, {suite[0].source}")
            questions += suite
    return questions


def _load(source: str, limit: int | None, strict: bool) -> Iterator[list[Question]]:
    if source.startswith(HUB):
        yield _from_hub(source, limit, strict)
        return
    place, options = (source, {}) if Path(source).exists() else formats.options_of(source, "field")
    files = local_files(place) or [OWN / f"{name}.jsonl" for name in own_suites() if name == place]
    if not files:
        raise FileNotFoundError(
            f"suite {source!r} is not a file, a folder of .jsonl files, or one that poss list shows"
        )
    for path in files:
        rows = ((f"{path}:{number}", number, record) for number, record in formats.file_records(path))
        name = Path(path.name.removesuffix(".gz")).stem
        name = path.resolve().parent.name if name == "question" else name  # SUITE/question.jsonl, as EAGLE has them
        yield _suite(name, str(path), rows, limit, options.get("field"), strict)


def _from_hub(source: str, limit: int | None, strict: bool) -> list[Question]:
    place, options = formats.options_of(source, "repo", "field", "config", "split", "revision")
    name, field = place.removeprefix(HUB), options.pop("field", None)
    if name not in KNOWN and "/" not in name:
        raise FileNotFoundError(f"suite {source!r} is not hub:OWNER/NAME, and not one that poss list shows")
    copied: dict[str, Any] = {"revision": None} if "repo" in options else {}  # the pin is of the original
    suite = replace(KNOWN.get(name, HubSuite(name)), **(copied | options))
    origin, records = _stream(suite)
    rows = ((f"{source} row {number}", number, record) for number, record in records)
    return _suite(Path(name).name, origin, rows, limit or suite.questions, field, strict)


def _stream(suite: HubSuite) -> tuple[str, Iterator[tuple[int, dict]]]:
    """Return where the rows of a suite come from, `repo@commit config split`; and the rows as records, numbered from 1.

    A row is downloaded when it is iterated to.
    """
    import datasets  # takes a second, and files do without it

    with announced(f"asking for the data set {suite.repo}"):
        builder = datasets.load_dataset_builder(
            suite.repo, suite.config, revision=suite.revision, data_files=suite.file
        )
        splits = builder.as_streaming_dataset()
    assert isinstance(splits, dict)  # as no split was asked for
    usual = ("test", "validation", *(splits if len(splits) == 1 else ()))
    split = suite.split or next((name for name in usual if name in splits), "test")
    if split not in splits:
        raise ValueError(f"{suite.repo} has no split {split!r}: choose ?split= of {', '.join(splits)}")
    commit = f"@{builder.hash}" if builder.repo_id else ""  # a folder's hash is of its path
    return f"{suite.repo}{commit} {builder.config.name} {split}", _records(suite, splits[split])


def _records(suite: HubSuite, rows: Iterable[dict]) -> Iterator[tuple[int, dict]]:
    for number, row in enumerate(rows, 1):
        if not row.get(suite.without):
            question = str(row.get("question", ""))
            sentence = question[:1].upper() + question[1:].removesuffix("?") + "?"
            try:
                made = {name: form.format_map({**row, "sentence": sentence}) for name, form in suite.fields.items()}
            except KeyError as error:
                raise ValueError(f"row {number} of {suite.repo} has no {error}; it has {', '.join(row)}") from None
            yield number, formats.without_nulls(row) | made


def local_files(suite: str) -> list[Path]:
    """Return the user's own files that a suite's name refers to; none for a suite of the project or of the hub."""
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
    """Make the questions of a suite from rows: the place of each, for messages; its number; and its content."""
    questions, faults = [], []
    for place, number, row in islice(rows, limit):
        try:
            questions.append(_question(name, source, number, row, field))
        except Malformed as error:
            faults.append(f"{place}: {error}")
    formats.report_left_out(f"{source}: {{}} malformed", faults, len(questions) + len(faults), strict)
    if not questions:
        raise ValueError(f"{source} has no questions")
    used: dict[str, int] = {}
    for place, question in enumerate(questions):
        if (id := formats.unused(str(question.id), used)) != str(question.id):
            if strict:
                raise ValueError(f"suite {name} repeats question_id {question.id!r}; ids must differ")
            questions[place] = replace(question, id=id)
    return questions


def _question(suite: str, source: str, number: int, row: object, field: str | None) -> Question:
    record = formats.parse_line(row) if isinstance(row, bytes) else row
    record = {"turns": [record]} if isinstance(record, str) else record
    if not isinstance(record, dict):
        raise Malformed(f"a record must be an object, not {type(record).__name__}")
    opening, turns, template = read_question(record, field)
    id = next((record[name] for name in ("question_id", *readers.IDS) if record.get(name) not in (None, "")), number)
    id = refuse_half_pairs(id if isinstance(id, int) else str(id), "its id")
    category = known if isinstance(known := record.get("category"), str) else ""
    return Question(suite, id, category, turns, opening, template, source)


def read_question(record: dict, field: str | None = None) -> tuple[list[Message], list[str], dict[str, Any]]:
    """The system messages, the user's turns, and what the chat template is given besides, as in a `Conversation`.

    Answers are left out, since the model gives its own: everything between two answers is one turn, its messages joined
    by a blank line. Where there are no answers at all, as in SPEED-Bench's files, each message of the user is a turn. A
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
    if any(WITHHELD in text for text in texts):
        raise Malformed(
            "SPEED-Bench may not hold this text: name a file that NVIDIA-NeMo/Skills' prepare.py has written"
        )
    return opening, refuse_half_pairs(texts, f"`{key}`"), readers.template_of(record)


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
    known = "`turns`, `messages`, `conversations`, `prompt` or `question` (?field=NAME names another)"
    has = ", ".join(map(str, record)) or "no field"
    raise Malformed(f"has no {f'`{field}`' if field else known}; it has {has}")


def _split_turns(messages: list[Message], field: str) -> tuple[list[Message], list[str]]:
    """Return the system messages before the user speaks, and the messages between answers as turns."""
    if not any(message["role"] == "assistant" for message in messages):  # each of the user's begins a turn
        later = [place for place, message in enumerate(messages) if message["role"] == "user"][1:]
        messages = [part for place, one in enumerate(messages) for part in (*[_ANSWER] * (place in later), one)]
    first = readers.first_user(messages)
    tools = (place for place, one in enumerate(messages) if one.get("tool_calls") or one["role"] == "tool")
    systems = (place for place, one in enumerate(messages) if one["role"] == "system" and place > first)
    messages = readers.make_regular([*messages[: min([*tools, *systems], default=len(messages))], _ANSWER])
    first = readers.first_user(messages)
    runs = groupby(messages[first:], key=lambda message: message["role"] == "assistant")
    turns = ["\n\n".join(message["content"] for message in run) for is_answer, run in runs if not is_answer]
    if not turns:
        raise Malformed(f"`{field}` has no message of a user")
    return messages[:first], turns
