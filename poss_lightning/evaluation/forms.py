"""What a question asks: the user's turns, and what stands before them, whichever form the records of its suite have."""

from itertools import groupby
from typing import Any, NamedTuple

from poss_lightning.corpus import readers
from poss_lightning.corpus.records import Malformed
from poss_lightning.corpus.regular import make_regular
from poss_lightning.target.template import Message

_NAMES = ("question_id", "id", "conversation_id", "prompt_id")
_CHATS = ("messages", "conversations", "conversation")
_FIELDS = ("turns", *_CHATS, "prompt")
LEFT_OUT = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE USING SPECDEC_BENCH"
_ANSWER: Message = {"role": "assistant", "content": "…"}
_SHOWN = 60  # letters of a wrong value shown in an error


class Asked(NamedTuple):
    """What a record asks."""

    opening: list[Message]  # system messages
    turns: list[str]  # of the user
    template: dict[str, Any]  # as of a `Conversation`


def asked(record: dict, field: str | None = None) -> Asked:
    """What a record asks.

    Args:
        record: the first of these fields that it has is read: `turns` (texts), `messages` (role, content), ShareGPT's
            `conversations` (from, value), `prompt` (a text, texts, or messages), `instruction` (and `input`),
            `question`.
        field: read this one instead; its value may be any that `prompt` may have.

    The answers of a conversation are left out, since the model gives its own. Everything between two answers is one
    turn: its messages are joined by a blank line. Where there are no answers at all, as in SPEED-Bench's files, each
    message of the user is a turn. A conversation ends where the answer was a call of a tool, which nobody runs here,
    and before a system message in its middle.

    Raises:
        Malformed: there is no such field, or it has no question; or SPEED-Bench left the text out.
    """
    fields = (field,) if field else _FIELDS
    name = next(
        (name for name in fields if record.get(name) is not None and (record[name] or name not in _CHATS)), None
    )
    key, value = (name, record[name]) if name else ("", None) if field else readers.question_of(record)
    if not key:
        known = "`turns`, `messages`, `conversations`, `prompt` or `question` (?field=NAME names another)"
        raise Malformed(
            f"has no {f'`{field}`' if field else known}; it has {', '.join(map(str, record)) or 'no field'}"
        )
    readers.check_text(record)
    opening = readers.system_of(record)
    if key in _CHATS or (chat := readers.as_chat(value)):
        given = {name: record[name] for name in ("system", "system_prompt") if name in record}
        opening, texts = _user_turns(readers.messages_of({"messages": value if key in _CHATS else chat, **given}), key)
    else:
        texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not texts:
        shown = repr(value)[:_SHOWN]
        raise Malformed(f"`{key}` is {shown}; it must be a text, or a list of one or more texts")
    for turn, text in enumerate(texts, start=1):
        if not _is_text(text):
            place = f"turn {turn} of `{key}`" if isinstance(value, list) else f"`{key}`"
            raise Malformed(f"{place} is {repr(text)[:_SHOWN]}; it must be a text that is not blank")
    if any(LEFT_OUT in text for text in texts):
        raise Malformed(
            f"`{key}` says that SPEED-Bench may not hold this text; NVIDIA's prepare.py (nemo_skills/dataset/"
            "speed-bench of NVIDIA-NeMo/Skills) fetches all texts: name a file that it has written"
        )
    return Asked(opening, texts, readers.template_of(record))


def name(record: dict, number: int) -> int | str:
    """The id of a record: `question_id`, `id` or `conversation_id`, else its number.

    Raises:
        Malformed: it is neither a number of at least 0 nor a name.
    """
    field = next((name for name in _NAMES if record.get(name) not in (None, "") and record[name] == record[name]), None)
    if field is None:
        return number
    value = record[field]
    value = int(value) if isinstance(value, float) and value.is_integer() else value
    if isinstance(value, bool) or not isinstance(value, int | str) or (isinstance(value, int) and value < 0):
        raise Malformed(f"{field} is {value!r}; it must be a number of at least 0 or a name")
    return value


def _user_turns(messages: list[Message], field: str) -> tuple[list[Message], list[str]]:
    """The system messages before the user speaks, and the messages between answers as turns."""
    if not any(message["role"] == "assistant" for message in messages):  # each of the user's begins a turn
        asked = [place for place, message in enumerate(messages) if message["role"] == "user"][1:]
        messages = [part for place, one in enumerate(messages) for part in (*[_ANSWER] * (place in asked), one)]
    first = next((place for place, message in enumerate(messages) if message["role"] == "user"), len(messages))
    ends = (place for place, one in enumerate(messages) if one.get("tool_calls") or one["role"] == "tool")
    later = (place for place, one in enumerate(messages) if one["role"] == "system" and place > first)
    messages = make_regular([*messages[: min([*ends, *later], default=len(messages))], _ANSWER])
    first = next((place for place, message in enumerate(messages) if message["role"] == "user"), len(messages))
    runs = groupby(messages[first:], key=lambda message: message["role"] == "assistant")
    turns = ["\n\n".join(message["content"] for message in run) for is_answer, run in runs if not is_answer]
    if not turns:
        raise Malformed(f"`{field}` has no message of a user")
    return messages[:first], turns


def _is_text(value: object) -> bool:
    """Whether it is a string that is not blank; half a surrogate pair, which JSON allows, is not text."""
    return isinstance(value, str) and bool(value.strip()) and value == value.encode(errors="ignore").decode()
