"""Chat templates: conversations -> token ids, the spans the assistant wrote in them, the tokens that stop it."""

import hashlib
import json
import re
from bisect import bisect_left
from dataclasses import dataclass

from jinja2 import TemplateError
from transformers import GenerationConfig, PreTrainedTokenizerFast

GUARD = "\ufdd0"  # stands in no text: Unicode keeps it for a program's own use
_MARK = "\u241f user message \u241f"


@dataclass(frozen=True)
class Rendered:
    """A conversation as the target reads it."""

    tokens: list[int]
    spans: list[tuple[int, int]]  # half-open token ranges written by the assistant, its stop token included


class Chat:
    r"""Chat template of a tokenizer: conversations -> token ids, assistant spans, stop tokens.

    An answer is what follows its generation prompt, up to and with the first stop token:

        <|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello<|im_end|>\n
        \_____________ prompt(messages[:1]) _____________/\____ span ____/

    `{% generation %}` markers are not asked: where one begins and whether it holds the stop token or the newline after
    it differs from template to template, while the prompt is what the target really reads before it writes.

    What people write cannot close their turn: the letters of a special token inside a message stay letters. They are
    rendered with a `GUARD` behind the first of them, and both sides of a guard are tokenised apart, without it.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast, generation_config: GenerationConfig | None = None):
        """Take the template from the tokenizer, the stop tokens from both.

        Raises:
            ValueError: the tokenizer gives no offsets, or has no chat template.
        """
        if not tokenizer.is_fast:
            raise ValueError(f"{type(tokenizer).__name__} gives no offsets: use a fast tokenizer (tokenizer.json)")
        if not tokenizer.chat_template:
            raise ValueError(
                f"the tokenizer {tokenizer.name_or_path!r} has no chat template: name an instruction-tuned target, or "
                "save a template as chat_template.jinja beside tokenizer.json"
            )
        self._tokenizer = tokenizer
        self._template = tokenizer.get_chat_template()
        self.stops = _stops(tokenizer, generation_config)
        self._stop_texts = [text for text in tokenizer.convert_ids_to_tokens(sorted(self.stops)) if text]
        self._special = _special_texts(tokenizer, self._stop_texts)
        self.digest = _digest(self._template, tokenizer.special_tokens_map)

    def render(self, messages: list[dict[str, str]]) -> Rendered:
        """The whole conversation and the answers in it.

        `prompt(messages[:i])` is a token prefix of the result that ends where the span of answer i begins. An answer
        that the template writes otherwise once the chat goes on (earlier reasoning dropped, say) was never generated
        in this form: it is context and has no span.

        Raises:
            ValueError: the template refuses the messages; nobody speaks before an answer; or the template renders a
                finished answer so that it does not follow the generation prompt.
        """
        messages = self._guarded(messages)
        text = self._text(messages)
        answers = self._answers(messages, text)
        tokens, begins, cuts = self._encode(text, [start for start, _ in answers])
        ends = [bisect_left(begins, end, lo=cut) for cut, (_, end) in zip(cuts, answers, strict=True)]
        return Rendered(tokens, [(start, end) for start, end in zip(cuts, ends, strict=True) if start < end])

    def prompt(self, messages: list[dict[str, str]]) -> list[int]:
        """Tokens of the conversation up to where the assistant begins to write.

        Raises:
            ValueError: no messages, the last is the assistant's, or as in `render`.
        """
        messages = self._guarded(messages)
        text = self._open(messages)
        tokens, _, _ = self._encode(text, [start for start, _ in self._answers(messages, text)])
        return tokens

    def user_prompt(self, messages: list[dict[str, str]], opening: str = "") -> list[int]:
        """Tokens of the conversation up to where its user goes on from an opening.

        Raises:
            ValueError: as in `render`.
        """
        text = self._text(self._guarded([*messages, {"role": "user", "content": _MARK}]))
        return self._tokens(text.split(_MARK)[0] + self._guard(opening))[0]

    def text(self, tokens: list[int]) -> str:
        """The text of tokens, without special tokens."""
        return str(self._tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False))

    def _text(self, messages: list[dict[str, str]], open_answer: bool = False) -> str:
        try:
            text = self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=open_answer)
            return str(text)
        except TemplateError as error:
            roles = ", ".join(message["role"] for message in messages)
            raise ValueError(f"the chat template refuses messages with the roles {roles}: {error}") from error

    def _open(self, messages: list[dict[str, str]]) -> str:
        """Text up to where the assistant answers the last message."""
        if not messages:
            raise ValueError("nobody speaks before the answer: there are no messages, or message 0 is the assistant's")
        if messages[-1]["role"] == "assistant":
            raise ValueError(f"nobody speaks before the answer: message {len(messages) - 1} is the assistant's too")
        return self._text(messages, open_answer=True)

    def _answers(self, messages: list[dict[str, str]], text: str) -> list[tuple[int, int]]:
        """Half-open character ranges of `text` that the assistant wrote."""
        answers = []
        for i, message in enumerate(messages):
            if message["role"] == "assistant":
                prompt, finished = self._open(messages[:i]), self._text(messages[: i + 1])
                answer = self._answer(prompt, finished, message["content"], i)
                if text.startswith(prompt + answer):
                    answers.append((len(prompt), len(prompt + answer)))
        return answers

    def _answer(self, prompt: str, finished: str, content: str, i: int) -> str:
        """What message i adds to its prompt: up to its first stop token, or, without one, to the content's end."""
        if not finished.startswith(prompt):
            shared = next(n for n in range(len(prompt)) if not finished.startswith(prompt[: n + 1]))
            raise ValueError(
                f"message {i}: the chat template opens an answer with {prompt[shared:]!r} but writes a finished one "
                f"with {finished[shared : shared + 40]!r}, so what the assistant wrote cannot be told"
            )
        tail = finished.removeprefix(prompt)
        if "add_generation_prompt" not in self._template and not tail.lstrip().startswith(content.strip()):
            raise ValueError(f"message {i}: the chat template heads it {tail[:40]!r} but has no generation prompt")
        stops = [tail.index(stop) + len(stop) for stop in self._stop_texts if stop in tail]
        bare = [tail.index(written) + len(written) for written in (content, content.strip()) if written in tail]
        if not stops and not bare:
            raise ValueError(f"message {i}: the chat template writes neither content nor stop token: {tail[:40]!r}")
        return tail[: min(stops) if stops else bare[0]]

    def _encode(self, text: str, starts: list[int]) -> tuple[list[int], list[int], list[int]]:
        """Tokens of `text`, none of them reaching over a start of an answer.

        Before a start stand the tokens of the prompt that ends there. Where the tokenizer would rather merge across it
        ("\\n" + "\\n\\nHi"), what follows is tokenised apart: after this prompt the target could not write otherwise.

        Returns:
            The tokens, the character at which each begins, and the number of tokens before each start.
        """
        tokens, begins, cuts, done = [], [], [], 0
        for border in (*starts, len(text)):
            cuts.append(len(tokens))
            joint, joint_begins = self._tokens(text[:border])
            if joint[: len(tokens)] == tokens:
                tokens, begins = joint, joint_begins
            else:
                rest, rest_begins = self._tokens(text[done:border])
                tokens, begins = tokens + rest, begins + [done + begin for begin in rest_begins]
            done = border
        return tokens, begins, cuts[1:]

    def _tokens(self, text: str) -> tuple[list[int], list[int]]:
        tokens, begins, done = [], [], 0
        for part in text.split(GUARD):
            encoding = self._tokenizer(part, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
            tokens += encoding["input_ids"]
            begins += [done + begin for begin, _ in encoding["offset_mapping"]]
            done += len(part) + len(GUARD)
        return tokens, begins

    def _guarded(self, messages: list[dict[str, str]]) -> list[dict[str, str]]:
        return [message | {"content": self._guard(message["content"])} for message in messages]

    def _guard(self, content: str) -> str:
        return self._special.sub(lambda found: found[0][:1] + GUARD + found[0][1:], content.replace(GUARD, ""))


def _special_texts(tokenizer: PreTrainedTokenizerFast, stops: list[str]) -> re.Pattern[str]:
    """Matches the letters of any special token, the longest where several begin."""
    added = [str(token) for token in tokenizer.added_tokens_decoder.values() if token.special]
    texts = sorted({*added, *tokenizer.all_special_tokens, *stops} - {""}, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, texts)) or "(?!)")


def _stops(tokenizer: PreTrainedTokenizerFast, generation_config: GenerationConfig | None) -> frozenset[int]:
    ids = getattr(generation_config, "eos_token_id", None)
    ids = ids if isinstance(ids, list) else [ids]
    return frozenset(token for token in (*ids, tokenizer.eos_token_id) if isinstance(token, int))


def _digest(template: str, special_tokens: dict[str, str]) -> str:
    """16 hex digits of the template and of the special tokens that it names."""
    used = {name: str(token) for name, token in special_tokens.items() if name in template}
    return hashlib.sha256(json.dumps([template, used], sort_keys=True).encode()).hexdigest()[:16]
