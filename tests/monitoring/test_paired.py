"""Comparison of validations by prompt."""

from __future__ import annotations

import math

import pytest

from reinforce_rl.monitoring.paired import compare_validation
from reinforce_rl.monitoring.records import RolloutRow
from reinforce_rl.utils.statistics import two_sided_p

NAN = math.nan


def row(prompt_id: int = 0, reward: float = 0.5, sample_id: int = 0) -> RolloutRow:
    return RolloutRow(
        12, prompt_id, sample_id, f"prompt {prompt_id}", "response", reward, "stop", 3
    )


def test_by_hand():
    before = [row(0, 0.0), row(1, 1.0), row(2, 2.0), row(3, 5.0)]
    # another order: pairs are made by prompt
    after = [row(3, 5.0), row(2, 4.0), row(1, 2.0), row(0, 1.0)]
    comparison = compare_validation(before, after)
    assert comparison.n == 4
    assert comparison.mean_before == 2.0
    assert comparison.mean_after == 3.0
    assert comparison.mean_difference == 1.0
    # differences 1, 1, 2, 0: variance 2 / 3, over 4 prompts
    error = math.sqrt(2 / 3 / 4)
    assert comparison.standard_error == pytest.approx(error)
    assert comparison.degrees == 3
    expected = (1 - 3.1824 * error, 1 + 3.1824 * error)
    assert comparison.interval == pytest.approx(expected, abs=1e-4)
    assert comparison.smallest_gain == pytest.approx((3.1824 + 0.9785) * error, abs=1e-4)
    assert comparison.p == pytest.approx(two_sided_p(1 / error, 3))


def test_pairing_makes_the_error_smaller_than_the_spread_of_prompts():
    before = [row(i, 10.0 * i) for i in range(50)]
    after = [row(i, 10.0 * i + 1 + 0.1 * (-1) ** i) for i in range(50)]
    assert compare_validation(before, after).p < 1e-30


def test_failed_and_absent_prompts_are_left_out_in_pairs_and_counted():
    before = [row(0, 0.0), row(1, NAN), row(2, 1.0), row(8, 100.0), row(4, 0.0)]
    after = [row(0, 1.0), row(1, 50.0), row(2, NAN), row(9, -100.0), row(4, 3.0)]
    comparison = compare_validation(before, after)
    assert comparison.n == 2
    assert comparison.left_out == 4
    assert comparison.mean_before == 0.0
    assert comparison.mean_after == 2.0
    assert comparison.sentence().endswith("; 4 left out, not scored on both sides")


def test_several_samples_of_a_prompt_count_once():
    before = [row(0, 0.0), row(0, 2.0, 1), row(1, 0.0), row(1, NAN, 1), row(2, 0.0)]
    after = [row(0, 4.0), row(1, 0.0), row(2, 1.0)]
    comparison = compare_validation(before, after)
    assert comparison.n == 2
    assert comparison.left_out == 1
    assert comparison.mean_difference == 2.0
    before = [row(i, 0.0, j) for i in range(3) for j in range(50)]
    many = compare_validation(before, [row(i, i) for i in range(3)])
    assert many.n == 3
    assert many.standard_error == pytest.approx(1 / math.sqrt(3))


def test_infinite_rewards_are_left_out_as_nan_is():
    before = [row(0, math.inf), row(0, -math.inf, 1), row(1)]
    comparison = compare_validation(before, [row(0), row(1)])
    assert comparison.n == 1
    assert comparison.left_out == 1


def test_one_prompt_and_none():
    single = compare_validation([row(reward=0.25)], [row(reward=0.5)])
    assert (
        single.sentence()
        == "0.250 -> 0.500: +0.250 on one prompt: this says nothing about other prompts"
    )
    assert math.isnan(single.p)
    assert math.isnan(single.smallest_gain)
    assert math.isnan(single.interval[0])
    none = compare_validation([], [row()])
    assert none.n == 0
    assert none.sentence() == "no prompt was scored on both sides"
    assert none.change() == "-"
