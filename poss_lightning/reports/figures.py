"""The figures of the page: acceptance, seconds and training as charts, a colour a method or choice."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from poss_lightning.reports.charts import Curve, colour_class, line_chart, stacked_chart
from poss_lightning.reports.scalars import Scalars, mean, mean_over_runs, series_by_depth
from poss_lightning.reports.statistics import Estimate
from poss_lightning.reports.summary import Answers

PARTS = ("prefill", "draft", "verify", "commit", "round")  # a CUDA graph is timed as one part, `round`
DRIFT = {  # tag -> what it is
    "val_drift_cosine": "cosine to the target's feature (1 is best)",
    "val_drift_l2": "relative L2 distance to the target's feature (0 is best)",
    "val_drift_norm_ratio": "norm over the target's (1 is best)",
}
ENDS = {
    "val_pos_acc_tree": "pos-acc in trees, held-out answers replayed",
    "val_pos_acc_chain": "pos-acc in chains, held-out answers replayed",
    "val_pos_acc_unroll": "pos-acc in the unroll, teacher-forced",
    **DRIFT,
}
STEPS = {
    "val/loss": "validation loss, all depths",
    "val/tau_tree": "τ in trees, held-out answers replayed",
    "val/tau_chain": "τ in chains, held-out answers replayed",
    "probe/tau": "τ of the probe's decodes",
}
DEPTHS = {"val_loss": "validation loss", "val_pos_acc_unroll": "pos-acc in the unroll", **DRIFT}


@dataclass(frozen=True)
class Figure:
    """A chart, and the name and colour of each of its series."""

    title: str
    chart: Markup
    legend: list[tuple[str, str]]


@dataclass(frozen=True)
class Training:
    """The figures of training runs.

    Attributes:
        ends: by depth at the last validation, a curve a choice.
        steps: by step, a curve a choice.
        depths: of each choice by step, a curve a depth.
        seeds: the most runs that a choice has.
    """

    ends: list[Figure]
    steps: list[Figure]
    depths: dict[str, list[Figure]]
    seeds: int


def assign_colours(names: Iterable[str]) -> dict[str, int]:
    """Give every name a colour, the same in all figures."""
    return {name: place for place, name in enumerate(dict.fromkeys(names))}


def position_figure(shares: Mapping[str, Sequence[Estimate]], colours: dict[str, int]) -> Figure | None:
    """pos-acc by position, a curve a method; None where nothing was accepted."""
    curves = [_curve(name, colours[name], dict(enumerate(estimates, 1))) for name, estimates in shares.items()]
    return _lines("pos-acc by position", curves, "position", "pos-acc", integer_ticks=True)


def seconds_figure(methods: dict[str, Answers]) -> Figure:
    """Milliseconds per new token by method, stacked by part; `rest` is the time outside the named parts."""
    rows: dict[str, list[float]] = {}
    present = {part for answers in methods.values() for record in answers.values() for part in record.seconds}
    measured = [part for part in PARTS if part in present]
    for name, answers in methods.items():
        records = answers.values()
        per_token = 1000 / sum(record.new_tokens for record in records)
        parts = [per_token * sum(record.seconds.get(part, 0.0) for record in records) for part in measured]
        total = per_token * sum(record.seconds.get("total", 0.0) for record in records)
        rows[name] = [*parts, max(total - sum(parts), 0.0)]
    names = [*measured, "rest"]
    legend = [(name, colour_class(place)) for place, name in enumerate(names)]
    return Figure("Milliseconds per new token", stacked_chart(rows, names, "ms"), legend)


def training_figures(runs: dict[str, list[Scalars]], colours: dict[str, int]) -> Training:
    """The figures of every choice's runs, where these logged the scalars."""
    ends = [figure for tag, title in ENDS.items() if (figure := _ends(tag, title, runs, colours))]
    steps = [figure for tag, title in STEPS.items() if (figure := _steps(tag, title, runs, colours))]
    depths = {
        choice: figures
        for choice, trainings in runs.items()
        if (figures := [figure for tag, title in DEPTHS.items() if (figure := _depths(tag, title, trainings))])
    }
    return Training(ends, steps, depths, max(map(len, runs.values()), default=0))


def _ends(tag: str, title: str, runs: dict[str, list[Scalars]], colours: dict[str, int]) -> Figure | None:
    """`tag` at the last validation by depth, a curve a choice, averaged over the runs that have it."""
    curves = []
    for choice, trainings in runs.items():
        last = [{k: series[-1][1] for k, series in series_by_depth(run, tag).items()} for run in trainings]
        depths = sorted(set().union(*last))
        means = {k: mean([end[k] for end in last if k in end]) for k in depths}
        curves.append(_curve(choice, colours[choice], means))
    return _lines(title, curves, "depth", title, integer_ticks=True)


def _steps(tag: str, title: str, runs: dict[str, list[Scalars]], colours: dict[str, int]) -> Figure | None:
    """`tag` by step, a curve a choice."""
    curves = []
    for choice, trainings in runs.items():
        means = mean_over_runs([run[tag] for run in trainings if tag in run])
        curves.append(_curve(choice, colours[choice], means))
    return _lines(title, curves, "step", title, points=2)


def _depths(tag: str, title: str, runs: list[Scalars]) -> Figure | None:
    """One choice's `tag` by step, a curve a depth."""
    runs_by_depth = [series_by_depth(run, tag) for run in runs]
    depths = sorted(set().union(*runs_by_depth))
    means = {k: mean_over_runs([series[k] for series in runs_by_depth if k in series]) for k in depths}
    return _lines(title, [_curve(f"depth {k}", k - 1, means[k]) for k in depths], "step", title, points=2)


def _curve(name: str, colour: int, means: dict[int, Estimate]) -> Curve:
    value, low, high = ([getattr(one, end) for one in means.values()] for end in ("value", "low", "high"))
    spread = any(map(math.isfinite, low))
    return Curve(name, colour, list(means), value, low if spread else (), high if spread else ())


def _lines(
    title: str, curves: list[Curve], x_label: str, y_label: str, *, integer_ticks: bool = False, points: int = 1
) -> Figure | None:
    """A chart of the curves that have so many points at least; None where none has."""
    drawn = [curve for curve in curves if len(curve.x) >= points]
    if not drawn:
        return None
    legend = [(curve.name, colour_class(curve.colour)) for curve in drawn]
    return Figure(title, line_chart(drawn, x_label, y_label, integer_ticks), legend)
