"""Where drafts accept: by how far the answer had come, by how long the input was, and by the question's category.

Published drafts fade in long texts (Test-Time Speculation, arXiv 2605.09329), which one mean hides.
"""

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import numpy as np

from poss_lightning.evaluation.records import Record
from poss_lightning.reports import statistics
from poss_lightning.reports.statistics import Floats, Sums, draw_counts, estimate
from poss_lightning.reports.summary import Answers
from poss_lightning.reports.tables import Cell, Table, make_cell

Rounds = Iterator[tuple[Any, int]]  # the column, and accepted tokens, of each round
SHORTEST = {"position": 32, "input": 128}  # where the second column begins; each reaches twice as far as the one before


def length_tables(methods: dict[str, Answers], resamples: int = 2000, seed: int = 0) -> list[Table]:
    """τ (micro) by output position and by input length, in tokens, and by category; none of a single column.

    Args:
        methods: the answers of each method that drafts, all to the same prompts.
        resamples: draws of the bootstrap over prompts.
        seed: of the bootstrap.
    """
    cuts = [
        ("τ micro by output position (tokens before the round)", by_position),
        ("τ micro by input length (tokens)", by_input),
        ("τ micro by category", by_category),
    ]
    found = [_table(title, methods, cut, resamples, seed) for title, cut in cuts]
    return [table for table in found if len(table.columns) > 1]


def by_position(record: Record) -> Rounds:
    """Rounds by the tokens that the answer had when they began; the first is the prefill's."""
    written = 1
    for accepted in record.accepted:
        yield _doubling(written, SHORTEST["position"]), accepted
        written += accepted + 1


def by_input(record: Record) -> Rounds:
    """Rounds by the tokens of the prompt, earlier turns included."""
    column = _doubling(record.prompt_tokens, SHORTEST["input"])
    return ((column, accepted) for accepted in record.accepted)


def by_category(record: Record) -> Rounds:
    """Rounds by the question's category; none where it has none."""
    return ((record.category, accepted) for accepted in record.accepted if record.category)


def _doubling(number: int, shortest: int) -> int:
    """The column of a number: 0 below `shortest`, then its largest part shortest · 2^n."""
    return 0 if number < shortest else shortest * 2 ** ((number // shortest).bit_length() - 1)


def _table(
    title: str, methods: dict[str, Answers], cut: Callable[[Record], Rounds], resamples: int, seed: int
) -> Table:
    prompts = {key[:2]: None for answers in methods.values() for key in answers}
    rows = {prompt: row for row, prompt in enumerate(prompts)}
    counts = draw_counts(len(rows), resamples, seed)
    by_method: dict[str, dict[Any, Floats]] = {}  # column -> (Q, 2): rounds of each prompt, and all they accepted
    for name, answers in methods.items():
        sums = by_method[name] = {}
        for key, record in answers.items():
            for column, accepted in cut(record):
                sums.setdefault(column, np.zeros((len(rows), 2)))[rows[key[:2]]] += (1, accepted)
    columns = sorted({column for sums in by_method.values() for column in sums})
    found = [([name], [_tau(counts, sums.get(column)) for column in columns]) for name, sums in by_method.items()]
    return Table(title, ["method"], [[each] for each in _names(columns)], found, folded=True)


def _tau(counts: Floats, sums: Floats | None) -> Cell:
    """τ (micro), to which a round counts 1 and what it accepted; empty where no prompt has a round."""
    if sums is None:
        return Cell("")
    none = np.zeros(len(sums))
    taus = statistics.tau_micro(counts, Sums(sums, none, none))
    return make_cell(estimate(taus, int((sums[:, 0] > 0).sum())))


def _names(columns: list) -> list[str]:
    """`0–31`, `32–63`, …, `512–`; categories as they are."""
    if not all(isinstance(column, int) for column in columns):
        return [str(column) for column in columns]
    return [*(f"{first}–{after - 1}" for first, after in pairwise(columns)), *(f"{last}–" for last in columns[-1:])]
