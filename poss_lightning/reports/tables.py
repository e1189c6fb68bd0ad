"""Tables of what was found, for terminal, page and notebooks: pandas frames of texts, values with their intervals."""

from collections.abc import Iterable
from typing import Any

import pandas as pd

from poss_lightning.evaluation.records import PLAIN, as_object
from poss_lightning.reports.findings import Findings
from poss_lightning.reports.lengths import length_tables
from poss_lightning.reports.statistics import Comparison
from poss_lightning.reports.summary import ALL, LOGS, MethodSummary

GAIN, RATIO, PERCENT = "+z.3f", ".3f", "+z.1f"  # how comparisons are written; z: no sign before a zero but +
TREES = ((2, 8), (4, 16), (6, 60))  # draft steps and nodes of the rounds whose cost is shown
WORDS = {"tau_macro": "τ macro", "tau_micro": "τ micro", "speed_up": "speed-up", "tokens_per_second": "tokens/s"}
SAME = "no difference shown"
VERDICTS = ("larger", "smaller", "identical", SAME)
METHODS = {  # what needs no run.json to be told
    PLAIN: "the target alone, one token a step",
    "generate": "the target alone, by transformers' generate",
    "lookup": "transformers' prompt lookup, no training",
    "vllm": "the target alone, in vLLM",
}
Tables = dict[str, pd.DataFrame]  # by title
LEGEND = (
    "τ macro is the mean over prompts, τ micro over rounds. * is p < 0.05. Beside a comparison stand its p and, as ±, "
    "its minimum detectable effect: the smallest true effect that it would find with 80 % power. Both are corrected "
    "(Holm) for all methods that are compared with the same one."
)


def overview(found: Findings) -> pd.DataFrame:
    """Speed, speed-up and τ of every method, as wide as a terminal; without seconds τ less the reference's."""
    rows = found.overall
    columns = {"method": [row.method for row in rows]}
    columns["tokens/s"] = [_text(row, "tokens_per_second", ".1f", brief=True) for row in rows]
    columns["speed-up"] = [_text(row, "speed_up") for row in rows]
    columns["τ"] = [_text(row, "tau_macro") for row in rows]
    if found.reference and not any(columns["speed-up"]):
        columns["τ − reference"] = [gain_text(row.gains.get("tau_macro"), GAIN, brief=True) for row in rows]
    return _table(columns)


def all_tables(found: Findings) -> Tables:
    """Every table: methods, against the reference, by position, suite, length and category; what drafting costs."""
    rows, reference = found.overall, found.reference
    drafted = [row for row in rows if row.rounds]
    tables = {"Methods": _methods(rows, found.baseline)}
    if reference:
        measures = ("tau_macro", "tau_micro", found.speed)
        tables[f"Against {reference}"] = _gains(rows, measures)
    tables["By suite"] = _by_suite([row for row in found.rows if row.suite != ALL], found)
    tables["pos-acc by position, %"] = _positions(drafted)
    if reference:
        tables[f"pos-acc by position, % − {reference}"] = _positions(drafted, gains=True)
    tables |= length_tables({row.method: found.answers[row.method] for row in drafted if row.method in found.answers})
    tables["What drafting costs on this machine"] = _costs(found)
    return {title: table for title, table in tables.items() if len(table) and len(table.columns) > 1}


def verdict(found: Findings) -> str:
    """In a line: whether drafting is faster than the baseline, and who differs from the reference."""
    said = [_speed_verdict(found)] if found.baseline else []
    if found.reference:
        said += [_reference_verdict(found)]
    elif known := [row for row in found.overall if "tau_macro" in row.values]:
        first = max(known, key=lambda row: row.values["tau_macro"].value)
        said += [f"Largest τ: {first.method}, {first.values['tau_macro'].with_interval()}."]
    return " ".join(filter(None, said)) or "No method here drafts."


def _speed_verdict(found: Findings) -> str:
    drafts = {row.method: row.values["speed_up"] for row in found.overall if row.rounds and "speed_up" in row.values}
    faster = [name for name, speed_up in drafts.items() if speed_up.low > 1]
    if not drafts:
        return ""
    if not faster:
        return f"No draft is shown to be faster than {found.baseline}."
    return f"Drafting is faster than {found.baseline}{'' if len(faster) == len(drafts) else f': {_named(faster)}'}."


def _reference_verdict(found: Findings) -> str:
    measure = "tau_macro" if any("tau_macro" in row.gains for row in found.overall) else found.speed
    by_verdict: dict[str, list[str]] = {}
    for row in found.overall:
        if gain := row.gains.get(measure):
            by_verdict.setdefault("identical" if gain.identical else gain.direction or SAME, []).append(row.method)
    said = "; ".join(f"{words} ({_named(by_verdict[words])})" for words in VERDICTS if words in by_verdict)
    return f"{WORDS[measure].removesuffix(' macro')} against {found.reference}: {said}." if said else ""


def define_methods(runs: Iterable[dict[str, Any]]) -> dict[str, str]:
    """What each method is, as far as run.json says: layers and positions, parameters, training."""
    defined = dict(METHODS)
    for run in runs:
        trainings = as_object(run.get("trainings"))
        for name, facts in as_object(run.get("methods")).items():
            if (allocation := as_object(facts).get("allocation")) and name not in defined:
                stacked = facts.get("block_layers", 1)
                single = "one layer" if stacked == 1 else f"{stacked} layers"
                layers = single if len(allocation) == 1 else f"{len(allocation)} specialists"
                size = f"{facts['parameters'] / 1e6:.1f} M parameters" if facts.get("parameters") else ""
                defined[name] = ", ".join(filter(None, [f"{layers} {allocation}", size, trainings.get(name)]))
    return defined


