"""Read and check conversations: JSON lines, JSON arrays and `datasets`, in the chat and the ShareGPT form."""

import gzip
import json
import logging
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path

from tqdm import tqdm

from poss_lightning.ranges import Count, check_numbers

logger = logging.getLogger(__name__)

_FILES = (".jsonl", ".jsonl.gz", ".json")
_FORMS = (("messages", "role", "content"), ("conversations", "from", "value"))  # field, and the fields of its turns
_QUESTIONS = ("turns", "prompt", "question")  # fields of records that have no answers
_ROLES = {
    "system": "system",
    **dict.fromkeys(("user", "human"), "user"),
    **dict.fromkeys(("assistant", "gpt", "chatgpt", "bing", "bard"), "assistant"),
}
_IDS = ("id", "conversation_id", "question_id")
_SHOWN = 3  # faults spelled out in one error


@dataclass(frozen=True)
class Conversation:
    """A chat that an assistant takes part in; no two neighbours have the same role."""

    id: str
    messages: list[dict[str, str]]  # {"role": system|user|assistant, "content": str}


class CorpusError(ValueError):
    """A corpus that cannot be read as conversations; the message says which and why."""


class Malformed(ValueError):
    """What is wrong with one record."""


@check_numbers
def read_conversations(source: str, split: str = "train", limit: Count | None = None) -> list[Conversation]:
    """Read conversations of the chat form (`messages`: role, content) or ShareGPT's (`conversations`: from, value).

    Conversations are made regular. Empty turns are dropped, and neighbours of one role are joined by a blank line.
    Answers before the first user message are dropped, and so are messages after the last answer. A conversation without
    an answer is skipped and counted in a log line. An id that occurs again gets `#2`, `#3`, ...; a conversation without
    an id gets `<file stem>:<line number>`.

    Args:
        source: a `.jsonl`, `.jsonl.gz` or `.json` (one array) file, else a folder or hub id for `datasets`.
        split: of a folder or hub id; files have none.
        limit: stop after this many conversations; later lines are not checked.

    Raises:
        ValueError: limit is out of its range.
        CorpusError: no such source, malformed records (all in one error), or no conversation at all.
    """
    conversations: dict[str, Conversation] = {}
    unit = "line" if source.endswith((".jsonl", ".jsonl.gz")) else "record"
    faults, skipped = [], 0
    for number, raw in tqdm(_records(source, split), desc=f"read {source}", unit=unit, delay=5, leave=False):
        try:
            conversation = _conversation(raw, f"{_stem(source)}:{number}")
        except Malformed as error:
            faults.append(f"{unit} {number}: {error}")
            continue
        if conversation is None:
            skipped += 1
            continue
        conversation = _with_unique_id(conversation, conversations)
        conversations[conversation.id] = conversation
        if len(conversations) == limit:
            break
    _report(source, len(conversations), skipped, faults)
    return list(conversations.values())


def _report(source: str, count: int, skipped: int, faults: list[str]) -> None:
    """Raise CorpusError where the corpus is malformed or empty; log how many conversations were skipped."""
    if faults:
        more = [f"and {len(faults) - _SHOWN} more"] if len(faults) > _SHOWN else []
        raise CorpusError("\n  ".join([f"{source}: {len(faults)} malformed", *faults[:_SHOWN], *more]))
    if not count:
        hint = "; `poss answer` lets a target answer them" if skipped else ""
        raise CorpusError(f"{source} is empty: no conversation with an answer ({skipped} without){hint}")
    if skipped:
        logger.warning("%s: skipped %d conversations without an answer, kept %d", source, skipped, count)


def _stem(source: str) -> str:
    name = Path(source).name
    return next((name.removesuffix(ending) for ending in _FILES if name.endswith(ending)), name)


def _with_unique_id(conversation: Conversation, others: dict[str, Conversation]) -> Conversation:
    name, count = conversation.id, 1
    while name in others:
        count += 1
        name = f"{conversation.id}#{count}"
    return replace(conversation, id=name)


def _records(source: str, split: str) -> Iterator[tuple[int, object]]:
    """Number, from 1, and content of every record: bytes still to be parsed, or the parsed object."""
    if not source.strip():
        raise CorpusError(f"corpus is {source!r}; it must be a file, a folder or a hub id")
    path = Path(source)
    if path.is_file() and path.name.endswith(_FILES):
        return _array(path) if path.suffix == ".json" else json_lines(path)
    if path.is_file() or path.name.endswith(_FILES):
        fault = f"is not one of {', '.join(_FILES)}" if path.is_file() else "is missing: there is no such file"
        raise CorpusError(f"{source} {fault}")
    return _rows(source, split)


def json_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Number, from 1, and bytes of every line of a file, unpacked where it is compressed; blank lines are skipped.

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


def _rows(source: str, split: str) -> Iterator[tuple[int, object]]:
    import datasets  # takes a second, and files do without it
    from datasets.exceptions import DatasetsError

    try:
        rows = datasets.load_dataset(source, split=split)
    except (OSError, ValueError, RuntimeError, LookupError, TypeError, DatasetsError) as error:
        fault = "a folder datasets cannot load" if Path(source).is_dir() else "no path here and no reachable hub id"
        raise CorpusError(f"{source} is {fault} (split {split!r}): {error.__cause__ or error}") from error
    return enumerate(rows, 1)


def _conversation(raw: object, name: str) -> Conversation | None:
    """One record as a regular conversation; None where it has no answer."""
    record = parse(raw) if isinstance(raw, bytes) else raw
    if not isinstance(record, dict):
        raise Malformed(f"a record must be an object, it is a {type(record).__name__}")
    messages = make_regular(messages_of(record))
    if not any(message["role"] == "assistant" for message in messages):
        return None
    names = [record[field] for field in _IDS if record.get(field) not in (None, "")]
    return Conversation(str(names[0]) if names else name, messages)


def parse(line: bytes) -> object:
    """The value of a line of JSON.

    Raises:
        Malformed: it is not JSON.
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
    asked = next((field for field in _QUESTIONS if field in record), None)
    hint = f"; it has {asked!r}, and `poss answer` lets a target answer questions" if asked else ""
    raise Malformed(f"neither 'messages' nor 'conversations'{hint}")


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


def make_regular(messages: list[dict[str, str]]) -> list[dict[str, str]]:
    """The messages without empty turns, answers before a user's message, and an end without an answer.

    Neighbours of one role are joined.
    """
    filled = [message for message in messages if message["content"].strip()]
    first = next((i for i, message in enumerate(filled) if message["role"] == "user"), len(filled))
    kept = [message for i, message in enumerate(filled) if i > first or message["role"] != "assistant"]
    while kept and kept[-1]["role"] != "assistant":
        kept.pop()
    turns = groupby(kept, key=lambda message: message["role"])
    return [{"role": role, "content": "\n\n".join(message["content"] for message in turn)} for role, turn in turns]
