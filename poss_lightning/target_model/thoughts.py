"""The marks of thoughts in a text: <think> </think>, [THINK] [/THINK], <|channel>thought <channel|>, and their like."""

import re
from typing import NamedTuple

_MARK = r"[<\[◁][^\s<>\[\]◁▷]+[>\]▷]"
_PAIR = rf"({_MARK})\s*\w*\s*({_MARK})\s*"
THINKS = re.compile("think|thought|reason", re.IGNORECASE)


class Thought(NamedTuple):
    """A thought that a prompt opens, or opens and closes; all empty where it does neither."""

    text: str = ""  # with which the prompt ends: `<think>\n`, `<think></think>` or `</think>`
    mark: str = ""  # that opens it
    close: str = ""
    is_open: bool = False


def thought_of(prompt: str) -> Thought:
    """Find the thought with which a prompt ends, by the names and the places of its marks.

    Examples:
        >>> thought_of("<|assistant|><think>\\n")
        Thought(text='<think>\\n', mark='<think>', close='</think>', is_open=True)
        >>> thought_of("<|turn>model\\n<|channel>thought\\n<channel|>").close
        '<channel|>'
    """
    pair = re.search(rf"{_PAIR}\Z", prompt)
    if pair and _is_empty(pair) and THINKS.search(pair[0]):
        return Thought(pair[0], pair[1], pair[2])
    last = re.search(rf"({_MARK})\s*\Z", prompt)
    if not last or not THINKS.search(last[1]):
        return Thought()
    return Thought(last[0], "", last[1]) if _closes(last[1]) else Thought(last[0], last[1], closing(last[1]), True)


def opened_thought(content: str) -> Thought:
    """Find the thought that a content opens with its first mark."""
    first = re.match(rf"\s*({_MARK})", content)
    return thought_of(first[1]) if first else Thought()


def closing(mark: str) -> str:
    """Return the mark that closes a thought: `</think>`, `<|END_THINKING|>`."""
    ended = re.sub("START|BEGIN", "END", re.sub("start|begin", "end", mark))
    return f"{mark[0]}/{mark[1:]}" if ended == mark else ended


def empty_thought(text: str) -> str:
    """Return the empty thought with which a text begins, or its closing mark, with the blanks around; "" if none."""
    pair, first = re.match(rf"\s*{_PAIR}", text), re.match(rf"\s*({_MARK})\s*", text)
    if pair and _is_empty(pair):
        return pair[0]
    return first[0] if first and _closes(first[1]) else ""


def _is_empty(pair: re.Match[str]) -> bool:
    """Return whether two marks are of one name, as of what begins and what ends."""
    first, last = (re.sub(r"(?i)start|begin|end|of|[\W_]", "", mark).lower() for mark in pair.groups())
    return first == last and pair[1] != pair[2]


def _closes(mark: str) -> bool:
    """Return whether a mark closes a thought."""
    return bool(THINKS.search(mark) and re.search(r"/|end", mark, re.IGNORECASE))