def gain_text(gain: Comparison | None, form: str = GAIN, brief: bool = False) -> str:
    """A comparison with its interval, p and minimum detectable effect; `brief`: marked where it is shown."""
    if gain is None or gain.identical:
        return "identical" if gain else ""
    if brief:
        return gain.with_interval(form) + ("*" if gain.direction else "")
    least = "" if gain.detectable != gain.detectable else f"±{gain.detectable:{form.replace('+', '')}}"
    return " ".join(filter(None, [gain.with_interval(form), gain.significance(), least]))


def _methods(rows: list[MethodSummary], baseline: str | None) -> pd.DataFrame:
    table = {"method": [row.method for row in rows], "trainings": [str(len(row.seeds)) for row in rows]}
    table[f"speed-up over {baseline}"] = [_text(row, "speed_up") for row in rows]
    table["tokens/s"] = [_text(row, "tokens_per_second", ".1f") for row in rows]
    for measure in ("tau_macro", "tau_micro"):
        table[WORDS[measure]] = [_text(row, measure) for row in rows]
    table["sd of a training, τ macro"] = [_deviation(row) for row in rows]
    same = [row.values.get("identical") for row in rows]
    table[f"same tokens as {baseline}, %"] = ["" if one is None else one.percent().with_interval(".0f") for one in same]
    table["rounds"] = [str(row.rounds or "") for row in rows]
    return _table(table)


def _gains(rows: list[MethodSummary], measures: Iterable[str]) -> pd.DataFrame:
    others = [row for row in rows if row.gains]
    table = {"method": [row.method for row in others]}
    for measure in measures:
        form, sign = (RATIO, "×") if measure in LOGS else (GAIN, "−")
        table[f"{WORDS[measure]} {sign}"] = [gain_text(row.gains.get(measure), form) for row in others]
    return _table(table)


def _by_suite(rows: list[MethodSummary], found: Findings) -> pd.DataFrame:
    rows = [row for row in rows if row.rounds]
    table = {"method": [row.method for row in rows], "suite": [row.suite for row in rows]}
    table["prompts"] = [str(row.prompts) for row in rows]
    table |= {WORDS[measure]: [_text(row, measure) for row in rows] for measure in ("tau_macro", "tau_micro")}
    table[f"τ macro − {found.reference}"] = [gain_text(row.gains.get("tau_macro")) for row in rows]
    table[f"× {found.baseline}"] = [_text(row, "speed_up") for row in rows]
    return _table(table)


def _positions(rows: list[MethodSummary], gains: bool = False) -> pd.DataFrame:
    """pos-acc in per cent, or its difference to the reference's in percentage points."""
    rows = [row for row in rows if row.gains or not gains]
    table = {"method": [row.method for row in rows]}
    for k in range(1, max((len(row.pos_acc) for row in rows), default=0) + 1):
        name = f"pos_acc_{k}"
        texts = (
            [gain_text(one and one.percent(), PERCENT) for one in (row.gains.get(name) for row in rows)]
            if gains
            else ["" if name not in row.values else row.values[name].percent().with_interval(".1f") for row in rows]
        )
        table[str(k)] = texts
    return _table(table)


def _costs(found: Findings) -> pd.DataFrame:
    """Milliseconds of a plain step, a draft step and of verifying; and the τ from which a round of some sizes pays."""
    table: dict[str, list[str]] = {"method": list(found.costs)}
    costs = found.costs.values()
    table["plain step, ms"] = [f"{1000 * cost.verify[1]:.1f}" for cost in costs]
    table["draft step, ms"] = [f"{1000 * cost.draft_step:.1f}" for cost in costs]
    for steps, nodes in TREES:  # nothing is known of trees larger than the largest that was measured
        known = [nodes <= max(cost.verify) for cost in costs]
        seconds = [cost.verify_seconds(nodes) for cost in costs]
        table[f"{nodes} nodes, ms"] = [
            f"{1000 * each:.1f}" if is_known else "" for each, is_known in zip(seconds, known, strict=True)
        ]
        least = [cost.break_even(steps, nodes) for cost in costs]
        table[f"{steps} steps pay from τ"] = [
            f"{tau:.2f}" if is_known else "" for tau, is_known in zip(least, known, strict=True)
        ]
    return _table(table)


def _table(columns: dict[str, list[str]]) -> pd.DataFrame:
    """The columns in which something stands."""
    return pd.DataFrame({name: texts for name, texts in columns.items() if any(texts)})


def _text(row: MethodSummary, measure: str, form: str = ".2f", brief: bool = False) -> str:
    value = row.values.get(measure)
    return "" if value is None else value.text(form) if brief else value.with_interval(form)


def _deviation(row: MethodSummary) -> str:
    """Standard deviation over trainings, over n - 1; nothing of one."""
    values = pd.Series([*row.trainings.get("tau_macro", {}).values()], dtype=float)
    return f"{values.std():.3f}" if len(values) > 1 else ""


def _named(names: list[str], most: int = 4) -> str:
    return ", ".join(names) if len(names) <= most else f"{len(names)} methods"
