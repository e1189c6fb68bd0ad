"""Tables of what was found, for terminal, page and notebooks: pandas frames of texts, values with their intervals."""

from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import Any

import numpy as np
import pandas as pd

from poss_lightning.evaluation.records import Record
from poss_lightning.reports.findings import Findings
from poss_lightning.reports.statistics import Jackknife, interval, leave_one_out, mean_over, ratio
from poss_lightning.reports.summary import ALL, LOGS, SHARES, Answers, MethodSummary

TREES = ((2, 8), (4, 16), (6, 60))  # draft steps and nodes of the rounds whose cost is shown
PARTS = ("prefill", "draft", "verify", "commit", "round")  # a CUDA graph is timed as one part, `round`
POSITION, INPUT = 32, 128  # tokens at which the second column begins; each reaches twice as far as the one before
LENGTHS = {
    "position": "τ micro by output position (tokens before the round)",
    "input": "τ micro by input length (tokens)",
    "category": "τ micro by category",
}
WORDS = {"tau_macro": "τ macro", "tau_micro": "τ micro", "speed_up": "speed-up", "tokens_per_second": "tokens/s"}
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
        "tokens/s": [_text(row, "tokens_per_second", ".1f").partition(" ")[0] for row in rows],
        "speed-up": [_text(row, "speed_up") for row in rows],
        "τ": [_text(row, "tau_macro") for row in rows],
    }
    if found.reference and not any(columns["speed-up"]):
        columns["τ − reference"] = [gain_text(row, "tau_macro", brief=True) for row in rows]
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
    lengths = _length_tables({row.method: found.answers[row.method] for row in drafted if row.method in found.answers})
    tables |= {title + one: table for title, table in lengths.items()}
    tables["What drafting costs on this machine"] = _costs(found)
    if found.speed != "speed_up":  # a sweep's choices were timed apart
        tables["Milliseconds per new token"] = _parts(found.answers)
    return {title: table for title, table in tables.items() if len(table) and len(table.columns) > 1}


def verdict(found: Findings) -> str:
    """Which drafts are faster than the baseline, and which methods differ from the reference."""
    said = []
    speed_ups = {row.method: row.values["speed_up"] for row in found.overall if row.rounds and "speed_up" in row.values}
    if faster := [name for name, speed_up in speed_ups.items() if speed_up.low > 1]:
        which = f": {_named(faster)}" if len(faster) < len(speed_ups) else ""
        said.append(f"Drafting is faster than {found.baseline}{which}.")
    elif speed_ups:
        said.append(f"No draft is shown to be faster than {found.baseline}.")
    effects: dict[str, list[str]] = {"larger": [], "smaller": [], "identical": [], "no difference shown": []}
    for row in found.overall:
        if gain := row.gains.get("tau_macro"):
            effects["identical" if gain.identical else gain.direction or "no difference shown"].append(row.method)
    if shown := "; ".join(f"{effect} ({_named(names)})" for effect, names in effects.items() if names):
        said.append(f"τ against {found.reference}: {shown}.")
    return " ".join(said)


def _named(names: list[str], most: int = 4) -> str:
    return ", ".join(names) if len(names) <= most else f"{len(names)} methods"


def gain_text(row: MethodSummary, measure: str, brief: bool = False) -> str:
    """A comparison with its interval, and p and minimum detectable effect, or where `brief` a mark if it is shown."""
    gain = row.gains.get(measure)
    if gain is None or gain.identical:
        return "identical" if gain else ""
    form = ".3f" if measure in LOGS else "+z.3f"
    if measure.startswith(SHARES):
        gain, form = gain.percent(), "+z.1f"
    if brief:
        return gain.with_interval(form) + ("*" if gain.direction else "")
    least = "" if gain.detectable != gain.detectable else f"±{gain.detectable:{form.replace('+', '')}}"
    return " ".join(filter(None, [gain.with_interval(form), gain.significance(), least]))


def _text(row: MethodSummary, measure: str, form: str = ".2f") -> str:
    """A measure with its interval, shares in per cent; nothing where it is not defined."""
    if (value := row.values.get(measure)) is None:
        return ""
    return (value.percent() if measure.startswith(SHARES) else value).with_interval(form)


def _methods(rows: list[MethodSummary], baseline: str | None) -> pd.DataFrame:
    trainings = [pd.Series([*row.trainings.get("tau_macro", {}).values()], dtype=float) for row in rows]
    return _table(
        {
            "method": [row.method for row in rows],
            "trainings": [str(len(row.seeds)) for row in rows],
            f"speed-up over {baseline}": [_text(row, "speed_up") for row in rows],
            "tokens/s": [_text(row, "tokens_per_second", ".1f") for row in rows],
            "τ macro": [_text(row, "tau_macro") for row in rows],
            "τ micro": [_text(row, "tau_micro") for row in rows],
            "sd of a training, τ macro": [f"{taus.std():.3f}" if len(taus) > 1 else "" for taus in trainings],
            f"same tokens as {baseline}, %": [_text(row, "identical", ".0f") for row in rows],
            "rounds": [str(row.rounds or "") for row in rows],
        }
    )


