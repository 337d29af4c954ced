"""Reward shaping, running moments, and groups with unequal rewards."""

from __future__ import annotations

import copy
import math
import statistics
from collections import defaultdict
from dataclasses import replace

import pytest
import torch
from helpers.choices import REWARD_STANDARDIZATIONS
from helpers.errors import raises_error
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from reinforce_rl.algorithm.advantages import MAX_REWARD, RewardGroups
from reinforce_rl.algorithm.rewards import (
    TOLERANCE,
    RunningMoments,
    has_reward_variance,
    shape_rewards,
    subtract_kl,
    subtract_truncation_penalty,
)
from reinforce_rl.config.actor import RewardShapingConfig
from reinforce_rl.errors import DivergedError, RewardServerError

NOTHING_PAST = RunningMoments()
NO_SHAPING = RewardShapingConfig()
RUNNING = RewardShapingConfig(standardization="running")


def shaped(
    rewards: list[float],
    shaping: RewardShapingConfig = NO_SHAPING,
    *,
    lengths: list[int] | None = None,
    ended: list[bool] | None = None,
    valid: list[bool] | None = None,
    past: RunningMoments = NOTHING_PAST,
    penalty: float = 0.0,
    buffer: int = 0,
    max_length: int = 1,
) -> list[float]:
    values = torch.tensor(rewards, dtype=torch.float64)
    everything = [True] * len(rewards)
    response_lengths = torch.tensor(lengths or [1] * len(rewards))
    is_valid = torch.tensor(valid or everything)
    has_ended = torch.tensor(everything if ended is None else ended)
    penalised = subtract_truncation_penalty(
        shape_rewards(values, is_valid, response_lengths, shaping, past),
        response_lengths,
        has_ended,
        penalty=penalty,
        buffer=buffer,
        max_length=max_length,
    )
    return penalised.tolist()


def test_by_default_nothing_is_done():
    assert shaped([1.5, -2.0], lengths=[3, 7], ended=[True, False]) == [1.5, -2.0]


class TestStandardisation:
    def test_given(self):
        assert shaped(
            [3.0, -1.0], RewardShapingConfig(standardization="given", mean=1.0, std=4.0)
        ) == [0.5, -0.5]

    @pytest.mark.parametrize("seen", [[], [5.0]])
    def test_the_first_step_takes_its_own_moments(self, seen):
        """A single number has no deviation yet."""
        past = RunningMoments.of(torch.tensor(seen, dtype=torch.float64))
        standardised = shaped([1.0, 2.0, 6.0], RUNNING, past=past)
        deviation = math.sqrt((4 + 1 + 9) / 2)
        expected = [-2 / deviation, -1 / deviation, 3 / deviation]
        assert standardised == pytest.approx(expected)

    def test_a_later_step_takes_past_moments_only(self):
        # mean 2, deviation sqrt(8)
        past = RunningMoments.of(torch.tensor([0.0, 4.0], dtype=torch.float64))
        assert shaped([2.0, 10.0], RUNNING, past=past) == pytest.approx([0.0, math.sqrt(8)])
        assert past == RunningMoments.of(torch.tensor([0.0, 4.0], dtype=torch.float64)), (
            "reading does not feed it"
        )

    def test_the_first_moments_are_of_the_valid_samples(self):
        standardised = shaped([1.0, math.nan, 3.0, 1e30], RUNNING, valid=[True, False, True, False])
        expected = [-math.sqrt(0.5), math.sqrt(0.5)]
        assert [standardised[0], standardised[2]] == pytest.approx(expected)

    @pytest.mark.parametrize("reward", [0.0, 0.95, -1e6 + 1 / 3])
    @pytest.mark.parametrize("noise", [0.0, 1e-7])
    def test_equal_rewards_do_not_blow_up(self, reward, noise):
        """The first step uses its own moments; then a reward differs."""
        equal = [reward, reward * (1 + noise), reward * (1 - noise), reward]
        assert shaped(equal, RUNNING) == [0.0] * 4
        past = RunningMoments.of(torch.tensor(equal, dtype=torch.float64))
        assert shaped([reward, reward + 1.0], RUNNING, past=past) == [0.0, 0.0]

    def test_of_a_single_valid_sample_nothing_is_left(self):
        standardised = shaped([7.0, math.nan], RUNNING, valid=[True, False])
        assert standardised[0] == 0.0
        assert math.isnan(standardised[1]), "what was not scored stays so"


# DAPO's own numbers: 16384 expected tokens, a buffer of 4096 above them, penalty factor 1.
DAPO = {"penalty": 1.0, "buffer": 4096, "max_length": 20480}


