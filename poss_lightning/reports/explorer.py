"""Decoded text for the page: coloured by round, and round by round with the tree that was drafted.

A tree is a nested list; the style sheet lays it out from left to right where there is room, and indented on a phone.
"""

import math
from dataclasses import dataclass, field
from itertools import accumulate, zip_longest

from poss_lightning.evaluation.drawing import Guesses
from poss_lightning.evaluation.records import Record
from poss_lightning.evaluation.rounds import Round
from poss_lightning.reports.summary import Answers

NODES = 24  # of a tree, at most; what was accepted is always there
ROUNDS, ALL_ROUNDS = 40, 1200  # of an answer and of a page, at most, so that it stays small
TAIL = 160  # characters of the text before a round


@dataclass(frozen=True)
class Span:
    """A run of text: `kind` is "plain", "accepted" or "bonus"; `strength` is accepted / K of its round."""

    kind: str
    text: str
    strength: float = 0.0
    round: int | None = None


@dataclass(frozen=True)
class Node:
    """A token of a tree: `kind` is "root", "accepted", "refused" or "bonus"; `chance` that of its path, in per cent."""

    kind: str
    token: str
    chance: str = ""
    below: list["Node"] = field(default_factory=list)


@dataclass(frozen=True)
class Step:
    """One round: the end of the text so far, what was drafted, how much of it was accepted, and what it said."""

    before: str
    accepted: str
    bonus: str
    drafted: int
    taken: int
    root: Node
    hidden: int  # nodes of the tree that are not shown


@dataclass(frozen=True)
class Shown:
    """An answer: its record, its text in spans, and as many of its rounds as were recorded and have room."""

    record: Record
    spans: list[Span]
    steps: list[Step]


@dataclass(frozen=True)
class Text:
    """One prompt's answers, by method."""

    title: str
    answers: list[Shown]


def decoded_texts(
    methods: dict[str, Answers], rounds: dict[tuple, list[Round]], depths: dict[str, int], prompts: int
) -> list[Text]:
    """First turn and repeat of some prompts: the first of each suite, then the second of each, and so on.

    Prompts whose rounds were recorded come first; replayed answers, which have no text, are left out. `depths` has K by
    method.
    """
    with_rounds = {answer[:2] for answer in rounds}
    by_suite: dict[str, list[tuple]] = {}
    for key in sorted(next(iter(methods.values())), key=lambda key: key[:2] not in with_rounds):
        if key[2:] == (0, 0) and any(own[key].text for own in methods.values()):
            by_suite.setdefault(key[0], []).append(key)
    chosen = [key for level in zip_longest(*by_suite.values()) for key in level if key is not None][:prompts]
    recorded = sum((*key[:3], name) in rounds for key in chosen for name in methods)
    most = min(ROUNDS, ALL_ROUNDS // max(recorded, 1))
    return [
        Text(
            f"{key[0]}, prompt {key[1]}",
            [
                Shown(own[key], spans(own[key], depths[name]), steps(own[key], rounds.get((*key[:3], name), []), most))
                for name, own in methods.items()
            ],
        )
        for key in chosen
    ]


def spans(record: Record, depth: int) -> list[Span]:
    """The text cut at rounds: the prefill's token, then each round's accepted run and its bonus or stop token.

    A last round that the limit cut ends within its accepted run.
    """
    if record.pieces is None or not record.accepted:
        return [Span("plain", record.text)]
    cut, start = [Span("plain", record.pieces[0])], 1
    for number, accepted in enumerate(record.accepted):
        end, strength = start + accepted, min(accepted / depth, 1.0) if depth else 0.0
        cut += [Span("accepted", _seen(record.pieces[start:end]), strength, number)] if accepted else []
        cut += [Span("bonus", _seen([piece]), 0.0, number) for piece in record.pieces[end : end + 1]]  # not if cut
        start = end + 1
    return cut


def steps(record: Record, rounds: list[Round], most: int = ROUNDS) -> list[Step]:
    """The recorded rounds of an answer, at most so many of them.

    Raises:
        ValueError: they are not the record's.
    """
    if not rounds:
        return []
    emitted = [len(one.guesses.path) - 1 + (one.guesses.bonus is not None) for one in rounds]
    if emitted != [accepted + 1 for accepted in record.accepted]:
        place = f"{record.suite}/{record.id} turn {record.turn}"
        raise ValueError(f"the rounds of {record.method!r}, {place}, are not those of its record: remove rounds.jsonl")
    pieces = record.pieces or []
    starts = accumulate((accepted + 1 for accepted in record.accepted), initial=1)
    return [_step(pieces, start, one.guesses) for start, one in zip(starts, rounds[:most], strict=False)]


def _step(pieces: list[str], start: int, guesses: Guesses[str]) -> Step:
    taken = len(guesses.path) - 1
    end = start + taken
    shown = likeliest(guesses, NODES)
    return Step(
        before="".join(pieces[:start])[-TAIL:],
        accepted=_seen(pieces[start:end]),
        bonus=_seen(pieces[end : end + 1]),
        drafted=len(guesses.tokens) - 1,
        taken=taken,
        root=_node(guesses, 0, shown),
        hidden=len(guesses.tokens) - len(shown),
    )


def _node(guesses: Guesses[str], node: int, shown: set[int]) -> Node:
    """A node of the tree and what is shown below it, likelier ones first, and the bonus behind the path."""
    tokens, parents, scores, path, bonus = guesses
    children = sorted(
        (child for child in shown - {0} if parents[child] == node), key=lambda child: (-scores[child], child)
    )
    below = [_node(guesses, child, shown) for child in children]
    if node == path[-1] and bonus is not None:
        below.append(Node("bonus", _sign(bonus)))
    if node == 0:
        return Node("root", _sign(tokens[0]), "", below)
    chance = 100 * math.exp(scores[node])
    words = f"{chance:.0f}" if chance >= 10 else f"{chance:.2g}"
    return Node("accepted" if node in path else "refused", _sign(tokens[node]), words, below)


def _seen(pieces: list[str]) -> str:
    """Joined, with a sign where a line ends: a coloured run of blanks shows nothing."""
    return "".join(pieces).replace("\n", "↵\n")


def _sign(token: str) -> str:
    """A token on one line."""
    return token.replace("\n", "↵").replace("\t", "⇥")
