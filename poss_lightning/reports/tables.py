"""Tables of what was found, for terminal, page and notebooks: pandas frames of texts, values with their intervals."""

import math
from collections.abc import Callable, Mapping
from functools import partial

import numpy as np
import pandas as pd

from poss_lightning.reports.findings import Findings
from poss_lightning.reports.measures import MEASURES, SPEED, SPEED_UP, TAU_MACRO, Measure, position
from poss_lightning.reports.statistics import Estimate
from poss_lightning.reports.summary import ALL, MethodSummary

PARTS = ["prefill", "draft", "verify", "commit", "round"]  # a CUDA graph is timed as one part, `round`
LEGEND = (
    "τ macro is the mean over prompts, τ micro over rounds. * is p < 0.05. A comparison is followed by its p and, as "
    "±, its minimum detectable effect: the smallest true effect that it would find with 80 % power. Both are corrected "
    "(Holm) for all methods that are compared with the same one."
)


def overview(found: Findings) -> pd.DataFrame:
    """Speed, speed-up and τ of every method, as wide as a terminal; without speed-ups also τ minus the reference's."""
    columns = {
        "tokens/s": lambda row: _text(row, SPEED).partition(" ")[0],
        "speed-up": partial(_text, measure=SPEED_UP),
        "τ": partial(_text, measure=TAU_MACRO),
    }
    if found.reference and not any(SPEED_UP.name in row.values for row in found.overall):
        columns["τ − reference"] = partial(gain_text, measure=TAU_MACRO, brief=True)
    return _table(found.overall, columns)


def all_tables(found: Findings) -> dict[str, pd.DataFrame]:
    """By title: methods, against the reference, by position and suite; milliseconds per token."""
    rows, reference = found.overall, found.reference
    drafted = [row for row in rows if row.rounds]
    compared = [row for row in rows if row.gains]
    depth = max((len(row.pos_acc) for row in drafted), default=0)
    positions = {each.title: each for each in map(position, range(1, depth + 1))}
    tables = {"Methods": _methods(rows, found.baseline)}
    if reference:
        gains = {each.compared_title: partial(gain_text, measure=each) for each in found.compared}
        tables[f"Against {reference}"] = _table(compared, gains)
    shown = [row for row in found.rows if row.suite != ALL and (row.rounds or SPEED_UP.name in row.values)]
    tables["By suite"] = _by_suite(shown, found)
    by_position = {title: partial(_text, measure=each) for title, each in positions.items()}
    tables["pos-acc by position, %"] = _table(drafted, by_position)
    if reference:
        gains = {title: partial(gain_text, measure=each) for title, each in positions.items()}
        tables[f"pos-acc by position, % − {reference}"] = _table([row for row in compared if row.rounds], gains)
    if found.speed is SPEED:  # a sweep's choices were timed apart
        tables["Milliseconds per new token"] = _parts(found.answers)
    return {title: table for title, table in tables.items() if len(table) and len(table.columns) > 1}


def verdict(found: Findings) -> str:
    """Say which drafts are faster than the baseline, and which methods differ from the reference."""
    said, drafted = [], [row for row in found.overall if row.rounds]
    speed_ups = {row.method: row.values[SPEED_UP.name] for row in drafted if SPEED_UP.name in row.values}
    if faster := [name for name, speed_up in speed_ups.items() if speed_up.low > 1]:
        which = f": {_named(faster)}" if len(faster) < len(speed_ups) else ""
        said.append(f"Drafting is faster than {found.baseline}{which}.")
    elif speed_ups:
        said.append(f"No draft is shown to be faster than {found.baseline}.")
    effects: dict[str, list[str]] = {"larger": [], "smaller": [], "identical": [], "no difference shown": []}
    for row in found.overall:
        if gain := row.gains.get(TAU_MACRO.name):
            effects["identical" if gain.identical else gain.direction or "no difference shown"].append(row.method)
    if shown := "; ".join(f"{effect} ({_named(names)})" for effect, names in effects.items() if names):
        said.append(f"τ against {found.reference}: {shown}.")
    return " ".join(said)


