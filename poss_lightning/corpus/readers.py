"""Conversations from JSON lines, JSON arrays and `datasets`, in the chat and the ShareGPT form, checked."""

import gzip
import json
import logging
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path

logger = logging.getLogger(__name__)

_FILES = (".jsonl", ".jsonl.gz", ".json")
_FORMS = (("messages", "role", "content"), ("conversations", "from", "value"))  # field, and the fields of its turns
_ROLES = {
    "system": "system",
    **dict.fromkeys(("user", "human"), "user"),
    **dict.fromkeys(("assistant", "gpt", "chatgpt", "bing", "bard"), "assistant"),
}
_IDS = ("id", "conversation_id", "question_id")
_SHOWN = 10  # faults spelled out in one error


@dataclass(frozen=True)
class Conversation:
    """A chat that an assistant takes part in; no two neighbours have the same role."""

    id: str
    messages: list[dict[str, str]]  # {"role": system|user|assistant, "content": str}


class CorpusError(ValueError):
    """A corpus that cannot be read as conversations; says which and why."""


class Malformed(ValueError):
    """What is wrong with one record."""


def read_conversations(source: str, split: str = "train", limit: int | None = None) -> list[Conversation]:
    """Read conversations of the chat form (`messages`: role, content) or ShareGPT's (`conversations`: from, value).

    Real corpora are made regular: empty turns are dropped, neighbours of one role joined by a blank line, answers
    before the first user message and messages after the last answer dropped. What then holds no answer is skipped and
    counted in a log line. An id met before gets `#2`, `#3`, ...; without one it is `<file stem>:<line number>`.

    Args:
        source: a `.jsonl`, `.jsonl.gz` or `.json` (one array) file, else a folder or hub id for `datasets`.
        split: of a folder or hub id; files have none.
        limit: stop after this many conversations; lines behind are not looked at.

    Raises:
        ValueError: limit below 1.
        CorpusError: no such source, malformed records (all of them in one error), or no conversation at all.
    """
    if limit is not None and limit < 1:
        raise ValueError(f"limit is {limit}; it must be at least 1")
    found: dict[str, Conversation] = {}
    unit = "line" if source.endswith((".jsonl", ".jsonl.gz")) else "record"
    faults, skipped = [], 0
    for number, raw in _records(source, split):
        try:
            conversation = _conversation(raw, f"{_stem(source)}:{number}")
        except Malformed as error:
            faults.append(f"{unit} {number}: {error}")
            continue
        if conversation is None:
            skipped += 1
            continue
        conversation = _unique(conversation, found)
        found[conversation.id] = conversation
        if len(found) == limit:
            break
    _judge(source, len(found), skipped, faults)
    return list(found.values())


def _judge(source: str, found: int, skipped: int, faults: list[str]) -> None:
    """Raise where the corpus is malformed or empty; tell what was skipped."""
    if faults:
        more = [f"and {len(faults) - _SHOWN} more"] if len(faults) > _SHOWN else []
        raise CorpusError("\n  ".join([f"{source}: {len(faults)} malformed", *faults[:_SHOWN], *more]))
    if not found:
        raise CorpusError(f"{source} is empty: no conversation with an answer ({skipped} without)")
    if skipped:
        logger.warning("%s: skipped %d conversations without an answer, kept %d", source, skipped, found)


def _stem(source: str) -> str:
    name = Path(source).name
    return next((name.removesuffix(ending) for ending in _FILES if name.endswith(ending)), name)


def _unique(conversation: Conversation, found: dict[str, Conversation]) -> Conversation:
    name, count = conversation.id, 1
    while name in found:
        count += 1
        name = f"{conversation.id}#{count}"
    return replace(conversation, id=name)


def _records(source: str, split: str) -> Iterator[tuple[int, object]]:
    """Number, from 1, and content of every record: bytes still to be parsed, or the parsed object."""
    path = Path(source)
    if path.is_file() and path.name.endswith(_FILES):
        return _array(path) if path.suffix == ".json" else json_lines(path)
    if path.is_file() or path.name.endswith(_FILES):
        fault = f"is not one of {', '.join(_FILES)}" if path.is_file() else "is missing: there is no such file"
        raise CorpusError(f"{source} {fault}")
    return _rows(source, split)


