"""`poss report`: one HTML page over benchmark records and training runs, complete in itself."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from poss_lightning import __version__
from poss_lightning.evaluation.charts import COLOURS, Curve, line_chart, stacked_chart
from poss_lightning.evaluation.records import BASELINES, Record, depths, read_records, read_runs
from poss_lightning.evaluation.scalars import Series, by_depth, read_scalars
from poss_lightning.evaluation.summary import ALL, Answers, MethodSummary, group, summarise
from poss_lightning.files import atomic

PARTS = ("prefill", "draft", "verify", "commit", "round")  # a CUDA graph is a round as a whole
DRIFT = {  # tag -> label of its axis
    "val_drift_cosine": "cosine to the target's feature (1 is best)",
    "val_drift_l2": "relative L2 distance (0 is best)",
    "val_drift_norm_ratio": "norm over the target's (1 is best)",
}


def report(
    records: list[str] | str,
    runs: list[str] | str | None = None,
    out: str = "report.html",
    baseline: str = "autoregressive",
    reference: str | None = None,
    prompts: int = 6,
    resamples: int = 2000,
    seed: int = 0,
) -> None:
    """Write one self-contained HTML page: tables, curves and decoded text of benchmark records and training runs.

    Args:
        records: Files of records, or folders that hold a records.jsonl; several as [a,b].
        runs: Folders of training runs, whose TensorBoard files give the feature drift and loss by depth.
        out: The page to write.
        baseline: The method whose speed is 1 and whose tokens the others should give.
        reference: The method that acceptance lengths and speeds are held against, for example the single-layer draft.
        prompts: Prompts whose decoded text is shown, spread over the suites.
        resamples: Draws of the bootstrap behind the 95 % intervals.
        seed: Of the bootstrap.
    """
    facts = read_runs(records)
    answers = read_records(records)
    methods = group(answers)
    summaries = summarise(answers, baseline, reference, depths(facts), resamples, seed)
    overall = [summary for summary in summaries if summary.suite == ALL]
    page = _template().render(
        headline=headline(overall, baseline),
        overall=overall,
        by_suite=[summary for summary in summaries if summary.suite != ALL and summary.method not in BASELINES],
        baseline=baseline,
        baselines=[name for name in dict.fromkeys((baseline, *BASELINES)) if name in {row.method for row in overall}],
        reference=reference,
        positions=position_figure(overall),
        deepest=max(len(row.pos_acc) for row in overall),
        seconds=seconds_figure(methods),
        training=training_figures(read_scalars(runs or [])),
        texts=decoded_texts(methods, {row.method: len(row.pos_acc) for row in overall}, prompts),
        facts={folder: list(readable(entries)) for folder, entries in facts.items()},
        made=f"poss_lightning {__version__}, {resamples} draws of the bootstrap, seed {seed}",
    )
    with atomic(out) as path:
        path.write_text(page, encoding="utf-8")
    print(f"{out}: {len(answers)} records of {len(overall)} methods")


def headline(overall: list[MethodSummary], baseline: str) -> str:
    """The fastest drafting method against the baseline, in a sentence or two."""
    drafting = [row for row in overall if row.method not in BASELINES and baseline in row.speed_up]
    if not drafting:
        speeds = ", ".join(f"{row.method} {row.tokens_per_second.text('.1f')}" for row in overall)
        return f"No method here drafts; tokens per second: {speeds}."
    best = max(drafting, key=lambda row: row.speed_up[baseline].value)
    gain = best.speed_up[baseline]
    verdict = "faster" if gain.low > 1 else "slower" if gain.high < 1 else "no difference shown"
    return (
        f"{best.method} decodes at {gain.text()} times the speed of {baseline}{_within(gain.interval())}: {verdict}. "
        f"It emits {best.tau_micro.text()} tokens a round{_within(best.tau_micro.interval())}, "
        f"and {best.identical.text('.0%')} of its {best.prompts} prompts have exactly {baseline}'s tokens."
    )


# --- figures ---


@dataclass(frozen=True)
class Figure:
    """A chart and the names of its series, in the order of their colours."""

    title: str
    chart: Markup
    names: list[str]


def position_figure(overall: list[MethodSummary]) -> Figure | None:
    """pos-acc by position, a curve a method; None where nothing was accepted."""
    curves = [
        Curve(
            name=row.method,
            x=range(1, len(row.pos_acc) + 1),
            y=[share.value for share in row.pos_acc],
            low=[share.low for share in row.pos_acc],
            high=[share.high for share in row.pos_acc],
        )
        for row in overall
        if row.pos_acc
    ]
    return _lines("", curves, "position", "pos-acc", whole=True) if curves else None


def seconds_figure(methods: dict[str, Answers]) -> Figure:
    """Milliseconds per new token by method, stacked by part; `rest` is what the total has beyond the named parts."""
    rows: dict[str, list[float]] = {}
    seen = {part for answers in methods.values() for record in answers.values() for part in record.seconds}
    measured = [part for part in PARTS if part in seen]
    for name, own in ((name, list(answers.values())) for name, answers in methods.items()):
        per_token = 1000 / sum(record.new_tokens for record in own)
        parts = [per_token * sum(record.seconds.get(part, 0.0) for record in own) for part in measured]
        total = per_token * sum(record.seconds["total"] for record in own)
        rows[name] = [*parts, max(total - sum(parts), 0.0)]
    return Figure("", stacked_chart(rows, [*measured, "rest"], "ms"), [*measured, "rest"])


def training_figures(scalars: dict[str, dict[str, Series]]) -> list[Figure]:
    """Feature drift by depth, a curve a run; then each run's validation loss by step, a curve a depth."""
    figures = []
    for tag, label in DRIFT.items():
        ends = {run: {k: series[-1][1] for k, series in by_depth(own, tag).items()} for run, own in scalars.items()}
        curves = [Curve(run, list(end), list(end.values())) for run, end in ends.items() if end]
        if curves:
            figures.append(_lines(f"Feature drift: {label}", curves, "depth", label, whole=True))
    for run, own in scalars.items():
        losses = by_depth(own, "val_loss").items()
        curves = [Curve(f"depth {k}", *zip(*series, strict=True)) for k, series in losses if len(series) > 1]
        if curves:
            figures.append(_lines(f"Validation loss of {run}", curves, "step", "loss"))
    return figures


