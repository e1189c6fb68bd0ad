"""What is drawn stands where its values are."""

import math
import re

import numpy as np
import pytest

from poss_lightning import plots
from poss_lightning.plots import Value


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
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["x", "y"]


def test_many_points_have_a_band_and_few_have_bars():
    for count, marker in ((plots.MARKED, "o"), (plots.MARKED + 1, "")):
        points = {x: Value(x, x - 1, x + 1) for x in range(count)}
        (axes,) = plots.curves({"": {"x": points}}, "", "").axes
        assert axes.get_lines()[0].get_marker() == (marker or "None") or axes.get_lines()[0].get_marker() == marker
        assert len(axes.collections) == 1


def test_the_ninth_curve_looks_different_from_the_first():
    names = [str(place) for place in range(20)]
    (axes,) = plots.curves({"": {name: {1: Value(float(name))} for name in names}}, "", "").axes
    assert len({(line.get_color(), line.get_linestyle()) for line in axes.get_lines()}) == 20


def test_curves_that_coincide_in_every_panel_are_one_under_all_their_names():
    one, other = {1: Value(0.5), 2: Value(0.4)}, {1: Value(0.5), 2: Value(0.3)}
    figure = plots.curves(
        {"a": {"x": one, "y": one, "z": other, "w": one}, "b": {"x": one, "y": one, "w": other}}, "", ""
    )
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["x = y (identical)", "z", "w"]
    assert [len(axes.get_lines()) for axes in figure.axes] == [3, 2]


def test_a_svg_is_text_of_the_page_and_asks_for_nothing():
    evil = '<script>&$x^2$"'
    figure = plots.curves({evil: {evil: {1: Value(1.0)}, "b": {1: Value(2.0)}}}, evil, "")
    drawn = plots.to_svg(figure, evil)
    assert drawn.startswith("<svg ") and drawn.endswith("</svg>") and "<script" not in drawn
    assert "&lt;script&gt;&amp;$x^2$" in drawn and "currentColor" in drawn and plots.INK not in drawn
    assert not re.search(r"https?:|url\((?!#)|href=\"(?!#)", drawn)
    assert drawn == plots.to_svg(plots.curves({evil: {evil: {1: Value(1.0)}, "b": {1: Value(2.0)}}}, evil, ""), evil)


def test_bars_end_at_their_sums_and_a_forest_has_the_largest_on_top():
    (axes,) = plots.bars({"a": {"x": 1.0, "y": 2.0}, "b": {"x": 4.0}}, "ms").axes
    assert max(bar.get_x() + bar.get_width() for bar in axes.patches) == 4
    gains = {name: type("Gain", (), {"value": v, "low": v - 1, "high": v + 1, "direction": ""}) for name, v in
             {"low": -3, "top": 5, "none": math.nan}.items()}  # fmt: skip
    (axes,) = plots.forest(gains, "").axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["low", "top"]