def json_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Number, from 1, and bytes of every line of a file, unpacked where it is compressed; blank ones are passed over.

    Raises:
        CorpusError: it cannot be read to its end.
    """
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            yield from ((number, line) for number, line in enumerate(file, 1) if line.strip())
    except (OSError, EOFError, zlib.error) as error:
        raise CorpusError(f"{path} cannot be read to its end: {error}") from error


def _array(path: Path) -> Iterator[tuple[int, object]]:
    try:
        records = json.loads(path.read_bytes())
    except ValueError as error:
        raise CorpusError(f"{path} is not JSON: {error}") from error
    if not isinstance(records, list):
        raise CorpusError(f"{path} is not a JSON array of conversations; one conversation a line is called .jsonl")
    return enumerate(records, 1)


def _rows(source: str, split: str) -> Iterator[tuple[int, dict]]:
    import datasets  # takes a second, and files do without it

    try:
        rows = datasets.load_dataset(source, split=split)
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        fault = "a folder datasets cannot load" if Path(source).is_dir() else "no path here and no reachable hub id"
        raise CorpusError(f"{source} is {fault} (split {split!r}): {error.__cause__ or error}") from error
    return enumerate(rows, 1)


def _conversation(raw: object, name: str) -> Conversation | None:
    """One record made regular; None where nothing is answered in it.

    Raises:
        Malformed: it is no conversation.
    """
    record = parsed(raw) if isinstance(raw, bytes) else raw
    if not isinstance(record, dict):
        raise Malformed(f"a record must be an object, it is a {type(record).__name__}")
    messages = regular(messages_of(record))
    if not any(message["role"] == "assistant" for message in messages):
        return None
    names = [record[field] for field in _IDS if record.get(field) not in (None, "")]
    return Conversation(str(names[0]) if names else name, messages)


def parsed(line: bytes) -> object:
    """What a line of JSON says.

    Raises:
        Malformed: it is none.
    """
    try:
        return json.loads(line)
    except ValueError as error:  # bytes that are not UTF-8 too
        raise Malformed(f"not JSON ({error})") from error


def messages_of(record: dict) -> list[dict[str, str]]:
    """The messages of a record of either form, as role and content, with the roles of chat templates.

    Raises:
        Malformed: it has neither form.
    """
    for field, role, content in _FORMS:
        if record.get(field) is not None:
            if not isinstance(record[field], list):
                raise Malformed(f"{field!r} must be a list, it is a {type(record[field]).__name__}")
            return [_message(turn, f"{field}[{i}]", role, content) for i, turn in enumerate(record[field])]
    raise Malformed("neither 'messages' nor 'conversations'")


def _message(turn: object, where: str, role: str, content: str) -> dict[str, str]:
    if not isinstance(turn, dict):
        raise Malformed(f"{where} must be an object, it is a {type(turn).__name__}")
    for field in (role, content):
        if turn.get(field) is None:
            raise Malformed(f"{where} has no {field!r}")
        if not isinstance(turn[field], str):
            raise Malformed(f"{where}: {field!r} must be a string, it is a {type(turn[field]).__name__}")
    if turn[role] not in _ROLES:
        raise Malformed(f"{where}: unknown role {turn[role]!r}, known are {', '.join(_ROLES)}")
    try:
        turn[content].encode()
    except UnicodeEncodeError as error:
        raise Malformed(f"{where}: {content!r} holds half a surrogate pair, which is no text") from error
    return {"role": _ROLES[turn[role]], "content": turn[content]}


def regular(messages: list[dict[str, str]]) -> list[dict[str, str]]:
    """Without empty turns, unasked answers and unanswered ends; neighbours of one role joined."""
    spoken = [message for message in messages if message["content"].strip()]
    asked = next((i for i, message in enumerate(spoken) if message["role"] == "user"), len(spoken))
    kept = [message for i, message in enumerate(spoken) if i > asked or message["role"] != "assistant"]
    while kept and kept[-1]["role"] != "assistant":
        kept.pop()
    turns = groupby(kept, key=lambda message: message["role"])
    return [{"role": role, "content": "\n\n".join(message["content"] for message in turn)} for role, turn in turns]