def _lines(title: str, curves: list[Curve], x_label: str, y_label: str, whole: bool = False) -> Figure:
    return Figure(title, line_chart(curves, x_label, y_label, whole), [curve.name for curve in curves])


# --- decoded text ---


@dataclass(frozen=True)
class Span:
    """A run of text: `kind` is "plain", "accepted" or "bonus"; `strength` is accepted / K of its round."""

    kind: str
    text: str
    strength: float = 0.0


@dataclass(frozen=True)
class Text:
    """One prompt's answers, by method: the record, and its text in spans."""

    title: str
    answers: list[tuple[Record, list[Span]]]


def decoded_texts(methods: dict[str, Answers], most: dict[str, int], prompts: int) -> list[Text]:
    """First turn and repeat of some prompts: the first of each suite, then the second of each, and so on."""
    by_suite: dict[str, list[tuple]] = {}
    for key in next(iter(methods.values())):
        if key[2:] == (0, 0):
            by_suite.setdefault(key[0], []).append(key)
    chosen = [key for level in zip_longest(*by_suite.values()) for key in level if key is not None][:prompts]
    return [
        Text(f"{key[0]}, prompt {key[1]}", [(own[key], spans(own[key], most[name])) for name, own in methods.items()])
        for key in chosen
    ]


def spans(record: Record, depth: int) -> list[Span]:
    """The text cut at rounds: the prefill's token, then each round's accepted run and its bonus token.

    A last round that a stop token or the limit cut ends within its accepted run.
    """
    if record.pieces is None or not record.accepted:
        return [Span("plain", record.text)]
    cut, start = [Span("plain", record.pieces[0])], 1
    for accepted in record.accepted:
        end, strength = start + accepted, min(accepted / depth, 1.0) if depth else 0.0
        cut += [Span("accepted", _seen(record.pieces[start:end]), strength)] if accepted else []
        cut += [Span("bonus", _seen(piece)) for piece in record.pieces[end : end + 1]]  # none after a cut round
        start = end + 1
    return cut


def _seen(pieces: list[str]) -> str:
    """Joined, with a sign where a line ends: a coloured run of blanks shows nothing."""
    return "".join(pieces).replace("\n", "↵\n")


# --- the page ---


def readable(facts: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Facts of a run as names and texts: a list of strings as a command line, nested facts as JSON of several lines."""
    for name, value in facts.items():
        if isinstance(value, dict) and not any(isinstance(part, dict | list) for part in value.values()):
            yield name, " · ".join(f"{key} {part}" for key, part in value.items())
        elif isinstance(value, list) and all(isinstance(part, str) for part in value):
            yield name, " ".join(value)
        elif isinstance(value, dict | list):
            yield name, json.dumps(value, indent=2, ensure_ascii=False)
        else:
            yield name, "–" if value is None else str(value)


def _within(interval: str) -> str:
    return f" (95 % interval {interval})" if interval else ""


def _template() -> Any:
    here = FileSystemLoader(Path(__file__).parent)
    environment = Environment(
        loader=here, autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined
    )
    environment.globals["colours"] = COLOURS
    return environment.get_template("report.html.j2")
