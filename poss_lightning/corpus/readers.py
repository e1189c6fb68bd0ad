"""Read conversations in the forms that people have: chats, ShareGPT, questions with answers; tools and thoughts."""

import hashlib
import json
import logging
import re
from dataclasses import dataclass, field, replace
from itertools import takewhile
from pathlib import Path
from typing import Any

from tqdm import tqdm

from poss_lightning.corpus.formats import (
    CorpusError,
    Malformed,
    parse_line,
    records,
    report_left_out,
    stem,
    unique_name,
)
from poss_lightning.corpus.turns import (
    THOUGHT_FIELDS,
    filled,
    finish_of,
    has_words,
    read_message,
    unpacked,
)
from poss_lightning.ranges import Count, check_numbers
from poss_lightning.target_model.template import Message

logger = logging.getLogger(__name__)

SIDES = ("user", "assistant")
CHATS = ("messages", "conversations", "conversation")
_ASKED = ("instruction", "prompt", "question", "query", "problem", "input")  # fields of a record with one question
_ANSWERED = ("output", "response", "completion", "generation", "generated_solution", "solution", "answer", "chosen")
_MEDIA = ("image", "images", "video", "videos", "audio", "audios")
IDS = ("id", "conversation_id", "question_id", "prompt_id")
_SWITCHES = ("on", "off", "true", "false", "yes", "no", "none", "low", "medium", "high")  # of thinking, no thoughts
_THOUGHTS = re.compile("think|thought|reasoning|chain_of|^cot|cot$|rationale|scratchpad", re.IGNORECASE)
_ENDED = {"tokens", "weight", "finish_reason"}  # fields of an answer that a later call does not continue


@dataclass(frozen=True)
class Conversation:
    """A chat in which an assistant takes part."""

    id: str  # unique in the corpus
    messages: list[Message]  # as `read_message` returns them
    template: dict[str, Any] = field(default_factory=dict)  # `tools` and `chat_template_kwargs` for the chat template

    @property
    def digest(self) -> str:
        """16 hex digits of the messages and template variables, without the id."""
        return hashlib.sha256(
            json.dumps([self.messages, self.template], sort_keys=True, default=str).encode()
        ).hexdigest()[:16]


@check_numbers
def read_conversations(
    source: str, split: str = "train", limit: Count | None = None, strict: bool = False
) -> list[Conversation]:
    """Read conversations from records of any of these forms:

    - `messages` or `conversations`: a list of turns, with role and content or from and value, or the JSON text of one;
      or a list of texts (also in `data`), of the user and the assistant in turn; or `chosen` where it is a whole chat;
    - one question and its answer: instruction (and input), prompt or question, with output, response or completion.

    They are made regular by leaving out, never by inventing. Messages before a user's first are dropped, except system
    messages. A conversation ends before its first empty turn, and with an answer. Successive messages of a user are
    joined by a blank line. A conversation without an answer is skipped and counted in a log line. A repeated id gets
    `#2`, `#3`, ...; a conversation without an id gets `<file stem>:<line number>`.

    Args:
        source: file, folder or hub id, as for `records`.
        split: part of a folder or hub id; files have none.
        limit: stop after this many conversations; later lines are not checked.
        strict: a malformed record is an error; otherwise it is left out, counted and named, up to a tenth of all.

    Raises:
        ValueError: limit is out of its range.
        CorpusError: no such source, too many malformed records (all in one error), or no conversation at all.
    """
    conversations: list[Conversation] = []
    used: dict[str, int] = {}
    faults, skipped, kind = [], 0, "line" if Path(source).is_file() else "record"
    for number, raw in tqdm(records(source, split), desc=f"read {source}", unit="record", delay=5, leave=False):
        try:
            conversation = _conversation(raw, f"{stem(source)}:{number}")
        except Malformed as error:
            faults.append(f"{kind if isinstance(raw, bytes) else 'record'} {number}: {error}")
            continue
        if conversation is None:
            skipped += 1
            continue
        conversations.append(replace(conversation, id=unique_name(conversation.id, used)))
        if len(conversations) == limit:
            break
    report_left_out(f"{source}: {{}} malformed", faults, len(conversations) + len(faults) + skipped, strict)
    if not conversations:
        raise CorpusError(f"{source} is empty: no conversation with an answer ({skipped} without)")
    if skipped:
        logger.warning("%s: skipped %d conversations without an answer, kept %d", source, skipped, len(conversations))
    return conversations