class TestOverlongResponses:
    @pytest.mark.parametrize(
        ("length", "expected"),
        [
            (1, 0.0),
            (16384, 0.0),
            (16385, -1 / 4096),
            (17408, -0.25),
            (18432, -0.5),
            (20479, -4095 / 4096),
            (20480, -1),
        ],
    )
    def test_ended_responses_follow_equation_13_of_dapo(self, length, expected):
        assert shaped([0.0], lengths=[length], **DAPO) == pytest.approx([expected], abs=1e-7)

    @settings(deadline=None, max_examples=40)
    @given(st.integers(1, 50), st.integers(1, 50), st.integers(0, 120))
    def test_equation_13_for_any_sizes(self, buffer, expected, length):
        longest = expected + buffer
        length = min(length, longest)
        punishment = 0.0 if length <= longest - buffer else (longest - buffer - length) / buffer
        rewards = shaped([1.0], lengths=[length], penalty=2.5, buffer=buffer, max_length=longest)
        assert rewards == pytest.approx([1.0 + 2.5 * punishment], abs=1e-6)

    def test_a_cut_response_has_the_whole_penalty(self):
        assert shaped([0.0], lengths=[20480], ended=[False], **DAPO) == [-1.0]

    def test_a_buffer_as_long_as_the_response_begins_at_once(self):
        lengths = [0, 1, 2, 3, 4]
        rewards = shaped([0.0] * 5, lengths=lengths, penalty=1.0, buffer=4, max_length=4)
        assert rewards == pytest.approx([0, -0.25, -0.5, -0.75, -1])

    def test_without_a_buffer_only_cut_responses_are_penalised(self):
        cut = {"lengths": [8, 8], "ended": [True, False]}
        assert shaped([1.0, 1.0], **cut, penalty=3.0, max_length=8) == [1.0, -2.0]


CUT_AT_FOUR = {"penalty": 100.0, "max_length": 4}


class TestOrder:
    EVERYTHING = RewardShapingConfig(
        standardization="given",
        mean=1.0,
        std=2.0,
        scale=10.0,
        clip=5.0,
        length_penalty=0.25,
    )

    def test_standardise_scale_clip_then_penalties(self):
        rewards = shaped(
            [1.2, 9.0, -9.0],
            self.EVERYTHING,
            lengths=[2, 4, 4],
            ended=[True, True, False],
            **CUT_AT_FOUR,
        )
        # (1.2 - 1) / 2 * 10 = 1; the others are clipped to 5 before the subtraction.
        assert rewards == pytest.approx([1.0 - 0.5, 5.0 - 1.0, -5.0 - 1.0 - 100.0])

    def test_penalties_are_neither_scaled_nor_clipped(self):
        rewards = shaped([1.2, -9.0], self.EVERYTHING, lengths=[1, 4], **CUT_AT_FOUR)
        assert rewards == pytest.approx([1.0 - 0.25, -5.0 - 1.0])

    def test_scale_comes_after_the_mean_is_taken(self):
        assert shaped(
            [3.0], RewardShapingConfig(standardization="given", mean=1.0, scale=10.0)
        ) == [20.0]

    def test_clip_bounds_both_sides(self):
        assert shaped([-3.0, 0.5, 3.0], RewardShapingConfig(clip=1.0)) == [-1.0, 0.5, 1.0]


@pytest.mark.parametrize("standardization", REWARD_STANDARDIZATIONS)
@settings(deadline=None, max_examples=30)
@given(
    rows=st.lists(
        st.tuples(
            st.floats(-MAX_REWARD, MAX_REWARD), st.booleans(), st.integers(0, 8), st.booleans()
        ),
        max_size=8,
    ),
    anything=st.sampled_from([math.nan, math.inf, -math.inf]),
    buffer=st.integers(0, 8),
    past=st.lists(st.floats(-MAX_REWARD, MAX_REWARD), max_size=4),
)
def test_an_invalid_sample_changes_no_other_reward(standardization, rows, anything, buffer, past):
    columns = list(zip(*rows, strict=True)) or [()] * 4
    rewards = torch.tensor(columns[0], dtype=torch.float64)
    valid = torch.tensor(columns[1], dtype=torch.bool)
    ended = torch.tensor(columns[3], dtype=torch.bool)
    lengths = torch.tensor(columns[2], dtype=torch.long)
    shaping = RewardShapingConfig(
        standardization=standardization,
        mean=0.5,
        std=2.0,
        scale=3.0,
        length_penalty=0.1,
    )
    moments = RunningMoments.of(torch.tensor(past, dtype=torch.float64))

    def run(values: Tensor) -> Tensor:
        shaped_values = shape_rewards(values, valid, lengths, shaping, replace(moments))
        return subtract_truncation_penalty(
            shaped_values, lengths, ended, penalty=1.0, buffer=buffer, max_length=8
        )

    shaped_rewards = run(torch.where(valid, rewards, anything))
    assert torch.isfinite(shaped_rewards[valid]).all()
    assert torch.equal(shaped_rewards[valid], run(torch.where(valid, rewards, 0.0))[valid])
    # The value of an invalid sample has no further effect.
    if bool((shaped_rewards[valid].abs() <= MAX_REWARD).all()):
        groups = RewardGroups.of(shaped_rewards, torch.zeros(len(valid)).long(), valid)
        assert torch.isfinite(groups.mean_by_group()).all()


numbers = st.lists(st.floats(-1e6, 1e6), max_size=8)


