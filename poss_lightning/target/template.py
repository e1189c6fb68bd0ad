"""A target's chat template: messages -> text, as transformers renders it; what it leaves out and how answers end."""

import hashlib
import json
import logging
from collections.abc import Mapping
from datetime import date
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedTokenizerFast

from poss_lightning.target.spelling import any_of

logger = logging.getLogger(__name__)
Message = dict[str, Any]  # role, content, and whatever else a template reads: tool_calls, thoughts, name
Variables = Mapping[str, Any]  # of a template, besides the messages: tools, enable_thinking

MARK = "\u241f one \u241f"
THOUGHTS = ("reasoning_content", "reasoning", "thinking")  # an answer's thoughts, as templates call them
_TODAY = "strftime_now"  # the function by which templates ask for the date; as a variable, its day: 2026-11-25
_DIRECTIVES = ("-d", "-m", *"aAbBcdDeFHIjmMpSTuUwWxXyYZ", "%")
_ISO_DATE = "{{ strftime_now('%Y-%m-%d') }}"


def thinking(text: str) -> Message:
    """Return the fields of a message that hold its thoughts, under every name that templates use."""
    return dict.fromkeys(THOUGHTS, text)


class Template:
    """The chat template of a tokenizer.

    `variables` are for all conversations, as `{"enable_thinking": False}`. A template that asks for the date gets that
    of the variable `strftime_now`, by default today.

    Raises:
        ValueError: there is no template.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast, variables: Variables | None = None):
        if not tokenizer.chat_template:
            raise ValueError(
                f"the tokenizer {tokenizer.name_or_path!r} has no chat template: name an instruction-tuned target, or "
                "save a template as chat_template.jinja beside tokenizer.json"
            )
        self._tokenizer, self._source = tokenizer, tokenizer.get_chat_template()
        self._today = self._render([{"role": "user", "content": ""}], {}, template=_ISO_DATE)  # by the templates' clock
        today = {_TODAY: self._today} if _TODAY in str(tokenizer.chat_template) else {}
        self.variables: dict[str, Any] = today | dict(variables or {})
        used = {name: str(token) for name, token in tokenizer.special_tokens_map.items() if name in self._source}
        self.digest = hashlib.sha256(json.dumps([self._source, used], sort_keys=True).encode()).hexdigest()[:16]
        self.opens_answers = "add_generation_prompt" in self._source

    def freeze(self, earlier: Variables) -> None:
        """Take the date of work that began on an earlier day, unless the user has given one."""
        if _TODAY in earlier and self.variables.get(_TODAY) == self._today:
            self.variables[_TODAY] = earlier[_TODAY]

    def text(self, messages: list[Message], variables: Variables, open_answer: bool = False) -> str:
        """Render what the target reads; with `open_answer`, up to where an answer begins.

        Raises:
            ValueError: the template refuses the messages.
        """
        given, faults, texts = {**self.variables, **variables}, [], []
        # Some templates want the arguments of a call as an object, others as text.
        for variant in (messages, [_with_text_arguments(message) for message in messages]):
            try:
                texts.append(self._render(variant, given, open_answer))
            except Exception as error:  # whatever a template's code raises
                faults.append(error)
                continue
            if _has_calls(messages, texts[-1]):
                return texts[-1]
        if texts:
            return texts[0]
        roles = ", ".join(message["role"] for message in messages)
        raise ValueError(f"the chat template refuses messages with the roles {roles}: {faults[0]}") from faults[0]

    def _render(self, messages: list[Message], given: Variables, open_answer: bool = False, template: str = "") -> str:
        rest = {name: value for name, value in given.items() if name != _TODAY}
        template = template or self._tokenizer.get_chat_template(tools=given.get("tools"))
        if _TODAY in given:
            template = _dated(template, date.fromisoformat(given[_TODAY]))
        render = self._tokenizer.apply_chat_template
        return str(render(messages, chat_template=template, tokenize=False, add_generation_prompt=open_answer, **rest))

    def check_rendered(self, messages: list[Message], variables: Variables) -> None:
        """Raise ValueError if the template leaves the tools, or what a system or a tool says, out of a prompt."""
        others = [i for i, message in enumerate(messages) if message["role"] in ("system", "tool")]
        if not others and not variables.get("tools"):
            return
        text = self.text(messages, variables, open_answer=True)
        if variables.get("tools") and text == self.text(messages, {**variables, "tools": None}, open_answer=True):
            raise ValueError("the chat template leaves out the tools")
        for i in others:
            message = messages[i]
            changed = [*messages[:i], message | {"content": MARK}, *messages[i + 1 :]]
            if message["content"].strip() and text == self.text(changed, variables, open_answer=True):
                raise ValueError(f"message {i}: the chat template leaves out what a {message['role']} says")

    def find_stops(self, generation_config: GenerationConfig | None) -> frozenset[int]:
        """Collect the stop tokens of tokenizer, generation config and template, which writes one after every answer."""
        ids = getattr(generation_config, "eos_token_id", None)
        stops = {*token_ids(ids, "eos_token_id of the generation config"), *token_ids(self._tokenizer.eos_token_id)}
        known = {str(token): number for number, token in self._tokenizer.added_tokens_decoder.items()}
        found = (any_of(known).match(text.lstrip()) for text in self._after_answers())
        last, earlier = (match[0] if match else "" for match in found)
        if last and last == earlier:
            stops.add(known[last])
        elif earlier and not last and known[earlier] not in stops:
            logger.warning("%s stands after an answer where the chat continues, and is not a stop token", earlier)
        return frozenset(stops)

    def _after_answers(self) -> list[str]:
        """Return what follows the last answer, and one after which the chat continues; "" if that is unclear."""
        turns = [(role, MARK if role == "assistant" else role) for role in ("user", "assistant", "user", "assistant")]
        messages = [{"role": role, "content": content} for role, content in turns]
        try:
            return [self.text(some, {}).split(MARK)[1] for some in (messages[:2], messages)]
        except (ValueError, IndexError):  # the template refuses them, or changes what is said
            return ["", ""]


def token_ids(ids: Any, name: str = "a token id") -> list[int]:
    """List ids in any form that transformers takes: a number, or numbers in a list, an array or a tensor; [] for None.

    Raises:
        ValueError: anything else; the message begins with `name`.
    """
    try:
        return torch.as_tensor([] if ids is None else ids, dtype=torch.long).flatten().tolist()
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"{name} is {ids!r}; it must be one or more token ids, as [2, 7]") from error


def _dated(template: str, day: date) -> str:
    """Give a template its own `strftime_now`, of a fixed day, as transformers passes no functions to a template."""
    spelt = "".join(f".replace('%{each}', {json.dumps(day.strftime(f'%{each}'))})" for each in _DIRECTIVES)
    return f"{{% macro {_TODAY}(format) %}}{{{{ format{spelt} }}}}{{% endmacro %}}\n{template}"


def _with_text_arguments(message: Message) -> Message:
    if not (calls := message.get("tool_calls")):
        return message
    functions = [dict(call["function"]) for call in calls]
    for function in functions:
        if not isinstance(function["arguments"], str):
            function["arguments"] = json.dumps(function["arguments"], ensure_ascii=False)
    return message | {"tool_calls": [call | {"function": one} for call, one in zip(calls, functions, strict=True)]}


def _has_calls(messages: list[Message], text: str) -> bool:
    """Return whether the text has all calls, and no arguments in Python's notation."""
    functions = [call["function"] for message in messages for call in message.get("tool_calls", ())]
    printed = any(
        function["arguments"] and str(function["arguments"]) in text
        for function in functions
        if not isinstance(function["arguments"], str)
    )
    return not printed and all(function["name"] in text for function in functions)
