"""Tables of results, for terminal, page and notebooks: pandas frames of texts, values with their intervals."""

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import pandas as pd

from poss_lightning.reports.measures import MEASURES, SPEED, SPEED_UP, TAU_MACRO, Measure, pos_acc
from poss_lightning.reports.results import ALL, Findings
from poss_lightning.reports.statistics import Estimate

PARTS = ["prefill", "draft", "verify", "commit", "round"]  # a CUDA graph is timed as one part, `round`
LEGEND = (
    "τ macro is the mean over prompts, τ micro over rounds. * is p < 0.05. A comparison is followed by its p and, as "
    "±, its minimum detectable effect: the smallest true effect that it would find with 80 % power. Both are corrected "
    "(Holm) for all methods that are compared with the same one."
)


class Column(NamedTuple):
    """A column of a table."""

    title: str
    measure: str
    form: str = ".0f"
    position: int = 0
    against: str = ""
    brief: bool = False  # without interval; a comparison with it, and a mark where it is shown


def overview(found: Findings) -> pd.DataFrame:
    """Speed, speed-up and τ of every method, as wide as a terminal; without speed-ups also τ minus the reference's."""
    columns = [_value(SPEED, "tokens/s", brief=True), _value(SPEED_UP, "speed-up"), _value(TAU_MACRO, "τ")]
    if found.reference and SPEED_UP.name not in {*found.overall["measure"]}:
        columns.append(_gain(TAU_MACRO, found.reference, "τ − reference", brief=True))
    return _table(found.overall, columns)


def all_tables(found: Findings) -> dict[str, pd.DataFrame]:
    """By title: methods, against the reference, by position and suite; milliseconds per token."""
    overall, reference = found.overall, found.reference or ""
    drafted = _drafted(overall)
    positions = [pos_acc(k) for k in range(1, int(drafted["position"].max()) + 1)] if len(drafted) else []
    compared = overall[overall["against"] != ""]
    tables = {
        "Methods": _table(overall, _methods(found.baseline)),
        f"Against {reference}": _table(
            compared, [_gain(each, reference, each.compared_title) for each in found.compared]
        ),
        "By suite": _by_suite(found),
        "pos-acc by position, %": _table(drafted, [_value(each) for each in positions]),
        f"pos-acc by position, % − {reference}": _table(
            compared[compared["method"].isin(drafted["method"])],
            [_gain(each, reference, each.title) for each in positions],
        ),
    }
    if not found.is_sweep:  # a sweep's choices were timed apart
        tables["Milliseconds per new token"] = _parts(found.answers)
    return {title: table for title, table in tables.items() if len(table) and len(table.columns) > 1}


def verdict(found: Findings) -> str:
    """Say which drafts are faster than the baseline, and which methods differ from the reference."""
    overall, sentences = found.overall, []
    drafted = _drafted(overall)
    speed_ups = drafted[(drafted["measure"] == SPEED_UP.name) & (drafted["against"] == "")]
    faster = speed_ups[speed_ups["low"] > 1]["method"]
    if len(faster):
        which = f": {', '.join(faster)}" if len(faster) < len(speed_ups) else ""
        sentences.append(f"Drafting is faster than {found.baseline}{which}.")
    elif len(speed_ups):
        sentences.append(f"No draft is shown to be faster than {found.baseline}.")
    gains = overall[(overall["measure"] == TAU_MACRO.name) & (overall["against"] != "")]
    effects = {each: gains.loc[gains["direction"] == each, "method"] for each in ("larger", "smaller", "identical", "")}
    shown = [f"{effect or 'no difference shown'} ({', '.join(own)})" for effect, own in effects.items() if len(own)]
    if shown:
        sentences.append(f"τ against {found.reference}: {'; '.join(shown)}.")
    return " ".join(sentences)


def _drafted(results: pd.DataFrame) -> pd.DataFrame:
    """Return the results of the methods with rounds."""
    return results[results["method"].isin(results.loc[results["measure"] == "rounds", "method"])]


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


def _value(measure: Measure, title: str = "", brief: bool = False) -> Column:
    return Column(title or measure.title, measure.name, measure.form, measure.position, "", brief)


def _gain(measure: Measure, reference: str, title: str, brief: bool = False) -> Column:
    return Column(title, measure.name, measure.gain_form, measure.position, reference, brief)


def _table(results: pd.DataFrame, columns: Iterable[Column], by: tuple[str, ...] = ("method",)) -> pd.DataFrame:
    """Return a row for each method, or for what `by` names, in the order of the results; the columns with any text."""
    table = results[[*by]].drop_duplicates(ignore_index=True)
    keys = [*table.itertuples(index=False, name=None)]
    for title, measure, form, position, against, brief in columns:
        rows = results[(results["measure"] == measure) & (results["position"] == position)]
        rows = rows[rows["against"] == against]
        texts = {tuple(getattr(row, name) for name in by): text_of(row, form, brief) for row in rows.itertuples()}
        if any(texts.values()):
            table[title] = [texts.get(key, "") for key in keys]
    return table


def _methods(baseline: str | None) -> list[Column]:
    values = [_value(each, each.title.format(baseline=baseline)) for each in MEASURES]
    shares = [column for column, each in zip(values, MEASURES, strict=True) if each.scale == "share"]
    others = [column for column in values if column not in shares]
    spread = Column("sd of a training, τ macro", "sd", ".3f")
    return [Column("trainings", "trainings"), *others, spread, *shares, Column("rounds", "rounds")]


def _by_suite(found: Findings) -> pd.DataFrame:
    rows = found.results[found.results["suite"] != ALL]
    shown = rows[rows["measure"].isin([SPEED_UP.name, "rounds"])]
    rows = rows.merge(shown[["suite", "method"]].drop_duplicates())
    lengths = [_value(each) for each in MEASURES if each.scale == "tokens"]
    columns = [Column("prompts", "prompts"), *lengths, _value(SPEED_UP, f"× {found.baseline}")]
    if found.reference:
        columns.insert(-1, _gain(TAU_MACRO, found.reference, f"{TAU_MACRO.compared_title} {found.reference}"))
    return _table(rows, columns, by=("method", "suite"))


def _parts(answers: pd.DataFrame) -> pd.DataFrame:
    """Return milliseconds per new token by method and part; `rest` is the time outside the named parts."""
    timed = answers[answers["seconds"].notna()]
    sums = timed.groupby("method", sort=False)[[*PARTS, "seconds", "new_tokens"]].sum()
    if not sums[PARTS].to_numpy().any():  # of a replay, none is timed
        return pd.DataFrame()
    sums["rest"] = (sums["seconds"] - sums[PARTS].sum(axis=1)).clip(lower=0)
    texts = (1000 * sums[[*PARTS, "rest"]].div(sums["new_tokens"], axis=0)).map(
        lambda each: f"{each:.1f}" if each else ""
    )
    return texts.loc[:, texts.any()].reset_index()
