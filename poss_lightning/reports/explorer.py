"""Decoded text for the page: coloured by round, and round by round with the tree that was drafted."""

from collections.abc import Mapping
from itertools import zip_longest
from typing import NamedTuple

from poss_lightning.evaluation.drawing import draw
from poss_lightning.evaluation.records import Record
from poss_lightning.evaluation.rounds import AnswerKey, Round
from poss_lightning.reports.summary import Answers

PROMPTS, ROUNDS = 6, 24  # shown, at most; rounds of an answer


class Span(NamedTuple):
    """A run of text: `kind` is "plain", "accepted" or "bonus"."""

    kind: str
    text: str


class ShownAnswer(NamedTuple):
    """An answer: its record, its text in spans, and of each recorded round a title and the drafted tree."""

    record: Record
    spans: list[Span]
    rounds: list[tuple[str, str]]


class ShownPrompt(NamedTuple):
    """One prompt's answers, by method, and its question, where recorded."""

    title: str
    question: str | None
    answers: list[ShownAnswer]


def decoded_texts(methods: Mapping[str, Answers], rounds: Mapping[AnswerKey, list[Round]]) -> list[ShownPrompt]:
    """First turn and first repeat of some prompts: the first of each suite, then the second of each, and so on."""
    by_suite: dict[str, list[tuple]] = {}
    for key, record in next(iter(methods.values()), {}).items():
        if key[2:] == (0, 0) and record.text:
            by_suite.setdefault(key[0], []).append(key)
    chosen = [key for keys in zip_longest(*by_suite.values()) for key in keys if key][:PROMPTS]
    shown = []
    for key in chosen:
        records = [answers[key] for answers in methods.values()]
        answers = [ShownAnswer(one, spans(one), steps(one, rounds.get((*key[:3], one.method), []))) for one in records]
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


def steps(record: Record, rounds: list[Round]) -> list[tuple[str, str]]:
    """The first recorded rounds of an answer.

    Raises:
        ValueError: they do not fit the record.
    """
    emitted = [len(one.guesses.path) - 1 + (one.guesses.bonus is not None) for one in rounds]
    if rounds and emitted != [accepted + 1 for accepted in record.accepted]:
        place = f"{record.suite}/{record.id} turn {record.turn}"
        raise ValueError(f"the rounds of {record.method!r}, {place}, are not those of its record: remove rounds.jsonl")
    return [(_title(number, one, len(rounds)), draw(one.guesses, str)) for number, one in enumerate(rounds[:ROUNDS], 1)]


def _title(number: int, one: Round, rounds: int) -> str:
    tokens, path = one.guesses.tokens, one.guesses.path
    return f"Round {number} of {rounds}: {len(tokens) - 1} drafted, {len(path) - 1} accepted"
