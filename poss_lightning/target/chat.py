"""Chat: conversations -> token ids, the spans that the assistant wrote, and the tokens that stop it."""

import re
from bisect import bisect_left
from dataclasses import dataclass, replace
from os.path import commonprefix
from typing import Any

from transformers import GenerationConfig, PreTrainedTokenizerFast

from poss_lightning.target.spelling import Spelling
from poss_lightning.target.template import MARK, THOUGHTS, Message, Template, Variables


@dataclass(frozen=True)
class Rendered:
    """A conversation, or its beginning, in tokens."""

    tokens: list[int]
    spans: list[tuple[int, int]]  # half-open token ranges that the assistant wrote, its stop token included
    answers: list[int]  # the number of each span's message


SHORT = 6  # letters that a prompt's end and an answer's beginning may share by chance
_TAG = r"[<[◁]{}[\w:|]*(?:think|thought)\w*[]>▷]\s*"
# What a template puts before an answer without a thought; its opening may be in the prompt.
_EMPTY_THOUGHT = re.compile(rf"\s*(?:{_TAG.format('')})?{_TAG.format('/')}", re.IGNORECASE)


@dataclass(frozen=True)
class _Answer:
    """An answer in its text: `prompt` + `lead` + `written`."""

    prompt: str
    lead: str  # what the template puts before it: an empty thought
    written: str | list[int]  # letters; or tokens, if a target wrote it

    @property
    def before(self) -> str:
        return self.prompt + self.lead


