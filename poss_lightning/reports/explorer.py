"""Decoded text for the page, coloured by round."""

from collections.abc import Mapping
from itertools import zip_longest
from typing import NamedTuple

from poss_lightning.evaluation.records import Record
from poss_lightning.reports.summary import Answers

PROMPTS = 6  # shown, at most


class Span(NamedTuple):
    """A run of text: `kind` is "plain", "accepted" or "bonus"."""

    kind: str
    text: str


class ShownAnswer(NamedTuple):
    """An answer: its record, and its text in spans."""

    record: Record
    spans: list[Span]


class ShownPrompt(NamedTuple):
    """One prompt's answers, by method, and its question, where recorded."""

    title: str
    question: str | None
    answers: list[ShownAnswer]


def decoded_texts(methods: Mapping[str, Answers]) -> list[ShownPrompt]:
    """First turn and first repeat of some prompts: the first of each suite, then the second of each, and so on."""
    by_suite: dict[str, list[tuple]] = {}
    for key, record in next(iter(methods.values()), {}).items():
        if key[2:] == (0, 0) and record.text:
            by_suite.setdefault(key[0], []).append(key)
    chosen = [key for keys in zip_longest(*by_suite.values()) for key in keys if key][:PROMPTS]
    shown = []
    for key in chosen:
        records = [answers[key] for answers in methods.values()]
        answers = [ShownAnswer(one, spans(one)) for one in records]
        shown.append(ShownPrompt(f"{key[0]}, {key[1]}", records[0].question, answers))
    return shown


def spans(record: Record) -> list[Span]:
    """The text split at rounds: the prefill's token, then each round's accepted run and its bonus or stop token.

    The last round may end within its accepted run, where the limit of new tokens cut it.
    """
    if record.pieces is None or not record.accepted:
        return [Span("plain", record.text)]
    cut, start = [Span("plain", record.pieces[0])], 1
    for accepted in record.accepted:
        end = start + accepted
        runs = ("accepted", record.pieces[start:end]), ("bonus", record.pieces[end : end + 1])
        cut += [Span(kind, "".join(pieces).replace("\n", "↵\n")) for kind, pieces in runs if pieces]
        start = end + 1
    return cut
