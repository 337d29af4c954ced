"""Axis ticks of the findings' charts."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from findings.charts import label, ticks


@given(low=st.floats(-1e6, 1e6), span=st.floats(0, 1e6))
@settings(max_examples=200, deadline=None)
def test_ticks_cover_the_range_evenly(low, span):
    values = ticks(low, low + span)
    slack = (values[1] - values[0]) * 1e-6
    assert values[0] <= low + slack
    assert values[-1] >= low + span - slack
    assert 2 <= len(values) <= 14
    steps = [b - a for a, b in itertools.pairwise(values)]
    assert max(steps) == pytest.approx(min(steps), rel=1e-3)


def test_ticks_are_round():
    assert ticks(0.0, 40.0) == [0, 10, 20, 30, 40]
    expected = [0, 1, 2, 3, 4, 5]
    assert ticks(0.0, 4.2) == expected
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