def double(values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def check(moments: RunningMoments, values: list[float]) -> None:
    assert moments.count == len(values)
    expected = math.fsum(values) / len(values) if values else 0.0
    assert moments.mean == pytest.approx(expected, rel=1e-9, abs=1e-9)
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
    a = RunningMoments.of(double(first))
    b = RunningMoments.of(double(second))
    c = RunningMoments.of(double(third))
    left = copy.copy(a)
    left.merge(b)
    left.merge(c)
    right = copy.copy(c)
    inner = copy.copy(b)
    inner.merge(a)
    right.merge(inner)
    check(left, first + second + third)
    check(right, first + second + third)


def test_what_is_merged_is_left_alone():
    left = RunningMoments.of(double([1.0, 2.0]))
    right = RunningMoments.of(double([5.0]))
    left.merge(right)
    assert right == RunningMoments.of(double([5.0]))
    assert left.count == 3


def test_nothing_is_nothing():
    moments = RunningMoments.of(torch.zeros(0))
    assert moments == RunningMoments()
    assert moments.deviation == 0.0
    moments.merge(RunningMoments())
    assert moments == RunningMoments(0.0, 0.0, 0.0)


def test_one_number_has_no_deviation():
    assert RunningMoments.of(double([3.0])) == RunningMoments(1.0, 3.0, 0.0)
    assert RunningMoments.of(double([3.0])).deviation == 0.0


def test_a_small_spread_on_a_large_mean_is_not_cancelled():
    """The mean square minus the squared mean would be 0 here, or negative."""
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
    old_squares = (1 - mean) ** 2 + (3 - mean) ** 2
    new_squares = (4 - mean) ** 2 + (6 - mean) ** 2
    squares = 0.5 * old_squares + new_squares
    assert (moments.count, moments.mean, moments.squares) == pytest.approx((3.0, mean, squares))


def differs(
    rewards: list[float], groups: list[int], valid: list[bool] | None = None, dtype=torch.float64
):
    valid = [True] * len(rewards) if valid is None else valid
    has_variance = has_reward_variance(
        torch.tensor(rewards, dtype=dtype), torch.tensor(groups).long(), torch.tensor(valid).bool()
    )
    assert has_variance.dtype == torch.bool
    return has_variance.tolist()


@settings(deadline=None, max_examples=50)
@given(
    st.lists(
        st.tuples(
            st.sampled_from([-1.0, 0.0, 0.5, 1e6]), st.sampled_from([-(2**62), 0, 3]), st.booleans()
        ),
        max_size=12,
    ),
    st.sampled_from([math.nan, math.inf, -math.inf]),
)
def test_by_brute_force_for_any_invalid_values(rows, anything):
    distinct = defaultdict(set)
    for reward, group, is_valid in rows:
        if is_valid:
            distinct[group].add(reward)
    expected = [len(distinct[group]) > 1 for _, group, _ in rows]
    rewards = [reward if ok else anything for reward, _, ok in rows]
    assert differs(rewards, [row[1] for row in rows], [row[2] for row in rows]) == expected


def test_a_reward_less_its_kl_must_be_a_number_within_the_bound():
    valid = torch.tensor([True, True, False])
    rewards = torch.tensor([1.0, 3.0, math.nan])
    kl = torch.tensor([0.0, 2.0, math.nan])
    shaped = subtract_kl(rewards, kl, 0.5, valid, step=7)
    assert shaped[valid].tolist() == [1.0, 2.0]
    values = ("1 of 2", "step 7", "1e+06", " 3,", "1e+12", " 2 nats")
    with raises_error("algorithm.reward.out_of_range", *values) as raised:
        subtract_kl(rewards, kl, 1e12, valid, step=7)
    assert isinstance(raised.value, RewardServerError), "after which the run saves"
    everything = torch.ones(3, dtype=torch.bool)
    with raises_error("algorithm.log_probs.not_finite", "step 7") as raised:
        subtract_kl(rewards, kl, 0.5, everything, step=7)
    assert isinstance(raised.value, DivergedError), "after which the run does not"


def test_every_sample_of_a_group_has_the_answer_of_the_group():
    expected = [True] * 3 + [False] * 2
    assert differs([1.0, 1.0, 2.0, 3.0, 3.0], [7, 7, 7, 9, 9]) == expected


def test_fewer_than_two_valid_samples_have_no_spread():
    assert differs([1.0, 5.0, math.nan], [0, 1, 1], [True, True, False]) == [False] * 3
    assert differs([1.0, 5.0], [0, 0], [False, False]) == [False] * 2


def test_a_group_of_equal_rewards_and_a_failed_one_has_none():
    assert differs([1.0, 1.0, 1.0, 0.0], [0] * 4, [True, True, True, False]) == [False] * 4


@pytest.mark.parametrize("size", [0.0, 1.0, -0.3, 1e3, -1e6])
def test_rounding_is_no_spread_at_any_size(size):
    step = TOLERANCE * max(abs(size), 1.0)
    assert differs([size, size + 0.5 * step], [0, 0]) == [False] * 2
    assert differs([size, size + 2 * step], [0, 0]) == [True] * 2
    noisy = torch.tensor([size, size]) * torch.tensor([1.0, 1.0 + 2**-23])
    assert differs(noisy.tolist(), [0, 0], dtype=torch.float32) == [False] * 2
