"""Running moments against those of all numbers at once."""

from __future__ import annotations

import copy
import math
import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from reinforce_rl.algorithm.moments import RunningMoments

numbers = st.lists(st.floats(-1e6, 1e6), max_size=8)


def double(values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def check(moments: RunningMoments, values: list[float]) -> None:
    assert moments.count == len(values)
    assert moments.mean == pytest.approx(math.fsum(values) / len(values) if values else 0.0, rel=1e-9, abs=1e-9)
    deviation = statistics.stdev(values) if len(values) > 1 else 0.0
    assert moments.deviation == pytest.approx(deviation, rel=1e-7, abs=1e-6)


@settings(deadline=None, max_examples=50)
@given(st.lists(numbers, max_size=6))
def test_in_parts_as_at_once(parts):
    moments = RunningMoments()
    for part in parts:
        moments.update(double(part))
    check(moments, [value for part in parts for value in part])


@settings(deadline=None, max_examples=50)
@given(numbers, numbers, numbers)
def test_the_order_and_the_nesting_of_merges_do_not_matter(first, second, third):
    one, two, three = (RunningMoments.of(double(part)) for part in (first, second, third))
    left = copy.copy(one)
    left.merge(two)
    left.merge(three)
    right = copy.copy(three)
    inner = copy.copy(two)
    inner.merge(one)
    right.merge(inner)
    check(left, first + second + third)
    check(right, first + second + third)


def test_what_is_merged_is_left_alone():
    one, two = RunningMoments.of(double([1.0, 2.0])), RunningMoments.of(double([5.0]))
    one.merge(two)
    assert two == RunningMoments.of(double([5.0])) and one.count == 3


def test_nothing_is_nothing():
    moments = RunningMoments.of(torch.zeros(0))
    assert moments == RunningMoments() and moments.deviation == 0.0
    moments.merge(RunningMoments())
    assert moments == RunningMoments(0.0, 0.0, 0.0)


def test_one_number_has_no_deviation():
    assert RunningMoments.of(double([3.0])) == RunningMoments(1.0, 3.0, 0.0)
    assert RunningMoments.of(double([3.0])).deviation == 0.0


def test_a_small_spread_on_a_large_mean_is_not_cancelled():
    """The difference of the mean square and the squared mean would be 0 here, or negative."""
    moments = RunningMoments()
    for value in (1e9, 1e9 + 1, 1e9 + 2):
        moments.update(double([value]))
    assert moments.deviation == pytest.approx(1.0, rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_sums_are_taken_in_float64(dtype):
    values = torch.tensor([1, 2, 4, 256], dtype=dtype)
    check(RunningMoments.of(values.repeat(1000)), [1.0, 2.0, 4.0, 256.0] * 1000)


def test_decayed_numbers_count_less_in_mean_and_deviation():
    moments = RunningMoments.of(double([1.0, 3.0]))
    moments.decay(0.5)
    moments.update(double([4.0, 6.0]))
    mean = (0.5 * (1 + 3) + 4 + 6) / 3
    squares = 0.5 * ((1 - mean) ** 2 + (3 - mean) ** 2) + (4 - mean) ** 2 + (6 - mean) ** 2
    assert (moments.count, moments.mean, moments.squares) == pytest.approx((3.0, mean, squares))