def _named(names: list[str], most: int = 4) -> str:
    return ", ".join(names) if len(names) <= most else f"{len(names)} methods"


def gain_text(row: MethodSummary, measure: Measure, brief: bool = False) -> str:
    """A comparison with its interval, and p and minimum detectable effect, or where `brief` a mark if it is shown."""
    gain, form = row.gains.get(measure.name), measure.gain_form
    if gain is None or gain.identical:
        return "identical" if gain else ""
    if brief:
        return gain.with_interval(form) + ("*" if gain.direction else "")
    p = "" if math.isnan(gain.p) else "p < 0.001" if gain.p < 0.001 else f"p {gain.p:.3f}"
    least = "" if math.isnan(gain.detectable) else "±" + Estimate(gain.detectable).text(form.replace("+", ""))
    return " ".join(filter(None, [gain.with_interval(form), p, least]))


def _text(row: MethodSummary, measure: Measure) -> str:
    """Return a measure with its interval; nothing where it is not defined."""
    value = row.values.get(measure.name)
    return value.with_interval(measure.form) if value else ""


def _table(rows: list[MethodSummary], columns: Mapping[str, Callable[[MethodSummary], str]]) -> pd.DataFrame:
    """Return a row for each method; the columns that have any text."""
    texts = {name: [text(row) for row in rows] for name, text in columns.items()}
    return pd.DataFrame(
        {"method": [row.method for row in rows]} | {name: own for name, own in texts.items() if any(own)}
    )


def _methods(rows: list[MethodSummary], baseline: str | None) -> pd.DataFrame:
    def deviation(row: MethodSummary) -> str:
        taus = [*row.trainings.get(TAU_MACRO.name, {}).values()]
        return f"{np.std(taus, ddof=1):.3f}" if len(taus) > 1 else ""

    texts = {each.title.format(baseline=baseline): partial(_text, measure=each) for each in MEASURES}
    shares = {each.title.format(baseline=baseline) for each in MEASURES if each.scale == "share"}
    return _table(
        rows,
        {
            "trainings": lambda row: str(len(row.seeds)),
            **{title: text for title, text in texts.items() if title not in shares},
            "sd of a training, τ macro": deviation,
            **{title: text for title, text in texts.items() if title in shares},
            "rounds": lambda row: str(row.rounds or ""),
        },
    )


def _by_suite(rows: list[MethodSummary], found: Findings) -> pd.DataFrame:
    lengths = [each for each in MEASURES if each.scale == "tokens"]
    return _table(
        rows,
        {
            "suite": lambda row: row.suite,
            "prompts": lambda row: str(row.prompts),
            **{each.title: partial(_text, measure=each) for each in lengths},
            f"{TAU_MACRO.compared_title} {found.reference}": partial(gain_text, measure=TAU_MACRO),
            f"× {found.baseline}": partial(_text, measure=SPEED_UP),
        },
    )


def _parts(methods: Mapping[str, pd.DataFrame]) -> pd.DataFrame:
    """Return milliseconds per new token by method and part; `rest` is the time outside the named parts."""
    timed = pd.concat([own[own["seconds"].notna()].assign(method=name) for name, own in methods.items()])
    sums = timed.groupby("method", sort=False)[[*PARTS, "seconds", "new_tokens"]].sum()
    if not sums[PARTS].to_numpy().any():  # of a replay, none is timed
        return pd.DataFrame()
    sums["rest"] = (sums["seconds"] - sums[PARTS].sum(axis=1)).clip(lower=0)
    texts = (1000 * sums[[*PARTS, "rest"]].div(sums["new_tokens"], axis=0)).map(
        lambda each: f"{each:.1f}" if each else ""
    )
    return texts.loc[:, texts.any()].reset_index()