def _conversation(raw: object, name: str) -> Conversation | None:
    """Read one record as a regular conversation; None if it has no answer."""
    record = parse_line(raw) if isinstance(raw, bytes) else raw
    record = {"messages": record} if isinstance(record, list) else record
    if not isinstance(record, dict):
        raise Malformed(f"a record must be an object, not {type(record).__name__}")
    messages = messages_of(record)
    if (answered := filled(record, *_ANSWERED)) and messages and messages[-1]["role"] == "user":
        raise Malformed(f"its messages end with the user, beside {answered!r}: give that as the last of them")
    messages = make_regular(messages)
    if not messages:
        return None
    names = [record[key] for key in IDS if record.get(key) not in (None, "")]
    return Conversation(str(names[0]) if names else name, messages, template_of(record))


# --- records ---


def messages_of(record: dict[str, Any]) -> list[Message]:
    """Read the messages of a record, `system` first; Malformed for an unknown form or more than text."""
    check_text(record)
    turns, key = _turns(record)
    messages: list[Message] = []
    for i, turn in enumerate(turns):
        message = read_message(turn, f"{key}[{i}]")
        more = message.keys() <= {"role", "content", "tool_calls"} and message.get("tool_calls")
        last: Message = messages[-1] if messages else {"role": ""}
        if more and not message["content"] and last["role"] == "assistant" and not last.keys() & _ENDED:
            last.setdefault("tool_calls", []).extend(message["tool_calls"])  # a text and its calls, one per turn
        else:
            messages.append(message)
    if messages and messages[-1]["role"] == "assistant":
        messages[-1] = finish_of(record) | messages[-1]
    system = system_of(record)
    if system and messages and messages[0]["role"] == "system":
        if messages[0] != system[0]:
            raise Malformed("its 'system' and its first message are different system messages")
        return messages
    return [*system, *messages]


def check_text(record: dict[str, Any]) -> None:
    """Raise Malformed if a record has images, audio or video."""
    if media := filled(record, *_MEDIA):
        raise Malformed(f"it has {media!r}, and only text is read")


def system_of(record: dict[str, Any]) -> list[Message]:
    """Read the system message beside the turns, if any."""
    key = filled(record, "system", "system_prompt")
    return [read_message({"role": "system", "content": record[key]}, "system")] if key else []


def template_of(record: dict[str, Any]) -> dict[str, Any]:
    """Read a record's variables for the chat template; Malformed if they have other types."""
    variables = unpacked(record.get("chat_template_kwargs") or {})
    tools = unpacked(record.get("tools") or record.get("functions")) or []
    tools = list(map(unpacked, tools)) if isinstance(tools, list) else tools
    if not isinstance(variables, dict):
        raise Malformed(f"'chat_template_kwargs' must be an object, not {type(variables).__name__}")
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise Malformed("'tools' must be a list of functions")
    tools = [tool if "function" in tool else {"type": "function", "function": tool} for tool in tools]
    return variables | ({"tools": tools} if tools else {})


def _turns(record: dict[str, Any]) -> tuple[list[Any], str]:
    """Return the turns of a record and the name of their field."""
    key, turns = chat_of(record)
    if key:
        _refuse_thoughts(record)
        return turns, key
    asked, question = question_of(record)
    answered = filled(record, *_ANSWERED)
    if asked and answered:
        if record.get("label") is False:  # KTO's
            raise Malformed(f"its 'label' says that {answered!r} is a bad answer: leave it out")
        thoughts = {key: record[key] for key in THOUGHT_FIELDS if isinstance(record.get(key), str | list)}
        thoughts = {key: text for key, text in thoughts.items() if str(text).strip().lower() not in _SWITCHES}
        _refuse_thoughts(record, *THOUGHT_FIELDS)
        answer = as_chat(record[answered]) or [{"role": "assistant", "content": _one(record, answered), **thoughts}]
        question = as_chat(question) or [{"role": "user", "content": question}]
        if read_message(question[-1], asked)["role"] == "assistant":
            raise Malformed(f"{asked!r} ends with the assistant, and {answered!r} may continue it: give 'messages'")
        return [*question, *answer], f"{asked} and {answered}"
    if any(isinstance(record.get(key), list) for key in CHATS):
        return [], "messages"  # empty
    has = ", ".join(map(repr, record)) or "nothing"
    raise Malformed(f"neither 'messages' nor 'conversations', nor a question with its answer: it has {has}")


