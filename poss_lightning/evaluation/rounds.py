"""Rounds of a few answers, as `poss benchmark` records them: the drafted tree, the accepted path and the bonus token.

They lie in `rounds.jsonl` beside `records.jsonl`, a line a round, and belong to the first repeat of their answer.
"""

import json
import math
import reprlib
from collections.abc import Callable, Iterable
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

from pydantic import SkipValidation, ValidationError
from pydantic.dataclasses import dataclass

from poss_lightning.decoding.decoder import Progress
from poss_lightning.evaluation.drawing import Guesses
from poss_lightning.evaluation.generate import guesses_of
from poss_lightning.evaluation.records import Name, Natural, Prompt, explain, read_lines
from poss_lightning.target.model import Target

NAME = "rounds.jsonl"
PLACES = 4  # decimals of a log-probability
KEYS = ("suite", "id", "turn", "method", "number")  # fields of a round that say which it is
AnswerKey = tuple[str, int | str, int, str]  # suite, id, turn and method


@dataclass(frozen=True)
class Round:
    """One round of one answer; its fields are checked when it is made.

    Attributes:
        suite: of the answer's question, as in its record; `id`, `turn` and `method` likewise.
        number: which round of the answer, from 0.
        guesses: the tree and what the target accepted of it; tokens are texts.

    Raises:
        ValueError: a field has a wrong type or range, the guesses are no tree, or the path is not in the tree.
    """

    suite: Name
    id: Prompt
    turn: Natural
    method: Name
    number: Natural
    guesses: SkipValidation[Guesses[str]]

    def __post_init__(self) -> None:
        tokens, parents, scores, path, bonus = self.guesses
        _expect(_all(str, tokens) and tokens, "tokens", tokens, "a list of texts, the root's first")
        rising = _all(int, parents) and all(0 <= parent < max(node, 1) for node, parent in enumerate(parents))
        _expect(rising and len(parents) == len(tokens), "parents", parents, "an earlier node for every token")
        numbers = _all((int, float), scores) and all(-math.inf < score <= 0 for score in scores)
        _expect(numbers and len(scores) == len(tokens), "scores", scores, "a log-probability for every token")
        inside = _all(int, path) and path[:1] == [0] and all(0 <= node < len(parents) for node in path)
        linked = inside and all(parents[node] == above for above, node in pairwise(path))
        _expect(linked and len(set(path)) == len(path), "path", path, "nodes from the root 0 on, each below the last")
        _expect(bonus is None or isinstance(bonus, str), "bonus", bonus, "a text, or null")

    @property
    def answer(self) -> AnswerKey:
        """Suite, id, turn and method: what all rounds of an answer share."""
        return self.suite, self.id, self.turn, self.method


def as_text(guesses: Guesses[int], text: Callable[[int], str]) -> Guesses[str]:
    """The same guesses with the text of each token for its id, and rounded scores."""
    scores = [min(round(score, PLACES), 0.0) for score in guesses.scores]
    bonus = None if guesses.bonus is None else text(guesses.bonus)
    return Guesses([text(token) for token in guesses.tokens], guesses.parents, scores, guesses.path, bonus)


def recorder(answer: AnswerKey, target: Target, rounds: list[Round]) -> Callable[[Progress], None]:
    """For `Decoder.decode` to `watch` with: appends every round of one answer to `rounds`."""
    before = len(rounds)

    def record(step: Progress) -> None:
        if step.tree is not None:
            guesses = as_text(guesses_of(step, target.chat.stops), lambda token: str(target.tokenizer.decode([token])))
            rounds.append(Round(*answer, number=len(rounds) - before, guesses=guesses))

    return record


def to_line(one: Round) -> str:
    """The round as one line of JSON, without the line's end."""
    values = asdict(one)
    del values["guesses"]
    return json.dumps(values | one.guesses._asdict(), ensure_ascii=False, separators=(",", ":"))


def read_rounds(folders: Iterable[str | Path]) -> dict[AnswerKey, list[Round]]:
    """The rounds that lie in `folders`, by answer and in their order; a folder without any adds none.

    Raises:
        ValueError: a torn file, or a line that is no round; the message names file, line, field and value.
    """
    rounds: dict[AnswerKey, list[Round]] = {}
    for folder in map(Path, folders):
        for file in (folder / NAME, folder / f"{NAME}.gz"):
            for place, values in read_lines(file) if file.is_file() else ():
                one = _round(place, values)
                rounds.setdefault(one.answer, []).append(one)
    return {answer: sorted(unordered, key=lambda one: one.number) for answer, unordered in rounds.items()}


def _round(place: str, values: dict[str, Any]) -> Round:
    try:
        guesses = Guesses(**{name: values[name] for name in Guesses._fields})
        return Round(**{name: values[name] for name in KEYS}, guesses=guesses)
    except KeyError as error:
        raise ValueError(f"{place}: lacks {error.args[0]}") from None
    except ValidationError as error:
        raise ValueError(f"{place}: {explain(error)}") from None


def _all(kind: type | tuple[type, ...], values: Any) -> bool:
    return isinstance(values, list) and all(isinstance(value, kind) for value in values)


def _expect(right: Any, name: str, value: Any, words: str) -> None:
    if not right:
        raise ValueError(f"{name} is {reprlib.repr(value)}; it must be {words}")
