"""A turn of a chat, in the forms that people have, as chat templates take it."""

import json
from contextlib import suppress
from typing import Any

from poss_lightning.corpus.draws import Draw
from poss_lightning.corpus.formats import Malformed
from poss_lightning.target.template import THOUGHTS, Message, thinking

_CALL = "tool call"
_ROLES = {
    **dict.fromkeys(("system", "developer"), "system"),
    **dict.fromkeys(("user", "human", "prompter"), "user"),
    **dict.fromkeys(("assistant", "gpt", "chatgpt", "bing", "bard", "model", "bot"), "assistant"),
    **dict.fromkeys(("tool", "function", "observation", "ipython", "environment"), "tool"),
    **dict.fromkeys(("tool_response", "function_response"), "tool"),
    **dict.fromkeys(("function_call", "tool_call"), _CALL),  # an assistant's message whose text is the call
}
# 0 or false keeps an answer out of the loss; of the others, 1 or true
_WEIGHTS = ("weight", "loss_weight", "loss", "loss_mask", "compute_loss", "calculate_loss")
_WEIGHTS += ("train", "training", "trainable", "train_on_turn")
_MASKS = ("mask", "masked", "is_masked")
_YES, _NO = ("1", "1.0", "true", "yes"), ("0", "0.0", "false", "no")
_CALL_FIELDS = ("tool_calls", "function_call", "function_calls")  # fields of an assistant's turn
_ARGUMENTS = ("arguments", "parameters", "args", "input")  # of a tool call
_CUT = ("length", "max_tokens", "max_length", "max_new_tokens")  # reasons why an answer ends without an end


def read_message(turn: object, where: str) -> Message:
    """Read a turn as chat templates take it: role (system, user, assistant or tool) and content, a text.

    Where the turn has them, also an assistant's `tool_calls`; its thoughts, under every name that templates use; a
    tool's `name` and `tool_call_id`; `tokens`, `finish_reason` and `drawn` of an answer that a target wrote; `weight` 0
    for one that is kept out of the loss.

    Raises:
        Malformed: it is not a turn of a chat, or more than text.
    """
    if not isinstance(turn, dict):
        raise Malformed(f"{where} must be an object, not {type(turn).__name__}")
    return refuse_half_pairs(_message(turn, _role(turn, where), where), where)


def filled(record: dict[str, Any], *keys: str) -> str | None:
    """Return the first of these fields that is not empty in a record."""
    return next((key for key in keys if record.get(key)), None)


def _role(turn: dict[str, Any], where: str) -> str:
    said = next((turn[key] for key in ("role", "from") if turn.get(key) is not None), None)
    if said is None:
        raise Malformed(f"{where} has no 'role'")
    role = _ROLES.get(said.strip().lower()) if isinstance(said, str) else None
    if role is None:
        raise Malformed(f"{where}: unknown role {said!r}, known are {', '.join(_ROLES)}")
    return role


def _message(turn: dict[str, Any], role: str, where: str) -> Message:
    if not {"content", "value", *_CALL_FIELDS} & turn.keys():
        raise Malformed(f"{where} has no 'content'")
    if tools := next((key for key in ("functions", "tools") if unpacked(turn.get(key))), None):
        raise Malformed(f"{where} has {tools!r}; tools are read beside the turns: move them to the record's 'tools'")
    value = next((turn[key] for key in ("content", "value") if turn.get(key) is not None), "")
    if role == _CALL:
        calls = value if isinstance(value, dict) or has_calls(value) else _text(value, where)
        return {"role": "assistant", "content": "", "tool_calls": _calls(calls, where)} | _weight(turn)
    if role == "tool" and not isinstance(value, str | list):  # a result that is no text
        value = json.dumps(value, ensure_ascii=False, default=str)
    content = _text(value, where)
    named = {key: turn[key] for key in ("name", "tool_call_id") if isinstance(turn.get(key), str)}
    message: Message = {"role": role, "content": content} | named
    if role != "assistant":
        return message
    if called := filled(turn, *_CALL_FIELDS):
        message["tool_calls"] = _calls(turn[called], where)
    thought = filled(turn, *THOUGHTS, "thoughts", "thought")
    if thought and "</think>" not in content:  # else the content has them already, as where it repeats them
        said = _text(turn[thought], where, "thoughts")
        message |= thinking(said) if said.strip() not in content else {}
    if tokens := turn.get("tokens"):
        if not isinstance(tokens, list) or not all(type(token) is int and 0 <= token < 2**31 for token in tokens):
            raise Malformed(f"{where}: 'tokens' must be a list of token ids")
        message["tokens"] = tokens
    if drawn := turn.get("drawn"):
        try:
            message["drawn"] = Draw.of(drawn).values()
        except ValueError as error:
            raise Malformed(f"{where}: 'drawn' is wrong: {error}") from error
    return message | finish_of(turn) | _weight(turn)


