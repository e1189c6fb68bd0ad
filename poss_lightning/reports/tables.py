"""Tables of what was found, for terminal, page and notebooks: pandas frames of texts, values with their intervals."""

from collections.abc import Iterable

import pandas as pd

from poss_lightning.reports.findings import Findings
from poss_lightning.reports.lengths import length_tables
from poss_lightning.reports.statistics import Comparison
from poss_lightning.reports.summary import ALL, LOGS, MethodSummary

TREES = ((2, 8), (4, 16), (6, 60))  # draft steps and nodes of the rounds whose cost is shown
WORDS = {"tau_macro": "τ macro", "tau_micro": "τ micro", "speed_up": "speed-up", "tokens_per_second": "tokens/s"}
SAME = "no difference shown"
VERDICTS = ("larger", "smaller", "identical", SAME)
LEGEND = (
    "τ macro is the mean over prompts, τ micro over rounds. * is p < 0.05. A comparison is followed by its p and, as "
    "±, its minimum detectable effect: the smallest true effect that it would find with 80 % power. Both are corrected "
    "(Holm) for all methods that are compared with the same one."
)


def overview(found: Findings) -> pd.DataFrame:
    """Speed, speed-up and τ of every method, as wide as a terminal; without speed-ups also τ minus the reference's."""
    rows = found.overall
    columns = {
        "method": [row.method for row in rows],
        "tokens/s": [text.partition(" ")[0] for text in _texts(rows, "tokens_per_second", ".1f")],
        "speed-up": _texts(rows, "speed_up"),
        "τ": _texts(rows, "tau_macro"),
    }
    if found.reference and not any(columns["speed-up"]):
        columns["τ − reference"] = [gain_text(row.gains.get("tau_macro"), brief=True) for row in rows]
    return _table(columns)


def all_tables(found: Findings) -> dict[str, pd.DataFrame]:
    """By title: methods, against the reference, by position, suite, length and category; what drafting costs."""
    rows, reference = found.overall, found.reference
    drafted = [row for row in rows if row.rounds]
    tables = {"Methods": _methods(rows, found.baseline)}
    if reference:
        tables[f"Against {reference}"] = _gains(rows, ("tau_macro", "tau_micro", found.speed))
    shown = (row for row in found.rows if row.suite != ALL and (row.rounds or "speed_up" in row.values))
    tables["By suite"] = _by_suite([*shown], found)
    tables["pos-acc by position, %"] = _positions(drafted)
    if reference:
        tables[f"pos-acc by position, % − {reference}"] = _positions([row for row in drafted if row.gains], gains=True)
    one = " (one training)" if any(len(row.seeds) > 1 for row in drafted) else ""
    lengths = length_tables({row.method: found.answers[row.method] for row in drafted if row.method in found.answers})
    tables |= {title + one: table for title, table in lengths.items()}
    tables["What drafting costs on this machine"] = _costs(found)
    return {title: table for title, table in tables.items() if len(table) and len(table.columns) > 1}


def verdict(found: Findings) -> str:
    """One line: whether drafting is faster than the baseline, and which methods differ from the reference."""
    said = [_speed_verdict(found)] if found.baseline else []
    known = {row.method: row.values["tau_macro"] for row in found.overall if "tau_macro" in row.values}
    if found.reference:
        said.append(_reference_verdict(found))
    elif known:
        first = max(known, key=lambda name: known[name].value)
        said.append(f"Largest τ: {first}, {known[first].with_interval()}.")
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


def _named(names: list[str], most: int = 4) -> str:
    return ", ".join(names) if len(names) <= most else f"{len(names)} methods"


def gain_text(gain: Comparison | None, form: str = "+z.3f", brief: bool = False) -> str:
    """A comparison with its interval, and p and minimum detectable effect, or where `brief` a mark if it is shown."""
    if gain is None or gain.identical:
        return "identical" if gain else ""
    if brief:
        return gain.with_interval(form) + ("*" if gain.direction else "")
    least = "" if gain.detectable != gain.detectable else f"±{gain.detectable:{form.replace('+', '')}}"
    return " ".join(filter(None, [gain.with_interval(form), gain.significance(), least]))


