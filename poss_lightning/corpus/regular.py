"""Messages made a regular conversation by leaving out, never by inventing."""

from itertools import takewhile

from poss_lightning.target.template import Message

SIDES = ("user", "assistant")


def make_regular(messages: list[Message]) -> list[Message]:
    """Keep the messages from the first user's to the last answer before an empty turn, and system messages before."""
    filled = [message for message in messages if message["role"] != "system" or message["content"].strip()]
    first = first_user(filled)
    started = (message for i, message in enumerate(filled) if i >= first or message["role"] == "system")
    kept = list(takewhile(_says_something, started))
    while kept and kept[-1]["role"] != "assistant":
        kept.pop()
    regular: list[Message] = []
    for message in kept:
        if regular and message["role"] == regular[-1]["role"] == "user":
            regular[-1] = regular[-1] | {"content": f"{regular[-1]['content']}\n\n{message['content']}"}
        else:
            regular.append(message)
    return regular


def first_user(messages: list[Message]) -> int:
    """Return the index of the first user message, or the number of messages if there is none."""
    return next((i for i, message in enumerate(messages) if message["role"] == "user"), len(messages))


def _says_something(message: Message) -> bool:
    """Return whether a message has text, calls, or thoughts that were cut; a tool's may be empty."""
    thought = message.get("finish_reason") == "length" and message.get("thinking")
    says = message["content"].strip() or message.get("tool_calls") or message.get("tokens") or thought
    return message["role"] not in SIDES or bool(says)
