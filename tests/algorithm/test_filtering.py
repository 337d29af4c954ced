"""Which groups teach something."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from reinforce_rl.algorithm.filtering import TOLERANCE, in_group_with_spread


def differs(rewards: list[float], groups: list[int], valid: list[bool] | None = None, dtype=torch.float64):
    valid = [True] * len(rewards) if valid is None else valid
    found = in_group_with_spread(
        torch.tensor(rewards, dtype=dtype), torch.tensor(groups).long(), torch.tensor(valid).bool()
    )
    assert found.dtype == torch.bool
    return found.tolist()


@settings(deadline=None, max_examples=50)
@given(
    st.lists(
        st.tuples(st.sampled_from([-1.0, 0.0, 0.5, 1e6]), st.sampled_from([-(2**62), 0, 3]), st.booleans()),
        max_size=12,
    ),
    st.sampled_from([math.nan, math.inf, -math.inf]),
)
def test_by_brute_force_whatever_the_invalid_hold(rows, anything):
    expected = [len({r for r, other, ok in rows if ok and other == group}) > 1 for _, group, _ in rows]
    rewards = [reward if ok else anything for reward, _, ok in rows]
    assert differs(rewards, [row[1] for row in rows], [row[2] for row in rows]) == expected


def test_every_sample_of_a_group_has_the_answer_of_the_group():
    assert differs([1.0, 1.0, 2.0, 3.0, 3.0], [7, 7, 7, 9, 9]) == [True] * 3 + [False] * 2


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
