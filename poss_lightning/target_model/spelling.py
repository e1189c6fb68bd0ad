"""Text -> tokens where only the chat template can write special tokens: inside a message their letters stay letters."""

import json
import re
from bisect import bisect_left
from collections.abc import Collection, Iterable
from functools import cached_property
from typing import Any

from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

GUARD = "\ufdd0"  # not in any text: Unicode reserves it for a program's own use
_ANCHOR = "\u241f"  # does not merge with any letter
_BYTE = re.compile("<0x[0-9A-F]{2}>")
# Special in some tokenizers, but they cannot close a turn: tokens of single bytes, and the marks of thoughts.
_HARMLESS = re.compile(f"{_BYTE.pattern}|</?think>")
_NOT_TEXT = ("role", "tokens", "finish_reason", "drawn", "weight")  # fields of a message
_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class Spelling:
    """Tokenises text in which a person may have typed the letters of special tokens.

    `guard` puts a GUARD after the first letter of a special token in a message; the special tokens without one are
    then the template's own. `encode` gives these other names, which a copy of the tokenizer knows. So the tokens are
    those of the tokenizer for the whole text, with `split_special_tokens` for what people wrote.

    In what an assistant said, the target's special tokens are its tokens: marks of thoughts and of calls. Only a stop,
    a role's token, and what no model writes (the beginning of a text, padding) stay letters.

    Args:
        tokenizer: a fast one.
        stops: texts of tokens that are special here, even if the tokenizer does not call them so.
        roles: texts of special tokens that begin or end messages.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast, stops: Collection[str], roles: Collection[str]):
        self._tokenizer = tokenizer
        added = {str(token): token.special for token in tokenizer.added_tokens_decoder.values()}
        texts = {text for text, is_special in added.items() if is_special or text in stops} - {""}
        special = sorted(text for text in texts if not _HARMLESS.fullmatch(text))
        self._names = {text: GUARD + chr(0xF0000 + place) for place, text in enumerate(special)}
        self._special = any_of(special)
        named = {str(getattr(tokenizer, name)) for name in _NAMED}
        self._forgeable = any_of({*special} & {*stops, *roles, *named})
        self._ending = re.compile(rf"((?:{any_of(text for text in special if text in stops).pattern})\s*)+\Z")

    def guard(self, value: Any, role: str = "user") -> Any:
        """Put guards into every text inside a value that somebody of this role wrote."""
        if isinstance(value, str):
            letters = self._forgeable if role == "assistant" else self._special
            return letters.sub(lambda found: found[0][:1] + GUARD + found[0][1:], value.replace(GUARD, ""))
        if isinstance(value, list):
            return [self.guard(part, role) for part in value]
        if isinstance(value, dict):
            return {self.guard(key, role): self.guard(part, role) for key, part in value.items()}
        return value

    def guard_message(self, message: dict[str, Any]) -> dict[str, Any]:
        """Put guards into everything that somebody wrote in a message.

        Stop tokens at the end of an answer, which some data sets have, are left out: the template writes its own.
        """
        if message["role"] == "assistant" and not message.get("tokens") and isinstance(message["content"], str):
            message = message | {"content": self._ending.sub("", message["content"])}
        return {key: part if key in _NOT_TEXT else self.guard(part, message["role"]) for key, part in message.items()}

    def encode(self, text: str, borders: list[int]) -> tuple[list[int], list[int], list[int]]:
        """Tokenize guarded text so that no token reaches across a border, where a prompt ends.

        Before a border stand the tokens of that prompt. Where the tokenizer would merge across it ("\n" + "\n\nHi"),
        what follows is tokenised apart, as the target itself would have to write it.

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
        """Tokenize guarded text; return the tokens and the character at which each begins."""
        if GUARD not in text:
            encoding = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
            return encoding["input_ids"], [begin for begin, _ in encoding["offset_mapping"]]
        parts, sources, done = [], [], 0  # sources: the character of `text` that each of the renamed text is of
        for match in re.finditer(f"{self._special.pattern}|{GUARD}", text):
            name = self._names.get(match[0], "")  # "" for a guard
            parts += [text[done : match.start()], name]
            sources += [*range(done, match.start()), *[match.start()] * len(name)]
            done = match.end()
        sources += range(done, len(text) + 1)
        encoded = self._renamed.encode("".join([*parts, text[done:]]), add_special_tokens=False)
        return encoded.ids, [sources[begin] for begin, _ in encoded.offsets]

    def _continued(self, text: str) -> tuple[list[int], list[int]]:
        """Tokenize a text that continues another, without the blank that some tokenizers put first."""
        if not self._adds_blank:
            return self.tokens(text)
        tokens, begins = self.tokens(_ANCHOR + text)
        first = bisect_left(begins, len(_ANCHOR))
        return tokens[first:], [begin - len(_ANCHOR) for begin in begins[first:]]

    @cached_property
    def _adds_blank(self) -> bool:
        """Whether the tokenizer puts a blank before a text, as Llama-2's does."""
        return self._tokenizer.convert_ids_to_tokens(self.tokens("a")[0])[0][:1] in ("▁", "Ġ")

    @cached_property
    def _renamed(self) -> Tokenizer:
        """A copy of the tokenizer in which special tokens have other names; made when a text has their letters."""
        state = json.loads(self._tokenizer.backend_tokenizer.to_str())
        model, names = state["model"], self._names
        state |= {"truncation": None, "padding": None}  # a saved tokenizer may have them
        added = [token for token in state["added_tokens"] if not _BYTE.fullmatch(token["content"])]
        state["added_tokens"] = [token | {"content": names.get(token["content"], token["content"])} for token in added]
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
    """Compile a pattern that matches any of the texts, the longest first."""
    return re.compile("|".join(map(re.escape, sorted({*texts} - {""}, key=len, reverse=True))) or "(?!)")
