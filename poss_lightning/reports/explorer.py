"""Decoded text for the page: coloured by round, and round by round with the tree that was drafted.

A tree is a nested list; the style sheet lays it out from left to right where there is room, and indented on a phone.
"""

import math
from dataclasses import dataclass, field
from itertools import accumulate, zip_longest

from poss_lightning.evaluation.drawing import Guesses, likeliest_nodes
from poss_lightning.evaluation.records import Record
from poss_lightning.evaluation.rounds import AnswerKey, Round
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
    """One round: the end of the text so far, its tree, how many tokens were drafted and accepted, and their text."""

    before: str
    accepted: str
    bonus: str
    drafted: int
    taken: int
    root: Node
    hidden: int  # nodes of the tree that are not shown


@dataclass(frozen=True)
class ShownAnswer:
    """An answer: its record, its text in spans, and its rounds, where these were recorded, up to a limit."""

    record: Record
    spans: list[Span]
    steps: list[Step]


@dataclass(frozen=True)
class ShownPrompt:
    """One prompt's answers, by method, and its question, where recorded."""

    title: str
    question: str | None
    answers: list[ShownAnswer]


def decoded_texts(
    methods: dict[str, Answers], rounds: dict[AnswerKey, list[Round]], depths: dict[str, int], prompts: int
) -> list[ShownPrompt]:
    """First turn and first repeat of some prompts: the first prompt of each suite, then the second of each, and so on.

    Prompts with recorded rounds come first. Replayed answers have no text and are left out. `depths` has K by method.
    """
    with_rounds = {answer[:2] for answer in rounds}
    by_suite: dict[str, list[tuple]] = {}
    for key in sorted(next(iter(methods.values())), key=lambda key: key[:2] not in with_rounds):
        if key[2:] == (0, 0) and any(by_key[key].text for by_key in methods.values()):
            by_suite.setdefault(key[0], []).append(key)
    chosen = [key for level in zip_longest(*by_suite.values()) for key in level if key is not None][:prompts]
    recorded = sum((*key[:3], name) in rounds for key in chosen for name in methods)
    most = min(ROUNDS, ALL_ROUNDS // max(recorded, 1))
    prompts_shown = []
    for key in chosen:
        answers = []
        for name, by_key in methods.items():
            record, recorded_rounds = by_key[key], rounds.get((*key[:3], name), [])
            answers.append(ShownAnswer(record, spans(record, depths[name]), steps(record, recorded_rounds, most)))
        question = next((one.record.question for one in answers if one.record.question is not None), None)
        prompts_shown.append(ShownPrompt(f"{key[0]}, prompt {key[1]}", question, answers))
    return prompts_shown


def spans(record: Record, depth: int) -> list[Span]:
    """The text split at rounds: the prefill's token, then each round's accepted run and its bonus or stop token.

    The last round may end within its accepted run, where the limit of new tokens cut it.
    """
    if record.pieces is None or not record.accepted:
        return [Span("plain", record.text)]
    cut, start = [Span("plain", record.pieces[0])], 1
    for number, accepted in enumerate(record.accepted):
        end, strength = start + accepted, min(accepted / depth, 1.0) if depth else 0.0
        cut += [Span("accepted", _mark_line_ends(record.pieces[start:end]), strength, number)] if accepted else []
        bonus = record.pieces[end : end + 1]  # none where the limit cut the round
        cut += [Span("bonus", _mark_line_ends(bonus), 0.0, number)] if bonus else []
        start = end + 1
    return cut


def steps(record: Record, rounds: list[Round], most: int = ROUNDS) -> list[Step]:
    """The recorded rounds of an answer, `most` at most.

    Raises:
        ValueError: they do not fit the record.
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
    shown = likeliest_nodes(guesses, NODES)
    return Step(
        before="".join(pieces[:start])[-TAIL:],
        accepted=_mark_line_ends(pieces[start:end]),
        bonus=_mark_line_ends(pieces[end : end + 1]),
        drafted=len(guesses.tokens) - 1,
        taken=taken,
        root=_node(guesses, 0, shown),
        hidden=len(guesses.tokens) - len(shown),
    )


def _node(guesses: Guesses[str], node: int, shown: set[int]) -> Node:
    """A node of the tree and what is shown below it, likelier ones first, and the bonus behind the path."""
    tokens, parents, scores, path, bonus = guesses
    children = [child for child in shown - {0} if parents[child] == node]
    children.sort(key=lambda child: (-scores[child], child))
    below = [_node(guesses, child, shown) for child in children]
    if node == path[-1] and bonus is not None:
        below.append(Node("bonus", _show_blanks(bonus)))
    if node == 0:
        return Node("root", _show_blanks(tokens[0]), "", below)
    chance = 100 * math.exp(scores[node])
    words = f"{chance:.0f}" if chance >= 10 else f"{chance:.2g}"
    return Node("accepted" if node in path else "refused", _show_blanks(tokens[node]), words, below)


def _mark_line_ends(pieces: list[str]) -> str:
    """Join pieces, and mark line ends: in a coloured run of blanks they would not be visible."""
    return "".join(pieces).replace("\n", "↵\n")


def _show_blanks(token: str) -> str:
    """A token on one line, with marks for line ends and tabs."""
    return token.replace("\n", "↵").replace("\t", "⇥")
