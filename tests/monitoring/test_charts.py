from __future__ import annotations

import itertools
import math
import re
import xml.etree.ElementTree as ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reinforce_rl.monitoring.charts import HEIGHT, WIDTH, Series, area_chart, label, legend, line_chart, ticks

NUMBERS = st.floats(-1e9, 1e9) | st.sampled_from([math.nan, math.inf, -math.inf, 0.0, 1e-9])


def coordinates(svg: str) -> list[float]:
    return [float(number) for d in re.findall(r' d="([^"]*)"', svg) for number in re.findall(r"-?\d+\.\d+", d)]


def titles(svg: str) -> list[str]:
    return [node.text or "" for node in ElementTree.fromstring(svg).iter("title")]


@given(low=st.floats(-1e6, 1e6), span=st.floats(0, 1e6))
@settings(max_examples=200, deadline=None)
def test_ticks_cover_the_range_evenly(low, span):
    found = ticks(low, low + span)
    slack = (found[1] - found[0]) * 1e-6
    assert found[0] <= low + slack and found[-1] >= low + span - slack
    assert 2 <= len(found) <= 14
    steps = [b - a for a, b in itertools.pairwise(found)]
    assert max(steps) == pytest.approx(min(steps), rel=1e-3)


def test_ticks_are_round():
    assert ticks(0.0, 40.0) == [0, 10, 20, 30, 40]
    assert ticks(0.0, 4.2) == [0, 1, 2, 3, 4, 5]
    assert ticks(1, 3, 7, whole=True) == [1, 2, 3]


@pytest.mark.parametrize(
    ("value", "step", "text"),
    [
        (0.25, 0.05, "0.25"),
        (10.0, 10.0, "10"),
        (0.0, 5e-6, "0"),
        (1.5e-5, 5e-6, "1.5e-5"),
        (-0.0, 1.0, "0"),
        (2e7, 1e7, "2e7"),
    ],
)
def test_labels(value, step, text):
    assert label(value, step) == text


@given(points=st.lists(NUMBERS, max_size=40), markers=st.booleans(), smooth=st.booleans())
@settings(max_examples=100, deadline=None)
def test_any_series_gives_a_chart_within_its_frame(points, markers, smooth):
    svg = line_chart([Series("a", list(enumerate(points)), 1, markers, smooth)])
    if not any(map(math.isfinite, points)):
        assert "no data" in svg
        return
    ElementTree.fromstring(svg)
    assert "nan" not in svg and "inf" not in svg
    assert all(-1 <= number <= max(WIDTH, HEIGHT) for number in coordinates(svg))


def test_a_missing_value_breaks_the_line_and_a_lonely_one_is_a_dot():
    svg = line_chart([Series("a", [(1, 1.0), (2, 2.0), (3, math.nan), (4, 3.0), (5, math.nan), (6, 1.0)], 1)])
    assert re.search(r' d="(M[^ML]*L[^ML]*M[^ML]*M[^ML]*)"', svg), "three pieces, the first of two points"
    assert svg.count("<circle") == 2


def test_higher_is_further_up_and_later_is_further_right():
    (x1, y1, x2, y2) = coordinates(line_chart([Series("a", [(1, 1.0), (9, 2.0)], 1)]))[:4]
    assert x2 > x1 and y2 < y1


def test_hover_text_lists_every_series_of_a_step():
    svg = line_chart([Series("a<b", [(1, 0.5), (2, 0.25)], 1), Series("c", [(2, 0.75)], 2)], percent=True)
    assert titles(svg) == ["step 1\na<b: 50.0%", "step 2\na<b: 25.0%\nc: 75.0%"]


def test_stacked_areas_lie_on_each_other():
    svg = area_chart([Series("a", [(1, 1.0), (2, 1.0)], 1), Series("b", [(1, 2.0), (2, math.nan)], 2)])
    first, second = (d.strip("MZ").split("L") for d in re.findall(r' d="([^"]*)"', svg))
    assert second[2:] == first[1::-1], "the second's lower edge is the first's upper edge"
    assert second[1] == first[1], "a missing value has no height"
    assert titles(svg) == ["step 1\na: 1\nb: 2", "step 2\na: 1"]


@pytest.mark.parametrize("count", [1, 2, 10_000])
def test_any_number_of_steps(count):
    points = [(step, float(step % 7)) for step in range(count)]
    for svg in (line_chart([Series("a", points, 1, smooth=True)]), area_chart([Series("a", points, 1)])):
        ElementTree.fromstring(svg)
        assert len(svg) < 150_000


def test_no_series_at_all():
    assert "no data" in line_chart([]) and "no data" in area_chart([])
    assert "no data" in area_chart([Series("a", [(1, math.nan)], 1)])
    assert legend([Series("a", [(1, math.nan)], 1)]) == ""
    assert "&lt;b&gt;" in legend([Series("<b>", [(1, 1.0)], 1)])
