"""The figures of the page: acceptance, seconds and training as charts, a colour a method or choice.

Charts of the same methods make a panel, which has one legend. Those of the same measure have the same axes.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from poss_lightning.reports.charts import (
    CROWDED,
    Curve,
    Effect,
    colour_class,
    forest_chart,
    line_chart,
    stacked_chart,
)
from poss_lightning.reports.findings import Effects
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
    """A chart and its title."""

    title: str
    chart: Markup


@dataclass(frozen=True)
class Panel:
    """Charts of the same series, and the name and classes of each series; `crowded`: too many to colour them all."""

    figures: list[Figure]
    legend: list[tuple[str, str]]
    crowded: bool = False


@dataclass(frozen=True)
class Depths:
    """Training depth by depth: figures by choice, with the same axes and one legend."""

    figures: dict[str, list[Figure]]
    legend: list[tuple[str, str]]


@dataclass(frozen=True)
class _Plot:
    """A chart to be drawn; those of one measure that are drawn together have the same axes."""

    title: str
    measure: str
    x_label: str
    curves: list[Curve]


def assign_colours(names: Iterable[str], reference: str | None = None) -> dict[str, int]:
    """Give every name a colour, the same in all figures; the first to the reference."""
    ordered = list(dict.fromkeys(names))
    ordered.sort(key=lambda name: name != reference)
    return {name: place for place, name in enumerate(ordered)}


def forest_figure(effects: Effects) -> Figure:
    """The reference, then the others from the largest effect to the smallest."""
    no_effect = next(iter(effects.gains.values())).no_effect
    own = effects.own.text(".4g")
    rows = [Effect(effects.reference, no_effect, math.nan, math.nan, own, detail="the reference")]
    known = {name: gain for name, gain in effects.gains.items() if math.isfinite(gain.value)}
    for name, gain in sorted(known.items(), key=lambda entry: -entry[1].value):
        label = "identical" if gain.identical else gain.with_interval(effects.form)
        detail = ", ".join(filter(None, [gain.significance(), gain.detectable_text(effects.form.replace("+", ""))]))
        rows.append(Effect(name, gain.value, gain.low, gain.high, label, gain.direction, detail and f"({detail})"))
    return Figure(effects.title, forest_chart(rows, no_effect, effects.title))


def choice_panel(
    shares: Mapping[str, Sequence[Estimate]], runs: dict[str, list[Scalars]], colours: dict[str, int]
) -> Panel | None:
    """Acceptance as it was measured, then what trainings logged: a curve a method or choice. None without any."""
    measured = [_curve(name, colours[name], dict(enumerate(estimates, 1))) for name, estimates in shares.items()]
    plots = [_Plot("pos-acc by position", "pos-acc", "position", [curve for curve in measured if curve.x])]
    plots += [_Plot(title, _measure(tag), "depth", _ends(tag, runs, colours)) for tag, title in ENDS.items()]
    plots += [_Plot(title, _measure(tag), "step", _steps(tag, runs, colours)) for tag, title in STEPS.items()]
    figures = [figure for figure in _draw(plots) if figure]
    legend = [(name, colour_class(colour)) for name, colour in colours.items()]
    return Panel(figures, legend, len(legend) >= CROWDED) if figures else None


def depth_figures(runs: dict[str, list[Scalars]]) -> Depths:
    """What each choice's trainings logged by step, a curve a depth."""
    wanted = [(choice, tag, title) for choice in runs for tag, title in DEPTHS.items()]
    plots = [_Plot(title, tag, "step", _depths(tag, runs[choice])) for choice, tag, title in wanted]
    figures: dict[str, list[Figure]] = {}
    for (choice, _, _), figure in zip(wanted, _draw(plots), strict=True):
        if figure:
            figures.setdefault(choice, []).append(figure)
    deepest = max((curve.colour for plot in plots for curve in plot.curves), default=-1)
    return Depths(figures, [(f"depth {k + 1}", colour_class(k)) for k in range(deepest + 1)])


def seconds_panel(methods: dict[str, Answers]) -> Panel:
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
    return Panel([Figure("Milliseconds per new token", stacked_chart(rows, names, "ms"))], legend)


def _measure(tag: str) -> str:
    """What a tag measures: pos-acc and τ in several ways, anything else in one."""
    return next((measure for measure in ("pos_acc", "tau") if measure in tag), tag).replace("_", "-")


def _ends(tag: str, runs: dict[str, list[Scalars]], colours: dict[str, int]) -> list[Curve]:
    """`tag` at the last validation by depth, a curve a choice, averaged over the runs that have it."""
    curves: list[Curve] = []
    for choice, trainings in runs.items():
        last = [{k: series[-1][1] for k, series in series_by_depth(run, tag).items()} for run in trainings]
        depths = sorted(set().union(*last))
        means = {k: mean([end[k] for end in last if k in end]) for k in depths}
        curves.append(_curve(choice, colours[choice], means))
    return [curve for curve in curves if curve.x]


def _steps(tag: str, runs: dict[str, list[Scalars]], colours: dict[str, int]) -> list[Curve]:
    """`tag` by step, a curve a choice."""
    curves = []
    for choice, trainings in runs.items():
        means = mean_over_runs([run[tag] for run in trainings if tag in run])
        curves.append(_curve(choice, colours[choice], means))
    return _longer(curves)


def _depths(tag: str, runs: list[Scalars]) -> list[Curve]:
    """One choice's `tag` by step, a curve a depth."""
    runs_by_depth = [series_by_depth(run, tag) for run in runs]
    depths = sorted(set().union(*runs_by_depth))
    means = {k: mean_over_runs([series[k] for series in runs_by_depth if k in series]) for k in depths}
    return _longer([_curve(f"depth {k}", k - 1, means[k]) for k in depths])


def _longer(curves: list[Curve]) -> list[Curve]:
    """Those that are a line: two points or more."""
    return [curve for curve in curves if len(curve.x) > 1]


def _curve(name: str, colour: int, means: dict[int, Estimate]) -> Curve:
    value, low, high = ([getattr(one, end) for one in means.values()] for end in ("value", "low", "high"))
    spread = any(map(math.isfinite, low))
    return Curve(name, colour, list(means), value, low if spread else (), high if spread else ())


def _draw(plots: list[_Plot]) -> list[Figure | None]:
    """Each plot's figure; None where it has no curve."""
    return [
        Figure(
            plot.title,
            line_chart(
                plot.curves,
                plot.x_label,
                plot.title,
                integer_ticks=plot.x_label != "step",
                beside=[curve for other in plots if other.measure == plot.measure for curve in other.curves],
            ),
        )
        if plot.curves
        else None
        for plot in plots
    ]
