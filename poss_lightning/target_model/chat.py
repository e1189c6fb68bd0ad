"""Chat: conversations -> token ids, the spans that the assistant wrote, and the tokens that stop it."""

import logging
from bisect import bisect_left
from dataclasses import dataclass
from typing import Any

from transformers import GenerationConfig, PreTrainedTokenizerFast

from poss_lightning.target_model.answers import Answer, AnswerFinder
from poss_lightning.target_model.spelling import Spelling
from poss_lightning.target_model.template import MARK, Message, Template, Variables

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Rendered:
    """A conversation, or its beginning, in tokens."""

    tokens: list[int]
    spans: list[tuple[int, int]]  # half-open token ranges that the assistant wrote, its stop token included
    answers: list[int]  # the number of each span's message


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
        self._spelling = Spelling(tokenizer, self._stop_texts, self.template.find_roles())
        self._finder = AnswerFinder(self.template, self._stop_texts)
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
        answered = _answered(messages)
        self.template.check_rendered(messages[: max(answered, default=0)], variables)
        answers = {}
        for i in answered:
            try:
                answers[i] = self._finder.find(messages, i, variables)
            except ValueError:
                if messages[i].get("weight", 1):  # nothing is trained on the rest
                    raise
        remaining = {i for i in answers if messages[i].get("weight", 1)}
        texts = []
        while remaining:
            tokens, spans = self._text_until(max(remaining), messages, answers, variables)
            found = sorted((span, i) for i, span in spans.items() if i in remaining and span[0] < span[1])
            texts.insert(0, Rendered(tokens, [span for span, _ in found], [i for _, i in found]))
            remaining -= spans.keys()
            self._warn_of_end(texts[0], messages)
        return texts

    def prompt(self, messages: list[Message], variables: Variables | None = None) -> list[int]:
        """Tokenize the conversation up to where the assistant begins to write.

        Raises:
            ValueError: there are no messages, the last is the assistant's, or as in `texts`.
        """
        messages, variables = self._guarded(messages, variables)
        text = self.template.prompt(messages, variables)
        self.template.check_rendered(messages, variables)
        before = [self.template.prompt(messages[:i], variables) for i in _answered(messages)]
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

    def _check_tokens(self, messages: list[Message]) -> None:
        for i, message in enumerate(messages):
            if (tokens := message.get("tokens")) and self.text(tokens) != message["content"]:
                raise ValueError(
                    f"message {i}: its tokens do not spell its content with this target's tokenizer; they are another "
                    "target's, or its content was changed: extract with that target, or remove 'tokens'"
                )

    def _guarded(self, messages: list[Message], variables: Variables | None) -> tuple[list[Message], dict[str, Any]]:
        return list(map(self._spelling.guard_message, messages)), self._spelling.guard(dict(variables or {}))

    def _warn_of_end(self, text: Rendered, messages: list[Message]) -> None:
        """Say once that an answer has no stop token at its end."""
        for (_, stop), i in zip(text.spans, text.answers, strict=True):
            ends = text.tokens[stop - 1] in self.stops or messages[i].get("finish_reason") == "length"
            if not ends and not self.template.warned_of_end:
                stops, self.template.warned_of_end = ", ".join(self._stop_texts), True
                logger.warning("message %d ends without a stop token (%s): drafts do not learn such ends", i, stops)

    # --- tokens ---

    def _text_until(
        self, last: int, messages: list[Message], answers: dict[int, Answer], variables: Variables
    ) -> tuple[list[int], dict[int, tuple[int, int]]]:
        """Tokenize the conversation up to an answer, and find the spans of this answer and of each earlier one
        that the text still has as it was written.
        """
        end = answers[last]
        text, written = end.prompt, end.written
        if isinstance(written, str):
            finished, text = self.template.text(messages[: last + 1], variables), end.before + written + end.next_stop
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
