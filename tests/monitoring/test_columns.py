"""Lines of metrics.jsonl as columns, and lines that are not valid."""

from __future__ import annotations

import math
from typing import Any

import pytest

from reinforce_rl.monitoring.columns import MAX_INTEGER, MetricColumns, checked_line, shown_value


def columns_of(*lines: tuple[int, dict[str, float]]) -> MetricColumns:
    columns = MetricColumns()
    for step, values in lines:
        columns.add(step, values)
    return columns


def test_lines_that_are_not_in_the_order_of_their_steps() -> None:
    columns = columns_of((2, {"a": 20.0}), (1, {"a": 10.0}), (3, {"a": 30.0}))
    steps, values = columns.series("a")
    assert steps.tolist() == [1, 2, 3]
    assert values.tolist() == [10.0, 20.0, 30.0]
    assert columns.rows_of("a").tolist() == [1, 0, 2]
    order = columns.order()
    assert order is not None
    assert order.tolist() == [1, 0, 2]
    assert [line["step"] for line in columns.lines(0, 3)] == [2, 1, 3]


def test_lines_in_order_need_no_other_one() -> None:
    assert columns_of((1, {}), (1, {}), (4, {})).order() is None


def test_numbers_that_json_does_not_have_are_none() -> None:
    values = {"nan": math.nan, "infinity": math.inf, "minus": -math.inf, "number": 2.5}
    (line,) = columns_of((1, values)).lines(0, 1)
    expected = {"step": 1, "nan": None, "infinity": None, "minus": None, "number": 2.5}
    assert line == expected


@pytest.mark.parametrize("step", [True, False, 1.0, "1", None, [1]])
def test_a_step_is_an_integer(step: Any) -> None:
    with pytest.raises(ValueError, match="expected an integer"):
        checked_line({"step": step})


@pytest.mark.parametrize("step", [-1, MAX_INTEGER])
def test_a_step_is_within_bounds(step: int) -> None:
    with pytest.raises(ValueError, match=str(MAX_INTEGER - 1)):
        checked_line({"step": step})
    assert checked_line({"step": 0}) == (0, {})
    expected = (MAX_INTEGER - 1, {"a": 1.0})
    assert checked_line({"step": MAX_INTEGER - 1, "a": 1}) == expected


def test_a_long_value_is_shown_by_its_beginning() -> None:
    assert shown_value("x" * 1000) == repr("x" * 40)
    assert shown_value(["x"] * 1000) == "a JSON list"
    assert shown_value("\x1b") == "'\\x1b'"
