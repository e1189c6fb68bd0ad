"""Charts as inline SVG: no ids, no outside references; colours come from the page's style sheet.

Colour i is the class `s{i}`, which the page defines for light and for dark. After the eighth, colours repeat, dashed.
Series i also has the class `n{i}`, so that the style sheet finds it in every chart and legend. A chart is 360 units
wide, about the width of a phone, so its letters stay readable there.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from markupsafe import Markup

WIDTH, HEIGHT = 360, 230
LEFT, RIGHT, TOP, BOTTOM = 38, 8, 8, 36  # margins for the labels
COLOURS = 8  # classes s0..s7
MARKED = 12  # points of a curve that has its points marked; more would hide the line
CROWDED = 5  # curves from which on they are grey, but for the reference and the one pointed at
ROW, VALUES = 34, 142  # units of a row of a forest plot, and of the values on its right


@dataclass(frozen=True)
class Curve:
    """One line of a chart; `low` and `high`, where given, are the ends of an interval at each point, or nan."""

    name: str
    colour: int
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] = ()
    high: Sequence[float] = ()


@dataclass(frozen=True)
class Effect:
    """One row of a forest plot: a value, the ends of its interval or nan, and what is written beside it.

    `direction` is `larger` or `smaller` where the effect is shown, else nothing; `detail` appears at the pointer.
    """

    name: str
    value: float
    low: float
    high: float
    label: str
    direction: str = ""
    detail: str = ""


@dataclass(frozen=True)
class Axis:
    """Maps values to units of the drawing."""

    label: str
    ticks: list[float]
    start: float
    end: float
    pad: float = 0.0  # units kept free at both ends

    def at(self, value: float) -> float:
        """The place of `value`, in units of the drawing."""
        low, high = self.ticks[0], self.ticks[-1]
        free = math.copysign(self.pad, self.end - self.start)
        return round(self.start + free + (value - low) / (high - low) * (self.end - self.start - 2 * free), 1)


def line_chart(
    curves: Sequence[Curve],
    x_label: str,
    y_label: str,
    integer_ticks: bool = False,
    beside: Sequence[Curve] = (),
) -> Markup:
    """Curves with bars for intervals, or bands where there are many points; nan values are left out.

    Args:
        integer_ticks: one tick for each integer x.
        beside: curves of other charts that have the same axes as this one.
    """
    spanned = [*curves, *beside]
    xs = [x for curve in spanned for x in curve.x]
    ys = [y for curve in spanned for y in (*curve.y, *curve.low, *curve.high) if math.isfinite(y)]
    across = (
        [float(x) for x in range(int(min(xs)), max(int(max(xs)), int(min(xs)) + 1) + 1)]
        if integer_ticks
        else _ticks(xs)
    )
    x_axis = Axis(x_label, across, LEFT, WIDTH - RIGHT, pad=10)
    y_axis = Axis(y_label, _ticks(ys or [0.0]), HEIGHT - BOTTOM, TOP)
    drawn = [
        _curve(curve, place=place, count=len(curves), x_axis=x_axis, y_axis=y_axis)
        for place, curve in enumerate(curves)
    ]
    return _svg(HEIGHT, f"{y_label} by {x_label}", _grid(x_axis, y_axis) + Markup("").join(reversed(drawn)))


def forest_chart(effects: Sequence[Effect], no_effect: float, title: str) -> Markup:
    """A forest plot: a row for each effect, its name above the interval, its label beside, and a line at no effect."""
    ends = [end for effect in effects for end in (effect.value, effect.low, effect.high) if math.isfinite(end)]
    axis = Axis(title, _ticks([*ends, no_effect]), 0, WIDTH - VALUES, pad=16)
    height = ROW * len(effects) + 20
    upright = Markup('<line class="{}" x1="{x}" x2="{x}" y1="0" y2="{}"/>')
    drawn = [upright.format("grid", height - 18, x=axis.at(tick)) for tick in axis.ticks]
    number = Markup('<text class="middle" x="{}" y="{}">{}</text>')
    drawn += [number.format(axis.at(tick), height - 5, _number(tick)) for tick in axis.ticks]
    drawn += [upright.format("none", height - 18, x=axis.at(no_effect))]
    drawn += [_effect(effect, top=ROW * place, axis=axis) for place, effect in enumerate(effects)]
    return _svg(height, title, Markup("").join(drawn))


def stacked_chart(rows: Mapping[str, Sequence[float]], parts: Sequence[str], unit: str) -> Markup:
    """A horizontal bar for each row, made of its parts, with the row's name above it and its sum behind it."""
    longest = max(map(sum, rows.values()))
    scale = (WIDTH - 70) / longest  # room for the sum
    drawn = [
        _bar(name, values, parts, unit=unit, top=40 * place, scale=scale)
        for place, (name, values) in enumerate(rows.items())
    ]
    return _svg(40 * len(rows), f"{unit} by part: {', '.join(parts)}", Markup("").join(drawn))


def colour_class(colour: int) -> str:
    """The style sheet's classes of a series and its colour."""
    return f"s{colour % COLOURS} n{colour}" + (" dashed" if colour >= COLOURS else "")


