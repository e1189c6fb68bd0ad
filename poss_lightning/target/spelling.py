"""Text -> tokens where only the chat template writes special tokens: inside a message their letters stay letters."""

import json
import re
from bisect import bisect_left
from collections.abc import Iterable
from functools import cached_property
from typing import Any

from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

GUARD = "\ufdd0"  # stands in no text: Unicode keeps it for a program's own use
_ANCHOR = "\u241f"  # merges with no letter
_BYTE = re.compile("<0x[0-9A-F]{2}>")
# Special in some tokenizers, and they close no turn: tokens of single bytes, and the marks of thoughts in an answer.
_HARMLESS = re.compile(f"{_BYTE.pattern}|</?think>")
_NOT_TEXT = ("role", "tokens", "finish_reason", "drawn", "weight")  # of a message


class Spelling:
    """A tokenizer, and the letters that special tokens have.

    `guard` puts a GUARD behind the first letter of a special token in a message. After rendering, the special tokens
    without one are the template's own. `encode` hands the text to a copy of the tokenizer in which special tokens have
    other names, and puts these names for the template's. So the tokens are those of the tokenizer for the whole text,
    with `split_special_tokens` for what people wrote.

    Args:
        tokenizer: a fast one.
        stops: texts of tokens that are special here, whether the tokenizer calls them so or not.

    Raises:
        ValueError: the tokenizer gives no offsets.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast, stops: Iterable[str]):
        self._tokenizer = tokenizer
        added = {str(token): token.special for token in tokenizer.added_tokens_decoder.values()}
        texts = {text for text, is_special in added.items() if is_special or text in stops} - {""}
        special = sorted(text for text in texts if not _HARMLESS.fullmatch(text))
        self._names = {text: GUARD + chr(0xF0000 + place) for place, text in enumerate(special)}
        self._special = any_of(special)

    def guard(self, value: Any) -> Any:
        """Every text inside a value, with guards."""
        if isinstance(value, str):
            return self._special.sub(lambda found: found[0][:1] + GUARD + found[0][1:], value.replace(GUARD, ""))
        if isinstance(value, list):
            return [self.guard(part) for part in value]
        if isinstance(value, dict):
            return {self.guard(key): self.guard(part) for key, part in value.items()}
        return value

    def guard_message(self, message: dict[str, Any]) -> dict[str, Any]:
        """The message with guards in all that somebody wrote."""
        return {key: part if key in _NOT_TEXT else self.guard(part) for key, part in message.items()}

    def encode(self, text: str, borders: list[int]) -> tuple[list[int], list[int], list[int]]:
        """Tokens of guarded text, none of them reaching over a border, where a prompt ends.

        Before a border stand the tokens of that prompt. Where the tokenizer would rather merge across it ("\\n" +
        "\\n\\nHi"), what follows is tokenised apart: after this prompt the target could not write otherwise.

        Returns:
            The tokens, the character at which each begins, and the number of tokens before each border.
        """
        tokens, begins, cuts, done = [], [], [], 0
        for border in (*borders, len(text)):
            cuts.append(len(tokens))
            joint, joint_begins = self.tokens(text[:border])
            if joint[: len(tokens)] == tokens:
                tokens, begins = joint, joint_begins
            else:
                rest, rest_begins = self._continued(text[done:border])
                tokens, begins = tokens + rest, begins + [done + begin for begin in rest_begins]
            done = border
        return tokens, begins, cuts[1:]

    def tokens(self, text: str) -> tuple[list[int], list[int]]:
        """Tokens of guarded text, and the character at which each begins."""
        if GUARD not in text:
            encoding = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
            return encoding["input_ids"], [begin for begin, _ in encoding["offset_mapping"]]
        parts, places, done = [], [], 0
        for found in re.finditer(f"{self._special.pattern}|{GUARD}", text):
            name = self._names.get(found[0], "")  # a guard is left out
            parts += [text[done : found.start()], name]
            places += [*range(done, found.start()), *[found.start()] * len(name)]
            done = found.end()
        places += range(done, len(text) + 1)
        encoded = self._renamed.encode("".join([*parts, text[done:]]), add_special_tokens=False)
        return encoded.ids, [places[begin] for begin, _ in encoded.offsets]

    def _continued(self, text: str) -> tuple[list[int], list[int]]:
        """Tokens of a text that stands behind another: without the blank that some tokenizers put at a beginning."""
        if not self._adds_blank:
            return self.tokens(text)
        tokens, begins = self.tokens(_ANCHOR + text)
        first = bisect_left(begins, len(_ANCHOR))
        return tokens[first:], [begin - len(_ANCHOR) for begin in begins[first:]]

    @cached_property
    def _adds_blank(self) -> bool:
        """Whether the tokenizer puts a blank before a text, as those of Llama-2's kind do."""
        return self._tokenizer.convert_ids_to_tokens(self.tokens("a")[0])[0][:1] in ("▁", "Ġ")

    @cached_property
    def _renamed(self) -> Tokenizer:
        """The copy of the tokenizer in which special tokens have other names; loaded when a text has their letters."""
        state = json.loads(self._tokenizer.backend_tokenizer.to_str())
        model, names = state["model"], self._names
        state |= {"truncation": None, "padding": None}  # a saved tokenizer may have them
        kept = [token for token in state["added_tokens"] if not _BYTE.fullmatch(token["content"])]
        state["added_tokens"] = [token | {"content": names.get(token["content"], token["content"])} for token in kept]
        if isinstance(model["vocab"], dict):
            model["vocab"] = {names.get(piece, piece): token for piece, token in model["vocab"].items()}
        else:  # Unigram's
            model["vocab"] = [[names.get(piece, piece), score] for piece, score in model["vocab"]]
        if "merges" in model:
            pairs = (pair.split(" ") if isinstance(pair, str) else pair for pair in model["merges"])
            model["merges"] = [pair for pair in pairs if not {*pair, "".join(pair)} & names.keys()]
        if isinstance(unknown := model.get("unk_token"), str):
            model["unk_token"] = names.get(unknown, unknown)
        return Tokenizer.from_str(json.dumps(state))


def any_of(texts: Iterable[str]) -> re.Pattern[str]:
    """Matches any of the texts, the longest where several begin."""
    return re.compile("|".join(map(re.escape, sorted({*texts} - {""}, key=len, reverse=True))) or "(?!)")
