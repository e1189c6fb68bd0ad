"""What a record asks: the user's turns, and the messages before them, in any form that suites have."""

import reprlib
from itertools import groupby
from typing import Any

from poss_lightning.corpus import readers
from poss_lightning.corpus.formats import Malformed
from poss_lightning.corpus.turns import refuse_half_pairs
from poss_lightning.target.template import Message

_IDS = ("question_id", *readers.IDS)
WITHHELD = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE USING SPECDEC_BENCH"
_ANSWER: Message = {"role": "assistant", "content": "…"}


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
        texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not texts:
        raise Malformed(f"`{key}` is {reprlib.repr(value)}; it must be a text, or a list of one or more texts")
    for turn, text in enumerate(texts, start=1):
        place = f"turn {turn} of `{key}`" if isinstance(value, list) else f"`{key}`"
        if not isinstance(text, str) or not text.strip():
            raise Malformed(f"{place} is {reprlib.repr(text)}; it must be a text that is not blank")
        refuse_half_pairs(text, place)
    if any(WITHHELD in text for text in texts):
        raise Malformed(
            f"`{key}` says that SPEED-Bench may not hold this text; NVIDIA's prepare.py (nemo_skills/dataset/"
            "speed-bench of NVIDIA-NeMo/Skills) fetches all texts: name a file that it has written"
        )
    return opening, texts, readers.template_of(record)


def read_id(record: dict, number: int) -> int | str:
    """The id of a record, or else its number; raises Malformed unless it is a natural number or a name."""
    field = next((name for name in _IDS if record.get(name) not in (None, "")), None)
    if field is None:
        return number
    value = record[field]
    value = int(value) if isinstance(value, float) and value.is_integer() else value
    if isinstance(value, bool) or not isinstance(value, int | str) or (isinstance(value, int) and value < 0):
        raise Malformed(f"{field} is {value!r}; it must be a number of at least 0 or a name")
    return value


def _find_field(record: dict, field: str | None) -> tuple[str, Any]:
    """The field that has the question, and its value."""
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
    """The system messages before the user speaks, and the messages between answers as turns."""
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
