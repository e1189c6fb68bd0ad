"""What is drawn stands where its values are."""

import math
import re
from types import SimpleNamespace

import numpy as np
import pytest
from matplotlib.figure import Figure

from poss_lightning import plots
from poss_lightning.plots import Value


def labels(figure: Figure) -> list[str]:
    return [text.get_text() for text in figure.legends[0].get_texts()]


@pytest.mark.parametrize("values", [[0.99, 0.98, 0.97], [0.0, 0.0], [math.nan, 0.2], [0.5]])
def test_points_stand_at_their_values_and_axes_of_shares_within_0_and_1(values):
    drawn = {k: Value(value, value - 0.2, value + 0.2) for k, value in enumerate(values, 1)}
    figure = plots.curves({"a": {"x": drawn}, "b": {"x": drawn, "y": drawn}}, "position", "share", share=True)
    for axes in figure.axes:
        low, high = axes.get_ylim()
        assert 0 <= low < high <= 1
        for line in axes.get_lines():
            assert np.allclose(line.get_ydata(), values, equal_nan=True)
            assert np.allclose(line.get_xdata(), [*drawn], atol=0.1)
    assert labels(figure) == ["x", "y"]


@pytest.mark.parametrize(("count", "markers"), [(plots.MARKED, {"o"}), (plots.MARKED + 1, {"", "None"})])
def test_few_points_have_bars_and_many_have_a_band(count, markers):
    points = {x: Value(x, x - 1, x + 1) for x in range(count)}
    (axes,) = plots.curves({"": {"x": points}}, "", "").axes
    assert axes.get_lines()[0].get_marker() in markers and len(axes.collections) == 1


def test_every_curve_looks_different():
    names = [str(place) for place in range(20)]
    (axes,) = plots.curves({"": {name: {1: Value(float(name))} for name in names}}, "", "").axes
    assert len({(line.get_color(), line.get_linestyle()) for line in axes.get_lines()}) == 20


def test_an_svg_is_text_of_the_page_loads_nothing_and_is_reproducible():
    evil = '<script>&$x^2$"'
    first, second = (
        plots.to_svg(plots.curves({evil: {evil: {1: Value(1.0)}, "b": {1: Value(2.0)}}}, evil, ""), evil)
        for _ in range(2)
    )
    assert first == second and first.startswith("<svg ") and first.endswith("</svg>") and "<script" not in first
    assert "&lt;script&gt;&amp;$x^2$" in first and "currentColor" in first and plots.INK not in first
    assert not re.search(r"https?:|url\((?!#)|href=\"(?!#)", first)


def test_a_forest_has_the_largest_on_top():
    gains = {
        name: SimpleNamespace(value=value, low=value - 1, high=value + 1, direction="")
        for name, value in {"low": -3, "top": 5, "none": math.nan}.items()
    }
    (axes,) = plots.forest(gains).axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["low", "top"]