def _curve(curve: Curve, *, place: int, count: int, x_axis: Axis, y_axis: Axis) -> Markup:
    """Line, points and intervals; curves with interval bars stand a little beside each other."""
    bounds = zip(curve.low, curve.high, strict=True) if curve.low else [(math.nan, math.nan)] * len(curve.y)
    points = [(x, y, low, high) for x, y, (low, high) in zip(curve.x, curve.y, bounds, strict=True) if math.isfinite(y)]
    marked = len(points) <= MARKED
    apart = curve.low and marked and count < CROWDED
    aside = 4 * (place - (count - 1) / 2) if apart else 0.0
    bars = [(x_axis.at(x) + aside, y_axis.at(low), y_axis.at(high)) for x, _, low, high in points if math.isfinite(low)]
    line = " ".join(f"{x_axis.at(x) + aside:g},{y_axis.at(y)}" for x, y, _, _ in points)
    inside = Markup('<polyline points="{}"/>').format(line)
    if marked:
        bar = Markup('<line x1="{0:g}" x2="{0:g}" y1="{1}" y2="{2}"/>')
        inside += Markup("").join(bar.format(*interval) for interval in bars)
        dot = Markup('<circle cx="{:g}" cy="{}" r="3"><title>{}, {} {:g}: {:.3g}</title></circle>')
        inside += Markup("").join(
            dot.format(x_axis.at(x) + aside, y_axis.at(y), curve.name, x_axis.label, x, y) for x, y, _, _ in points
        )
    elif bars:
        around = [f"{x:g},{low}" for x, low, _ in bars] + [f"{x:g},{high}" for x, _, high in reversed(bars)]
        inside += Markup('<polygon points="{}"/>').format(" ".join(around))
    return Markup('<g class="{}"><title>{}</title>{}</g>').format(colour_class(curve.colour), curve.name, inside)


def _effect(effect: Effect, *, top: int, axis: Axis) -> Markup:
    words = Markup('<text class="halo" x="0" y="{}">{}</text><text class="end" x="{}" y="{}">{}</text>')
    drawn = words.format(top + 14, effect.name, WIDTH, top + 28, effect.label)
    inside = Markup("<title>{}</title>").format(f"{effect.name}: {effect.label} {effect.detail}".rstrip())
    if math.isfinite(effect.low):
        bar = Markup('<line x1="{}" x2="{}" y1="{y}" y2="{y}"/>')
        inside += bar.format(axis.at(effect.low), axis.at(effect.high), y=top + 24)
    if math.isfinite(effect.value):
        inside += Markup('<circle cx="{}" cy="{}" r="4"/>').format(axis.at(effect.value), top + 24)
    return drawn + Markup('<g class="effect {}">{}</g>').format(effect.direction, inside)


def _bar(name: str, values: Sequence[float], parts: Sequence[str], *, unit: str, top: int, scale: float) -> Markup:
    segments, start = Markup(""), 0.0
    for place, (part, value) in enumerate(zip(parts, values, strict=True)):
        segments += Markup(
            '<rect class="{}" x="{:.1f}" y="{}" width="{:.1f}" height="16"><title>{}: {:.2f} {}</title></rect>'
        ).format(colour_class(place), start * scale, top + 16, value * scale, part, value, unit)
        start += value
    labels = Markup('<text x="0" y="{}">{}</text><text x="{:.1f}" y="{}">{:.1f} {}</text>')
    return segments + labels.format(top + 12, name, start * scale + 5, top + 28, start, unit)


def _grid(x_axis: Axis, y_axis: Axis) -> Markup:
    """Horizontal lines, tick labels and the names of both axes."""
    rows = [
        Markup('<line class="grid" x1="{}" x2="{}" y1="{}" y2="{}"/><text class="end" x="{}" y="{}">{}</text>').format(
            LEFT, WIDTH - RIGHT, y_axis.at(tick), y_axis.at(tick), LEFT - 5, y_axis.at(tick) + 4, _number(tick)
        )
        for tick in y_axis.ticks
    ]
    columns = [
        Markup('<text class="middle" x="{}" y="{}">{}</text>').format(x_axis.at(tick), HEIGHT - 21, _number(tick))
        for tick in x_axis.ticks
    ]
    name = Markup('<text class="middle" x="{}" y="{}">{}</text>').format((LEFT + WIDTH) / 2, HEIGHT - 5, x_axis.label)
    return Markup("").join([*rows, *columns, name])


def _svg(height: int, title: str, inside: Markup) -> Markup:
    return Markup('<svg viewBox="0 0 {} {}" role="img" aria-label="{}">{}</svg>').format(WIDTH, height, title, inside)


def _ticks(values: Sequence[float]) -> list[float]:
    """About five round numbers that span the values."""
    low, high = min(values), max(values)
    raw = (high - low or abs(high) or 1.0) / 5
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(times * power for times in (1, 2, 5, 10) if times * power >= raw * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [float(f"{place * step:.10g}") for place in range(first, max(last, first + 1) + 1)]


def _number(value: float) -> str:
    return f"{value:g}"