class Chat:
    r"""Chat template of a tokenizer: conversations -> token ids, assistant spans, stop tokens.

    An answer is what follows its generation prompt, up to and including the first stop token:

        <|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello<|im_end|>\n
        \_____________ prompt(messages[:1]) _____________/\____ span ____/

    `{% generation %}` markers are ignored: templates differ in whether these include the head, the stop token or the
    newline after it, while the prompt is what the target really reads before it writes.

    An answer with `tokens` keeps them: what a target wrote is never rendered anew. What people write cannot close
    their turn: the letters of a special token inside a message stay letters (`Spelling`).

    Args:
        tokenizer: a fast one, with a chat template.
        generation_config: has stop tokens. More are the tokenizer's, and the one that the template writes after every
            answer.
        variables: of the template, for all conversations: `{"enable_thinking": False}`.

    Raises:
        ValueError: the tokenizer gives no offsets or has no chat template.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerFast,
        generation_config: GenerationConfig | None = None,
        variables: Variables | None = None,
    ):
        if not tokenizer.is_fast:
            raise ValueError(f"{type(tokenizer).__name__} gives no offsets: use a fast tokenizer (tokenizer.json)")
        self._tokenizer, self.template = tokenizer, Template(tokenizer, variables)
        self.stops = self.template.find_stops(generation_config)
        self._stop_texts = tuple(text for text in tokenizer.convert_ids_to_tokens(sorted(self.stops)) if text)
        self._spelling = Spelling(tokenizer, self._stop_texts)
        special = {number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
        self._special_ids = {*special, *tokenizer.all_special_ids, *self.stops}

    # --- conversations ---

    def texts(self, messages: list[Message], variables: Variables | None = None) -> list[Rendered]:
        """Render a conversation as one text, or as several if the template rewrites earlier answers.

        Every answer is in one of the texts as it was written, and `prompt(messages[:i])` is a token prefix of that
        text. An answer whose thoughts the template drops once the chat continues ends a separate text. Answers of
        `weight` 0, and those that follow another answer, are in no span.

        Args:
            messages: role and content each; an answer may have `tokens`, and `finish_reason` "length" if it was cut.
            variables: of the template, for this conversation.

        Raises:
            ValueError: the template refuses the messages, or leaves out some of what they say.
        """
        self._check_tokens(messages)
        messages, variables = self._guarded(messages, variables)
        places = _answered(messages)
        self.template.check_rendered(messages[: max(places, default=0)], variables)
        answers = {}
        for i in places:
            try:
                answers[i] = _thought_once(self._answer(messages, i, variables), messages[i], i)
            except ValueError:
                if messages[i].get("weight", 1):  # of others nothing is trained
                    raise
        remaining = {i for i in answers if messages[i].get("weight", 1)}
        texts = []
        while remaining:
            tokens, spans = self._text_until(max(remaining), messages, answers, variables)
            found = sorted((span, i) for i, span in spans.items() if i in remaining and span[0] < span[1])
            texts.insert(0, Rendered(tokens, [span for span, _ in found], [i for _, i in found]))
            remaining -= spans.keys()
        return texts

    def prompt(self, messages: list[Message], variables: Variables | None = None) -> list[int]:
        """Tokenize the conversation up to where the assistant begins to write.

        Raises:
            ValueError: there are no messages, the last is the assistant's, or as in `texts`.
        """
        messages, variables = self._guarded(messages, variables)
        text = self._open(messages, variables)
        self.template.check_rendered(messages, variables)
        before = [self._open(messages[:i], variables) for i in _answered(messages)]
        return self._spelling.encode(text, [len(prompt) for prompt in before if text.startswith(prompt)])[0]

    def user_prompt(self, messages: list[Message], opening: str = "") -> list[int]:
        """Tokenize the conversation up to where its user continues an opening; ValueError as in `texts`."""
        text = self.template.text(self._guarded([*messages, {"role": "user", "content": MARK}], None)[0], {})
        return self._spelling.tokens(text.split(MARK)[0] + self._spelling.guard(opening))[0]

    def text(self, tokens: list[int]) -> str:
        """Decode tokens, without special tokens and the stop token at the end."""
        body = self._body(tokens)
        return str(self._tokenizer.decode(body, skip_special_tokens=True, clean_up_tokenization_spaces=False))

    def message(self, tokens: list[int]) -> Message:
        """Return the answer that the target wrote as these tokens; `finish_reason` says whether it ended or was cut."""
        finish = "length" if self._body(tokens) == tokens else "stop"
        return {"role": "assistant", "content": self.text(tokens), "tokens": tokens, "finish_reason": finish}

    def is_plain(self, tokens: list[int]) -> bool:
        """Return whether an answer's text says all of it: no special token stands before its final stop token."""
        return not self._special_ids & set(self._body(tokens))

    def _body(self, tokens: list[int]) -> list[int]:
        return tokens[:-1] if tokens and tokens[-1] in self.stops else tokens

    # --- answers ---

    def _answer(self, messages: list[Message], i: int, variables: Variables) -> _Answer:
        r"""Find what message i adds to its prompt: up to the first stop token or, without one, the end of its content.

            finished   …<|im_start|>assistant\nHello<|im_end|>\n
                       \_________ prompt __________/\_____ tail _____/

        what the prompt opens   tail                            what is written
        -                       Hello<|im_end|>\n               Hello<|im_end|>
        -                       Hello\n  (no stop token)        Hello
        -                       <think></think>Hello<|im_end|>  Hello<|im_end|>, after a lead that nobody wrote
        -                       Hello<|im_end|>                 <think>a</think>Hello<|im_end|>, if that is the content
        <think>                 Hello<|im_end|>                 a</think>Hello<|im_end|>, the rest of that content
        <think> or not          whatever                        a  (cut within its thought, which has no end)
        """
        message, prompt = messages[i], self._open(messages[:i], variables)
        if tokens := message.get("tokens"):
            return _Answer(prompt, "", tokens)
        content, finished = message["content"], self.template.text(messages[: i + 1], variables)
        cut, thoughts = message.get("finish_reason") == "length", _thoughts(message).strip()
        calls = [call["function"]["name"] for call in message.get("tool_calls", ())]
        opened, tail = _parted(prompt, finished, content.strip() or "".join(calls[:1]))
        in_thought = prompt.rstrip().endswith("<think>")
        cut_thought = thoughts if cut and not content.strip() and not calls else ""
        if thoughts and in_thought and _squeeze(thoughts) not in _squeeze(tail):  # the template reads its content alone
            inline = cut_thought or f"{thoughts}\n</think>\n\n{content}"
            bare = {key: part for key, part in message.items() if key not in THOUGHTS}
            return self._answer([*messages[:i], bare | {"content": inline}], i, variables)
        # A thought that was cut short has no end, so no template finds it: it is taken as it stands.
        is_open = in_thought or content.lstrip().startswith("<think>")
        if cut and is_open and not thoughts and "</think>" not in content:
            return _Answer(prompt, "", content)
        if not self.template.opens_answers and not tail.lstrip().startswith(content.strip()):
            raise ValueError(f"message {i}: the chat template heads it {tail[:40]!r} but has no generation prompt")
        stop = min((text for text in self._stop_texts if text in tail), key=tail.index, default="")
        body, end = tail.partition(stop)[0] if stop else tail, "" if cut else stop
        said, shown = _squeeze(content), _squeeze(body)
        _check_said(message, i, calls, shown)
        if said not in shown:
            if not shown or not said.endswith(shown):
                raise ValueError(f"message {i}: the chat template writes {body[:40]!r} for {content[:40]!r}")
            # What the template drops: thoughts; or their opening alone, if the prompt has it.
            if not _squeeze(prompt.removesuffix(opened)).endswith(said.removesuffix(shown)):
                return _Answer(prompt, "", _after(opened, content) + end)
        if opened:
            raise ValueError(f"message {i}: the chat template opens an answer with {opened!r} and later drops that")
        if cut_thought and cut_thought in body:
            body = body[: body.rindex(cut_thought) + len(cut_thought)]
        elif not stop:  # the answer ends with its content; what follows belongs to the template
            kept = "" if calls else content if content in body else content.strip()
            body = body[: body.rindex(kept) + len(kept)] if kept and kept in body else body.rstrip()
        lead = 0
        if not thoughts and said in shown and not (said and shown.startswith(said)):
            framed = self.template.text([*messages[:i], {"role": "assistant", "content": MARK}], variables)
            empty = _EMPTY_THOUGHT.match(_parted(prompt, framed, MARK)[1].partition(MARK)[0])
            lead = empty.end() if empty and body.startswith(empty[0]) else 0
        return _Answer(prompt, tail[:lead], body[lead:] + end)

    def _check_tokens(self, messages: list[Message]) -> None:
        for i, message in enumerate(messages):
            if (tokens := message.get("tokens")) and self.text(tokens) != message["content"]:
                raise ValueError(
                    f"message {i}: its tokens do not spell its content with this target's tokenizer; they are another "
                    "target's, or its content was changed: extract with that target, or remove 'tokens'"
                )

    def _guarded(self, messages: list[Message], variables: Variables | None) -> tuple[list[Message], dict[str, Any]]:
        return list(map(self._spelling.guard_message, messages)), self._spelling.guard(dict(variables or {}))

    def _open(self, messages: list[Message], variables: Variables) -> str:
        """Render the text up to where the assistant answers the last message."""
        if not messages or "assistant" in (messages[0]["role"], messages[-1]["role"]):
            raise ValueError("nobody speaks before the answer: no message, or the first or last is the assistant's")
        return self.template.text(messages, variables, open_answer=True)

    # --- tokens ---

    def _text_until(
        self, last: int, messages: list[Message], answers: dict[int, _Answer], variables: Variables
    ) -> tuple[list[int], dict[int, tuple[int, int]]]:
        """Tokenize the conversation up to an answer, and find the spans of this answer and of each earlier one
        that the text still has as it was written.
        """
        end = answers[last]
        text, written = end.prompt, end.written
        if isinstance(written, str):
            finished, text = self.template.text(messages[: last + 1], variables), end.before + written
            text = finished if finished.startswith(text) else text
        before = {i: answer for i, answer in answers.items() if i <= last and text.startswith(answer.before)}
        borders = sorted({len(answer.prompt) for answer in before.values()})
        tokens, begins, cuts = self._spelling.encode(text, borders)
        first = dict(zip(borders, cuts, strict=True))
        tokens = tokens if isinstance(written, str) else tokens + written
        spans = {}
        for i, answer in before.items():
            cut, written = first[len(answer.prompt)], answer.written
            if not isinstance(written, str):
                if tokens[cut : cut + len(written)] == written:
                    spans[i] = cut, cut + len(written)
            elif text.startswith(written, len(answer.before)):
                start = bisect_left(begins, len(answer.before), lo=cut)
                stop = bisect_left(begins, len(answer.before) + len(written), lo=start)
                is_open = messages[i].get("finish_reason") != "length" and not written.endswith(self._stop_texts)
                # In some families the token that begins the next turn ends an answer.
                spans[i] = start, stop + (is_open and stop < len(tokens) and tokens[stop] in self.stops)
        return tokens, spans


