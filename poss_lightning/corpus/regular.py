"""Messages made a regular conversation by leaving out, never by inventing."""

from collections.abc import Callable
from itertools import groupby

from poss_lightning.target.template import Message

SIDES = ("user", "assistant")


def make_regular(messages: list[Message]) -> list[Message]:
    """The messages from a user's first, with system messages before it, to the last answer before an empty one."""
    filled = [message for message in messages if message["role"] != "system" or message["content"].strip()]
    first = first_user(filled)
    kept = [message for i, message in enumerate(filled) if i >= first or message["role"] == "system"]
    kept = kept[: _first(kept, _is_empty)]
    while kept and kept[-1]["role"] != "assistant":
        kept.pop()
    runs = groupby(enumerate(kept), lambda pair: -1 if pair[1]["role"] == "user" else pair[0])
    return [_joined([message for _, message in run]) for _, run in runs]


def first_user(messages: list[Message]) -> int:
    """The index of a user's first message; the number of messages where there is none."""
    return _first(messages, lambda message: message["role"] == "user")


def _is_empty(message: Message) -> bool:
    """Whether a user or an assistant says nothing, which a tool may, and an answer that was cut in its thoughts."""
    says = message["content"].strip() or message.get("tool_calls") or message.get("tokens")
    thought = message.get("finish_reason") == "length" and message.get("thinking")
    return message["role"] in SIDES and not says and not thought


def _joined(run: list[Message]) -> Message:
    return run[0] if len(run) == 1 else run[0] | {"content": "\n\n".join(message["content"] for message in run)}


def _first(messages: list[Message], holds: Callable[[Message], bool]) -> int:
    """The index of the first message for which `holds` is true; the number of messages where there is none."""
    return next((i for i, message in enumerate(messages) if holds(message)), len(messages))