def _methods(rows: list[MethodSummary], baseline: str | None) -> pd.DataFrame:
    trainings = [pd.Series([*row.trainings.get("tau_macro", {}).values()], dtype=float) for row in rows]
    same = [row.values.get("identical") for row in rows]
    return _table(
        {
            "method": [row.method for row in rows],
            "trainings": [str(len(row.seeds)) for row in rows],
            f"speed-up over {baseline}": _texts(rows, "speed_up"),
            "tokens/s": _texts(rows, "tokens_per_second", ".1f"),
            "τ macro": _texts(rows, "tau_macro"),
            "τ micro": _texts(rows, "tau_micro"),
            "sd of a training, τ macro": [f"{taus.std():.3f}" if len(taus) > 1 else "" for taus in trainings],
            f"same tokens as {baseline}, %": [share.percent().with_interval(".0f") if share else "" for share in same],
            "rounds": [str(row.rounds or "") for row in rows],
        }
    )


def _gains(rows: list[MethodSummary], measures: Iterable[str]) -> pd.DataFrame:
    others = [row for row in rows if row.gains]
    table = {"method": [row.method for row in others]}
    for measure in measures:
        form, sign = (".3f", "×") if measure in LOGS else ("+z.3f", "−")
        table[f"{WORDS[measure]} {sign}"] = [gain_text(row.gains.get(measure), form) for row in others]
    return _table(table)


def _by_suite(rows: list[MethodSummary], found: Findings) -> pd.DataFrame:
    return _table(
        {
            "method": [row.method for row in rows],
            "suite": [row.suite for row in rows],
            "prompts": [str(row.prompts) for row in rows],
            "τ macro": _texts(rows, "tau_macro"),
            "τ micro": _texts(rows, "tau_micro"),
            f"τ macro − {found.reference}": [gain_text(row.gains.get("tau_macro")) for row in rows],
            f"× {found.baseline}": _texts(rows, "speed_up"),
        }
    )


def _positions(rows: list[MethodSummary], gains: bool = False) -> pd.DataFrame:
    """pos-acc in per cent, or its difference from the reference's in percentage points."""
    table = {"method": [row.method for row in rows]}
    for k in range(1, max((len(row.pos_acc) for row in rows), default=0) + 1):
        name = f"pos_acc_{k}"
        if gains:
            differences = [row.gains.get(name) for row in rows]
            table[str(k)] = [gain_text(one and one.percent(), "+z.1f") for one in differences]
        else:
            shares = [row.values.get(name) for row in rows]
            table[str(k)] = [share.percent().with_interval(".1f") if share else "" for share in shares]
    return _table(table)


def _costs(found: Findings) -> pd.DataFrame:
    """Milliseconds of a plain step, a draft step and of verifying; and the τ from which rounds of some sizes pay."""
    costs = found.costs.values()
    table = {
        "method": [*found.costs],
        "plain step, ms": [f"{1000 * cost.verify[1]:.1f}" for cost in costs],
        "draft step, ms": [f"{1000 * cost.draft_step:.1f}" for cost in costs],
    }
    for steps, nodes in TREES:
        known = [cost if nodes <= max(cost.verify) else None for cost in costs]  # no larger tree was measured
        table[f"{nodes} nodes, ms"] = [f"{1000 * cost.verify_seconds(nodes):.1f}" if cost else "" for cost in known]
        table[f"{steps} steps pay from τ"] = [f"{cost.break_even(steps, nodes):.2f}" if cost else "" for cost in known]
    return _table(table)


def _table(columns: dict[str, list[str]]) -> pd.DataFrame:
    """The columns that have any text."""
    return pd.DataFrame({name: texts for name, texts in columns.items() if any(texts)})


def _texts(rows: list[MethodSummary], measure: str, form: str = ".2f") -> list[str]:
    values = [row.values.get(measure) for row in rows]
    return [value.with_interval(form) if value else "" for value in values]
