"""Equality of samples and records: bits, rounding, NaN, moments, and what one of two lacks."""

from __future__ import annotations

import math
from typing import Any

import pyarrow as pa
import pytest

from reinforce_rl.debugging.differences import (
    EQUAL_BITS,
    ROUNDING,
    Bounds,
    fact_differences,
    missing_samples,
    number_differences,
    sample_differences,
    tensor_differences,
    update_differences,
)
from reinforce_rl.monitoring.step_record import RankState, StepRecord


def record_of(**changes: Any) -> StepRecord:
    facts: dict[str, Any] = {
        "software": {},
        "machine": {},
        "layout": {},
        "settings": {},
        "files": {},
    }
    values = {
        **facts,
        "step": 3,
        "past": {},
        "updates": [],
        "data": {},
        "scorer": None,
        "reference": None,
    }
    return StepRecord(**{**values, **changes})


@pytest.mark.parametrize("bounds", [EQUAL_BITS, ROUNDING])
@pytest.mark.parametrize("other", [0.0, 1.0, math.inf, None])
def test_nan_equals_nan_alone(other, bounds):
    nan = math.nan
    assert number_differences({"loss": nan}, {"loss": nan}, bounds) == []
    assert len(number_differences({"loss": nan}, {"loss": other}, bounds)) == 1
    assert len(number_differences({"loss": other}, {"loss": nan}, bounds)) == 1
    of_nan = table_of(pa.array([nan], pa.float64(), from_pandas=False))
    of_other = table_of(pa.array([other], pa.float64(), from_pandas=False))
    assert len(sample_differences(of_nan, of_other, ["x"], bounds)) == 1
    assert len(sample_differences(of_other, of_nan, ["x"], bounds)) == 1


def table_of(column: pa.Array | list) -> pa.Table:
    """Return a single sample with the column `x`."""
    return pa.table({"prompt_id": [0], "sample_id": [0], "x": column})


@pytest.mark.parametrize("bounds", [EQUAL_BITS, ROUNDING])
def test_nan_within_a_list_equals_nan_alone(bounds):
    numbers = table_of([[0.5, 0.25]])
    second_nan = table_of([[0.5, math.nan]])
    also_second_nan = table_of([[0.5, math.nan]])
    assert sample_differences(second_nan, also_second_nan, ["x"], bounds) == []
    (difference,) = sample_differences(second_nan, numbers, ["x"], bounds)
    assert difference.token == 1
    first_nan = table_of([[math.nan, 0.25]])
    (difference,) = sample_differences(numbers, first_nan, ["x"], bounds)
    assert difference.token == 0


def test_a_response_that_is_the_beginning_of_another_one_is_another():
    """Comparisons stop at the end of the shorter one, so lengths are compared too."""
    short = table_of([[0.5, 0.25]])
    long = table_of([[0.5, 0.25, 0.125]])
    for bounds in (EQUAL_BITS, ROUNDING):
        for left, right in ((short, long), (long, short)):
            (difference,) = sample_differences(left, right, ["x"], bounds)
            assert difference.token == 2


@pytest.mark.parametrize(("difference", "is_rounding"), [(0.9, True), (1.1, False), (5.0, False)])
def test_rounding_has_its_size(difference, is_rounding):
    """Near 0 the bound is absolute, at 1,000 relative; values are multiples of the bounds."""
    small = number_differences({"x": 0.0}, {"x": difference * ROUNDING.absolute}, ROUNDING)
    second = {"x": 1000.0 * (1 + difference * ROUNDING.relative)}
    large = number_differences({"x": 1000.0}, second, ROUNDING)
    assert (small == []) is is_rounding
    assert (large == []) is is_rounding


MOMENTS = {"w.exp_avg": "01", "w.exp_avg_sq": "02"}


