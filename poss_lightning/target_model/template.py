"""A target's chat template: messages -> text, as transformers renders it; what it leaves out and how answers end."""

import hashlib
import json
import logging
import re
from collections.abc import Mapping
from datetime import date
from functools import cached_property
from os.path import commonprefix
from typing import Any

import torch
from jinja2 import Environment, meta
from transformers import GenerationConfig, PreTrainedTokenizerFast

from poss_lightning.target_model.spelling import any_of
from poss_lightning.target_model.thoughts import THINKS, thought_of

logger = logging.getLogger(__name__)
Message = dict[str, Any]  # role, content, and whatever else a template reads: tool_calls, thoughts, name
Variables = Mapping[str, Any]  # of a template, besides the messages: tools, enable_thinking

MARK = "\u241f one \u241f"
_USER, _ANSWER, _SYSTEM, _TOLD = ({"role": role, "content": MARK} for role in ("user", "assistant", "system", "tool"))
_FUNCTION = {"type": "function", "id": "callcall0", "function": {"name": "f", "arguments": {"a": "b"}}}  # Mistral's id
_CALL: Message = {"role": "assistant", "content": "", "tool_calls": [_FUNCTION]}
_TOLD |= {"tool_call_id": "callcall0", "name": "f"}
THOUGHTS = ("reasoning_content", "reasoning", "thinking")  # an answer's thoughts, as templates call them
_TODAY = "strftime_now"  # the function by which templates ask for the date; as a variable, its day: 2026-11-25
_DIRECTIVES = ("-d", "-m", *"aAbBcdDeFHIjmMpSTuUwWxXyYZ", "%")
_GENERATION = re.compile(r"\{%-?\s*(end)?generation\s*-?%\}")  # tags that only transformers parses
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
        self.warned_of_end = False  # that no stop token ends an answer

    def freeze(self, earlier: Variables) -> None:
        """Take the date of work that began on an earlier day, unless the user has given one."""
        if _TODAY in earlier and self.variables.get(_TODAY) == self._today:
            self.variables[_TODAY] = earlier[_TODAY]

    def text(self, messages: list[Message], variables: Variables, open_answer: bool = False) -> str:
        """Render what the target reads; with `open_answer`, up to where an answer begins.

        Raises:
            ValueError: the template refuses the messages.
        """
        values, faults, texts = {**self.variables, **variables}, [], []
        # Some templates want the arguments of a call as an object, others as text.
        for variant in (messages, [_with_text_arguments(message) for message in messages]):
            try:
                texts.append(self._render(variant, values, open_answer))
            except Exception as error:  # whatever a template's code raises
                faults.append(error)
                continue
            if _has_calls(messages, texts[-1]):
                return texts[-1]
        if texts:
            return texts[0]
        roles = ", ".join(message["role"] for message in messages)
        raise ValueError(f"the chat template refuses messages with the roles {roles}: {faults[0]}") from faults[0]

    def prompt(self, messages: list[Message], variables: Variables) -> str:
        """Render the text up to where the assistant answers the last message."""
        if not messages or "assistant" in (messages[0]["role"], messages[-1]["role"]):
            raise ValueError("nobody speaks before the answer: no message, or the first or last is the assistant's")
        return self.text(messages, variables, open_answer=True)

    def _render(self, messages: list[Message], values: Variables, open_answer: bool = False, template: str = "") -> str:
        rest = {name: value for name, value in values.items() if name != _TODAY}
        template = template or self._tokenizer.get_chat_template(tools=values.get("tools"))
        if _TODAY in values:
            template = _dated(template, date.fromisoformat(values[_TODAY]))
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
        """Collect the stop tokens of tokenizer and generation config; the template's own, if it writes none of these.

        The template's is the token after every answer: what closes a part of an answer (`<|END_RESPONSE|>`) is no stop.
        """
        ids = getattr(generation_config, "eos_token_id", None)
        stops = {*token_ids(ids, "eos_token_id of the generation config"), *token_ids(self._tokenizer.eos_token_id)}
        added = {str(token): number for number, token in self._tokenizer.added_tokens_decoder.items()}
        after = [self._between(_USER, _ANSWER)[2:3], self._between(_USER, _ANSWER, _USER, _ANSWER)[2:3]]
        matches = (any_of(added).match("".join(text).lstrip()) for text in after)
        last, earlier = (match[0] if match else "" for match in matches)
        if any(text in "".join(after[0]) for text, number in added.items() if number in stops):
            return frozenset(stops)
        if last and last == earlier:
            stops.add(added[last])
        elif earlier and not last and added[earlier] not in stops:
            logger.warning("%s stands after an answer where the chat continues, and is not a stop token", earlier)
            self.warned_of_end = True
        return frozenset(stops)

    def find_roles(self) -> set[str]:
        """Collect the special tokens that begin or end messages of any role.

        Before an answer, they end with a role's word or an empty thought: `<|im_assistant|>assistant`.
        """
        special = any_of(str(token) for token in self._tokenizer.added_tokens_decoder.values() if token.special)
        _, head, frame, *_ = [*self._between(_USER, _ANSWER, _USER, _ANSWER), "", "", ""]
        head = re.match(rf"(?:{special.pattern}|\W)*", head.removesuffix(thought_of(head).text))
        frames = [head[0] if head else "", frame, *self._between(_SYSTEM, _USER)[:2]]
        called, told = (MARK.join(self._between(*messages)) for messages in ([_USER, _CALL], [_USER, _CALL, _TOLD]))
        result = special.findall(told[len(commonprefix([called, told])) :])  # noqa: RUF071, letter by letter
        roles = {*special.findall(" ".join(frames))} | ({*result} - {*special.findall(called)})
        return {text for text in roles if not THINKS.search(text)}  # which a system message may speak of

    def _between(self, *messages: Message) -> list[str]:
        """Return what stands between the texts of messages; nothing if the template refuses them, or lacks a text."""
        try:
            pieces = self.text([*messages], {}).split(MARK)
        except ValueError:
            return []
        return pieces if len(pieces) > sum(message["content"] == MARK for message in messages) else []

    @cached_property
    def switch(self) -> str:
        """Where variables of the template switch thoughts: the end of a message that names them."""
        tree = Environment(extensions=["jinja2.ext.loopcontrols"]).parse(_GENERATION.sub("", self._source))
        names = sorted(filter(THINKS.search, meta.find_undeclared_variables(tree) - {*THOUGHTS}))
        return f"; its variable {', '.join(names)} (chat_template_kwargs) switches thoughts" if names else ""


def token_ids(ids: Any, name: str = "a token id", vocabulary: int = 2**31) -> list[int]:
    """List ids in any form that transformers takes: a number, or numbers in a list, an array or a tensor; [] for None.

    Raises:
        ValueError: anything else, or not one of `vocabulary` tokens; the message begins with `name`.
    """
    try:
        values = torch.as_tensor([] if ids is None else ids)
        numbers = values.long()
        if values.dtype == torch.bool or not ((numbers == values) & (numbers >= 0) & (numbers < vocabulary)).all():
            raise ValueError
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"{name} is {ids!r}; it must be one or more token ids below {vocabulary}") from error
    return numbers.flatten().tolist()


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