def finish_of(said: dict[str, Any]) -> Message:
    """Return the `finish_reason` that a turn, or the record beside the turns, has for an answer."""
    reason = said.get("finish_reason") or said.get("stop_reason")
    return {"finish_reason": "length" if str(reason).lower() in _CUT else reason} if reason else {}


def _weight(turn: dict[str, Any]) -> Message:
    if turn.get("train_detail"):
        raise Malformed("an answer has 'train_detail', and only whole answers can be kept out of the loss")
    given = [key for key in (*_WEIGHTS, *_MASKS) if turn.get(key) not in (None, "")]
    said = {key: str(turn[key]).strip().lower() for key in given}
    if odd := [key for key in given if said[key] not in _YES + _NO]:
        key = odd[0]
        raise Malformed(f"an answer's {key!r} is {turn[key]!r}; it must be 0 or 1: answers count whole or not at all")
    return {"weight": 0} if any((said[key] in _YES) == (key in _MASKS) for key in given) else {}


def _text(content: Any, where: str, name: str = "content") -> str:
    """Return a text, or the concatenated texts of its parts."""
    if isinstance(content, list):
        parts = [part if isinstance(part, dict) else {"type": "text", "text": part} for part in content]
        if other := next((part for part in parts if not str(part.get("type", "text")).endswith("text")), None):
            raise Malformed(f"{where} has a part of type {other['type']!r}, and only text is read")
        texts: list[Any] = [part.get("text", part.get("content")) for part in parts]
        if odd := [part for part, text in zip(parts, texts, strict=True) if not isinstance(text, str)]:
            raise Malformed(f"{where} has a part without a text; it has {', '.join(map(repr, odd[0])) or 'nothing'}")
        content = "".join(texts)
    if not isinstance(content, str):
        raise Malformed(f"{where}: {name!r} must be a text, not {type(content).__name__}")
    return content


def refuse_half_pairs(said: Any, what: str) -> Any:
    """Return the value; Malformed if one of its texts holds half a surrogate pair."""
    try:
        json.dumps(said, ensure_ascii=False, default=str).encode()
    except UnicodeEncodeError as error:
        raise Malformed(f"{what} holds half a surrogate pair, which is not text") from error
    return said


def _calls(calls: Any, where: str) -> list[dict[str, Any]]:
    """Read tool calls as chat templates take them, with arguments as objects."""
    calls, found = unpacked(calls), []
    for call in calls if isinstance(calls, list) else [calls]:
        function = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise Malformed(f"{where}: a tool call must have a function with a name, it is {str(call)[:40]!r}")
        key = next((key for key in _ARGUMENTS if function.get(key) is not None), None)
        if key is None and (other := function.keys() - {"name", "id", "type", "index", *_ARGUMENTS}):
            raise Malformed(f"{where}: a tool call has {sorted(other)}, and its arguments in none of {_ARGUMENTS}")
        arguments = unpacked(function[key]) if key else {}
        named = {"id": call["id"]} if isinstance(call.get("id"), str) else {}
        found.append({**named, "type": "function", "function": {"name": function["name"], "arguments": arguments}})
    return found


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