@pytest.mark.parametrize("kind", ["before", "after", "optimizer"])
@pytest.mark.parametrize(
    ("sums", "name"),
    [
        ({**MOMENTS, "w.exp_avg": "09"}, "w.exp_avg"),
        ({**MOMENTS, "w.exp_avg_sq": "09"}, "w.exp_avg_sq"),
        ({"w.exp_avg": "01"}, "w.exp_avg_sq"),
        ({}, "w.exp_avg"),
        ({**MOMENTS, "w.step": "03"}, "w.step"),
    ],
)
def test_a_tensor_that_differs_or_is_absent_is_named(sums, name, kind):
    def states(values: dict[str, str]) -> list[RankState]:
        tensors = {"before": {}, "after": {}, "optimizer": {}, kind: values}
        return [RankState(0, **tensors, random="")]

    assert tensor_differences(states(MOMENTS), states(dict(MOMENTS)), kind) == []
    for left, right in ((MOMENTS, sums), (sums, MOMENTS)):
        (difference,) = tensor_differences(states(left), states(right), kind)
        assert difference.quantity == f"tensor {name}"


@pytest.mark.parametrize("counts", [(1, 2), (2, 1)])
def test_another_number_of_optimizer_steps_is_a_difference(counts):
    """The steps in both records would not show it."""
    left, right = (record_of(updates=[{"loss": 0.5}] * count) for count in counts)
    (difference,) = update_differences(left, right)
    assert (difference.first, difference.second) == counts


def test_facts_that_one_of_two_records_lacks_are_no_difference():
    """Records of earlier releases have no digest of a file; a digest in both is compared."""
    known = record_of(files={"reward": "aa"}, scorer={"name": "a"}, reference="01")
    unknown = record_of(files={"reward": None}, scorer=None, reference=None)
    assert fact_differences(known, unknown) == fact_differences(unknown, known) == []
    assert fact_differences(known, known) == []
    other = record_of(files={"reward": "bb"}, scorer={"name": "b"}, reference="02")
    facts = fact_differences(known, other)
    assert len(facts) == 3
    assert "reward" in facts[0]


def table(**columns: list) -> pa.Table:
    count = len(next(iter(columns.values())))
    return pa.table({"prompt_id": list(range(count)), "sample_id": [0] * count, **columns})


@pytest.mark.parametrize(
    ("values", "other", "bounds", "expected"),
    [
        ([1.0, 2.0], [1.0, 2.0], EQUAL_BITS, None),
        ([1.0, 2.0], [1.0, math.nextafter(2.0, 3.0)], EQUAL_BITS, (1, None)),
        ([1.0, 2.0], [1.0, 2.0001], ROUNDING, None),
        ([1.0, 2.0], [1.0, 2.1], ROUNDING, (1, None)),
        ([1.0, None], [1.0, 2.0], ROUNDING, (1, None)),
        ([math.nan], [math.nan], ROUNDING, None),
        ([[1, 2, 3]], [[1, 5, 3]], ROUNDING, (0, 1)),
        ([[1, 2, 3]], [[1, 2]], ROUNDING, (0, 2)),
        ([[0.5, 0.25]], [[0.5, 0.75]], ROUNDING, (0, 1)),
        ([[0.5, 0.25]], [None], ROUNDING, (0, None)),
        (["a", "b"], ["a", "c"], ROUNDING, (1, None)),
    ],
)
def test_columns(values: list, other: list, bounds: Bounds, expected: tuple | None) -> None:
    differences = sample_differences(table(x=values), table(x=other), ["x", "absent"], bounds)
    places = [(each.prompt_id, each.token) for each in differences]
    assert places == ([] if expected is None else [expected])


def test_samples_that_one_lacks() -> None:
    first = table(x=[1, 2, 3])
    second = table(x=[1, 2])
    assert missing_samples(first, first) is None
    missing = missing_samples(first, second)
    assert missing is not None
    expected = ("sample 2 of the step", "prompt 2, sample 0", "none", 1)
    assert (missing.quantity, missing.first, missing.second, missing.count) == expected


def test_long_texts_are_shown_where_they_part() -> None:
    text = "You are a helpful assistant. " * 5
    differences = sample_differences(
        table(prompt=[text + "Bake bread"]), table(prompt=[text + "Bake breads"]), ["prompt"]
    )
    assert 'bread" and "...' in str(differences[0]).replace('..."', '"...')
    assert "from character 155" in str(differences[0])
