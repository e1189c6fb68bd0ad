"""Tables of results, for terminal, page and notebooks: pandas frames of texts, values with their intervals."""

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import pandas as pd

from poss_lightning.reports.measures import (
    MEASURES,
    MILLISECONDS,
    PROMPTS,
    ROUNDS,
    SPEED,
    SPEED_UP,
    SPREAD,
    TAU_MACRO,
    TRAININGS,
    Measure,
    pos_acc,
)
from poss_lightning.reports.results import ALL
from poss_lightning.reports.statistics import Estimate

LEGEND = (
    "τ macro is the mean over prompts, τ micro over rounds. * is p < 0.05. A comparison is followed by its p and, as "
    "±, its minimum detectable effect: the smallest true effect that it would find with 80 % power. Both are corrected "
    "(Holm) for all methods that are compared with the same one."
)


class Column(NamedTuple):
    """A column of a table: values of a measure, or its comparisons with the reference."""

    measure: Measure
    title: str = ""  # the measure's by default
    is_gain: bool = False
    brief: bool = False  # without interval; a comparison with it, and a mark where it is shown


def overview(results: pd.DataFrame) -> pd.DataFrame:
    """Speed, speed-up and τ of every method, as wide as a terminal; without speed-ups also τ minus the reference's."""
    columns = [Column(SPEED, brief=True), Column(SPEED_UP, "speed-up"), Column(TAU_MACRO, "τ")]
    if SPEED_UP.name not in {*results["measure"]}:
        columns.append(Column(TAU_MACRO, "τ − reference", is_gain=True, brief=True))
    return _table(results[results["suite"] == ALL], columns)


def all_tables(results: pd.DataFrame, baseline: str) -> dict[str, pd.DataFrame]:
    """By title: methods, against the reference, by position and suite; milliseconds per token."""
    overall, reference = results[results["suite"] == ALL], reference_of(results)
    by_suite = results[results["suite"] != ALL]
    shown = by_suite.loc[by_suite["measure"].isin([SPEED_UP.name, ROUNDS.name]), ["suite", "method"]]
    drafted = _drafted(overall)
    gains, gains_drafted = (rows[rows["against"] != ""] for rows in (overall, drafted))
    positions = [pos_acc(k) for k in range(1, int(drafted["position"].max()) + 1)] if len(drafted) else []
    lengths = [Column(each) for each in MEASURES if each.scale == "tokens"]
    gain = Column(TAU_MACRO, f"{TAU_MACRO.compared_title} {reference}", is_gain=True)
    values = [Column(each, each.title.format(baseline=baseline)) for each in MEASURES if each.scale != "share"]
    shares = [Column(each, each.title.format(baseline=baseline)) for each in MEASURES if each.scale == "share"]
    tables = {
        "Methods": _table(overall, [Column(TRAININGS), *values, Column(SPREAD), *shares, Column(ROUNDS)]),
        f"Against {reference}": _table(
            gains, [Column(each, each.compared_title, is_gain=True) for each in compared_measures(results)]
        ),
        "By suite": _table(
            by_suite.merge(shown.drop_duplicates()),
            [Column(PROMPTS), *lengths, gain, Column(SPEED_UP, f"× {baseline}")],
            by=["method", "suite"],
        ),
        "pos-acc by position, %": _table(drafted, map(Column, positions)),
        f"pos-acc by position, % − {reference}": _table(
            gains_drafted, [Column(each, is_gain=True) for each in positions]
        ),
        "Milliseconds per new token": _table(overall, [Column(each, brief=True) for each in MILLISECONDS]),
    }
    return {title: table for title, table in tables.items() if len(table) and len(table.columns) > 1}


def reference_of(results: pd.DataFrame) -> str:
    """Return the method that others are compared with; "" if there are no comparisons."""
    return next(filter(None, results["against"]), "")


def compared_measures(results: pd.DataFrame) -> list[Measure]:
    """Return the measures of the table against the reference: differences first, then ratios."""
    compared = {*results.loc[results["against"] != "", "measure"]}
    return sorted((m for m in MEASURES if m.scale != "share" and m.name in compared), key=lambda m: m.logs)


def verdict(results: pd.DataFrame, baseline: str) -> str:
    """Say which drafts are faster than the baseline, and which methods differ from the reference."""
    overall, sentences = results[results["suite"] == ALL], []
    drafted = _drafted(overall)
    speed_ups = drafted[(drafted["measure"] == SPEED_UP.name) & (drafted["against"] == "")]
    faster = speed_ups[speed_ups["low"] > 1]["method"]
    if len(faster):
        which = f": {', '.join(faster)}" if len(faster) < len(speed_ups) else ""
        sentences.append(f"Drafting is faster than {baseline}{which}.")
    elif len(speed_ups):
        sentences.append(f"No draft is shown to be faster than {baseline}.")
    gains = overall[(overall["measure"] == TAU_MACRO.name) & (overall["against"] != "")]
    effects = {each: gains.loc[gains["direction"] == each, "method"] for each in ("larger", "smaller", "identical", "")}
    shown = [f"{effect or 'no difference shown'} ({', '.join(own)})" for effect, own in effects.items() if len(own)]
    if shown:
        sentences.append(f"τ against {reference_of(gains)}: {'; '.join(shown)}.")
    return " ".join(sentences)


def _drafted(results: pd.DataFrame) -> pd.DataFrame:
    """Return the results of the methods with rounds."""
    return results[results["method"].isin(results.loc[results["measure"] == ROUNDS.name, "method"])]


def text_of(row: Any, form: str, brief: bool = False) -> str:
    """Write a `Result` with its interval; of a comparison also p and its detectable effect, or where `brief` a mark."""
    estimate = Estimate(row.value, row.low, row.high)
    if not row.against:
        return estimate.text(form) if brief else estimate.with_interval(form)
    if row.direction == "identical":
        return "identical"
    if brief:
        return estimate.with_interval(form) + "*" * bool(row.direction)
    p = "" if math.isnan(row.p) else "p < 0.001" if row.p < 0.001 else f"p {row.p:.3f}"
    least = "" if math.isnan(row.detectable) else "±" + Estimate(row.detectable).text(form.replace("+", ""))
    return " ".join(filter(None, [estimate.with_interval(form), p, least]))


def _table(results: pd.DataFrame, columns: Iterable[Column], by: Sequence[str] = ("method",)) -> pd.DataFrame:
    """Return a row for each method, or for what `by` names, in the order of the results; the columns with any text."""
    table = results[[*by]].drop_duplicates(ignore_index=True)
    keys = [*table.itertuples(index=False, name=None)]
    for measure, title, is_gain, brief in columns:
        rows = results[(results["measure"] == measure.name) & (results["position"] == measure.position)]
        rows = rows[(rows["against"] != "") == is_gain]
        form = measure.gain_form if is_gain else measure.form
        texts = {tuple(getattr(row, name) for name in by): text_of(row, form, brief) for row in rows.itertuples()}
        if any(texts.values()):
            table[title or measure.title] = [texts.get(key, "") for key in keys]
    return table
