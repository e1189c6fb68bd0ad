"""What is drawn stands where its values are."""

import math
import re

import numpy as np
import pytest
from matplotlib.collections import LineCollection, PolyCollection

from poss_lightning import plots
from poss_lightning.reports.statistics import Comparison, Estimate


@pytest.mark.parametrize("values", [[0.99, 0.98, 0.97], [0.0, 0.0], [math.nan, 0.2]])
def test_points_stand_at_their_values_and_axes_of_shares_within_0_and_1(values):
    drawn = {k: Estimate(value, value - 0.2, value + 0.2) for k, value in enumerate(values, 1)}
    figure = plots.curves({"a": {"x": drawn}, "b": {"x": drawn, "y": drawn}}, "position", "share", share=True)
    for axes in figure.axes:
        low, high = axes.get_ylim()
        assert 0 <= low < high <= 1
        for line in axes.get_lines():
            assert np.array_equal(line.get_ydata(), values, equal_nan=True)
            assert np.abs(line.get_xdata() - [*drawn]).max() < 0.1
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["x", "y"]


@pytest.mark.parametrize(
    "name", ["HASS {}", "your specialists (PosS-2), 40 steps {}", "a name of more than one line {} " * 9]
)
def test_a_legend_lies_inside_its_figure_and_below_its_panels(name):
    drawn = {name.format(*[i] * 9): {1: Estimate(0.5)} for i in range(5)}
    for panels in ({"a": drawn}, {"a": drawn, "b": drawn}):
        figure = plots.curves(panels, "position", "share")
        figure.draw_without_rendering()
        inside, box = figure.bbox, figure.legends[0].get_window_extent()
        assert inside.x0 <= box.x0 < box.x1 <= inside.x1 and inside.y0 <= box.y0 < box.y1 <= inside.y1
        assert all(box.y1 <= axes.get_tightbbox().y0 and axes.bbox.height > 150 for axes in figure.axes)


@pytest.mark.parametrize(("count", "kind"), [(plots.MARKED, LineCollection), (plots.MARKED + 1, PolyCollection)])
def test_few_points_have_bars_many_have_a_band_and_every_curve_looks_different(count, kind):
    points = {x: Estimate(x, x - 1, x + 1) for x in range(count)}
    (axes,) = plots.curves({"": dict.fromkeys(map(str, range(20)), points)}, "", "").axes
    assert len({(line.get_color(), line.get_linestyle()) for line in axes.get_lines()}) == 20
    assert len(axes.collections) == 20 and all(isinstance(drawn, kind) for drawn in axes.collections)


def test_an_svg_is_text_of_the_page_loads_nothing_and_is_reproducible():
    evil = '<script>&$x^2$"'
    drawn = {evil: {evil: {1: Estimate(1.0)}, "b": {1: Estimate(2.0)}}}
    first, second = (plots.to_svg(plots.curves(drawn, evil, ""), evil) for _ in range(2))
    assert first == second and first.startswith("<svg ") and first.endswith("</svg>")
    assert "&lt;script&gt;&amp;$x^2$" in first and "currentColor" in first and plots.INK not in first
    assert not re.search(r"<script|https?:|url\((?!#)|href=\"(?!#)", first)


def test_a_forest_has_the_largest_on_top():
    values = {"low": -3, "top": 5, "none": math.nan}
    (axes,) = plots.forest({name: Comparison(value, value - 1, value + 1) for name, value in values.items()}).axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["low", "top"]