def _gains(rows: list[MethodSummary], measures: Iterable[str]) -> pd.DataFrame:
    others = [row for row in rows if row.gains]
    signs = {measure: "×" if measure in LOGS else "−" for measure in measures}
    texts = {f"{WORDS[name]} {sign}": [gain_text(row, name) for row in others] for name, sign in signs.items()}
    return _table({"method": [row.method for row in others], **texts})


def _by_suite(rows: list[MethodSummary], found: Findings) -> pd.DataFrame:
    return _table(
        {
            "method": [row.method for row in rows],
            "suite": [row.suite for row in rows],
            "prompts": [str(row.prompts) for row in rows],
            "τ macro": [_text(row, "tau_macro") for row in rows],
            "τ micro": [_text(row, "tau_micro") for row in rows],
            f"τ macro − {found.reference}": [gain_text(row, "tau_macro") for row in rows],
            f"× {found.baseline}": [_text(row, "speed_up") for row in rows],
        }
    )


def _positions(rows: list[MethodSummary], gains: bool = False) -> pd.DataFrame:
    """pos-acc in per cent, or its difference from the reference's in percentage points."""
    table = {"method": [row.method for row in rows]}
    for k in range(1, max((len(row.pos_acc) for row in rows), default=0) + 1):
        name = f"pos_acc_{k}"
        table[str(k)] = [gain_text(row, name) if gains else _text(row, name, ".1f") for row in rows]
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


def _parts(methods: Mapping[str, Answers]) -> pd.DataFrame:
    """Milliseconds per new token by method and part; `rest` is the time outside the named parts."""
    table: dict[str, list[str]] = {name: [] for name in ("method", *PARTS, "rest")}
    for name, answers in methods.items():
        if records := [record for record in answers.values() if record.seconds]:
            seconds = {part: sum(record.seconds.get(part, 0.0) for record in records) for part in (*PARTS, "total")}
            seconds["rest"] = max(2 * seconds["total"] - sum(seconds.values()), 0.0)
            tokens = sum(record.new_tokens for record in records)
            table["method"].append(name)
            for part in (*PARTS, "rest"):
                table[part].append(f"{1000 * seconds[part] / tokens:.1f}" if seconds[part] else "")
    return _table(table) if any(any(table[part]) for part in PARTS) else pd.DataFrame()  # of a replay, none is timed


def _table(columns: dict[str, list[str]]) -> pd.DataFrame:
    """The columns that have any text."""
    return pd.DataFrame({name: texts for name, texts in columns.items() if any(texts)})


# --- where drafts accept: published drafts fade in long texts (arXiv 2605.09329), which one mean hides ---


def _length_tables(methods: Mapping[str, Answers]) -> dict[str, pd.DataFrame]:
    """τ (micro) of each method that drafts, a table for each of `LENGTHS`; those with a single column are left out."""
    rounds = pd.DataFrame(
        [
            {"method": name, "prompt": key[:2], **each}
            for name, answers in methods.items()
            for key, record in answers.items()
            if record.prompt_tokens  # 0 where an engine said neither lengths nor the order of rounds
            for each in list_rounds(record)
        ]
    )
    tables = {}
    for by, title in LENGTHS.items() if len(rounds) else ():
        if len(rounds[by].unique()) > 1:
            sums = rounds.groupby([by, "method", "prompt"], sort=False)["accepted"].agg(["size", "sum"])
            taus = sums.groupby([by, "method"]).apply(_tau).unstack(by).reindex(rounds["method"].unique())
            tables[title] = taus.fillna("").set_axis(_name_columns([*taus.columns]), axis=1).reset_index()
    return tables


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


def _name_columns(begins: list[Any]) -> list[str]:
    """Categories as they are, and ranges: `0–31`, `32–63`, …, `512–`."""
    if isinstance(begins[0], str):
        return begins
    return [*(f"{begin}–{after - 1}" for begin, after in pairwise(begins)), f"{begins[-1]}–"]


def _tau(sums: pd.DataFrame) -> str:
    """τ (micro) with its interval over the prompts that have such rounds."""
    rounds, accepted = sums.to_numpy(float).T  # (Q,)
    counts = leave_one_out(len(rounds))
    taus = ratio(counts @ (rounds + accepted), counts @ rounds)
    return interval(mean_over([Jackknife(taus, rounds > 0)])).with_interval()
