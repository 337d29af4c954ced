"""Reward shaping: each option against its formula, and their order."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from reinforce_rl.algorithms.moments import RunningMoments
from reinforce_rl.algorithms.rewards import RewardShaping, shape_rewards

REWARDS = torch.tensor([1.0, -3.0, 8.0, math.nan], dtype=torch.float64)
VALID = ~REWARDS.isnan()
LENGTHS = torch.tensor([2, 6, 10, 1])
ENDED = torch.tensor([True, True, False, True])
NOTHING = RewardShaping(max_length=10)


def shaped(shaping: RewardShaping, past: RunningMoments | None = None) -> list[float]:
    values = shape_rewards(REWARDS, VALID, LENGTHS, ENDED, shaping, past or RunningMoments())
    assert values[3].isnan(), "what was not scored stays so"
    return values[:3].tolist()


def test_by_default_nothing_happens():
    assert shaped(NOTHING) == [1.0, -3.0, 8.0]


def test_the_order_is_standardise_scale_clip_penalise():
    shaping = RewardShaping("given", 1.0, 2.0, 3.0, 5.0, 0.1, 4.0, 0, 10)
    # (r - 1) / 2 * 3: 0, -6, 10.5; clipped: 0, -5, 5; length: -0.2, -0.6, -1; the last one was cut
    assert shaped(shaping) == pytest.approx([-0.2, -5.6, 0.0])


def test_running_moments_are_the_past_or_the_first_steps_own():
    running = replace(NOTHING, standardisation="running")
    mean, deviation = 2.0, float(REWARDS[:3].std())
    assert shaped(running) == pytest.approx([(r - mean) / deviation for r in (1.0, -3.0, 8.0)])
    past = RunningMoments.of(torch.tensor([10.0, 14.0]))
    assert shaped(running, past) == pytest.approx([(r - 12.0) / math.sqrt(8) for r in (1.0, -3.0, 8.0)])


def test_rewards_that_never_differed_do_not_blow_up():
    running = replace(NOTHING, standardisation="running")
    equal = shape_rewards(
        torch.full((2,), 5.0), torch.ones(2).bool(), LENGTHS[:2], ENDED[:2], running, RunningMoments()
    )
    assert equal.tolist() == [0.0, 0.0]
    assert shaped(running, RunningMoments(100.0, 5.0, 0.0)) == [0.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("length", "ended", "penalty"),
    [(1, True, 0), (6, True, 0), (7, True, 0.5), (8, True, 1.0), (10, True, 2.0), (10, False, 2.0), (4, False, 2.0)],
)
def test_soft_overlong_punishment(length, ended, penalty):
    """DAPO, equation 13, with L_max 10 and L_cache 4, times 2."""
    shaping = replace(NOTHING, truncation_penalty=2.0, overlong_buffer=4)
    found = shape_rewards(
        torch.tensor([3.0]),
        torch.tensor([True]),
        torch.tensor([length]),
        torch.tensor([ended]),
        shaping,
        RunningMoments(),
    )
    assert found.item() == 3.0 - penalty


def test_without_a_buffer_only_cut_responses_pay():
    assert shaped(replace(NOTHING, truncation_penalty=2.0)) == [1.0, -3.0, 6.0]


@settings(deadline=None, max_examples=60)
@given(st.lists(st.lists(st.floats(-1e6, 1e6), max_size=6), max_size=6))
def test_moments_of_parts_are_those_of_the_whole(parts):
    moments = RunningMoments()
    for part in parts:
        moments.update(torch.tensor(part, dtype=torch.float64))
    everything = torch.tensor([x for part in parts for x in part], dtype=torch.float64)
    assert moments.count == len(everything)
    if len(everything):
        assert moments.mean == pytest.approx(float(everything.mean()), abs=1e-6)
    if len(everything) > 1:
        assert moments.deviation == pytest.approx(float(everything.std()), rel=1e-9, abs=1e-6)
    else:
        assert moments.deviation == 0.0


def test_small_deviations_beside_a_large_mean_are_not_lost():
    moments = RunningMoments()
    for _ in range(100):
        moments.update(1e6 + torch.tensor([-1.0, 1.0], dtype=torch.float64))
    assert moments.deviation == pytest.approx(math.sqrt(200 / 199), rel=1e-9)
