"""Where drafts accept: by how far the answer had come, by how long the input was, and by the question's category.

Published drafts fade in long texts (Test-Time Speculation, arXiv 2605.09329), which one mean hides.
"""

from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from typing import Any

import numpy as np
import pandas as pd

from poss_lightning.evaluation.records import Record
from poss_lightning.reports.statistics import Floats, Jackknife, Sums, interval, leave_one_out, mean_over, tau_micro
from poss_lightning.reports.summary import Answers

Rounds = Iterator[tuple[Any, int]]  # the column, and accepted tokens, of each round
SHORTEST = {"position": 32, "input": 128}  # where the second column begins; each reaches twice as far as the one before


def length_tables(methods: Mapping[str, Answers]) -> dict[str, pd.DataFrame]:
    """τ (micro) by output position and by input length, in tokens, and by category, by title; none of a single column.

    Args:
        methods: the answers of each method that drafts, all to the same prompts.
    """
    cuts = {
        "τ micro by output position (tokens before the round)": by_position,
        "τ micro by input length (tokens)": by_input,
        "τ micro by category": by_category,
    }
    found = {title: _table(methods, cut) for title, cut in cuts.items()}
    return {title: table for title, table in found.items() if len(table.columns) > 2}


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


def _table(methods: Mapping[str, Answers], cut: Callable[[Record], Rounds]) -> pd.DataFrame:
    prompts = dict.fromkeys(key[:2] for answers in methods.values() for key in answers)
    rows = {prompt: row for row, prompt in enumerate(prompts)}
    by_method: dict[str, dict[Any, Floats]] = {}  # column -> (Q, 2): rounds of each prompt, and all they accepted
    for name, answers in methods.items():
        sums = by_method[name] = {}
        for key, record in answers.items():
            for column, accepted in cut(record):
                sums.setdefault(column, np.zeros((len(rows), 2)))[rows[key[:2]]] += (1, accepted)
    columns = sorted({column for sums in by_method.values() for column in sums})
    texts = {name: [_tau(sums.get(column)) for sums in by_method.values()] for name, column in _named(columns)}
    return pd.DataFrame({"method": [*by_method], **texts})


def _tau(sums: Floats | None) -> str:
    """τ (micro), to which a round counts 1 and what it accepted; nothing where no prompt has a round."""
    if sums is None:
        return ""
    none = np.zeros(len(sums))
    taus = tau_micro(leave_one_out(len(sums)), Sums(sums, none, none))
    return interval(mean_over([Jackknife(taus, sums[:, 0] > 0)])).with_interval()


def _named(columns: list) -> list[tuple[str, Any]]:
    """`0–31`, `32–63`, …, `512–`; categories as they are."""
    if not all(isinstance(column, int) for column in columns):
        return [(str(column), column) for column in columns]
    ends = [*(f"{first}–{after - 1}" for first, after in pairwise(columns)), *(f"{last}–" for last in columns[-1:])]
    return list(zip(ends, columns, strict=True))