def _refuse_thoughts(record: dict[str, Any], *read: str) -> None:
    """Raise Malformed for thoughts in a field of a record that is not read: they would be left out."""
    for key in record.keys() - {*read}:
        if _THOUGHTS.search(key) and has_words(record[key]):
            raise Malformed(f"it has {key!r} beside the answer: give thoughts as its 'reasoning_content', or remove it")


def chat_of(record: dict[str, Any]) -> tuple[str, list[Any]]:
    """Return name and turns of the field with a whole chat; "" and no turns without one."""
    for key in CHATS:
        if turns := _alternating(unpacked(record.get(key))):
            if not isinstance(turns, list):
                raise Malformed(f"{key!r} must be a list, not {type(turns).__name__}")
            return key, turns
    texts = None if record.keys() & {*_ASKED} else _alternating(record.get("data"))
    for key, turns in (("chosen", as_chat(record.get("chosen"))), ("data", as_chat(texts))):
        if turns and read_message(turns[0], key)["role"] != "assistant":
            return key, turns
    return "", []


def _alternating(turns: Any) -> Any:
    """Turn a list of texts, alternately the user's and the assistant's or each the JSON of a turn, into turns."""
    if not isinstance(turns, list) or not all(isinstance(turn, str) for turn in turns):
        return turns
    return as_chat([*map(unpacked, turns)]) or [{"role": SIDES[i % 2], "content": text} for i, text in enumerate(turns)]


def question_of(record: dict[str, Any]) -> tuple[str, Any]:
    """Return name and value (text or turns) of the field with the one question; "" and None without one."""
    refuse_history(record)
    asked = filled(record, *_ASKED) or ""
    question = as_chat(record.get(asked)) or _one(record, asked)
    for key in ("input", "context"):
        if isinstance(question, str) and key != asked and record.get(key):
            if not isinstance(more := _one(record, key), str):
                raise Malformed(f"{key!r} must be a text, not {type(more).__name__}")
            question = f"{question}\n\n{more}"
    return asked, question


def refuse_history(record: dict[str, Any]) -> None:
    """Raise Malformed for earlier turns beside a question, which would be left out."""
    if record.get("history"):
        raise Malformed("it has 'history' beside a question: give the whole chat as 'messages'")


def _one(record: dict[str, Any], key: str) -> Any:
    """Return the value of a field, unwrapped if it is a list of one text."""
    value = record.get(key)
    if isinstance(value, list) and all(isinstance(text, str) for text in value):
        if len(value) != 1:
            raise Malformed(f"{key!r} has {len(value)} texts; it must be one")
        return value[0]
    return value


def as_chat(value: Any) -> list[Any] | None:
    """Return the turns of a chat or of its JSON text; None if it is not a chat."""
    turns = unpacked(value)
    if not isinstance(turns, list) or not turns:
        return None
    return turns if all(isinstance(turn, dict) and {"role", "from"} & turn.keys() for turn in turns) else None


# --- regular conversations ---


def make_regular(messages: list[Message]) -> list[Message]:
    """Keep the messages from the first user's to the last answer before an empty turn, and system messages before."""
    filled = [message for message in messages if message["role"] != "system" or message["content"].strip()]
    first = first_user(filled)
    started = (message for i, message in enumerate(filled) if i >= first or message["role"] == "system")
    answered = list(takewhile(_says_something, started))
    while answered and answered[-1]["role"] != "assistant":
        answered.pop()
    regular: list[Message] = []
    for message in answered:
        if regular and message["role"] == regular[-1]["role"] == "user":
            regular[-1] = regular[-1] | {"content": f"{regular[-1]['content']}\n\n{message['content']}"}
        else:
            regular.append(message)
    return regular


def first_user(messages: list[Message]) -> int:
    """Return the index of the first user message, or the number of messages without one."""
    return next((i for i, message in enumerate(messages) if message["role"] == "user"), len(messages))


def _says_something(message: Message) -> bool:
    """Return whether a message has text, calls, or thoughts that were cut; a tool's may be empty."""
    thought = message.get("finish_reason") == "length" and message.get("thinking")
    says = message["content"].strip() or message.get("tool_calls") or message.get("tokens") or thought
    return message["role"] not in SIDES or bool(says)
