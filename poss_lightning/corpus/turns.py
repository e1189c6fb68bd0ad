"""A turn of a chat, in the forms that people have, as chat templates take it."""

import json
import re
from contextlib import suppress
from typing import Any

from poss_lightning.corpus.formats import Malformed
from poss_lightning.sampling import Draw
from poss_lightning.target_model.template import THOUGHTS, Message, thinking

_CALL = "tool call"
_ROLES = {
    **dict.fromkeys(("system", "developer"), "system"),
    **dict.fromkeys(("user", "human", "prompter"), "user"),
    **dict.fromkeys(("assistant", "gpt", "chatgpt", "bing", "bard", "model", "bot", "ai"), "assistant"),
    **dict.fromkeys(("tool", "function", "observation", "ipython", "environment"), "tool"),
    **dict.fromkeys(("tool_response", "function_response"), "tool"),
    **dict.fromkeys(("function_call", "tool_call"), _CALL),  # an assistant's message whose text is the call
}
_WEIGHTS = re.compile("(^|_)(weight|loss|mask|masked|train|training|trainable)(_|$)")  # of other names than `weight`
_CALL_FIELDS = ("tool_calls", "function_call", "function_calls")  # fields of an assistant's turn
_ARGUMENTS = ("arguments", "parameters", "args", "input")  # of a tool call
_CUT = ("length", "max_tokens", "max_length", "max_new_tokens")  # reasons why an answer ends without an end
THOUGHT_FIELDS = (*THOUGHTS, "thoughts", "thought", "reasoning_text", "reasoning_details", "thinking_blocks")
# Types of the parts of a content, in the order in which a message can hold them. What has another type is refused.
_PARTS = {
    **dict.fromkeys(("thinking", "thought", "reasoning", "reasoning_text", "reasoning.text"), "thoughts"),
    **dict.fromkeys(("text", "input_text", "output_text"), "content"),
    **dict.fromkeys(("tool_use", "tool_call", "function_call"), "calls"),
}
_READ = {"role", "from", "content", "value", "name", "tokens", "drawn", "finish_reason", "stop_reason"}
_READ |= {"weight", *_CALL_FIELDS, *THOUGHT_FIELDS}
# Fields that say how or when an answer was written, not what it says. Others that hold words are refused.
_ABOUT = {"id", "type", "index", "call_id", "status", "state", "model", "author", "source", "metadata", "usage"}
_ABOUT |= {"timestamp", "created_at", "date", "header", "country", "language", "lang", "logprobs", "annotations"}
_ABOUT |= {"citations", "cache_control", "signature", "description", "labels", "tags", "feedback", "moderation"}


def read_message(turn: object, where: str) -> Message:
    """Read a turn as chat templates take it: role (system, user, assistant or tool) and content, a text.

    Where the turn has them, also an assistant's `tool_calls`; its thoughts, under every name that templates use; a
    tool's `name` and `tool_call_id`; `tokens`, `finish_reason` and `drawn` of an answer that a target wrote; `weight` 0
    for one that is kept out of the loss.

    Raises:
        Malformed: it is not a turn of a chat, or says something that a message does not hold.
    """
    if not isinstance(turn, dict):
        raise Malformed(f"{where} must be an object, not {type(turn).__name__}")
    return _message(turn, _role(turn, where), where)


def filled(record: dict[str, Any], *keys: str) -> str | None:
    """Return the first of these fields that is not empty in a record."""
    return next((key for key in keys if record.get(key)), None)


def has_words(value: Any) -> bool:
    """Return whether a value holds a text of several words, or of letters beyond ASCII, which may need no blanks."""
    if isinstance(value, str):
        return len(value.split()) > 1 or not value.isascii()
    return any(map(has_words, value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()))


def _role(turn: dict[str, Any], where: str) -> str:
    name = next((turn[key] for key in ("role", "from") if turn.get(key) is not None), None)
    if name is None:
        raise Malformed(f"{where} has no 'role'")
    role = _ROLES.get(str(name).strip().lower())
    if role is None:
        raise Malformed(f"{where}: unknown role {name!r}, known are {', '.join(_ROLES)}")
    return role


