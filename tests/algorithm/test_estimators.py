"""The other estimators against their formulas, and the names that a configuration allows."""

from __future__ import annotations

import inspect
import math

import pytest
import torch
from helpers.choices import KL_ESTIMATORS
from hypothesis import given, settings
from hypothesis import strategies as st

from reinforce_rl.algorithm import kl
from reinforce_rl.algorithm.advantages import ADVANTAGE_ESTIMATORS, RewardGroups

REWARDS = torch.tensor([1.0, 3.0, 8.0, 5.0, 5.0, 9.0, math.nan], dtype=torch.float64)
GROUPS = torch.tensor([4, 4, 4, 7, 7, 9, 4])
VALID = ~REWARDS.isnan()


def found(name: str, **options):
    return ADVANTAGE_ESTIMATORS[name].function(RewardGroups.of(REWARDS, GROUPS, VALID, **options))


EXPECTED = {
    "none": [1, 3, 8, 5, 5, 9],
    "running_mean": [-1.5, 0.5, 5.5, 2.5, 2.5, 6.5],  # past mean 2.5
    "moving_average": [-1.5, 0.5, 5.5, 2.5, 2.5, 6.5],
    "exponential_moving_average": [-1.5, 0.5, 5.5, 2.5, 2.5, 6.5],
    "batch_mean": [r - 31 / 6 for r in (1, 3, 8, 5, 5, 9)],
    "prompt_mean": [-3, -1, 4, 0, 0, 0],
    "rloo": [-4.5, -1.5, 6, 0, 0, 0],
    "grpo": [*(d / (math.sqrt(13) + 1e-4) for d in (-3, -1, 4)), 0, 0, 0],
    "raft": [0, 0, 1, 1, 0, 1],
}


@pytest.mark.parametrize("name", ADVANTAGE_ESTIMATORS)
def test_each_is_its_formula(name):
    result = found(name, past_mean=2.5)
    expected = torch.tensor([*EXPECTED[name], 0.0], dtype=torch.float64)
    torch.testing.assert_close(result.values, expected)
    trains = [False, False, True, True, False, True, False] if name == "raft" else VALID.tolist()
    assert result.trains.tolist() == trains


@pytest.mark.parametrize("name", ADVANTAGE_ESTIMATORS)
@settings(deadline=None, max_examples=40)
@given(
    rows=st.lists(st.tuples(st.floats(-1e6, 1e6), st.integers(0, 3), st.booleans()), max_size=12)
)
def test_no_rewards_give_a_nan_or_an_infinity(name, rows):
    rewards = torch.tensor([row[0] for row in rows], dtype=torch.float64)
    groups = torch.tensor([row[1] for row in rows], dtype=torch.long)
    valid = torch.tensor([row[2] for row in rows], dtype=torch.bool)
    result = ADVANTAGE_ESTIMATORS[name].function(RewardGroups.of(rewards, groups, valid))
    assert torch.isfinite(result.values).all()
    assert torch.isfinite(result.baseline).all()
    assert not result.values[~valid].any()
    assert not result.trains[~valid].any()


def test_nearly_equal_rewards_do_not_blow_up():
    rewards = 0.95 + 1e-7 * torch.tensor([0.0, 1.0, -1.0, 0.0])
    groups = torch.zeros(4, dtype=torch.long)
    assert (
        ADVANTAGE_ESTIMATORS["grpo"].function(RewardGroups.of(rewards, groups)).values.abs().max()
        < 0.01
    )


def test_raft_takes_the_first_of_the_best_and_nothing_of_a_group_without_a_valid_one():
    rewards = torch.tensor([2.0, 2.0, 1.0, math.nan])
    group_ids = torch.tensor([0, 0, 0, 5])
    valid = torch.tensor([True, True, True, False])
    groups = RewardGroups.of(rewards, group_ids, valid)
    assert ADVANTAGE_ESTIMATORS["raft"].function(groups).trains.tolist() == [
        True,
        False,
        False,
        False,
    ]


@pytest.mark.parametrize("reward", [2e6, -math.inf, math.nan])
def test_a_valid_reward_beyond_the_largest_is_refused(reward):
    with pytest.raises(ValueError, match="not finite or beyond 1e"):
        RewardGroups.of(torch.tensor([reward, 1.0]), torch.tensor([0, 0]))


def test_every_name_has_a_function_with_a_docstring_and_a_place_in_the_documentation():
    from pathlib import Path

    page = (Path(__file__).parents[2] / "docs" / "algorithms.md").read_text(encoding="utf-8")
    for name in ADVANTAGE_ESTIMATORS:
        assert inspect.getdoc(ADVANTAGE_ESTIMATORS[name].function), name
        assert f"`{name}`" in page, f"docs/algorithms.md does not name {name}"
    for name in KL_ESTIMATORS:
        assert inspect.getdoc(getattr(kl, name)), name
        assert f"`{name}`" in page, f"docs/algorithms.md does not name {name}"
