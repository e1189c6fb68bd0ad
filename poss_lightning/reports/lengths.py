"""Where drafts accept: by output position, by input length, and by the question's category.

Published drafts fade in long texts (Test-Time Speculation, arXiv 2605.09329), which one mean hides.
"""

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import numpy as np
import pandas as pd

from poss_lightning.evaluation.records import Record
from poss_lightning.reports.statistics import Jackknife, interval, leave_one_out, mean_over, ratio
from poss_lightning.reports.summary import Answers

POSITION, INPUT = 32, 128  # where the second column begins, in tokens; each reaches twice as far as the one before
TITLES = {
    "position": "τ micro by output position (tokens before the round)",
    "input": "τ micro by input length (tokens)",
    "category": "τ micro by category",
}


def length_tables(methods: Mapping[str, Answers]) -> dict[str, pd.DataFrame]:
    """τ (micro) of each method that drafts, a table for each of `TITLES`; those with a single column are left out."""
    rounds = pd.DataFrame(
        [
            {"method": name, "prompt": key[:2], **each}
            for name, answers in methods.items()
            for key, record in answers.items()
            for each in list_rounds(record)
        ]
    )
    tables = {title: _table(rounds, by) for by, title in TITLES.items()} if len(rounds) else {}
    return {title: table for title, table in tables.items() if len(table.columns) > 2}


def list_rounds(record: Record) -> list[dict]:
    """What each round accepted, and its columns: of its position the tokens before it (1 is the prefill's)."""
    before = 1 + np.cumsum([0, *(count + 1 for count in record.accepted)])
    given = {"input": _doubling(record.prompt_tokens, INPUT), "category": record.category or None}
    return [
        {"accepted": accepted, "position": _doubling(int(at), POSITION), **given}
        for at, accepted in zip(before, record.accepted, strict=False)
    ]


def _doubling(number: int, shortest: int) -> int:
    """The column of a number, by where it begins: 0, then `shortest` times 1, 2, 4, …"""
    return 0 if number < shortest else shortest * 2 ** ((number // shortest).bit_length() - 1)


def _table(rounds: pd.DataFrame, by: str) -> pd.DataFrame:
    texts = {
        column: {method: _tau(own) for method, own in in_column.groupby("method")}
        for column, in_column in rounds.groupby(by)
    }
    methods, columns = list(rounds["method"].unique()), list(texts)
    names = columns if by == "category" else _name_ranges(columns)
    cells = ([own.get(method, "") for method in methods] for own in texts.values())
    return pd.DataFrame({"method": methods, **dict(zip(names, cells, strict=True))})


def _name_ranges(starts: list[Any]) -> list[str]:
    """`0–31`, `32–63`, …, `512–`."""
    return [*(f"{start}–{after - 1}" for start, after in pairwise(starts)), f"{starts[-1]}–"]


def _tau(rounds: pd.DataFrame) -> str:
    """τ (micro) with its interval over the prompts that have such rounds."""
    count, accepted = rounds.groupby("prompt", sort=False)["accepted"].agg(["size", "sum"]).to_numpy(float).T  # (Q,)
    counts = leave_one_out(len(count))
    taus = ratio(counts @ (count + accepted), counts @ count)
    return interval(mean_over([Jackknife(taus, count > 0)])).with_interval()