def _message(turn: dict[str, Any], role: str, where: str) -> Message:
    if not {"content", "value", *_CALL_FIELDS} & turn.keys():
        raise Malformed(f"{where} has no 'content'")
    if tools := next((key for key in ("functions", "tools") if unpacked(turn.get(key))), None):
        raise Malformed(f"{where} has {tools!r}; tools are read beside the turns: move them to the record's 'tools'")
    value = next((turn[key] for key in ("content", "value") if turn.get(key) is not None), "")
    if role == _CALL:
        calls = value if isinstance(value, dict) or has_calls(value) else _text(value, where)
        return {"role": "assistant", "content": "", "tool_calls": _calls(calls, where)} | _weight(turn, where)
    if role == "tool" and not isinstance(value, str | list):  # a result that is no text
        value = json.dumps(value, ensure_ascii=False, default=str)
    named = {key: turn[key] for key in ("name", "tool_call_id") if isinstance(turn.get(key), str)}
    if role != "assistant":
        return {"role": role, "content": _text(value, where)} | named
    if (channel := turn.get("channel") or "final") != "final":  # gpt-oss'
        raise Malformed(f"{where} has channel {channel!r}; give an analysis as 'thinking' of the answer that follows")
    for key in turn.keys() - _READ - _ABOUT:
        if has_words(turn[key]):
            raise Malformed(f"{where} has {key!r}, which is not read: name thoughts 'reasoning_content', or remove it")
    return {"role": role, **_answer(turn, value, where), **named, **finish_of(turn), **_weight(turn, where)}


def _answer(turn: dict[str, Any], value: Any, where: str) -> Message:
    """Read what an assistant says in the fields of a turn, and in the parts of its content."""
    parts = _parts(value, where)
    answer: Message = {"content": parts["content"]}
    called = filled(turn, *_CALL_FIELDS)
    if calls := parts["calls"] + (_calls(turn[called], where) if called else []):
        answer["tool_calls"] = calls
    fields = {key: _joined(turn[key], where, "thoughts") for key in THOUGHT_FIELDS if turn.get(key)}
    answer |= _thoughts(parts["content"], {"content": parts["thoughts"]} | fields, where)
    if tokens := turn.get("tokens"):
        if not isinstance(tokens, list) or not all(type(token) is int and 0 <= token < 2**31 for token in tokens):
            raise Malformed(f"{where}: 'tokens' must be a list of token ids")
        answer["tokens"] = tokens
    if drawn := turn.get("drawn"):
        try:
            answer["drawn"] = Draw.of(drawn).values()
        except ValueError as error:
            raise Malformed(f"{where}: 'drawn' is wrong: {error}") from error
    return answer


def _thoughts(content: str, fields: dict[str, str], where: str) -> Message:
    """Return the thoughts that some fields hold, unless the content has them, too; Malformed if they differ."""
    by_text = {text.strip(): name for name, text in fields.items() if text.strip()}
    names = list(by_text.values())
    if len(names) > 1:
        raise Malformed(f"{where} has different thoughts in {names[0]!r} and {names[1]!r}")
    for text in by_text:
        if content.strip() == text or re.search(rf"[>\]▷]\s*{re.escape(text)}", content):
            return {}
        if "</think>" in content:
            raise Malformed(f"{where} has different thoughts in {names[0]!r} and in its content")
        return thinking(text)
    return {}


def finish_of(said: dict[str, Any]) -> Message:
    """Return the `finish_reason` that a turn, or the record beside the turns, has for an answer."""
    reason = said.get("finish_reason") or said.get("stop_reason")
    return {"finish_reason": "length" if str(reason).lower() in _CUT else reason} if reason else {}


def _weight(turn: dict[str, Any], where: str) -> Message:
    """Return `weight` 0 for an answer that is kept out of the loss."""
    if other := [key for key in turn if _WEIGHTS.search(key) and key != "weight" and turn[key] not in (None, "")]:
        raise Malformed(f"{where} has {other[0]!r}: an answer that is kept out of the loss has 'weight': 0")
    if turn.get("weight") not in (None, 0, 1):
        raise Malformed(
            f"{where}: 'weight' is {turn['weight']!r}; it must be 0 or 1: answers count whole or not at all"
        )
    return {"weight": 0} if turn.get("weight") == 0 else {}


# --- texts and their parts ---