def _answered(messages: list[Message]) -> list[int]:
    """Return the indices of answers to somebody: not the first message, nor one that follows another answer."""
    roles = [message["role"] for message in messages]
    return [i for i in range(1, len(roles)) if roles[i] == "assistant" != roles[i - 1]]


def _thoughts(message: Message) -> str:
    return next((message[name] for name in THOUGHTS if message.get(name)), "")


def _check_said(message: Message, i: int, calls: list[str], shown: str) -> None:
    """Raise ValueError if an answer's thoughts or tool calls are missing from what is shown of it."""
    if _squeeze(_thoughts(message)) not in shown:
        raise ValueError(f"message {i}: the chat template leaves out its thoughts (reasoning_content)")
    names = [_squeeze(name) for name in calls]
    if missing := [name for name in names if shown.count(name) < names.count(name)]:
        raise ValueError(f"message {i}: the chat template leaves out its call of {missing[0]!r}")


def _thought_once(answer: _Answer, message: Message, i: int) -> _Answer:
    """Drop the opening of an answer's thought if the prompt has it.

    ValueError if it does not close that thought, or closes one that the prompt has closed.
    """
    written = answer.written
    if not isinstance(written, str):
        return answer
    closes, opened = "</think>" in written, answer.before.rstrip().endswith("<think>")
    if closes and answer.prompt.rstrip().endswith("</think>"):
        raise ValueError(f"message {i}: it has thoughts, and the chat template closes them before it is written")
    if opened and not closes and message.get("finish_reason") != "length":
        raise ValueError(f"message {i}: the chat template opens a thought that the answer does not close")
    return replace(answer, written=_after("<think>", written)) if opened else answer


def _parted(prompt: str, finished: str, said: str) -> tuple[str, str]:
    """Return what a finished text lacks of its prompt's end, and what follows the rest.

    Text far before an answer may change once it is finished: a system message that stands only before the last user's.
    """
    shared = len(commonprefix([prompt, finished]))  # noqa: RUF071, letter by letter
    if shared < len(prompt) and prompt.rstrip().endswith("<think>"):
        shared = min(shared, prompt.rindex("<think>"))  # never inside the tag
    rest = finished[shared:]  # which has the longest end of the prompt from here on, and so every shorter one
    begin = bisect_left(range(len(prompt)), True, lo=shared, key=lambda n: prompt[n:] in rest)
    _, found, tail = rest.rpartition(prompt[begin:] or MARK)
    if shared < len(prompt) and len(found) > SHORT and said and said in tail:
        return "", tail
    return prompt[shared:], rest


def _squeeze(text: str) -> str:
    """Remove white space: templates trim and indent."""
    return "".join(text.split())


def _after(opened: str, content: str) -> str:
    """Return a content without `opened`, with which its prompt ends, if the content repeats it."""
    opened, start = opened.strip(), content.lstrip()
    return start.removeprefix(opened).lstrip() if opened and start.startswith(opened) else content
