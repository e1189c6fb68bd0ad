"""The user's turns of a question, whichever form the records of its suite have."""

from itertools import groupby

from poss_lightning.corpus import readers

_NAMES = ("question_id", "id", "conversation_id")
_CHATS = ("messages", "conversations")
_FIELDS = ("turns", *_CHATS, "prompt")
LEFT_OUT = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE USING SPECDEC_BENCH"
_ANSWER = {"role": "assistant", "content": "…"}
_SHOWN = 60  # letters of a wrong value shown in an error


def turns(record: dict, field: str | None = None) -> list[str]:
    """The user's turns of a record.

    Args:
        record: the first of these fields that it has is read: `turns` (texts), `messages` (role, content), ShareGPT's
            `conversations` (from, value), `prompt` (a text, texts, or messages).
        field: read this one instead; its value may be any that `prompt` may have.

    The answers of a conversation are left out, since the model gives its own. Everything between two answers is one
    turn: its messages, also those of a system, are joined by a blank line. Where there are no answers at all, as in
    SPEED-Bench's files, each message of the user is a turn.

    Raises:
        Malformed: there is no such field, or it has no question; or SPEED-Bench left the text out.
    """
    fields = (field,) if field else _FIELDS
    name = next((name for name in fields if record.get(name) is not None), None)
    if name is None:
        known = "`turns`, `messages`, `conversations` or `prompt` (?field=NAME names another)"
        raise readers.Malformed(
            f"has no {f'`{field}`' if field else known}; it has {', '.join(map(str, record)) or 'no field'}"
        )
    value = record[name]
    if name in _CHATS:
        texts = _user_turns({name: value}, name)
    elif isinstance(value, list) and value and isinstance(value[0], dict):
        texts = _user_turns({"messages": value}, name)
    else:
        texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not texts:
        shown = repr(value)[:_SHOWN]
        raise readers.Malformed(f"`{name}` is {shown}; it must be a text, or a list of one or more texts")
    for turn, text in enumerate(texts, start=1):
        if not _is_text(text):
            place = f"turn {turn} of `{name}`" if isinstance(value, list) else f"`{name}`"
            raise readers.Malformed(f"{place} is {repr(text)[:_SHOWN]}; it must be a text that is not blank")
    if any(LEFT_OUT in text for text in texts):
        raise readers.Malformed(
            f"`{name}` says that SPEED-Bench may not hold this text; NVIDIA's prepare.py (nemo_skills/dataset/"
            "speed-bench of NVIDIA-NeMo/Skills) fetches all texts: name a file that it has written"
        )
    return texts


def name(record: dict, number: int) -> int | str:
    """The id of a record: `question_id`, `id` or `conversation_id`, else its number.

    Raises:
        Malformed: it is neither a number of at least 0 nor a name.
    """
    field = next((field for field in _NAMES if record.get(field) not in (None, "")), None)
    if field is None:
        return number
    value = record[field]
    if isinstance(value, bool) or not isinstance(value, int | str) or (isinstance(value, int) and value < 0):
        raise readers.Malformed(f"{field} is {value!r}; it must be a number of at least 0 or a name")
    return value


def _user_turns(conversation: dict, field: str) -> list[str]:
    """The messages between answers, as turns."""
    messages = readers.messages_of(conversation)
    if not any(message["role"] == "assistant" for message in messages):  # each of the user's begins a turn
        asked = [place for place, message in enumerate(messages) if message["role"] == "user"][1:]
        messages = [part for place, one in enumerate(messages) for part in (*[_ANSWER] * (place in asked), one)]
    messages = readers.make_regular([*messages, _ANSWER])
    runs = groupby(messages, key=lambda message: message["role"] == "assistant")
    turns = ["\n\n".join(message["content"] for message in run) for is_answer, run in runs if not is_answer]
    if not turns:
        raise readers.Malformed(f"`{field}` has no message of a user")
    return turns


def _is_text(value: object) -> bool:
    """Whether it is a string that is not blank; half a surrogate pair, which JSON allows, is no text."""
    return isinstance(value, str) and bool(value.strip()) and value == value.encode(errors="ignore").decode()