def _parts(value: Any, where: str, name: str = "content") -> dict[str, Any]:
    """Read a text, or a list of parts: thoughts and text, each joined, and calls; Malformed for any other order."""
    if not isinstance(value, str | list):
        raise Malformed(f"{where}: {name!r} must be a text, not {type(value).__name__}")
    by_kind: dict[str, Any] = {"thoughts": "", "content": "", "calls": []}
    order, last = list(by_kind), "thoughts"
    for part in [value] if isinstance(value, str) else value:
        part = part if isinstance(part, dict) else {"text": part}
        kind = _kind(part, where)
        if order.index(kind) < order.index(last):
            raise Malformed(f"{where} has {kind} after {last}; a message holds thoughts, then content, then calls")
        by_kind[kind], last = by_kind[kind] + (_calls if kind == "calls" else _part_text)(part, where), kind
    return by_kind


def _kind(part: dict[str, Any], where: str) -> str:
    """Return what a part is, as `_PARTS` names it; Malformed for a type that is not read."""
    untyped = next((key for key in part if key in _PARTS), ", ".join(map(str, part)))
    stated = "thought" if part.get("thought") else part.get("type") or untyped
    if stated not in _PARTS:
        raise Malformed(f"{where} has a part of type {stated!r}; text, thoughts and calls are read")
    return _PARTS[stated]


def _part_text(part: dict[str, Any], where: str) -> str:
    field = next((key for key in ("text", "thinking", "reasoning", "content") if part.get(key) is not None), "text")
    value = part.get(field)
    return value if isinstance(value, str) else _joined(value, where, field)


def _joined(value: Any, where: str, name: str) -> str:
    """Return the text of thoughts, or of their parts."""
    parts = _parts(value, where, name)
    return parts["thoughts"] + parts["content"]


def _text(value: Any, where: str) -> str:
    """Return a text, or the joined texts of its parts; Malformed if it has other parts."""
    parts = _parts(value, where)
    if parts["thoughts"] or parts["calls"]:
        raise Malformed(f"{where} has thoughts or calls, and is not an assistant's")
    return parts["content"]


# --- tool calls ---


def _calls(calls: Any, where: str) -> list[dict[str, Any]]:
    """Read tool calls as chat templates take them, with arguments as objects."""
    calls, read = unpacked(calls), []
    for call in calls if isinstance(calls, list) else [calls]:
        function = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise Malformed(f"{where}: a tool call must have a function with a name, it is {str(call)[:40]!r}")
        stated = {key: value for part in (call, function) for key, value in part.items() if value}
        if other := stated.keys() - {"function", "name", *_ARGUMENTS} - _ABOUT:
            raise Malformed(f"{where}: a tool call has {sorted(other)}, and arguments are in one of {_ARGUMENTS}")
        named = {"id": call["id"]} if isinstance(call.get("id"), str) else {}
        read_function = {"name": function["name"], "arguments": _arguments(function, where)}
        read.append({**named, "type": "function", "function": read_function})
    return read


def _arguments(function: dict[str, Any], where: str) -> dict[str, Any]:
    """Return the arguments of a call as an object: {} for every form of none; Malformed for any other text."""
    arguments: Any = next((function[key] for key in _ARGUMENTS if function.get(key)), {})
    try:
        while isinstance(arguments, str) and arguments.strip():  # JSON, which may be packed twice
            arguments = json.loads(arguments)
    except (ValueError, RecursionError) as error:
        raise Malformed(f"{where}: the arguments of {function['name']!r} are not JSON ({error})") from error
    if arguments in (None, [], {}) or isinstance(arguments, str):
        return {}
    if not isinstance(arguments, dict):
        raise Malformed(f"{where}: the arguments of {function['name']!r} must be an object, not {arguments!r:.40}")
    return arguments


def has_calls(value: Any) -> bool:
    """Return whether a value is a non-empty list of tool calls, or the text of one."""
    calls = unpacked(value) or [None]
    return isinstance(calls, list) and all(isinstance(one, dict) and {"name", "function"} & one.keys() for one in calls)


def unpacked(value: Any) -> Any:
    """Parse a list or object from its JSON text; return any other value unchanged."""
    if isinstance(value, str) and value.lstrip()[:1] in ("[", "{"):
        with suppress(ValueError, RecursionError):
            return json.loads(value)
    return value
