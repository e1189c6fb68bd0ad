"""Every curve and interval: on the page of `poss compare`, in TensorBoard, documents and notebooks.

Each function returns a figure of matplotlib, without a display and without pyplot's state. A point has a `value` and
the ends of its 95 % interval, `low` and `high`, nan without one, as an `Estimate` or a row of `results` has them.
"""

import html
import io
import math
import re
import textwrap
import warnings
from collections.abc import Mapping, Sequence
from itertools import cycle
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

INK, QUIET = "#222222", "#8a8a8a"
COLOURS = ("#2f6fd0", "#d2691e", "#1f9d6b", "#b04fb0", "#a08400", "#1692a8", "#d0465d", "#7a8694")
LARGER, SMALLER = "#1f9d6b", "#d0465d"  # of effects
DASHES = ("-", "--", ":", "-.")  # from the ninth series on, colours repeat, dashed
MARKED = 12  # points that a curve marks, with bars for intervals; a curve of more has a band
SIZE = (4.4, 3.0)  # inches of a panel without its legend, readable on a phone
LEGEND_LETTERS, ROW_LETTERS = 13, 30  # of a legend's line, per inch; of a line beside a row
STYLE: Any = {
    "font.size": 9,
    "text.parse_math": False,  # a $ in a name is a $
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": QUIET,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": QUIET,
    "grid.alpha": 0.25,
    "legend.frameon": False,
    "legend.fontsize": 8,
    **dict.fromkeys(("text.color", "axes.labelcolor", "axes.titlecolor", "xtick.color", "ytick.color"), INK),
    "svg.hashsalt": "poss_lightning",  # the same input gives the same file
}


Curves = Mapping[str, Mapping[Any, Any]]  # points by name, then by x, a number


def curves(
    panels: Mapping[str, Curves],
    x_label: str,
    y_label: str,
    *,
    share: bool = False,
    colours: Mapping[str, str] | None = None,
) -> Figure:
    """Draw curves with their intervals, in panels side by side, by title, with one y axis and one legend.

    A `share` limits the axis to 0 to 1. `colours` are by name; otherwise in order, the same in all panels.
    """
    names = list(dict.fromkeys(name for drawn in panels.values() for name in drawn))
    styles = dict(zip(names, cycle((colour, dashes) for dashes in DASHES for colour in COLOURS), strict=False))
    styles |= {name: (colour, "-") for name, colour in (colours or {}).items()}
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(SIZE[0] * len(panels), SIZE[1]), layout="constrained")
        every = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
        for axes, (title, drawn) in zip(every, panels.items(), strict=True):
            for place, (name, points) in enumerate(drawn.items()):
                aside = min(0.06, 0.5 / len(drawn)) * (place - (len(drawn) - 1) / 2)
                _curve(axes, name, points, styles[name], aside)
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
            axes.set(xlabel=x_label, title=title)
        every[0].set_ylabel(y_label)
        if share:
            low, high = every[0].get_ylim()
            every[0].set_ylim(max(low, 0.0), min(high, 1.0))
        if len(names) > 1 or not any(panels):
            handles = {h.get_label(): h for axes in every for h in axes.get_lines()}
            _legend(figure, handles)
    return figure


def forest(gains: Mapping[str, Any], no_effect: float = 0.0) -> Figure:
    """A forest plot: one row per effect, coloured by its `direction`, the largest on top, and a line at no effect."""
    known = sorted((gain.value, name) for name, gain in gains.items() if math.isfinite(gain.value))
    with matplotlib.rc_context(STYLE):
        axes = _rows(figure := Figure(layout="constrained"), [name for _, name in known])
        axes.axvline(no_effect, color=QUIET, linestyle="--", linewidth=1)
        for place, (value, name) in enumerate(known):
            gain = gains[name]
            colour = {"larger": LARGER, "smaller": SMALLER}.get(gain.direction, QUIET)
            axes.plot([gain.low, gain.high], [place, place], color=colour, linewidth=1.6)
            axes.plot([value], [place], "o", color=colour, markersize=5)
    return figure


def bars(values: Mapping[str, Any], least: float = 0.0) -> Figure:
    """Draw a bar from `least` for each value, with its interval, in their order from top to bottom."""
    with matplotlib.rc_context(STYLE):
        axes = _rows(figure := Figure(layout="constrained"), names := [*values][::-1])
        for row, value in enumerate(values[name] for name in names):
            axes.barh(row, value.value - least, left=least, color=COLOURS[0], alpha=0.6)
            axes.plot([value.low, value.high], [row, row], color=INK, linewidth=1.4)
    return figure


def _rows(figure: Figure, names: Sequence[str]) -> Axes:
    """Make axes with a row for each name, from bottom to top; of a long name two lines are shown."""
    lines = [textwrap.fill(name, ROW_LETTERS, max_lines=2, placeholder=" …") for name in names]
    most = max((name.count("\n") + 1 for name in lines), default=1)
    figure.set_size_inches(SIZE[0], 0.7 + (0.12 + 0.16 * most) * len(lines))
    axes = figure.add_subplot(ylim=(-0.6, len(lines) - 0.4))
    axes.set_yticks(range(len(lines)), lines)
    axes.xaxis.set_major_locator(MaxNLocator(5))
    axes.grid(False, axis="y")
    return axes


def to_svg(figure: Figure, label: str) -> str:
    """Write the figure as inline SVG: its letters are text, its ink has the page's colour, and it loads nothing."""
    with matplotlib.rc_context(STYLE | {"svg.fonttype": "none"}), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about letters that matplotlib's font lacks; the page's has them
        file = io.StringIO()
        figure.savefig(file, format="svg", transparent=True, metadata={"Date": None})
    drawn = re.sub(r"<metadata>.*?</metadata>", "", file.getvalue(), flags=re.DOTALL)
    _, box, inside = re.split(r'<svg[^>]*(viewBox="[^"]*")[^>]*>', drawn, maxsplit=1)
    start = f'<svg {box} role="img" aria-label="{html.escape(label)}">'
    return start + inside.replace(INK, "currentColor").strip()


def _legend(figure: Figure, handles: Mapping[Any, Any]) -> None:
    """Put a legend below the panels, in as many columns as fit, and make the figure higher by its rows."""
    letters = int(LEGEND_LETTERS * figure.get_figwidth())
    names = [textwrap.fill(str(name), letters) for name in handles]
    columns = max(1, letters // (6 + max(map(len, names))))  # 6 for a handle
    legend = figure.legend([*handles.values()], names, loc="outside lower center", ncols=columns)
    figure.set_figheight(figure.get_figheight() + legend.get_window_extent().height / figure.dpi)


def _curve(axes: Axes, name: str, points: Mapping[float, Any], style: tuple[str, str], aside: float) -> None:
    """Draw a line; few points are marked, and their bars are shifted by `aside` from those of other curves."""
    few = len(points) <= MARKED
    places = [x + (aside if few else 0.0) for x in points]
    values, lows, highs = ([getattr(point, end) for point in points.values()] for end in ("value", "low", "high"))
    colour, dashes = style
    marker = "o" if few else ""
    axes.plot(places, values, dashes, marker=marker, markersize=3.5, color=colour, linewidth=1.4, label=name)
    if few:
        axes.vlines(places, lows, highs, color=colour, linewidth=1)
    else:
        axes.fill_between(places, lows, highs, color=colour, alpha=0.18, linewidth=0)
